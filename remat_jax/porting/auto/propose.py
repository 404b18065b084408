"""`propose`: guess a weight map between two models from names, shapes and kinds of modules, and prove it by running both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_jax.errors import PortingError
from remat_jax.porting.auto.compress import compress
from remat_jax.porting.auto.interrogate import MapCandidate, Space, identify, other_answers, unexercised
from remat_jax.porting.auto.pair import FLOAT32_ERROR, LIMIT, ModelPair
from remat_jax.porting.auto.recipes import by_names, likeness, table
from remat_jax.porting.auto.units import FlaxUnit, TorchUnit, attentions, flax_units, stack_candidates, torch_parts
from remat_jax.porting.float64 import FLOAT32_REMEDY, keep_jax_float64
from remat_jax.porting.links import links_of_places, links_of_tensors
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
    keep_float64: bool = False,
) -> Rules:
    """Return a weight map between two models of the same function, proved by running both in float64 with random weights.

    Names, shapes and kinds of modules give the first guess; running the models decides. With the returned map, outputs and the
    gradients of all parameters agree to 1e-9 on `inputs`; with any other map, such as one that exchanges two equal modules or
    transposes a square kernel, they do not. If the outputs do not depend on a weight, its name, shape and kind must allow only
    one rule; the weight is then mapped by this rule, and a `RematWarning` names it.

    `inputs` are arrays for both models: a tuple of positional arguments, or a dictionary of keywords. `torch_call` and
    `flax_call` replace `model(*inputs)` by `call(model, *inputs)`, for instance if only one model takes channels last.
    `torch_module` may be a function that builds the model; `flax_module` may be a function of a dtype, for modules with a fixed
    dtype. `variables` are a Linen module's variables, if `init` cannot make them. `rules` map the tensors that they match;
    the other tensors are guessed. `keep_float64` prevents casts to float32 inside the Flax model.

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
    with jax.enable_x64(True), keep_jax_float64() if keep_float64 else contextlib.nullcontext():
        pair = ModelPair(torch_module, flax_module, inputs, variables, (torch_call, flax_call))
        _refuse_random(pair.torch)
        space, start = _space(pair, as_rules(rules))
        answer = start
        if not pair.disagreement(space.rules(start), pair.generic(0))[0] <= LIMIT:
            answer = identify(pair, space, start)
            _require_proof(pair, space, answer)
        unused = unexercised(pair, space, answer)
        _require_forced(space, answer, unused)
        _require_one(pair, space, answer)
        if unused:
            names = [name for unit in unused for name in space.names(unit)]
            them = "them, so their places follow from" if len(names) > 1 else "it, so its place follows from"
            warn(f"{', '.join(names)}: the outputs do not depend on {them} name, shape and kind alone, without proof")
        return compress(space.rules(answer), {n: x.shape for n, x in pair.initial.items()}, pair.shapes)


def _space(pair: ModelPair, rules: Rules) -> tuple[Space, MapCandidate]:
    """All weight maps, and the map that names suggest.

    Flax's arrays are grouped into units (the weights of one module) in several ways; the first way that fits PyTorch's units is
    used.
    """
    fits, reason = _fitting(pair, rules)
    frozen = tuple(name for name, parameter in pair.torch.named_parameters() if not parameter.requires_grad)
    if fits is None and frozen:  # a frozen parameter may be a table from a constructor, which Flax computes at each use
        pair.written -= set(frozen)
        fits, _ = _fitting(pair, rules | Rules((), (), frozen))
    if fits is None:
        raise PortingError(reason)
    return fits


def _fitting(pair: ModelPair, rules: Rules) -> tuple[tuple[Space, MapCandidate] | None, str]:
    """The result of `_space` and an empty text, or None and the reason why no map fits."""
    covered = links_of_tensors(rules, pair.initial)
    taken = {name for link in covered.values() for name in link.torch} | {n for n in pair.initial if rules.allows_extra(n)}
    filled = {place.path for place in links_of_places(rules, pair.shapes)}
    shapes = {path: s for path, s in pair.shapes.items() if path not in filled and not rules.allows_missing(path)}
    units, ties, buffers = torch_parts(pair.torch, taken)
    new_ties = tuple(tie for tie in ties if tie not in [(first.text, second.text) for first, second in rules.ties])
    rules = rules | Rules((), new_ties, tuple(buffers))  # type: ignore[arg-type]  # `Rules` accepts texts
    if not units and not shapes:
        return (Space([], [], [], rules), MapCandidate((), ())), ""
    for stack in ("", *stack_candidates(shapes)):
        for together in _together(units, attentions(shapes, stack)):
            flax = flax_units(shapes, stack=stack, together=together)
            ways = table(units, flax) if len(flax) == len(units) else []
            places = by_names(units, flax, ways) if ways else None
            if places is not None:
                return (Space(units, flax, ways, rules), MapCandidate(tuple(places), (0,) * len(places))), ""
    return None, _no_match(units, flax_units(shapes))


