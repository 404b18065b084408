"""Names with placeholders: `layers.{i}.attn.q.weight` in PyTorch, `params/layers_{i}/attn/q/kernel` in Flax."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from remat_jax.errors import PortingError

Captures = dict[str, str]
Shape = tuple[int, ...]

# At most nine digits, so that every number fits into NumPy's integers.
_PLACEHOLDER = re.compile(r"\{(\w+)(?:\s*([+-])\s*(\d{1,9}))?\}")
# The largest number of names that one text may expand to. The counts of alternatives in several braces multiply.
_MOST_NAMES = 10_000


@dataclass(frozen=True)
class Pattern:
    """A name with placeholders: `{i}` matches any text without a dot or slash, and `{i+1}` matches the number `i` + 1.

    >>> Pattern("layers.{i}.q.weight").match("layers.10.q.weight")
    {'i': '10'}
    >>> Pattern("params/layers_{i-1}/q").format({"i": "10"})
    'params/layers_9/q'
    """

    text: str

    def __str__(self) -> str:
        return self.text

    def __post_init__(self) -> None:
        rest = _PLACEHOLDER.sub("", self.text)
        if not self.text or "{" in rest or "}" in rest or any(c.isspace() for c in rest):
            raise PortingError(
                f"{self.text!r} is not a name; a placeholder is written {{i}}, {{i+1}} or {{i-1}}; a name has no spaces."
            )

    @property
    def placeholders(self) -> frozenset[str]:
        """The names of the placeholders."""
        return frozenset(match[1] for match in _PLACEHOLDER.finditer(self.text))

    def match(self, name: str) -> Captures | None:
        """The text of each placeholder in `name`; None if `name` does not match."""
        _, placeholders, regex = _compiled(self.text)
        matched = regex.fullmatch(name)
        if not matched:
            return None
        captures: Captures = {}
        for (placeholder, offset), text in zip(placeholders, matched.groups(), strict=True):
            value = text if offset is None else str(int(text) - offset)
            if captures.setdefault(placeholder, value) != value:
                return None
        return captures

    def format(self, captures: Captures) -> str | None:
        """The name for these captures; None if a number would be negative, or if the capture for `{i+1}` is no number."""
        texts, placeholders, _ = _compiled(self.text)
        values = [captures[name] if offset is None else _shifted(captures[name], offset) for name, offset in placeholders]
        return None if None in values else _interleaved(texts, values)


@dataclass(frozen=True)
class Place:
    """An array of the Flax model, or a part of a stacked array.

    `index` has an entry for each leading axis: a number selects an entry of the axis, None keeps the whole axis.
    """

    path: str
    index: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        return _indexed(self.path, self.index)

    @property
    def key(self) -> tuple[int | slice, ...]:
        """The NumPy index of the part."""
        return tuple(slice(None) if entry is None else entry for entry in self.index)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that the index selects on."""
        return tuple(axis for axis, entry in enumerate(self.index) if entry is not None)

    def shape(self, whole: Shape) -> Shape:
        """The shape of the part."""
        return tuple(size for axis, size in enumerate(whole) if axis not in self.axes)

    def inside(self, whole: Shape) -> bool:
        """Whether an array of shape `whole` has this part."""
        fits = (entry is None or entry < size for entry, size in zip(self.index, whole, strict=False))
        return len(self.index) <= len(whole) and all(fits)


