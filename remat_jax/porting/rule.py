"""One rule of a weight map: which PyTorch tensors become which Flax arrays, and how."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from remat_jax.errors import PortingError
from remat_jax.porting.pattern import Pattern, Target, expand
from remat_jax.porting.transform import Transform

_EXAMPLE = "'layers.{i}.q.weight -> params/layers_{i}/q/kernel | linear'"


@dataclass(frozen=True, repr=False)
class Rule:
    """PyTorch's names, Flax's paths and the transform between them; all may be given as text.

    A placeholder `{i}` stands for the same in every name. A Flax path starts with its collection, also in NNX, where the
    index of a list joins the list's name as Linen has it (`layers[0]` is `layers_0`); `[{i}]` at its end is a place in a
    stack of layers. `{q,k,v}` writes several names as one.

    Raises:
        PortingError: a name, a path or a transform is malformed, or placeholders do not stand in all names.

    >>> rule = Rule.parse("layers.{i}.in_proj_weight -> params/layers/{query,key,value}/kernel[{i}] | in_proj")
    >>> [str(target) for target in rule.flax]
    ['params/layers/query/kernel[{i}]', 'params/layers/key/kernel[{i}]', 'params/layers/value/kernel[{i}]']
    """

    torch: tuple[Pattern, ...]
    flax: tuple[Target, ...]
    transform: Transform = Transform()

    def __post_init__(self) -> None:
        torch = [Pattern(name) if isinstance(name, str) else name for name in _several(self.torch)]
        flax = [Target.parse(path) if isinstance(path, str) else path for path in _several(self.flax)]
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
                text = name.text if isinstance(name, Pattern) else str(name)
                raise PortingError(
                    f"Rule: {str(self)!r}: {text!r} has no {{{lacking[0]}}}, so that several tensors would be one; "
                    "use the same placeholders in every name."
                )

    @classmethod
    def parse(cls, text: str) -> Rule:
        """The rule that a line of text says: `torch[, torch] -> flax[, flax] [| step | step]`.

        Raises:
            PortingError: the text is malformed.
        """
        names, bar, transform = text.partition("|")
        torch, arrow, flax = names.partition("->")
        if not arrow or not torch.strip() or not flax.strip():
            raise PortingError(f"{text.strip()!r} is no rule; write it as in {_EXAMPLE}.")
        return cls(tuple(expand(torch)), tuple(expand(flax)), transform if bar else "identity")  # type: ignore[arg-type]  # texts are taken

    def __str__(self) -> str:
        torch = ", ".join(name.text for name in self.torch)
        steps = "" if self.transform == Transform() else f" | {self.transform}"
        return f"{torch} -> {', '.join(map(str, self.flax))}{steps}"

    def __repr__(self) -> str:
        return f"Rule.parse({str(self)!r})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the names, the paths, and the transform as text."""
        names = {"torch": [name.text for name in self.torch], "flax": [str(target) for target in self.flax]}
        return {**names, "transform": str(self.transform)}


def _several(names: Any) -> tuple[Any, ...]:
    return (names,) if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
