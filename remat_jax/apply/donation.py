"""Donated arguments of a finished step: which there are, which there could be, and how to donate them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat_jax import compat
from remat_jax.errors import ArgumentError


@dataclass(frozen=True)
class OwnArguments:
    """The arguments of the user's own step that vary, by their numbers among these.

    Attributes:
      replaced: the numbers of those whose new values the given function, the step, returns or writes to NNX objects.
      donating: how to donate the arguments with these numbers, and those that are donated already, as text.
    """

    replaced: Callable[[Callable[..., Any]], tuple[int, ...]]
    donating: Callable[[Iterable[int]], str]


def donated(step: Callable[..., Any], given: int | Sequence[int] | None, count: int) -> tuple[int, ...]:
    """The positions of the donated arguments among `count`: those `given`, by default those that a `jit` around `step` has.

    Raises:
      ArgumentError: `given` is no position, or not positions.
    """
    if given is None:
        return compat.jit_of(step, count).donated
    places = (given,) if isinstance(given, int) else tuple(given)
    if not all(isinstance(place, int) and 0 <= place < count for place in places):
        raise ArgumentError(f"donate_argnums={given!r}: expected positions among the {count} arguments of step")
    return places


def donating(step: Callable[..., Any], names: Sequence[str], wanted: Iterable[int], has_objects: bool) -> str:
    """How the `jit` of `step` donates the arguments at the positions `wanted` of a call, as text.

    The positions in the text are those that this `jit` counts: it counts static arguments, `self`, and what a
    `functools.partial` has bound. Arguments that it donates already are among them, because the text replaces its setting.

    Args:
      names: the names of the arguments of a call.
      has_objects: the step takes NNX objects.

    >>> step = jax.jit(lambda size, params, x: params, static_argnums=0)
    >>> donating(step, ["size", "params", "x"], [1], False)
    "donate_argnums=(1,) in the step's jax.jit: params, counted with static arguments"
    """
    jit = compat.jit_of(step, len(names))
    places = sorted({*wanted, *jit.donated})
    if jit.kind == compat.EQUINOX_JIT:
        every = 0 in [place + jit.bound for place in places]
        others = [name for place, name in enumerate(names) if place not in places and (every or place + jit.bound > 0)]
        also = f", which also donates {' and '.join(others)}: give it new arrays at each call" if others else ""
        return f'donate="{"all" if every else "all-except-first"}" in the step\'s {jit.kind}{also}'
    numbers = tuple(place + jit.bound for place in places)
    text = f"donate_argnums={numbers!r} in the step's {jit.kind}"
    if not jit.kind:
        text = f"{compat.NNX_JIT if has_objects else compat.JAX_JIT}(step, donate_argnums={numbers!r})"
    counted = [*(["static"] if jit.static else []), *(["bound"] if jit.bound else [])]
    remark = f", counted with {' and '.join(counted)} arguments" if counted else ""
    return f"{text}: {' and '.join(names[place] for place in places)}{remark}"


def replaced(arguments: Sequence[Any], results: Any) -> tuple[int, ...]:
    """The numbers of the `arguments` that the step replaces: `results` has a part of the same structure, shapes and dtypes.

    A part of a result of another argument does not count: a moment of Adam is no new value of the parameters. If fewer
    results than arguments are alike, which ones are replaced is unknown, and none of them counts.

    >>> params, teacher, rows = {"w": jax.numpy.ones(3)}, {"w": jax.numpy.ones(3)}, jax.numpy.ones(4)
    >>> replaced([params, rows], (params, {"loss": 1.0}))
    (0,)
    >>> replaced([params, teacher, rows], (params, {"loss": 1.0}))
    ()
    """
    signatures = [_signature(argument) for argument in arguments]
    asked = Counter(signatures)
    made = Counter(_parts_like(results, set(asked)))
    return tuple(
        number
        for number, signature in enumerate(signatures)
        if jax.tree.leaves(arguments[number]) and made[signature] >= asked[signature]
    )


def _parts_like(results: Any, signatures: set[Hashable]) -> Iterator[Hashable]:
    """The signatures of the largest parts of `results` that are among `signatures`."""
    if (signature := _signature(results)) in signatures:
        yield signature
    elif not jax.tree_util.all_leaves([results]):
        for part in jax.tree.leaves(results, is_leaf=lambda each: each is not results):
            yield from _parts_like(part, signatures)


def _signature(tree: Any) -> Hashable:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((getattr(leaf, "shape", None), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves)
