"""`propose`: guess a weight map between two models from names, shapes and kinds of modules, and prove it by running both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat_jax.errors import PortingError
from remat_jax.porting.auto.compress import compress
from remat_jax.porting.auto.crossing import crossings, like_siblings
from remat_jax.porting.auto.fitting import fitting
from remat_jax.porting.auto.interrogate import MapCandidate, Space, identify, other_answers, unexercised
from remat_jax.porting.auto.pair import FLOAT32_ERROR, LIMIT, ModelPair
from remat_jax.porting.auto.recipes import by_names, likeness, tokens
from remat_jax.porting.float64 import FLOAT32_REMEDY, keep_jax_float64
from remat_jax.porting.rules import Rules, as_rules
from remat_jax.warning import warn


def propose(
    torch_module: Any,
    flax_module: Any,
    inputs: Any,
    *,
    variables: Any = None,
    rules: Any = (),
    torch_call: Callable[..., Any] | None = None,
    flax_call: Callable[..., Any] | None = None,
    keep_float64: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> Rules:
    """Return a weight map between two models of the same function, proved by running both in float64 with random weights.

    Names, shapes and kinds of modules give the first guess; running the models decides. With the returned map, outputs and the
    gradients of all parameters agree to 1e-9 on `inputs`; with any other map, such as one that exchanges two equal modules or
    transposes a square kernel, they do not. If the outputs do not depend on a weight, its name, shape and kind must allow only
    one rule; the weight is then mapped by this rule, and a `RematWarning` names it. A `RematWarning` also names tensors and
    arrays that only one model has, if no output depends on them, equal names that the map exchanges, and a weight that the map
    transforms unlike its siblings.

    `inputs` are arrays for both models: a tuple of positional arguments, or a dictionary of keywords. `torch_call` and
    `flax_call` replace `model(*inputs)` by `call(model, *inputs)`, for instance if only one model takes channels last.
    `torch_module` may be a function that builds the model; `flax_module` may be a function of a dtype, for modules with a fixed
    dtype. `variables` are a Linen module's variables, if `init` cannot make them. `rules` map the tensors that they match;
    the other tensors are guessed. `keep_float64` prevents casts to float32 inside the Flax model; by default, it is on if there
    are such casts. `progress` is called with a text when a part of a long search begins.

    Raises:
        PortingError: no map fits the shapes; the models agree under no map, or under several, as in a model with a symmetry
            (the error lists the lines in which the maps differ; choose one map and give its lines as `rules`); or the outputs
            do not depend on a weight whose name, shape and kind allow several rules, or whose names in both models are unlike.

    >>> import flax.linen as nn
    >>> import numpy as np
    >>> import torch
    >>> theirs = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    >>> ours = nn.Sequential([nn.Dense(5), nn.tanh, nn.Dense(2)])
    >>> print(propose(theirs, ours, (np.ones((2, 3), np.float32),)))
    {i}.weight -> params/layers_{i}/kernel | linear
    {i}.bias -> params/layers_{i}/bias
    """
    proposal = search(
        torch_module,
        flax_module,
        inputs,
        variables=variables,
        rules=rules,
        calls=(torch_call, flax_call),
        keep_float64=keep_float64,
        tell=progress,
    )
    if proposal.problem:
        raise PortingError(proposal.problem)
    warn(proposal.notes)
    warn(proposal.fault_text)
    return proposal.proven or proposal.rules


_MOST_LINES = 8
"""The largest number of rules that are listed one by one; if there are more, the whole map is listed in its short form."""
_USUAL = ("Linear", "Embedding", "LayerNorm", "Conv1d", "Conv2d", "Conv3d")
"""The kinds of PyTorch modules whose first way of conversion is the only usual one."""


@dataclass(frozen=True)
class Proposal:
    """The result of `search`.

    A proven map is unusual if it exchanges equal names, or transforms a weight unlike its siblings.

    Attributes:
        rules: the proven map. If no map is proven: the map that names suggest. If the proven map is unusual: the usual map.
        problem: why no map is proven; "" if a map is proven.
        proven: the proven map, if it is unusual; else None.
        crossed: the groups of PyTorch modules whose equal names in Flax `proven` exchanges.
        unlike: a text for each weight that `proven` transforms unlike its siblings.
        lines: the rules of `proven` that are unusual.
        error, where: the relative error of the outputs under the usual map, and the output that has it.
        notes: sentences about weights that are mapped without proof, and about tensors and arrays of only one model.
    """

    rules: Rules
    problem: str = ""
    proven: Rules | None = None
    crossed: tuple[tuple[str, ...], ...] = ()
    unlike: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    error: float = 0.0
    where: str = ""
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """The state of `rules`, as in `ParityReport.weight_map`."""
        if self.problem:
            return "not proven"
        return "crosses names" if self.crossed else "unlike siblings" if self.unlike else "proven"

    @property
    def fault_text(self) -> str | None:
        """The sentence about an unusual map, which is probably a fault of the port; None if the map is usual."""
        if self.proven is None:
            return None
        groups = [" and ".join(group) for group in self.crossed]
        parts = [f"equal names are exchanged ({_several(groups)})"] if groups else []
        parts += [f"weights are transformed unlike their siblings ({_several(self.unlike)})"] if self.unlike else []
        usual = "map of equal names" if groups else "map without this exception"
        return (
            f"the models agree only if {', and '.join(parts)}, probably a fault of the port: under the {usual}, {self.where} "
            f"differs by {self.error:.1e}. If the port intends this, give these rules, and 'auto' for the rest:\n"
            + "\n".join(f"  {line}" for line in self.lines)
        )


def _several(texts: Sequence[str]) -> str:
    return "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")


def search(
    torch_module: Any,
    flax_module: Any,
    inputs: Any,
    *,
    variables: Any = None,
    rules: Any = (),
    calls: tuple[Any, Any] = (None, None),
    keep_float64: bool | None = None,
    tell: Callable[[str], None] | None = None,
) -> Proposal:
    """`propose`, but a map that is not proven is part of the result."""
    with jax.enable_x64(True):
        pair = ModelPair(torch_module, flax_module, inputs, variables, calls, tell)
        _refuse_random(pair.torch)
        keeps = pair.narrows() if keep_float64 is None else keep_float64
        with keep_jax_float64() if keeps else contextlib.nullcontext():
            return _searched(pair, as_rules(rules))


def _searched(pair: ModelPair, given: Rules) -> Proposal:
    space, named = fitting(pair, given)

    def short(candidate: MapCandidate) -> Rules:
        return compress(space.rules(candidate), {n: x.shape for n, x in pair.initial.items()}, pair.shapes)

    answer = named
    if not pair.disagreement(space.rules(named), pair.generic(0))[0] <= LIMIT:
        pair.tell("looking for the weight map that makes the models agree")
        answer, problem = identify(pair, space, named)
        other = _usual(space) if problem else None  # names may mislead if their numbers do not mean the same
        if other and other.places != named.places:
            again, other_problem = identify(pair, space, other)
            answer, problem = (answer, problem) if other_problem else (again, "")
            errors = [pair.disagreement(space.rules(each), pair.generic(0), gradients=False)[0] for each in (named, other)]
            named = other if errors[1] < _MUCH_LESS * errors[0] else named
        problem = problem or _without_proof(pair, space, answer)
        if problem:
            best = answer if answer.places == named.places or not _names_decide(space, named) else named
            return Proposal(short(best), problem=problem + _leftovers_text(space, best))
    unused = unexercised(pair, space, answer)
    _require_forced(space, answer, unused)
    answer = _only_one(pair, space, answer, unused)
    notes = _notes(space, answer, unused)
    crossed = crossings(space, answer, named)
    alike, unlike = like_siblings(space, answer)
    usual = named if crossed else alike
    if crossed or unlike:
        error, where = pair.disagreement(space.rules(usual), pair.generic(0), gradients=False)
        ways = [(space.way(answer, unit), space.way(usual, unit)) for unit in range(len(space.torch))]
        lines, proven = [str(rule) for way, other in ways for rule in way if rule not in other], short(answer)
        lines = lines if len(lines) <= _MOST_LINES else str(proven).splitlines()
        return Proposal(short(usual), "", proven, tuple(crossed), tuple(unlike), tuple(lines), error, where, notes)
    return Proposal(short(answer), notes=notes)


_MUCH_LESS = 0.5
"""The ratio of two errors below which the map of the smaller error is compared, not the map that names suggest."""


def _usual(space: Space) -> MapCandidate | None:
    """The map with as many usual transforms as possible; names decide the rest."""
    places = by_names(space.torch, space.flax, space.table, usual_first=True)
    if None in places:
        return None
    return space.usual(MapCandidate(tuple(places), (0,) * len(places)))  # type: ignore[arg-type]


def _without_proof(pair: ModelPair, space: Space, candidate: MapCandidate) -> str:
    """Why the models do not agree under a candidate; "" if they do."""
    error, where = pair.disagreement(space.rules(candidate), pair.generic(0))
    if error <= LIMIT:
        return ""
    rounded = f" The error has the size of float32's rounding: {FLOAT32_REMEDY}." if error <= FLOAT32_ERROR else ""
    return (
        f"no map was found under which the models agree: under the best map, {where} differs by {error:.1e}.{rounded} The "
        "models may differ in more than their weights. You can also pass `rules` for some of the weights."
    )


def _names_decide(space: Space, named: MapCandidate) -> bool:
    """Whether every pair of units has a word or a number in common."""
    return all(likeness(unit.name, space.flax[place].name) for unit, place in zip(space.torch, named.places, strict=True))


def _leftovers_text(space: Space, candidate: MapCandidate) -> str:
    tensors, arrays = space.left_over(candidate)
    sides = ((tensors, "PyTorch", "extra"), (arrays, "Flax", "missing"))
    lines = [f"\n  only {side} has {', '.join(names)} (in rules: '{key}: …')" for names, side, key in sides if names]
    return "".join(lines)


def _notes(space: Space, answer: MapCandidate, unused: Sequence[int]) -> tuple[str, ...]:
    names, notes = [name for unit in unused for name in space.names(unit)], []
    if names:
        them = "them, so their places follow from" if len(names) > 1 else "it, so its place follows from"
        notes.append(f"{', '.join(names)}: the outputs do not depend on {them} name, shape and kind alone, without proof")
    for left_over, side in zip(space.left_over(answer), ("PyTorch", "Flax"), strict=True):
        weights = [name for name in left_over if name not in space.buffers]
        them = "them" if len(weights) > 1 else "it"
        notes += [f"only {side} has {', '.join(weights)}; the outputs do not depend on {them}"] if weights else []
    return tuple(notes)


def _require_forced(space: Space, answer: MapCandidate, unused: Sequence[int]) -> None:
    """Raise an error if an `unused` unit's name, shape and kind allow several places, or its two names are unlike.

    Of several ways to convert a unit, the usual way for its kind is right: a dense layer's kernel is transposed.
    """
    places = [answer.places[unit] for unit in unused]
    open_units = [unit for unit in unused if not _is_forced(space, answer, unit, places)]
    if open_units:
        names = [name for unit in open_units for name in space.names(unit)]
        lines = [rule for unit in open_units for rule in space.way(answer, unit)]
        raise PortingError(
            f"the outputs do not depend on {', '.join(names)}, so nothing can be proved about these weights; give inputs that "
            "use them, or rules for them, such as:\n" + "\n".join(f"  {rule}" for rule in lines)
        )


def _is_forced(space: Space, answer: MapCandidate, unit: int, places: Sequence[int]) -> bool:
    name, place = space.torch[unit].name, answer.places[unit]
    fitting = [other for other in places if space.table[unit][other]]
    equal = [other for other in fitting if tokens(name) == tokens(space.flax[other].name)]
    is_usual = len(space.ways(answer, unit)) == 1 or space.torch[unit].kind in _USUAL
    return [place] in (fitting, equal) and is_usual and likeness(name, space.flax[place].name) > 0


def _only_one(pair: ModelPair, space: Space, answer: MapCandidate, unused: Sequence[int]) -> MapCandidate:
    """The candidate under which the models agree; of several, the candidate that maps equal names onto each other.

    Raises PortingError if several candidates agree and names do not decide.
    """
    others = other_answers(pair, space, answer, unused)
    for candidate in (answer, *others):
        rest = [other for other in (answer, *others) if other != candidate]
        if all(other.choices == candidate.choices and _is_crossed(space, other, candidate) for other in rest):
            return candidate
    units = [unit for unit in range(len(space.torch)) if len({space.way(each, unit) for each in (answer, *others)}) > 1]
    lines = []
    for number, candidate in enumerate([answer, *others[:8]], 1):
        lines += [f"  {number}:", *(f"    {rule}" for unit in units for rule in space.way(candidate, unit))]
    raise PortingError(
        "several maps agree with both models, in values and gradients; choose one map, and give its lines as rules:\n"
        + "\n".join(lines)
    )


def _is_crossed(space: Space, other: MapCandidate, candidate: MapCandidate) -> bool:
    """Whether `other` differs from `candidate` in that it exchanges equal names."""
    return bool(crossings(space, other, candidate))


def _refuse_random(module: Any) -> None:
    dropping = [name for name, part in module.named_modules() if part.training and _drops(part)]
    if dropping:
        raise PortingError(f"torch_module: dropout is on in {', '.join(dropping)}; call torch_module.eval() first.")


def _drops(part: Any) -> bool:
    rates = (getattr(part, name, 0.0) for name in (("p", "dropout") if "Dropout" in type(part).__name__ else ("dropout",)))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
