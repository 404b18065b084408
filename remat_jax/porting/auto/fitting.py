"""The weight maps that fit the shapes of two models, and the map that names suggest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from remat_jax.errors import PortingError
from remat_jax.porting.auto.interrogate import MapCandidate, Space
from remat_jax.porting.auto.pair import ModelPair
from remat_jax.porting.auto.recipes import by_names, likeness, table, tokens
from remat_jax.porting.auto.units import (
    FUSED_CELL,
    FlaxUnit,
    TorchUnit,
    attentions,
    buffer_units,
    flax_units,
    stackings,
    torch_parts,
)
from remat_jax.porting.links import links_of_places, links_of_tensors
from remat_jax.porting.pattern import Shape
from remat_jax.porting.rules import Rules

Fit = tuple[Space, MapCandidate]


def fitting(pair: ModelPair, rules: Rules) -> Fit:
    """All weight maps, and the map that names suggest.

    Flax's arrays are grouped into units (the weights of one module) in several ways; the first way that fits PyTorch's units is
    used. If no way fits, tensors and arrays may be left over.

    Raises PortingError if modules of equal names have different shapes.
    """
    mapped = {name for name in links_of_tensors(rules, pair.initial) if pair.initial[name].dtype.kind == "f"}
    pair.write(pair.written | mapped)
    fits = _exactly(pair, rules)
    frozen = tuple(name for name, parameter in pair.torch.named_parameters() if not parameter.requires_grad)
    if fits is None and frozen:  # a frozen parameter may be a table from a constructor, which Flax computes at each use
        fits = _exactly(pair, rules | Rules((), (), frozen))
        pair.write(pair.written - set(frozen if fits else ()))
    return fits or _with_leftovers(pair, rules, frozen)


class _Parts:
    """The tensors and arrays that the user's rules leave open."""

    def __init__(self, pair: ModelPair, rules: Rules) -> None:
        covered = links_of_tensors(rules, pair.initial)
        taken = {name for link in covered.values() for name in link.torch} | {n for n in pair.initial if rules.allows_extra(n)}
        filled = {place.path for place in links_of_places(rules, pair.shapes)}
        self.shapes = {path: s for path, s in pair.shapes.items() if path not in filled and not rules.allows_missing(path)}
        self.units, ties, self.buffers = torch_parts(pair.torch, taken)
        new_ties = tuple(tie for tie in ties if tie not in [(first.text, second.text) for first, second in rules.ties])
        self.rules = rules | Rules((), new_ties)  # type: ignore[arg-type]  # `Rules` accepts texts

    def groupings(self) -> Iterator[list[FlaxUnit]]:
        """The ways to group Flax's arrays into units."""
        for stacks in stackings(self.shapes, self.units):
            for together in _together(self.units, attentions(self.shapes, stacks)):
                yield flax_units(self.shapes, stacks=stacks, together=together)


def _exactly(pair: ModelPair, rules: Rules) -> Fit | None:
    """The maps that use every tensor and fill every array; None if there are none."""
    parts = _Parts(pair, rules)
    given = parts.rules | Rules((), (), tuple(parts.buffers))
    if not parts.units and not parts.shapes:
        return Space([], [], [], given), MapCandidate((), ())
    for flax in parts.groupings():
        ways = table(parts.units, flax) if len(flax) == len(parts.units) else []
        places = by_names(parts.units, flax, ways) if ways else [None]
        if None not in places:
            space = Space(parts.units, flax, ways, given)
            return space, space.usual(MapCandidate(tuple(places), (0,) * len(places)))  # type: ignore[arg-type]
    return None


