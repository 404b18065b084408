"""The blocks of a workload as its loss calls them: in forward order, each with its program and what is differentiated."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply import linen, nnx, scope
from remat_jax.apply.audit import Audit
from remat_jax.apply.scope import BlockPolicies
from remat_jax.errors import BlockError, UnsupportedError
from remat_jax.graph import PlannedBlock, is_smooth
from remat_jax.graph.flat import called
from remat_jax.graph.flow import flagged, has, inner_flags
from remat_jax.graph.walk import holds_block
from remat_jax.policy import Policy
from remat_jax.workload import Workload

_FOLDED = re.compile(r"\b\d+:u32\[\]")


@dataclass(frozen=True)
class Call:
    """One place where the loss calls a block.

    Attributes:
      key: the block as the workload names it: a class or a glob.
      path: the module path that leads the names of its residuals.
      block: its program, with every array named.
      live: for each input of the program, whether it is differentiated along.
      free: for each input, whether keeping it costs nothing: parameters, the batch, and what several calls share.
      same: for each input, whether it is the same in all rounds.
      shared: for each input, whether several blocks or rounds read it, so that it stays on the device (`graph.shared`).
      rounds: how often it runs: the length of the scan around it.
      scanned: whether there is one.
      nested: whether there are several, one in another, so that its calls cannot have policies of their own.
      within: each `shard_map` that it stands in, whose devices run it on a part of their own.
      position: where it comes first among all calls of its key; `stride` further for each round.
    """

    key: type | str
    path: str
    block: PlannedBlock
    live: tuple[bool, ...]
    free: tuple[bool, ...]
    same: tuple[bool, ...]
    shared: tuple[bool, ...]
    rounds: int = 1
    scanned: bool = False
    position: int = 0
    stride: int = 1
    nested: bool = False
    within: tuple[Any, ...] = ()

    @property
    def parts(self) -> int:
        """Into how many parts each of its arrays is divided already, where a `shard_map` divides them."""
        return math.prod(map(compat.manual_devices, self.within))

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for calls that run the same program on the same types, whatever module they are of."""
        # Flax folds a number made of the module's path into the keys that it draws from.
        program = _FOLDED.sub(":u32[]", str(self.block.jaxpr))
        return self.key, self.live, self.free, self.same, self.shared, self.scanned, program

    def layers(self) -> range:
        """Its positions in forward order among all calls of its key."""
        return range(self.position, self.position + self.stride * self.rounds, self.stride)


def calls(workload: Workload) -> tuple[list[Call], Any]:
    """The calls of the workload's blocks in forward order, and the loss as a closed jaxpr.

    Raises:
      UnsupportedError: the workload was made by `Workload.from_step`; blocks stand inside each other, in a `while` loop, or
        in a checkpoint of the model's own.
      BlockError: a block is never called.
    """
    if not workload.has_loss:
        raise UnsupportedError(
            f"workload={workload.name!r} was made from a finished step, which takes its gradient inside: what its blocks keep "
            "cannot be read from outside. Make a Workload of the loss instead."
        )
    jaxpr, seen = _traced(workload)
    trained = jax.tree.leaves(workload.split_loss("off")[1])
    known = [index >= len(trained) for index in range(len(jaxpr.in_avals))]
    arrays = [_Source(argument=True) for _ in jaxpr.in_avals]
    found = list(_walk(jaxpr, known, arrays, _Place()))
    if not found:
        raise BlockError(f"workload={workload.name!r}: its loss calls none of the blocks {workload.blocks!r}")
    return _numbered(_matched(found, seen)), jaxpr


