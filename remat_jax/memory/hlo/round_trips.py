"""The way of an array to the host and back, read from a compiled module: where it is made, copied out, fetched, and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from remat_jax.memory.hlo.text import FREE, Computation, Instruction

Roots = str | list[Any]


@dataclass(frozen=True)
class RoundTrip:
    """The instructions, by name, that make an array, start its copy to the host, start its copy back, and read it first."""

    made: str
    out: str
    back: str
    read: str


def round_trips(computation: Computation, direction: Callable[[Instruction], str | None]) -> list[RoundTrip]:
    """The arrays that leave for the host and come back in `computation` itself, not in its loops.

    Args:
      direction: "out" or "back" of an instruction that starts a copy between device and host, None of any other.
    """
    roots: dict[str, Roots] = {}
    sources: dict[str, tuple[str, str]] = {}
    readers: dict[str, str] = {}
    for one in computation:
        if one.opcode in FREE or one.opcode.endswith("-done"):
            roots[one.name] = _passed_on(one, roots)
            continue
        for read in (root for operand in one.operands for root in _flat(roots.get(operand, operand))):
            readers.setdefault(read, one.name)
        way = direction(one)
        source = roots.get(one.operands[0], one.operands[0]) if way and one.operands else None
        if way and isinstance(source, str):
            sources[one.name] = way, source
    return list(_pairs(sources, readers))


def _pairs(sources: Mapping[str, tuple[str, str]], readers: Mapping[str, str]) -> Any:
    for back, (way, out) in sources.items():
        if way == "back" and out in sources and sources[out][0] == "out" and back in readers:
            yield RoundTrip(sources[out][1], out, back, readers[back])


def _passed_on(one: Instruction, roots: Mapping[str, Roots]) -> Roots:
    """What an instruction that makes nothing hands on, by the names of the instructions that made it."""
    taken = [roots.get(operand, operand) for operand in one.operands]
    if one.opcode == "get-tuple-element":
        whole, index = taken[0], one.attribute("index")
        return whole[int(index)] if isinstance(whole, list) and index is not None and int(index) < len(whole) else one.name
    if one.opcode == "tuple":
        return taken
    return taken[0] if one.opcode not in ("parameter", "constant") and len(taken) == 1 else one.name


def _flat(roots: Roots) -> list[str]:
    return [roots] if isinstance(roots, str) else [name for one in roots for name in _flat(one)]
