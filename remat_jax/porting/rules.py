"""The weight map as data: ordered rules, tied tensors, and names without a counterpart; its text and its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from remat_jax.errors import PortingError
from remat_jax.porting.pattern import FlaxPattern, Pattern, expand
from remat_jax.porting.transform import Transform

_EXAMPLE = "'layers.{i}.q.weight -> params/layers_{i}/q/kernel | linear'"


@dataclass(frozen=True, repr=False)
class Rule:
    """PyTorch's names, Flax's paths and the transform between them; all may be given as text.

    A placeholder `{i}` has the same value in every name. A Flax path starts with its collection, also in NNX, where the
    index of a list is appended to the list's name as in Linen (`layers[0]` is `layers_0`). `[{i}]` at the end of a path
    selects a layer of a stack. `{q,k,v}` abbreviates several names.

    Raises:
        PortingError: a name, a path or a transform is malformed, or a placeholder is missing from some of the names.

    >>> rule = Rule.parse("layers.{i}.in_proj_weight -> params/layers/{query,key,value}/kernel[{i}] | in_proj")
    >>> [str(target) for target in rule.flax]
    ['params/layers/query/kernel[{i}]', 'params/layers/key/kernel[{i}]', 'params/layers/value/kernel[{i}]']
    """

    torch: tuple[Pattern, ...]
    flax: tuple[FlaxPattern, ...]
    transform: Transform = Transform()

    def __post_init__(self) -> None:
        torch = [Pattern(name) if isinstance(name, str) else name for name in _several(self.torch)]
        flax = [FlaxPattern.parse(path) if isinstance(path, str) else path for path in _several(self.flax)]
        if isinstance(self.transform, str):
            object.__setattr__(self, "transform", Transform.parse(self.transform))
        object.__setattr__(self, "torch", tuple(torch))
        object.__setattr__(self, "flax", tuple(flax))
        if not torch or not flax:
            raise PortingError(f"Rule: one or more names of both sides are expected, as in {_EXAMPLE}.")
        every = frozenset[str]().union(*(name.placeholders for name in (*torch, *flax)))
        for name in (*torch, *flax):
            lacking = sorted(every - name.placeholders)
            if lacking:
                raise PortingError(
                    f"Rule: {str(self)!r}: {str(name)!r} has no {{{lacking[0]}}}, so several tensors would share one name; use "
                    "the same placeholders in every name."
                )

    @classmethod
    def parse(cls, text: str) -> Rule:
        """The rule in a line of text: `torch[, torch] -> flax[, flax] [| step | step]`. Raises PortingError if malformed."""
        names, bar, transform = text.partition("|")
        torch, arrow, flax = names.partition("->")
        if not arrow or not torch.strip() or not flax.strip():
            raise PortingError(f"{text.strip()!r} is not a rule; write it as in {_EXAMPLE}.")
        return cls(tuple(expand(torch)), tuple(expand(flax)), transform if bar else "identity")  # type: ignore[arg-type]  # `__post_init__` also accepts texts

    def __str__(self) -> str:
        steps = "" if self.transform == Transform() else f" | {self.transform}"
        return f"{', '.join(map(str, self.torch))} -> {', '.join(map(str, self.flax))}{steps}"

    def __repr__(self) -> str:
        return f"Rule.parse({str(self)!r})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the names, the paths, and the transform as text."""
        return {"torch": [*map(str, self.torch)], "flax": [*map(str, self.flax)], "transform": str(self.transform)}


def _several(names: Any) -> tuple[Any, ...]:
    return (names,) if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)


VERSION = 1
_KEYS = ("rules", "ties", "extra", "missing")


