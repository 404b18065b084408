"""The signs of attention masks: whether a 1 (in an additive mask a 0) shows a position or hides it.

A mask hides a position if it makes the position's score, at a softmax, far lower than the other scores. So a mask's sign is
followed through the operations up to a softmax; an operation that `through` does not know ends the search. Flax's signs come
from the traced program, PyTorch's from a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from remat_jax.core.walk import bodies
from remat_jax.identity import ByIdentity
from remat_jax.parity.tapped import Running, is_tap

Signs = dict[str, dict[int, str]]
"""Mask name → sign → path of the Flax module of the first softmax that the mask reaches with this sign ("" in PyTorch).

Sign 1: a 1 in the mask (in an additive mask a 0) shows a position. Sign −1: it hides the position."""

FAR = -1e3  # adding this or a lower number hides a score; models add -inf, the dtype's lowest number, or -1e4 or lower

_FLIPS = frozenset({"not", "neg", "logical_not", "bitwise_not", "rsub"})
_MIXES = frozenset("and or max min add bitwise_and bitwise_or logical_and logical_or minimum maximum".split())
_KEEPS = _MIXES | frozenset(
    "broadcast_in_dim convert_element_type reshape squeeze expand_dims transpose slice copy copy_p reduce_precision rev tap "
    "view _unsafe_view expand unsqueeze _to_copy to clone select alias detach permute t repeat contiguous lift_fresh".split()
)
_FIRST = frozenset({"index", "gather", "dynamic_slice", "baddbmm"})  # only their first operand can be a mask
_COMPARISONS = frozenset({"eq", "ne", "gt", "ge", "lt", "le"})
_SOFTMAXES = frozenset({"exp", "_softmax", "_safe_softmax"})


@dataclass(frozen=True)
class Fact:
    """The known facts about an array: the sign with which it depends on each mask, or its value if it is constant.

    `added`: the array is an additive mask, 0 where it shows and far below 0 where it hides, so a cast to bool inverts it.
    """

    signs: Mapping[str, int] = field(default_factory=dict)
    value: float | None = None
    added: bool = False

    @property
    def is_far(self) -> bool:
        """Whether adding this value to a score hides the score."""
        return self.value is not None and self.value <= FAR


NOTHING = Fact()


def through(name: str, facts: Sequence[Fact]) -> Fact:
    """The known facts about an operation's result; the operands of `select_n` are (mask, value if 0, value if 1).

    >>> through("select_n", [Fact({"mask": 1}), Fact(value=-1e9), NOTHING]).signs, through("not", [Fact({"mask": 1})]).signs
    ({'mask': 1}, {'mask': -1})
    """
    if name in _FLIPS:
        return _signed(facts[0], shows=name == "logical_not" and facts[0].added)
    if name in _COMPARISONS:
        return _compared(name, *facts)
    if name == "select_n" and len(facts) == 3:
        return _chosen(*facts)
    if name == "sub":
        first, second = facts
        return _signed(first, shows=True) if first.signs else _signed(second, shows=False)
    if name == "mul":
        return _multiplied(*facts)
    if name in _FIRST:
        return facts[0]
    if name in _KEEPS and facts:
        values = {fact.value for fact in facts}
        # Sums, minima and maxima of additive masks are additive masks.
        added = any(fact.added for fact in (facts if name in _MIXES else facts[:1]))
        return Fact(_agreed(fact.signs for fact in facts), values.pop() if len(facts) == 1 else None, added)
    return NOTHING


def _signed(fact: Fact, *, shows: bool) -> Fact:
    """The fact, with its signs negated unless `shows`."""
    if shows:
        return Fact(fact.signs)
    return Fact({name: -sign for name, sign in fact.signs.items()}, None if fact.value is None else -fact.value)


def _compared(name: str, fact: Fact, other: Fact) -> Fact:
    """The result of comparing a mask with a number."""
    if not fact.signs or other.value is None or fact.added and other.value > 0:
        return NOTHING
    is_true_at_0 = (name == "eq") == (other.value == 0)
    if name not in ("eq", "ne"):
        return _signed(fact, shows=name in ("gt", "ge"))
    return _signed(fact, shows=is_true_at_0 if fact.added else not is_true_at_0 or other.value not in (0, 1))


def _as_boolean(fact: Fact) -> Fact:
    """The fact of an additive mask after a cast to bool."""
    return _compared("ne", fact, Fact(value=0.0))


def _chosen(mask: Fact, otherwise: Fact, chosen: Fact) -> Fact:
    if mask.signs and otherwise.is_far != chosen.is_far:
        # The result is far below 0 where it hides, like an additive mask.
        return replace(_signed(mask, shows=otherwise.is_far), added=True)
    return Fact(_agreed([otherwise.signs, chosen.signs]))


def _multiplied(first: Fact, second: Fact) -> Fact:
    for fact, other in ((first, second), (second, first)):
        if fact.signs and other.value:
            return fact if other.value > 0 else replace(_signed(fact, shows=False), added=fact.added or other.is_far)
    return Fact(_agreed([first.signs, second.signs]))


def _agreed(operands: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The signs of several operands, without masks whose signs contradict each other."""
    all_signs: dict[str, set[int]] = {}
    for signs in operands:
        for name, sign in signs.items():
            all_signs.setdefault(name, set()).add(sign)
    return {name: signs.pop() for name, signs in all_signs.items() if len(signs) == 1}


def _enter_softmax(fact: Fact, signs: Signs, module: str = "") -> None:
    for name, sign in fact.signs.items():
        signs.setdefault(name, {}).setdefault(sign, module)


# Flax: facts are followed along the equations.