@dataclass(frozen=True)
class FlaxPattern:
    """A Flax path and an index into its array: `params/layers/q/kernel[{i}]` is the i-th layer of a stack.

    >>> target = FlaxPattern.parse("params/layers/q/kernel[{i}]")
    >>> target.format({"i": "3"})
    Place(path='params/layers/q/kernel', index=(3,))
    >>> [captures for captures, _ in target.matches("params/layers/q/kernel", (2, 8, 8))]
    [{'i': '0'}, {'i': '1'}]
    """

    path: Pattern
    index: tuple[Pattern | None, ...] = ()

    @classmethod
    def parse(cls, text: str) -> FlaxPattern:
        """The pattern written as `path` or `path[index, …]`; `:` in the index leaves an axis whole."""
        match = re.fullmatch(r"(.*?)(?:\[([^\[\]]*)\])?", text.strip())
        if not match or not match[1]:
            raise PortingError(f"{text!r} is not a Flax path; write it as 'params/l_{{i}}/kernel' or 'params/l/kernel[{{i}}]'.")
        if match[2] is None:
            return cls(Pattern(match[1]))
        entries = [entry.strip() for entry in match[2].split(",")]
        for entry in entries:
            if not (entry == ":" or (entry.isdecimal() and len(entry) <= 9) or _PLACEHOLDER.fullmatch(entry)):
                raise PortingError(f"{text!r}: {entry!r} is not an index; write a number, a placeholder such as {{i}}, or ':'.")
        while entries and entries[-1] == ":":
            entries.pop()
        return cls(Pattern(match[1]), tuple(None if entry == ":" else Pattern(entry) for entry in entries))

    def __str__(self) -> str:
        return _indexed(self.path, self.index)

    @property
    def placeholders(self) -> frozenset[str]:
        """The names of the placeholders, also in the index."""
        return self.path.placeholders.union(*(entry.placeholders for entry in self.index if entry is not None))

    def format(self, captures: Captures) -> Place | None:
        """The place for these captures; None if a number would be negative, or an index is no number."""
        path = self.path.format(captures)
        index = tuple(None if entry is None else _number(entry.format(captures)) for entry in self.index)
        return None if path is None or index.count(None) > self.index.count(None) else Place(path, index)

    def matches(self, path: str, shape: Shape) -> Iterator[tuple[Captures, Place]]:
        """(captures, place) for every part of the array at `path` that matches this pattern."""
        captures = self.path.match(path)
        if captures is None or len(shape) < len(self.index):
            return
        ranges = [[None] if entry is None else range(size) for entry, size in zip(self.index, shape, strict=False)]
        for index in itertools.product(*ranges):
            merged = dict(captures)
            for entry, number in zip(self.index, index, strict=True):
                inside = {} if entry is None else entry.match(str(number))
                if inside is None or any(merged.setdefault(name, value) != value for name, value in inside.items()):
                    break
            else:
                yield merged, Place(path, index)


def expand(text: str) -> list[str]:
    """The names in a comma-separated text, with `{q,k,v}` expanded to one name for each of `q`, `k` and `v`.

    Raises:
        PortingError: the text expands to too many names.

    >>> expand("layers.{i}.{q,k}.weight, head.weight")
    ['layers.{i}.q.weight', 'layers.{i}.k.weight', 'head.weight']
    """
    # A comma inside braces or brackets does not end a name.
    names = [name.strip() for name in re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,])+", text)]
    result: list[str] = []
    for name in names:
        pieces = re.split(r"\{([^{}]*,[^{}]*)\}", name)
        choices = [[piece] if number % 2 == 0 else piece.split(",") for number, piece in enumerate(pieces)]
        if math.prod(map(len, choices)) + len(result) > _MOST_NAMES:
            raise PortingError(
                f"{text[:200]!r} stands for more than {_MOST_NAMES} names; write a rule for some of them at a time."
            )
        result += ["".join(part.strip() for part in chosen) for chosen in itertools.product(*choices)]
    return result


def _indexed(path: object, index: Sequence[object]) -> str:
    """A path and an index as text, such as `params/layers/q/kernel[0, :, 1]`."""
    entries = ", ".join(":" if entry is None else str(entry) for entry in index)
    return f"{path}[{entries}]" if index else str(path)


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> tuple[list[str], list[tuple[str, int | None]], re.Pattern[str]]:
    """The texts around the placeholders, each (placeholder, offset), and the regular expression; None as offset: any text."""
    pieces = _PLACEHOLDER.split(text)
    texts, names, signs, digits = (pieces[start::4] for start in range(4))
    offsets = [int(sign + number) if sign else None for sign, number in zip(signs, digits, strict=True)]
    values = [r"([^./]+)" if offset is None else r"(\d{1,18})" for offset in offsets]
    regex = re.compile(_interleaved(map(re.escape, texts), values))
    return texts, list(zip(names, offsets, strict=True)), regex


def _interleaved(texts: Iterable[str], values: Sequence[str | None]) -> str:
    return "".join(f"{text}{value}" for text, value in zip(texts, [*values, ""], strict=True))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) <= 18 else None


def _shifted(text: str, offset: int) -> str | None:
    number = _number(text)
    return str(number + offset) if number is not None and number + offset >= 0 else None
