"""The collectives of one step on a mesh, read from the compiled module, because the compiler inserts them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remat_jax.core.module_paths import module_path
from remat_jax.hardware import Target
from remat_jax.hardware.rates import Links
from remat_jax.hardware.slices import axes_between
from remat_jax.memory.hlo.scalars import trip_count
from remat_jax.memory.hlo.text import COLLECTIVES, Computation, HloModule, Instruction, parse

_GROUPS_OF_MESH = re.compile(r"replica_groups=mesh\[(?P<mesh>[^\]]*)\] \{(?P<axes>[^}]*)\}")
_AXIS, _GROUPED = re.compile(r"'([^']+)'=(\d+)"), re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_WITH_OPERANDS = ("all-gather-start", "collective-permute-start")
"""Collectives whose result is a tuple that also contains the operands."""


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind in one phase of a step.

    Attributes:
      kind: XLA's name: `all-gather`, `reduce-scatter`, `all-reduce`, …
      phase: `forward`, `recomputed`, `backward`, or `other`, from the operator's name. If both the recomputation and the
        gradient read the result, the collective runs once and counts in one of the two phases.
      count: the number of arrays; an array in a loop counts once per iteration.
      bytes: the larger of two sizes on one device: the operands' bytes (larger in a reduce-scatter) and the results' bytes
        (larger in an all-gather).
    """

    kind: str
    phase: str
    count: int
    bytes: int


def read_collectives(text: str | HloModule) -> tuple[Collective, ...]:
    """The collectives that one execution of the compiled module `text` runs, by kind and phase.

    A loop counts with its trip count, or once if the compiler does not know it. Every branch of a `conditional` counts.

    >>> read_collectives('''ENTRY %main (x: f32[2]) -> f32[8] {
    ...   %x = f32[2] parameter(0)
    ...   ROOT %all = f32[8] all-gather(%x), dimensions={0}, metadata={op_name="jit(step)/jvp(Model)/dot_general"}
    ... }''')
    (Collective(kind='all-gather', phase='forward', count=1, bytes=32),)
    """
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for key, count, nbytes in _within(parse(text).entry, 1, "other"):
        counts[key] += count
        sizes[key] += nbytes
    ordered = sorted(counts, key=lambda key: (COLLECTIVES.index(key[0]), key[1]))
    return tuple(Collective(*key, counts[key], sizes[key]) for key in ordered)


def executed(collectives: Sequence[Collective]) -> dict[str, tuple[int, int]]:
    """A dict from the kind of collective to (number of arrays, their bytes), summed over the phases."""
    totals: dict[str, tuple[int, int]] = {}
    for each in collectives:
        count, nbytes = totals.get(each.kind, (0, 0))
        totals[each.kind] = count + each.count, nbytes + each.bytes
    return totals


def _within(computation: Computation, times: int, phase: str) -> Iterator[tuple[tuple[str, str], int, int]]:
    """Yield ((kind, phase), number of arrays, bytes) for each collective; numbers are for `times` runs of `computation`."""
    for instruction in computation:
        # Merged instructions have no operator name, so they get the phase of the loop or call around them.
        named_phase = module_path(instruction.op_name)[2]
        inner_phase = phase if named_phase == "other" else named_phase
        if instruction.kind in COLLECTIVES:
            yield (instruction.kind, inner_phase), times * len(_sent(instruction)), times * _bytes(instruction)
        if instruction.collective_part[0] in ("step", "done"):
            continue  # the fusion that starts the collective contains it too
        rounds = times * (trip_count(instruction, unknown=1) if instruction.opcode == "while" else 1)
        for body in instruction.bodies:
            yield from _within(body, rounds, inner_phase)


def _sent(collective: Instruction) -> tuple[Instruction | None, ...]:
    """The operands that a collective sends: of a ragged all-to-all and of a `send` only the first, not offsets or a token."""
    return collective.inputs[:1] if collective.opcode.startswith(("ragged-", "send")) else collective.inputs


def _bytes(collective: Instruction) -> int:
    sent = sum(array.bytes for operand in _sent(collective) if operand is not None for array in operand.arrays)
    if collective.opcode == "send":
        return sent
    whole = sum(array.bytes for array in collective.arrays)
    return max(sent, whole - sent if collective.opcode in _WITH_OPERANDS else whole)


# --- the time of a collective ------------------------------------------------------------------------------------------


def exchange_seconds(collective: Instruction, target: Target, links: Links | None) -> float | None:
    """The seconds of a collective over the target's links; None if it needs a link whose rate is unknown."""
    if collective.opcode == "send" and links is not None:  # each device exchanges its part with those of the other slices
        return links.seconds(collective.kind, _bytes(collective), target.slices, hosts=target.slices)
    group = largest_group(collective.rest, target.devices)
    if len(group) < 2 or links is None:
        return 0.0 if len(group) < 2 else None
    each = target.devices // target.linked_groups
    groups = len({device // each for device in group})
    inside = [device % each for device in group]
    axes = axes_between(inside, target.topology, target.chip["devices_per_chip"]) if target.topology else 1.0
    return links.seconds(collective.kind, _bytes(collective), len(group), hosts=groups, axes=axes)


def largest_group(attributes: str, devices: int) -> list[int]:
    """The device numbers of the group by which a collective is timed.

    If the groups are tiled (`[2,4]<=[4,2]`), this is the first group. If they are listed, it is the group with the widest range
    of numbers. If the text has no groups, it is all `devices`.

    >>> largest_group("replica_groups=[2,4]<=[4,2]T(1,0)", 8), largest_group("replica_groups={}", 2)
    ([0, 2, 4, 6], [0, 1])
    >>> largest_group("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", 8)
    [0, 4]
    >>> largest_group("replica_groups=mesh['x'=8] {'x':(2)2}", 8)
    [0, 2]
    """
    if (of_mesh := _GROUPS_OF_MESH.search(attributes)) is not None:
        numbers = np.arange(math.prod(int(size) for _, size in _AXIS.findall(of_mesh["mesh"])))
        # Each axis is (before, along the group, after); of a part of an axis, `'x':(2)4`, the group spans 4 after 2.
        parts = {name: (int(before or 1), int(along or 0)) for name, before, along in _GROUPED.findall(of_mesh["axes"])}
        shape, chosen = list[int](), list[Any]()
        for name, size in _AXIS.findall(of_mesh["mesh"]):
            before, along = parts.get(name, (int(size), 1))
            along = along or int(size)
            shape += [before, along, int(size) // (before * along)]
            chosen += [0, slice(None), 0]
        return list(map(int, numbers.reshape(shape)[tuple(chosen)].reshape(-1)))
    tiled = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if tiled is not None:
        shape, dims = _integers(tiled[1]), _integers(tiled[2])
        order = _integers(tiled[3]) if tiled[3] else list(range(len(dims)))
        return list(map(int, np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape)[0]))
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}", attributes)
    if listed is None:
        return list(range(devices))
    groups = [_integers(group) for group in re.findall(r"\{([\d,]*)\}", listed[1])]
    widest: list[int] = max(groups, key=lambda group: (max(group) - min(group), len(group)) if group else (-1, 0))
    return sorted(set(widest))


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
