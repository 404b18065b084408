"""The collectives of one step on a mesh, read from the compiled module.

The compiler's partitioner, not the program, decides where an array is gathered, summed or scattered. A collective in a loop
counts once per iteration. If collectives were combined into one call, each of its arrays counts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from remat_jax.hardware import Target
from remat_jax.hardware.rates import Links
from remat_jax.memory.hlo.live import module_path
from remat_jax.memory.hlo.text import COLLECTIVES, Computation, HloModule, Instruction, parse

_WITH_OPERANDS = ("all-gather-start", "collective-permute-start")
_BODIES = {"while": ("body",), "call": ("to_apply", "calls"), "async-start": ("calls",), "fusion": ("calls",)}


@dataclass(frozen=True)
class Collective:
    """The exchanges of one kind in one phase of a step.

    Attributes:
      kind: XLA's name: `all-gather`, `reduce-scatter`, `all-reduce`, …
      phase: `forward`, `recomputed`, `backward`, or `other`. An array that both the recomputation and the gradient read is
        exchanged once, in the phase that the compiler names.
      count: the number of exchanged arrays; an array in a loop counts once per iteration.
      bytes: the larger of the bytes that one device sends and receives: for an all-gather the whole result, for a
        reduce-scatter the whole operand.
    """

    kind: str
    phase: str
    count: int
    bytes: int


def read_collectives(text: str | HloModule) -> tuple[Collective, ...]:
    """The collectives that one execution of the compiled module `text` runs, by kind and phase.

    A loop runs for the trip count that the compiler knows, else once. Every branch of a `conditional` counts.

    Raises:
      UnsupportedError: the text has a line of an unknown form.

    >>> read_collectives('''ENTRY %main (x: f32[2]) -> f32[8] {
    ...   %x = f32[2] parameter(0)
    ...   ROOT %all = f32[8] all-gather(%x), dimensions={0}, metadata={op_name="jit(step)/jvp(Model)/dot_general"}
    ... }''')
    (Collective(kind='all-gather', phase='forward', count=1, bytes=32),)
    """
    module = parse(text)
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for kind, phase, count, nbytes in _within(module, module.computations[module.entry], 1, "other"):
        counts[kind, phase] += count
        sizes[kind, phase] += nbytes
    return tuple(Collective(*key, counts[key], sizes[key]) for key in sorted(counts, key=_order))


def executed(collectives: Sequence[Collective]) -> dict[str, tuple[int, int]]:
    """By kind, the number of arrays exchanged in all phases together, and their bytes.

    >>> executed([Collective("all-gather", "forward", 2, 10), Collective("all-gather", "backward", 2, 10)])
    {'all-gather': (4, 20)}
    """
    found: dict[str, tuple[int, int]] = {}
    for one in collectives:
        count, nbytes = found.get(one.kind, (0, 0))
        found[one.kind] = count + one.count, nbytes + one.bytes
    return found


def _order(key: tuple[str, str]) -> tuple[int, str]:
    return COLLECTIVES.index(key[0]), key[1]


def _within(module: HloModule, computation: Computation, times: int, phase: str) -> Iterator[tuple[str, str, int, int]]:
    for one in computation:
        own = _phase(one) or phase
        kind = one.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            # Besides its array, a ragged collective has a result buffer, offsets and sizes as operands.
            count = 1 if _is_ragged(one) else len(one.operands)
            yield kind, own, times * count, times * _bytes(computation, one)
        for name in _inside(one):
            body = module.computations.get(name)
            if body is not None:
                rounds = int(one.config.get("known_trip_count", {}).get("n", 1)) if one.opcode == "while" else 1
                yield from _within(module, body, times * rounds, own)


def _inside(one: Instruction) -> list[str]:
    """The computations that an instruction runs."""
    if one.opcode == "conditional":
        listed = re.search(r"branch_computations=\{([^}]*)\}", one.rest)
        names = [name.strip().lstrip("%") for name in listed[1].split(",")] if listed else []
        return names + [name for key in ("true_computation", "false_computation") if (name := one.attribute(key))]
    return [name for key in _BODIES.get(one.opcode, ()) if (name := one.attribute(key))][:1]


def _phase(one: Instruction) -> str | None:
    """The phase in an instruction's op name; None if it has none, as for merged instructions, which take their loop's phase."""
    named = re.search(r'op_name="([^"]*)"', one.rest)
    phase = module_path(named[1])[2] if named else "other"
    return None if phase == "other" else phase


def _is_ragged(one: Instruction) -> bool:
    return one.opcode.startswith("ragged-")


def _bytes(computation: Computation, one: Instruction) -> int:
    operands = [computation.operand(one, index) for index in range(1 if _is_ragged(one) else len(one.operands))]
    given = sum(array.bytes for operand in operands if operand is not None for array in operand.arrays)
    whole = sum(array.bytes for array in one.arrays)
    return max(given, whole - given if one.opcode in _WITH_OPERANDS else whole)


# --- the time of an exchange -------------------------------------------------------------------------------------------


def exchange_of(module: HloModule, computation: Computation, one: Instruction) -> tuple[Computation, Instruction] | None:
    """The collective that an instruction is, starts, or wraps in an asynchronous call; None for other instructions."""
    if one.opcode.removesuffix("-start") in COLLECTIVES:
        return computation, one
    called = module.computations.get(one.attribute("calls") or "") if one.opcode == "async-start" else None
    inside = [inner for inner in called or () if inner.opcode in COLLECTIVES]
    return (called, inside[0]) if called is not None and inside else None


def exchange_seconds(computation: Computation, one: Instruction, target: Target, links: Links | None) -> float | None:
    """Seconds of a collective over the target's links; None if the rate of a link that it needs is unknown."""
    kind = one.opcode.removesuffix("-start")
    group = largest_group(one.rest, target.devices)
    hosts = len({device // (target.devices // target.hosts) for device in group})
    if len(group) < 2:
        return 0.0
    return None if links is None else links.seconds(kind, _bytes(computation, one), len(group), hosts=hosts)


def largest_group(attributes: str, devices: int) -> list[int]:
    """The device numbers of the largest group that exchanges data in a collective.

    >>> largest_group("replica_groups={{0,1},{2,3}}", 4), largest_group("replica_groups=[2,4]<=[4,2]T(1,0)", 8)
    ([0, 1], [0, 2, 4, 6])
    >>> largest_group("source_target_pairs={{0,1},{1,0}}", 2), largest_group("replica_groups={}", 2)
    ([0, 1], [0, 1])
    """
    tiled = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if tiled is not None:
        shape, dims = ([int(one) for one in text.split(",")] for text in tiled.group(1, 2))
        order = [int(one) for one in tiled[3].split(",")] if tiled[3] else list(range(len(dims)))
        return list(map(int, np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape)[0]))
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}", attributes)
    if listed is None:
        return list(range(devices))
    groups = [[int(one) for one in group.split(",") if one] for group in re.findall(r"\{([\d,]*)\}", listed[1])]
    widest: list[int] = max(groups, key=lambda group: (max(group) - min(group), len(group)) if group else (-1, 0))
    return sorted(set(widest))
