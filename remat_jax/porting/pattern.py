"""Names with placeholders: `layers.{i}.attn.q.weight` in PyTorch, `params/layers_{i}/attn/q/kernel` in Flax."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from remat_jax.errors import PortingError

Captures = dict[str, str]
# A place in a stacked array: an index per leading axis, None for an axis that stays whole.
Index = tuple[int | None, ...]

# At most nine digits, so that every number fits into Python's and NumPy's integers.
_PLACEHOLDER = re.compile(r"\{(\w+)(?:\s*([+-])\s*(\d{1,9}))?\}")
MOST_NAMES = 10_000
"""The most names that a text may expand to: several braces multiply."""


@dataclass(frozen=True)
class Pattern:
    """A name in which `{i}` stands for any text without a dot or slash, and `{i+1}` or `{i-1}` for a number beside it.

    >>> Pattern("layers.{i}.q.weight").match("layers.10.q.weight")
    {'i': '10'}
    >>> Pattern("params/layers_{i-1}/q").format({"i": "10"})
    'params/layers_9/q'
    """

    text: str

    def __post_init__(self) -> None:
        rest = _PLACEHOLDER.sub("", self.text)
        if not self.text or "{" in rest or "}" in rest or any(c.isspace() for c in rest):
            raise PortingError(
                f"{self.text!r} is not a name; a placeholder is written {{i}}, {{i+1}} or {{i-1}}, spaces nowhere."
            )

    @property
    def placeholders(self) -> frozenset[str]:
        """The names of the placeholders."""
        return frozenset(match[1] for match in _PLACEHOLDER.finditer(self.text))

    def match(self, name: str) -> Captures | None:
        """The text of each placeholder in `name`; None if `name` does not match."""
        parts, regex = _compiled(self.text)
        matched = regex.fullmatch(name)
        if not matched:
            return None
        captures: Captures = {}
        for part, text in zip(parts, matched.groups(), strict=True):
            value = str(int(text) - _offset(part)) if part[2] else text
            if captures.setdefault(part[1], value) != value:
                return None
        return captures

    def format(self, captures: Captures) -> str | None:
        """The name for these captures; None if a number would be negative, or a text is no number."""
        pieces: list[str] = []
        end = 0
        for part in _PLACEHOLDER.finditer(self.text):
            value = _shifted(captures[part[1]], _offset(part)) if part[2] else captures[part[1]]
            if value is None:
                return None
            pieces += [self.text[end : part.start()], value]
            end = part.end()
        return "".join(pieces) + self.text[end:]


@dataclass(frozen=True)
class FlaxPattern:
    """A Flax path and an index into its array: `params/layers/q/kernel[{i}]` is the i-th layer of a stack.

    >>> target = FlaxPattern.parse("params/layers/q/kernel[{i}]")
    >>> target.format({"i": "3"})
    ('params/layers/q/kernel', (3,))
    >>> [captures for captures, _ in target.matches("params/layers/q/kernel", (2, 8, 8))]
    [{'i': '0'}, {'i': '1'}]
    """

    path: Pattern
    index: tuple[Pattern | None, ...] = ()

    @classmethod
    def parse(cls, text: str) -> FlaxPattern:
        """The target written as `path` or `path[index, …]`; `:` in the index leaves an axis whole."""
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
        index = ", ".join(":" if entry is None else entry.text for entry in self.index)
        return self.path.text + (f"[{index}]" if self.index else "")

    @property
    def placeholders(self) -> frozenset[str]:
        """The names of the placeholders, including those of the index."""
        return self.path.placeholders.union(*(entry.placeholders for entry in self.index if entry is not None))

    def format(self, captures: Captures) -> tuple[str, Index] | None:
        """The path and index for these captures; None if a number would be negative, or an index is no number."""
        path = self.path.format(captures)
        numbers = [None if entry is None else entry.format(captures) for entry in self.index]
        index = [None if number is None else _shifted(number, 0) for number in numbers]
        missing = any(entry is not None and number is None for entry, number in zip(self.index, index, strict=True))
        return None if path is None or missing else (path, tuple(None if n is None else int(n) for n in index))

    def matches(self, path: str, shape: tuple[int, ...]) -> Iterator[tuple[Captures, Index]]:
        """The captures and the index of every place in the array at `path` that matches this target."""
        captures = self.path.match(path)
        if captures is None or len(shape) < len(self.index):
            return
        sizes = shape[: len(self.index)]
        ranges: list[list[int | None]] = [
            [None] if entry is None else list(range(size)) for entry, size in zip(self.index, sizes, strict=True)
        ]
        for index in itertools.product(*ranges):
            merged = dict(captures)
            for entry, number in zip(self.index, index, strict=True):
                inside = {} if entry is None else entry.match(str(number))
                if inside is None or any(merged.setdefault(name, value) != value for name, value in inside.items()):
                    break
            else:
                yield merged, index


def expand(text: str) -> list[str]:
    """A comma-separated list of names, with `{q,k,v}` written out.

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
        if math.prod(map(len, choices)) + len(result) > MOST_NAMES:
            raise PortingError(
                f"{text[:200]!r} stands for more than {MOST_NAMES} names; write a rule for some of them at a time."
            )
        result += ["".join(part.strip() for part in chosen) for chosen in itertools.product(*choices)]
    return result


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> tuple[list[re.Match[str]], re.Pattern[str]]:
    """The placeholders of a pattern and its regular expression; cached because a map matches each pattern many times."""
    parts = list(_PLACEHOLDER.finditer(text))
    pieces, end = [], 0
    for part in parts:
        pieces += [re.escape(text[end : part.start()]), r"(\d{1,18})" if part[2] else r"([^./]+)"]
        end = part.end()
    return parts, re.compile("".join(pieces) + re.escape(text[end:]))


def _offset(part: re.Match[str]) -> int:
    return int(part[3]) * (1 if part[2] == "+" else -1) if part[2] else 0


def _shifted(text: str, offset: int) -> str | None:
    is_number = text.isdecimal() and len(text) <= 18
    return str(int(text) + offset) if is_number and int(text) + offset >= 0 else None