def flax_masks(
    jaxpr: ClosedJaxpr, names: Mapping[int, str], paths: Sequence[tuple[str, ...]], added: Collection[str] = ()
) -> Signs:
    """Follow the masks among the arguments of a closed jaxpr with taps; return the signs with which they enter softmaxes.

    `names`: argument position of a mask → its name; `paths`: the module path of every call in `Recorder.calls`; `added`: the
    names of the additive masks.
    """
    equations = _Equations(paths)
    facts = {place: Fact({name: 1}, added=name in added) for place, name in names.items()}
    equations.follow(jaxpr, [facts.get(place, NOTHING) for place in range(len(jaxpr.jaxpr.invars))])
    return equations.signs


class _Equations:
    def __init__(self, paths: Sequence[tuple[str, ...]]) -> None:
        self.signs: Signs = {}
        self._running = Running(paths)

    def follow(self, jaxpr: ClosedJaxpr, facts: Sequence[Fact]) -> list[Fact]:
        """The facts of a closed jaxpr's results."""
        fact_of: dict[Any, Fact] = dict(zip(jaxpr.jaxpr.invars, facts, strict=True))
        fact_of |= {var: _constant(value) for var, value in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)}

        def of(atom: Var | Literal) -> Fact:
            return _constant(atom.val) if hasattr(atom, "val") else fact_of.get(atom, NOTHING)

        for eqn in jaxpr.jaxpr.eqns:
            fact_of.update(zip(eqn.outvars, self._results(eqn, [of(atom) for atom in eqn.invars]), strict=False))
        return [of(atom) for atom in jaxpr.jaxpr.outvars]

    def _results(self, eqn: JaxprEqn, operands: list[Fact]) -> list[Fact]:
        inside = bodies(eqn)
        if is_tap(eqn):
            self._running.passes(eqn)
        if inside:
            return self._called(inside, operands, len(eqn.outvars))
        if eqn.primitive.name in _SOFTMAXES:
            _enter_softmax(operands[0], self.signs, self._running.path)
        result = through(eqn.primitive.name, operands)
        return [_as_boolean(result) if result.added and eqn.outvars[0].aval.dtype == bool else result]

    def _called(self, inside: Sequence[Any], operands: Sequence[Fact], count: int) -> list[Fact]:
        """The facts of a call's or loop's results; a loop's body is followed once."""
        results = [NOTHING] * count
        for body in inside:
            skipped = len(operands) - len(body.jaxpr.invars)
            if skipped in (0, 1):  # 1: a cond's branches do not take its index; other bodies are not followed
                returned = self.follow(body, operands[skipped:])
                results = returned if len(returned) == count else results
        return results


def _constant(value: Any) -> Fact:
    if np.size(value) != 1 or np.asarray(value).dtype.kind not in "fiub":
        return NOTHING
    return Fact(value=float(np.asarray(value).reshape(-1)[0]))


# PyTorch: facts are followed along the operators of a forward pass.


def torch_masks(run: Callable[[], Any], inputs: Mapping[str, Any], added: Collection[str] = ()) -> Signs:
    """The signs with which tensors (name → tensor) enter the softmaxes of `run()`; `added` names additive masks."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    signs: Signs = {}
    facts = ByIdentity((x, Fact({name: 1}, added=name in added)) for name, x in inputs.items())

    def of(value: object) -> Fact:
        if isinstance(value, torch.Tensor):
            fact = facts.get(value, NOTHING)
            # A tensor without a sign may still be a constant.
            return fact if fact.signs else _torch_constant(value)
        return Fact(value=float(value)) if isinstance(value, int | float) else NOTHING

    class Follow(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, others = func._schema.name.removeprefix("aten::").removesuffix("_"), list((kwargs or {}).values())
            fact = NOTHING
            if any(x in facts for x in (*args, *others)):
                # The constants are read before the call, because an in-place operator overwrites its arguments.
                fact = _of_operator(name, [of(x) for x in args], [of(x) for x in others], signs)
            result = func(*args, **(kwargs or {}))
            if fact.added and isinstance(result, torch.Tensor) and result.dtype == torch.bool:
                fact = _as_boolean(fact)
            if fact.signs and isinstance(result, torch.Tensor):
                facts[result] = fact
            return result

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), Follow():
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return signs


def _of_operator(name: str, args: list[Fact], kwargs: list[Fact], signs: Signs) -> Fact:
    if name in _SOFTMAXES:
        _enter_softmax(args[0], signs)
        return NOTHING
    if name.startswith("_scaled_dot_product"):
        for fact in (*args[3:], *kwargs):  # the additive mask follows queries, keys and values
            _enter_softmax(fact, signs)
        return NOTHING
    if name == "where":
        mask, chosen, otherwise = args
        return through("select_n", [mask, otherwise, chosen])
    if name == "masked_fill":
        otherwise, mask, chosen = args
        return through("select_n", [mask, otherwise, chosen])
    return through(name, args[:2] if name in _COMPARISONS | {"add", "sub", "mul"} else args)


def _torch_constant(tensor: Any) -> Fact:
    if not tensor.numel() or tensor.dtype.is_complex:
        return NOTHING
    first = float(tensor.flatten()[0])
    return Fact(value=first) if tensor.numel() == 1 or bool((tensor == first).all()) else NOTHING


def opposed(torch: Signs, flax: Signs) -> Iterator[tuple[str, str, int]]:
    """Yield (Flax module, mask name, Flax's sign) for each mask that has opposite signs in the two frameworks."""
    for name in sorted(torch.keys() & flax.keys()):
        if len(torch[name]) == len(flax[name]) == 1 and torch[name].keys() != flax[name].keys():
            [(sign, module)] = flax[name].items()
            yield module, name, sign