def _with_leftovers(pair: ModelPair, rules: Rules, frozen: Sequence[str]) -> Fit:
    """The maps that leave the fewest numbers over; a buffer of PyTorch may fill an array of Flax.

    A parameter in `frozen` that is left over keeps its values: Flax may compute it.
    """
    parts = _Parts(pair, rules)
    buffers = buffer_units(parts.buffers, pair.initial)
    names, aside = [*(name for unit in parts.units for name in unit_names(unit)), *parts.buffers], pair.unread()
    fits: list[tuple[int, Fit]] = []
    for flax in parts.groupings():
        torch = [*parts.units, *buffers]
        ways = table(torch, flax, partial=True)
        unread = (
            {i for i, unit in enumerate(torch) if aside[0].issuperset(unit_names(unit))},
            {j for j, unit in enumerate(flax) if all(place.path in aside[1] for _, place, _ in unit.arrays)},
        )
        places = by_names(torch, flax, ways, unread) if torch and flax else []
        kept = [unit for unit, place in enumerate(places) if place is not None]
        space = Space(
            [torch[unit] for unit in kept],
            flax,
            [ways[unit] for unit in kept],
            parts.rules,
            tuple(names),
            tuple(parts.shapes),
            frozenset(parts.buffers),
        )
        start = space.usual(MapCandidate(tuple(places[unit] for unit in kept), (0,) * len(kept)))  # type: ignore[misc]
        tensors, arrays = space.left_over(start)
        sizes = [pair.initial[name].shape for name in tensors if name not in parts.buffers]
        sizes += [parts.shapes[path] for path in arrays]
        fits.append((sum(int(np.prod(shape)) for shape in sizes), (space, start)))
        if not fits[-1][0]:
            break
    _, (space, start) = min(fits, key=lambda entry: entry[0])
    tables = set(space.left_over(start)[0]) & set(frozen)
    pair.write((pair.written | {unit.name for unit in space.torch if unit.kind == "Buffer"}) - tables)
    _refuse_misfits(parts.units, space, start)
    return space, start


def unit_names(unit: TorchUnit) -> list[str]:
    """The full names of a unit's tensors."""
    return [unit.full(local) for local, _ in unit.tensors]


def _together(units: Sequence[TorchUnit], names: list[str]) -> list[list[str]]:
    """Sets of Flax attentions whose query, key and value may be one PyTorch tensor.

    The sets are: none; all; and for each PyTorch `MultiheadAttention` the Flax attention with the most similar name.
    """
    fused = [unit.name for unit in units if unit.kind == "MultiheadAttention"]
    alike = {max(names, key=lambda name: likeness(unit, name)) for unit in fused} if names else set()
    return [list(each) for each in dict.fromkeys(map(tuple, ([], names, sorted(alike))))]


def _refuse_misfits(units: Sequence[TorchUnit], space: Space, start: MapCandidate) -> None:
    """Raise an error if both sides have modules left over: then shapes differ, or one module has another form."""
    torch = [unit for unit in units if unit not in space.torch]
    flax = [unit for place, unit in enumerate(space.flax) if place not in start.places]
    if not (torch and flax) and space.torch:
        return
    theirs = [f"{unit.name or 'the model'} ({unit.kind}): {_shapes(unit.tensors)}" for unit in torch]
    ours = [f"{unit.name or 'the model'}: {_shapes([(str(place), shape) for _, place, shape in unit.arrays])}" for unit in flax]
    alike = [(unit, other) for unit in torch for other in flax if tokens(unit.name) == tokens(other.name)]
    gru = [unit.name or "the model" for unit in torch if unit.kind == "GRU" and len(unit.tensors) == 4]
    notes = [_NNX_GRU.format(name=name) for name in gru if any(unit.children == FUSED_CELL for unit in flax)]
    names = [f"  {unit.name or 'the model'} and {other.name or 'the model'} have equal names" for unit, other in alike]
    lines = [
        f"no map fits the shapes: PyTorch has {len(units)} modules with weights, Flax {len(space.flax)}, and both have modules "
        "that fit no module of the other; change the shapes, or give rules for these modules:",
        "  PyTorch modules that fit nothing:",
        *(f"    {text}" for text in theirs or ["none"]),
        "  Flax modules that nothing fits:",
        *(f"    {text}" for text in ours or ["none"]),
    ]
    raise PortingError("\n".join([*lines, *names, *notes]))


_NNX_GRU = (
    "  {name}: in PyTorch, the hidden part of a GRU's third gate has a bias; nnx.GRUCell has no such bias, so it cannot "
    "compute the same function. Use a cell with this bias, such as Linen's GRUCell"
)


def _shapes(arrays: Sequence[tuple[str, Shape]]) -> str:
    return ", ".join(f"{name or 'itself'} {shape}" for name, shape in arrays)
