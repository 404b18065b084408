"""Convert variables between unrolled layers and layers stacked on an axis, as under `nn.scan`."""

from __future__ import annotations

from typing import Any

from remat_jax.errors import PortingError
from remat_jax.porting.pattern import FlaxPattern, Pattern
from remat_jax.porting.rules import Rule, Rules
from remat_jax.porting.transfer import from_torch, to_torch
from remat_jax.porting.variables import Variables


def restack(variables: Any, like: Any, each: str, stack: str) -> Any:
    """Return the values of `variables` in the form of `like`: unrolled layers are stacked on axis 0, or the reverse.

    `each` is the name of a single layer, such as `layers_{i}`; `stack` is the name of the stacked layers. Both may be Linen
    or NNX, in either direction; `like` may be shapes. If both have the same form, only the container changes.

    Raises:
        PortingError: lists every array that only one of the two has, or that differs in shape.

    >>> import numpy as np
    >>> zero, one = np.zeros(2, np.float32), np.ones(2, np.float32)
    >>> unrolled = {"params": {"layers_0": {"scale": zero}, "layers_1": {"scale": one}}}
    >>> stacked = {"params": {"layers": {"scale": np.zeros((2, 2))}}}
    >>> restack(unrolled, stacked, "layers_{i}", "layers")["params"]["layers"]["scale"].tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """
    if len(Pattern(each).placeholders) != 1:
        raise PortingError(f"each={each!r}: expected a name with one placeholder, such as 'layers_{{i}}'.")
    source, target = Variables(variables), Variables(like)
    flat = to_torch(variables, _rules(source, each, stack), numpy=True)
    return from_torch(flat, like, _rules(target, each, stack))


def _rules(variables: Variables, each: str, stack: str) -> Rules:
    """The rules from unrolled paths, used as tensor names, to the variables' paths."""
    by_itself = _plain([path for path in variables.leaves if f"/{stack}/" not in f"/{path}/"])
    inside = [path for path in variables.leaves if f"/{stack}/" in f"/{path}/"]
    unrolled = [f"/{path}/".replace(f"/{stack}/", f"/{each}/").strip("/") for path in inside]
    placeholder = next(iter(Pattern(each).placeholders))
    index = (Pattern(f"{{{placeholder}}}"),)
    stacked = [
        Rule((Pattern(name),), (FlaxPattern(Pattern(path), index),)) for name, path in zip(unrolled, inside, strict=True)
    ]
    return Rules((*by_itself, *stacked))


def _plain(paths: list[str]) -> list[Rule]:
    if any("{" in path or "}" in path for path in paths):
        raise PortingError("restack: a path of the variables has braces in it, which name a placeholder; rename the module.")
    return [Rule((Pattern(path),), (FlaxPattern(Pattern(path)),)) for path in paths]