@dataclass(frozen=True)
class Rules:
    """A weight map between a PyTorch model and a Flax model.

    In text, each line is a rule, `tie: a = b`, `extra: globs` or `missing: globs`; `#` starts a comment.

    Attributes:
        rules: the first rule that matches a tensor applies.
        ties: pairs of PyTorch names that share a Flax array; rules use the first name. The two tensors must have equal values;
            their gradients are added. Both names may contain a placeholder.
        extra: globs on PyTorch's names: tensors that need no rule.
        missing: globs on Flax's paths: arrays that no tensor fills; they keep their value.

    >>> rules = Rules.parse('''
    ...     embed.weight -> params/embed/embedding
    ...     layers.{i}.up.weight -> params/layers_{i}/up/kernel | linear
    ...     tie: embed.weight = head.weight
    ...     extra: *.inv_freq
    ... ''')
    >>> Rules.from_json(rules.to_json()) == rules == Rules.parse(str(rules))
    True
    """

    rules: tuple[Rule, ...]
    ties: tuple[tuple[Pattern, Pattern], ...] = ()
    extra: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rules = [Rule.parse(rule) if isinstance(rule, str) else rule for rule in self.rules]
        ties = [tuple(Pattern(name) if isinstance(name, str) else name for name in pair) for pair in self.ties]
        for name, value in (("rules", rules), ("ties", ties), ("extra", self.extra), ("missing", self.missing)):
            if isinstance(value, str):
                raise PortingError(f"Rules: {name}={value!r} is a text; give a tuple.")
            object.__setattr__(self, name, tuple(value))
        if not all(isinstance(rule, Rule) for rule in rules):
            raise PortingError(
                f"Rules: rules={self.rules!r} must be a sequence of Rule or text, one text per rule; for several lines use "
                "Rules.parse."
            )
        for pair in ties:
            if len(pair) != 2 or pair[0].placeholders != pair[1].placeholders or pair[0] == pair[1]:
                raise PortingError(f"Rules: the tie {pair!r} must be two names with the same placeholders.")
        chained = sorted({first.text for first, _ in ties} & {second.text for _, second in ties})
        if chained:
            raise PortingError(f"Rules: {chained[0]!r} is first in one tie and second in another; tie all names to one.")

    @classmethod
    def parse(cls, text: str) -> Rules:
        """The map in a text with one entry per line. Raises a PortingError that lists every malformed line and its number."""
        entries: dict[str, list[Any]] = {key: [] for key in _KEYS}
        problems = []
        for number, line in enumerate(text.splitlines(), 1):
            line = line.partition("#")[0].strip()
            if line:
                try:
                    _read(line, entries)
                except PortingError as error:
                    problems.append(f"line {number}: {error}")
        if problems:
            raise PortingError("the rules are malformed:\n  " + "\n  ".join(problems))
        return cls(**entries)  # type: ignore[arg-type]  # `__post_init__` turns lists into tuples

    def __str__(self) -> str:
        lines = [str(rule) for rule in self.rules]
        lines += [f"tie: {first} = {second}" for first, second in self.ties]
        lines += [f"{key}: {', '.join(globs)}" for key, globs in (("extra", self.extra), ("missing", self.missing)) if globs]
        return "\n".join(lines)

    def __or__(self, other: Rules | str) -> Rules:
        """These rules, followed by the rules of `other`."""
        other = as_rules(other)
        return Rules(**{key: getattr(self, key) + getattr(other, key) for key in _KEYS})

    def stacked(self, each: str, stack: str) -> Rules:
        """The same map for stacked layers, as under `nn.scan`: `each` names a single layer, `stack` the stacked layers.

        Raises:
            PortingError: no path contains `each`.

        >>> rules = Rules.parse("layers.{i}.up.weight -> params/layers_{i}/up/kernel | linear")
        >>> print(rules.stacked("layers_{i}", "layers"))
        layers.{i}.up.weight -> params/layers/up/kernel[{i}] | linear
        """
        placeholder = "{" + each.partition("{")[2].partition("}")[0] + "}"
        Pattern(placeholder)

        def restack(target: FlaxPattern) -> FlaxPattern:
            whole = f"/{target.path.text}/"
            if f"/{each}/" not in whole:
                return target
            path = whole.replace(f"/{each}/", f"/{stack}/").strip("/")
            return FlaxPattern(Pattern(path), (Pattern(placeholder), *target.index))

        rules = tuple(replace(rule, flax=tuple(map(restack, rule.flax))) for rule in self.rules)
        if rules == self.rules:
            raise PortingError(f"stacked(each={each!r}): no Flax path of the rules contains it; give whole parts of a path.")
        return replace(self, rules=rules)

    def allows_extra(self, name: str) -> bool:
        """Whether a PyTorch tensor of this name may stay unused."""
        return any(fnmatchcase(name, glob) for glob in self.extra)

    def allows_missing(self, path: str) -> bool:
        """Whether the Flax array at this path may stay unfilled."""
        return any(fnmatchcase(path, glob) for glob in self.missing)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        ties = [[*map(str, pair)] for pair in self.ties]
        rules = [rule.to_dict() for rule in self.rules]
        return {"version": VERSION, "rules": rules, "ties": ties, "extra": list(self.extra), "missing": list(self.missing)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Rules:
        """The map in `data`, which `to_dict` returned. Raises PortingError if `data` is malformed or of another version."""
        if not isinstance(data, dict) or set(data) != {"version", *_KEYS} or data["version"] != VERSION:
            raise PortingError(
                f"a weight map: expected an object of version {VERSION} with {', '.join(_KEYS)}; found {data!r:.200}."
            )
        strange = [key for key in ("ties", "extra", "missing") if not _are_texts(data[key], pairs=key == "ties")]
        if strange or not isinstance(data["rules"], list):
            raise PortingError(
                f"a weight map: {', '.join(strange) or 'rules'}: expected a list of {'pairs of ' * ('ties' in strange)}texts."
            )
        for rule in data["rules"]:
            if (
                not isinstance(rule, dict)
                or set(rule) != {"torch", "flax", "transform"}
                or not (_are_texts(rule["torch"]) and _are_texts(rule["flax"]) and isinstance(rule["transform"], str))
            ):
                raise PortingError(
                    f"a rule of a weight map: expected lists of texts, torch and flax, and a text, transform; not {rule!r:.99}."
                )
        return cls(tuple(Rule(**rule) for rule in data["rules"]), *(tuple(data[key]) for key in _KEYS[1:]))

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Rules:
        """The map in `text`, which `to_json` returned. Raises PortingError if `text` is malformed."""
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise PortingError(
                f"a weight map: {repr(text)[:200]} is not JSON ({error}); give what Rules.to_json wrote."
            ) from None
        return cls.from_dict(data)


def _are_texts(value: Any, *, pairs: bool = False) -> bool:
    """Whether `value` is a list of texts or, if `pairs`, of pairs of texts."""
    if not isinstance(value, list):
        return False
    return all(_are_texts(item) and len(item) == 2 if pairs else isinstance(item, str) for item in value)


def as_rules(rules: Any) -> Rules:
    """The map given as `Rules`, as text, or as a sequence of rules.

    Raises:
        PortingError: `rules` is none of these, or malformed.

    >>> as_rules("a.weight -> params/a/kernel | linear") == Rules.parse("a.weight -> params/a/kernel | linear")
    True
    """
    if isinstance(rules, Rules):
        return rules
    if isinstance(rules, str):
        if rules.strip() == "auto":
            raise PortingError(
                "rules='auto' needs both models and inputs, to prove its proposal: call porting.propose, and give its rules "
                "here."
            )
        return Rules.parse(rules)
    if isinstance(rules, Iterable):
        return Rules(tuple(rules))
    raise PortingError(f"rules={rules!r} is of type {type(rules).__name__}; give Rules, their text, or a sequence of rules.")


def _read(line: str, entries: dict[str, list[Any]]) -> None:
    key, colon, rest = line.partition(":")
    if "->" in line or not colon:
        entries["rules"].append(Rule.parse(line))
    elif key.strip() in ("extra", "missing"):
        entries[key.strip()] += expand(rest)
    elif key.strip() == "tie" and rest.count("=") == 1:
        entries["ties"].append(tuple(Pattern(name.strip()) for name in rest.split("=")))
    else:
        raise PortingError(
            f"{line!r} is neither a rule 'torch -> flax | transform' nor 'tie: a = b', 'extra: globs', 'missing: globs'"
        )
