"""The blocks of a workload in the order in which its loss calls them: their programs and their differentiated inputs."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.effect import with_blocks
from remat_jax.core import BlockUnderPolicy, block_under_policy, is_smooth
from remat_jax.core.flow import all_inputs, flagged, has, inner_flags
from remat_jax.core.marks import Batch, Block, Mark, mark_of, vmapped
from remat_jax.core.walk import bodies, equations, variables
from remat_jax.cost.flat import called
from remat_jax.errors import BlockError, UnsupportedError
from remat_jax.policy import Policy
from remat_jax.workload import Workload

EVERYTHING = Policy.parse("everything")
_FOLDED = re.compile(r"\b\d+:u32\[\]")


@dataclass(frozen=True)
class Call:
    """One place where the loss calls a block.

    Attributes:
      key: the block as the workload names it: a class or a glob.
      path: the module path at the start of its residuals' names.
      block: its program, with every array named.
      live: for each input of the program, whether the loss is differentiated with respect to it.
      free: for each input, whether keeping it costs nothing: parameters, the batch, and arrays that several calls read.
      same: for each input, whether it is the same in all rounds.
      shared: for each input, whether several blocks or rounds read it, so that it stays on the device.
      rounds: how often the call runs: the length of the scan around it.
      scanned: whether the call is in a scan.
      nested: whether it is in nested scans, so that its rounds cannot have different policies.
      position: its first position among all calls of its key; each further round adds `stride`.
      batches: the `vmap`s around it, the innermost first.
      within: the `shard_map`s around it; each device runs the call on its own part of the arrays.
    """

    key: Block
    path: str
    block: BlockUnderPolicy
    live: tuple[bool, ...]
    free: tuple[bool, ...]
    same: tuple[bool, ...]
    shared: tuple[bool, ...]
    rounds: int
    scanned: bool
    nested: bool
    position: int
    stride: int
    batches: tuple[Batch, ...]
    within: tuple[Any, ...]

    def batched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` under the `vmap`s around the call."""
        for batch in self.batches:
            function = vmapped(function, batch, len(batch.in_axes))
        return function

    @property
    def in_avals(self) -> list[Any]:
        """The types of the inputs with the batch axes of the `vmap`s around the call."""
        avals = list(self.block.jaxpr.in_avals)
        for batch in self.batches:
            pairs = zip(avals, batch.in_axes, strict=True)
            avals = [aval if axis is None else aval.update(shape=(batch.size, *aval.shape)) for aval, axis in pairs]
        return avals

    @property
    def parts(self) -> int:
        """The number of parts into which the `shard_map`s divide its arrays."""
        return math.prod(map(compat.manual_devices, self.within))

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for calls that run the same program on the same types, in whatever module."""
        # Flax folds a hash of the module's path into its random keys.
        program = _FOLDED.sub(":u32[]", str(self.block.jaxpr))
        return self.key, self.live, self.free, self.same, self.shared, self.scanned, self.batches, program

    def layers(self) -> range:
        """Its positions in forward order among all calls of its key."""
        return range(self.position, self.position + self.stride * self.rounds, self.stride)


def calls(workload: Workload) -> list[Call]:
    """The calls of the workload's blocks in forward order.

    Raises:
      UnsupportedError: the workload was made by `Workload.from_step`; or a block is inside another block, in a `while` loop,
        or in a checkpoint of the model's own.
      BlockError: a block is never called.
    """
    workload.require_loss()
    jaxpr = _traced(workload)
    trained = jax.tree.leaves(workload.split_loss("off")[1])
    untrained = [index >= len(trained) for index in range(len(jaxpr.in_avals))]
    arrays = [_Source(argument=True) for _ in jaxpr.in_avals]
    marked = list(_walk(jaxpr, untrained, arrays, _Place()))
    if not marked:
        raise BlockError(f"workload={workload.name!r}: its loss calls none of the blocks {workload.blocks!r}")
    return _calls(marked)


def _traced(workload: Workload) -> Any:
    """The loss as a closed jaxpr, with a mark in place of every block."""
    policies = workload.own.policies(dict.fromkeys(workload.blocks, EVERYTHING))
    checked = replace(policies, waits=True).anew()
    loss, trained, frozen = workload.split_loss("off")
    arguments = (trained, frozen, *workload.batch)
    with scope.applying(checked) as audit:
        jaxpr = jax.make_jaxpr(lambda *args: with_blocks(checked, loss, args, {}))(*arguments)
        missing = scope.missed(checked, audit)
    workload.own.note(audit)
    if missing is not None:
        raise missing
    return jaxpr


@dataclass(eq=False)
class _Source:
    """The origin of a value: an `argument` of the loss or computed in it; `shared` if all rounds of a loop read the same."""

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
class _MarkedCall:
    eqn: Any
    mark: Mark
    live: tuple[bool, ...]
    sources: tuple[_Source, ...]
    place: _Place


# These primitives only view an array: a view of the batch costs no memory of its own.
_VIEWS = frozenset({"broadcast_in_dim", "copy", "dynamic_slice", "reshape", "slice", "squeeze", "transpose"})


def _walk(jaxpr: Any, untrained: Sequence[bool], sources: Sequence[_Source], place: _Place) -> Iterator[_MarkedCall]:
    """The block calls in the closed `jaxpr`; `untrained` marks the inputs that depend on no trained parameter."""
    fixed = flagged(jaxpr, untrained, all_inputs)
    where: dict[Any, _Source] = dict(zip(jaxpr.jaxpr.invars, sources, strict=True))
    # A constant of the program is the same in all rounds.
    where.update((var, _Source(shared=True)) for var in jaxpr.jaxpr.constvars)
    for eqn in jaxpr.jaxpr.eqns:
        inputs = [_Source(argument=True) if hasattr(atom, "val") else where[atom] for atom in eqn.invars]
        flags = [has(atom, fixed) for atom in eqn.invars]
        if (mark := mark_of(eqn)) is not None:
            # An array passed twice to one block has one reader.
            for source in set(inputs):
                source.readers += 1
            yield _MarkedCall(eqn, mark, tuple(not flag for flag in flags), tuple(inputs), place)
        elif any(mark_of(inner) is not None for body in bodies(eqn) for inner in equations(body)):
            yield from _inside(eqn, flags, inputs, place)
        view = eqn.primitive.name in _VIEWS and inputs and inputs[0].argument
        where.update((var, inputs[0] if view else _Source()) for var in eqn.outvars)


def _inside(eqn: Any, flags: list[bool], inputs: list[_Source], place: _Place) -> Iterator[_MarkedCall]:
    name = eqn.primitive.name
    if name == "scan":
        body = compat.closed(eqn.params["jaxpr"])
        consts, carry = compat.scan_layout(eqn)
        # A row of an argument needs no memory beside the argument.
        rows = [_Source(argument=source.argument) for source in inputs[consts + carry :]]
        same = [_Source(argument=source.argument, shared=True) for source in inputs[:consts]]
        deeper = replace(place, rounds=place.rounds * eqn.params["length"], loops=(*place.loops, id(eqn)))
        untrained = inner_flags(eqn, "jaxpr", body, flags, all_inputs)
        yield from _walk(body, untrained, [*same, *(_Source() for _ in range(carry)), *rows], deeper)
    elif name == "cond":
        yield from max((list(_walk(branch, flags[1:], inputs[1:], place)) for branch in bodies(eqn)), key=len)
    elif name == "while":
        raise UnsupportedError("a block in a while loop: its trip count is unknown before it runs; use lax.scan")
    elif compat.is_checkpoint(eqn):
        raise UnsupportedError(
            "a block inside one of the model's own checkpoints (nn.remat, jax.checkpoint), which discards the residuals that "
            "a plan keeps: leave own_checkpoints='keep' out of the Workload, and the plan replaces this checkpoint"
        )
    else:
        body = called(eqn)
        if body is None:
            raise UnsupportedError(f"a block inside {name!r} cannot be planned: this is not a call, scan or cond")
        yield from _walk(body, flags, inputs, replace(place, within=(*place.within, eqn)) if name == "shard_map" else place)


def _calls(marked: Sequence[_MarkedCall]) -> list[Call]:
    """The calls, each with its block's program and its positions among the calls of its key."""
    blocks: dict[int, BlockUnderPolicy] = {}
    # A body that two loops share is read once.
    by_eqn = {id(one.eqn): one.eqn for one in marked}
    readers = Counter(atom for eqn in by_eqn.values() for atom in set(variables(eqn.invars)))
    # Calls of one key in one loop alternate.
    alternating = Counter((one.mark.marked.block, one.place.loops) for one in marked)
    first, turn = Counter[Block](), Counter[Block]()
    calls = []
    for one in marked:
        mark, place, key = one.mark, one.place, one.mark.marked.block
        if id(mark) not in blocks:
            blocks[id(mark)] = _block(one)
        block = blocks[id(mark)]
        shared = (
            source.shared or (not hasattr(atom, "val") and readers[atom] > 1)
            for atom, source in zip(one.eqn.invars, one.sources, strict=True)
        )
        stride = alternating[key, place.loops] if place.loops else 1
        call = Call(
            key=key,
            path=mark.path,
            block=block,
            live=tuple(live and is_smooth(aval) for live, aval in zip(one.live, block.jaxpr.in_avals, strict=True)),
            free=tuple(source.free for source in one.sources),
            same=tuple(source.shared for source in one.sources),
            shared=tuple(shared),
            rounds=place.rounds,
            scanned=bool(place.loops),
            nested=len(place.loops) > 1,
            position=first[key] + turn[key],
            stride=stride,
            batches=mark.batches,
            within=place.within,
        )
        calls.append(call)
        turn[key] += 1
        if turn[key] >= stride:
            turn[key] = 0
            first[key] += stride * place.rounds
    return calls


def _block(one: _MarkedCall) -> BlockUnderPolicy:
    mark = one.mark
    if any(mark_of(inner) is not None for inner in equations(mark.jaxpr)):
        raise UnsupportedError(
            "blocks inside blocks: a plan needs blocks that follow each other; name only the outer or only the inner blocks"
        )
    with axes_around(one.place.within, mark.batches):
        return block_under_policy(mark.jaxpr, EVERYTHING, mark.path, mark.inputs)


@contextlib.contextmanager
def axes_around(within: Sequence[Any], batches: Sequence[Batch]) -> Iterator[None]:
    """Inside it the axes of the `shard_map`s and `vmap`s around a call are bound."""
    with contextlib.ExitStack() as stack:
        for eqn in within:
            stack.enter_context(compat.inner_context(eqn))
        stack.enter_context(compat.axes_of_vmaps(batches))
        yield