def _together(units: Sequence[TorchUnit], names: list[str]) -> list[list[str]]:
    """Sets of Flax attentions whose query, key and value may be one PyTorch tensor.

    The sets are: none; all; and for each PyTorch `MultiheadAttention` the Flax attention with the most similar name.
    """
    fused = [unit.name for unit in units if unit.kind == "MultiheadAttention"]
    alike = {max(names, key=lambda name: likeness(unit, name)) for unit in fused} if names else set()
    return [[], names, sorted(alike)]


def _no_match(units: Sequence[TorchUnit], flax: Sequence[FlaxUnit]) -> str:
    ways = table(units, flax)
    ours, theirs = [], []
    for unit, row in zip(units, ways, strict=True):
        shapes = ", ".join(f"{local or 'itself'} {shape}" for local, shape in unit.tensors)
        ours += [] if any(row) else [f"{unit.name or 'the model'} ({unit.kind}): {shapes}"]
    for index, flax_unit in enumerate(flax):
        shapes = ", ".join(f"{place} {shape}" for _, place, shape in flax_unit.arrays)
        theirs += [] if any(row[index] for row in ways) else [f"{flax_unit.name or 'the model'}: {shapes}"]
    lines = [
        f"no map fits the shapes: PyTorch has {len(units)} modules with weights, Flax {len(flax)}; give rules "
        "that name PyTorch-only tensors under 'extra:' and Flax-only arrays under 'missing:':",
        "  PyTorch modules that fit nothing:",
        *(f"    {text}" for text in ours or ["none"]),
        "  Flax modules that nothing fits:",
        *(f"    {text}" for text in theirs or ["none"]),
    ]
    return "\n".join(lines)


def _require_proof(pair: ModelPair, space: Space, candidate: MapCandidate) -> None:
    error, where = pair.disagreement(space.rules(candidate), pair.generic(0))
    if not error <= LIMIT:
        rounded = f" The error has the size of float32's rounding: {FLOAT32_REMEDY}." if error <= FLOAT32_ERROR else ""
        raise PortingError(
            f"no map was found under which the models agree: under the best map, {where} differs by {error:.1e}.{rounded} The "
            "models may differ in more than their weights. You can also pass `rules` for some of the weights."
        )


def _require_forced(space: Space, answer: MapCandidate, unused: Sequence[int]) -> None:
    """Raise an error if an `unused` unit's name, shape and kind allow several places or ways, or its two names are unlike."""
    places = [answer.places[unit] for unit in unused]
    open_units = []
    for unit in unused:
        name, place = space.torch[unit].name, answer.places[unit]
        fitting = [other for other in places if space.table[unit][other]]
        if fitting != [place] or len(space.table[unit][place]) > 1 or not likeness(name, space.flax[place].name):
            open_units.append(unit)
    if open_units:
        names = [name for unit in open_units for name in space.names(unit)]
        lines = [rule for unit in open_units for rule in space.way(answer, unit)]
        raise PortingError(
            f"the outputs do not depend on {', '.join(names)}, so nothing can be proved about these weights; give inputs that "
            "use them, or rules for them, such as:\n" + "\n".join(f"  {rule}" for rule in lines)
        )


def _require_one(pair: ModelPair, space: Space, answer: MapCandidate) -> None:
    others = other_answers(pair, space, answer)
    if others:
        units = [unit for unit in range(len(space.torch)) if len({space.way(each, unit) for each in (answer, *others)}) > 1]
        lines = []
        for number, candidate in enumerate([answer, *others[:8]], 1):
            lines += [f"  {number}:", *(f"    {rule}" for unit in units for rule in space.way(candidate, unit))]
        raise PortingError(
            "several maps agree with both models, in values and gradients; choose one map, and give its lines as rules:\n"
            + "\n".join(lines)
        )


def _refuse_random(module: Any) -> None:
    dropping = [name for name, part in module.named_modules() if part.training and _drops(part)]
    if dropping:
        raise PortingError(f"torch_module: dropout is on in {', '.join(dropping)}; call torch_module.eval() first.")


def _drops(part: Any) -> bool:
    rates = (getattr(part, name, 0.0) for name in (("p", "dropout") if "Dropout" in type(part).__name__ else ("dropout",)))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