class _Watching(Audit):
    """An audit that keeps the blocks that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[tuple[str, PlannedBlock]] = []

    def saw(self, path: str, block: PlannedBlock, **rest: Any) -> None:
        super().saw(path, block, **rest)
        self.blocks.append((path, block))


def _traced(workload: Workload) -> tuple[Any, list[tuple[type | str, str, PlannedBlock]]]:
    """The loss with every residual of every block saved, and the blocks that were traced in it, with their keys."""
    # Equal, but not one and the same: by which of them a block runs says which key it is of.
    policies = {key: Policy.parse("everything") for key in workload.blocks}
    keys = {id(policy): key for key, policy in policies.items()}
    checked = BlockPolicies.of(policies).anew()
    loss, trained, frozen = workload.split_loss("off")
    arguments = (trained, frozen, *workload.batch)
    watching = _Watching()
    with scope.applying(checked) as found, linen.intercepting(), nnx.intercepting(checked, (arguments, {})):
        found.audit = watching
        jaxpr = jax.make_jaxpr(lambda *args: loss(*args))(*arguments)
        missing = scope.missed(checked, found)
    if missing is not None:
        raise missing
    return jaxpr, [(keys[id(block.policy)], path, block) for path, block in watching.blocks]


@dataclass(eq=False)
class _Source:
    """Where a value comes from: `argument` of the loss, or made in it; `shared` where all rounds of a loop have the same."""

    argument: bool = False
    shared: bool = False
    readers: int = 0

    @property
    def free(self) -> bool:
        return self.argument or self.shared or self.readers > 1


@dataclass(frozen=True)
class _Place:
    rounds: int = 1
    loops: tuple[int, ...] = ()
    within: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _Found:
    eqn: Any
    live: tuple[bool, ...]
    sources: tuple[_Source, ...]
    place: _Place


# What only looks at an array: a view of the batch is there anyway.
_VIEWS = frozenset({"broadcast_in_dim", "copy", "dynamic_slice", "reshape", "slice", "squeeze", "transpose"})


def _is_known(eqn: Any, flags: list[bool]) -> bool:
    return all(flags)


def _walk(jaxpr: Any, known: Sequence[bool], sources: Sequence[_Source], place: _Place) -> Iterator[_Found]:
    """The block calls in the closed `jaxpr`; `known` says which inputs no trained parameter reaches."""
    fixed = flagged(jaxpr, known, _is_known)
    where: dict[Any, _Source] = dict(zip(jaxpr.jaxpr.invars, sources, strict=True))
    for eqn in jaxpr.jaxpr.eqns:
        inputs = [_Source(argument=True) if hasattr(atom, "val") else where.get(atom, _SHARED) for atom in eqn.invars]
        flags = [has(atom, fixed) for atom in eqn.invars]
        if compat.is_block(eqn):
            found = _Found(eqn, tuple(not flag for flag in flags), tuple(inputs), place)
            # An array that a block is given twice is read by one block all the same.
            for source in {id(source): source for source in inputs}.values():
                source.readers += 1
            yield found
        elif holds_block(eqn):
            yield from _inside(eqn, flags, inputs, place)
        view = eqn.primitive.name in _VIEWS and inputs and inputs[0].argument
        where.update((var, inputs[0] if view else _Source()) for var in eqn.outvars)


_SHARED = _Source(shared=True)


def _inside(eqn: Any, flags: list[bool], inputs: list[_Source], place: _Place) -> Iterator[_Found]:
    name = eqn.primitive.name
    if name == "scan":
        body = compat.closed(eqn.params["jaxpr"])
        consts, carry = compat.scan_layout(eqn)
        # A row of an argument is there as long as the argument is.
        rows = [_Source(argument=one.argument) for one in inputs[consts + carry :]]
        same = [_Source(argument=one.argument, shared=True) for one in inputs[:consts]]
        length = eqn.params["length"]
        deeper = replace(place, rounds=place.rounds * length, loops=(*place.loops, id(eqn)))
        known = inner_flags(eqn, "jaxpr", body, flags, _is_known)
        yield from _walk(body, known, [*same, *(_Source() for _ in range(carry)), *rows], deeper)
    elif name == "cond":
        branches = [compat.closed(one) for one in eqn.params["branches"]]
        inner = [list(_walk(one, flags[1:], inputs[1:], place)) for one in branches]
        yield from max(inner, key=len)
    elif name == "while":
        raise UnsupportedError("a block in a while loop: the number of its rounds is not known before it runs; use lax.scan")
    elif compat.is_checkpoint(eqn):
        raise UnsupportedError(
            "a block inside a checkpoint of the model's own (nn.remat, jax.checkpoint), which throws away what a plan would "
            "keep: take it out of the model, or plan and train remat_jax.replan(loss, 'off') in place of loss"
        )
    else:
        body = called(eqn)
        if body is None:
            raise UnsupportedError(f"a block inside {name!r}, which is no call, scan or cond, cannot be planned for")
        yield from _walk(body, flags, inputs, replace(place, within=(*place.within, eqn)) if name == "shard_map" else place)


def _matched(found: Sequence[_Found], seen: Sequence[tuple[type | str, str, PlannedBlock]]) -> list[Call]:
    """Each call with the block that was traced for it.

    A block may be traced more often than it is called (a scan traces its body several times) or less (a `jit` is traced once
    for many calls); blocks come in the order of the calls either way.
    """
    left: dict[Any, list[tuple[type | str, str, PlannedBlock]]] = {}
    for traced in seen:
        left.setdefault(_kind(traced[2].jaxpr), []).append(traced)
    of: dict[int, tuple[type | str, str, PlannedBlock]] = {}
    readers = _readers(found)
    result = []
    for one in found:
        body = compat.closed(one.eqn.params["call_jaxpr"])
        if any(compat.is_block(inner) or holds_block(inner) for inner in body.jaxpr.eqns):
            raise UnsupportedError(
                "blocks inside blocks: a plan is made for blocks that follow each other; name the outer or the inner"
            )
        if id(body.jaxpr) not in of:
            queue = left.get(_kind(body))
            if queue is None:
                raise UnsupportedError(
                    "a block that vmap maps over, or that is differentiated inside the loss, cannot be planned for: what it "
                    "computes there is not what was traced. Give the blocks the whole batch."
                )
            # A scan's body is traced several times: what was left over of it is not taken for a block elsewhere.
            first = next((at for at, (_, _, block) in enumerate(queue) if _scopes(block.jaxpr) == _scopes(body)), 0)
            of[id(body.jaxpr)] = queue.pop(first) if len(queue) > 1 else queue[0]
        key, path, block = of[id(body.jaxpr)]
        smooth = tuple(live and is_smooth(aval) for live, aval in zip(one.live, block.jaxpr.in_avals, strict=True))
        free = tuple(source.free for source in one.sources)
        same = tuple(source.shared for source in one.sources)
        shared = tuple(every or len(readers.get(atom, ())) > 1 for atom, every in zip(_atoms(one.eqn), same, strict=True))
        call = Call(key, path, block, smooth, free, same, shared, one.place.rounds, bool(one.place.loops))
        call = replace(call, nested=len(one.place.loops) > 1, within=one.place.within)
        result.append((call, one.place.loops))
    return _strided(result)


def _readers(found: Sequence[_Found]) -> dict[Any, set[int]]:
    """By variable, the blocks that read it: a `jit` that is called for many layers is one program, as it is traced once."""
    readers: dict[Any, set[int]] = {}
    for one in found:
        for atom in _atoms(one.eqn):
            readers.setdefault(atom, set()).add(id(one.eqn))
    readers.pop(None, None)
    return readers


def _atoms(eqn: Any) -> list[Any]:
    """The variables that `eqn` reads; None for literals."""
    return [None if hasattr(atom, "val") else atom for atom in eqn.invars]


def _kind(jaxpr: Any) -> tuple[Any, ...]:
    """Equal for a program and what it is after being bound and traced again."""
    return tuple(map(str, jaxpr.in_avals)), tuple(
        (eqn.primitive.name, str(eqn.outvars[0].aval)) for eqn in jaxpr.jaxpr.eqns if eqn.outvars
    )


def _scopes(jaxpr: Any) -> list[tuple[str, ...]]:
    """The module paths in a program; none where no one said."""
    return [compat.scopes(eqn) for eqn in jaxpr.jaxpr.eqns]


def _strided(found: Sequence[tuple[Call, tuple[int, ...]]]) -> list[Call]:
    """The calls with their strides: several of one key in one loop take turns."""
    together: dict[Any, int] = {}
    for call, loops in found:
        together[call.key, loops] = together.get((call.key, loops), 0) + 1
    return [replace(call, stride=together[call.key, loops] if loops else 1) for call, loops in found]


def _numbered(found: Sequence[Call]) -> list[Call]:
    """The calls with their positions among those of their key."""
    first: dict[Any, int] = {}
    turn: dict[Any, int] = {}
    result = []
    for call in found:
        here = turn.get(call.key, 0)
        base = first.get(call.key, 0)
        result.append(replace(call, position=base + here))
        if here + 1 < call.stride:
            turn[call.key] = here + 1
        else:
            turn[call.key] = 0
            first[call.key] = base + call.stride * call.rounds
    return result
