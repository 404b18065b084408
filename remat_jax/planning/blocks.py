"""The calls of a workload's blocks in its traced loss, in forward order, with their jaxprs and differentiated inputs."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.effect import with_blocks
from remat_jax.apply.replan import with_marked_parts
from remat_jax.core import BlockUnderPolicy, block_under_policy, is_smooth
from remat_jax.core.flow import all_inputs, flagged, has, inner_flags
from remat_jax.core.marks import Batch, Block, Mark, mark_of, vmapped
from remat_jax.core.walk import bodies, equations, variables
from remat_jax.cost.flat import called
from remat_jax.errors import BlockError, UnsupportedError
from remat_jax.identity import ByIdentity
from remat_jax.policy import Policy
from remat_jax.report.activity import activity
from remat_jax.workload import Workload

EVERYTHING = Policy.parse("everything")
_FOLDED = re.compile(r"\b\d+:u32\[\]")


@dataclass(frozen=True)
class Call:
    """One call site of a block in the traced loss.

    Attributes:
      key: the block as the workload names it, such as a class or a glob.
      path: the module path at the start of its residuals' names.
      block: its jaxpr, with a residual name for every array.
      live: for each input of the jaxpr, whether the loss is differentiated with respect to it.
      free: for each input, whether saving it needs no further memory. True for parameters, the batch, and arrays that several
        calls or iterations read.
      same: for each input, whether it is the same in all iterations of the scans around the call.
      shared: for each input, whether several blocks or iterations read it. If so, it stays on the device.
      rows: for each input, whether it is live, and one iteration's part of a scanned array, such as stacked parameters. False
        if the scan's iterations have several calls.
      rounds: how often the call runs: the product of the trip counts of the scans around it.
      scanned: whether the call is in a scan.
      nested: whether it is in nested scans. If so, its iterations cannot have different policies.
      position: the position of its first iteration among all calls of its key; each further iteration adds `stride`.
      batches: the `vmap`s around the call, innermost first.
      within: the `shard_map`s around the call; each device runs the call on its own shards.
    """

    key: Block
    path: str
    block: BlockUnderPolicy
    live: tuple[bool, ...]
    free: tuple[bool, ...]
    same: tuple[bool, ...]
    shared: tuple[bool, ...]
    rows: tuple[bool, ...]
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
        """The types of the inputs, with the batch axes of the `vmap`s around the call."""
        avals = list(self.block.jaxpr.in_avals)
        for batch in self.batches:
            pairs = zip(avals, batch.in_axes, strict=True)
            avals = [aval if axis is None else aval.update(shape=(batch.size, *aval.shape)) for aval, axis in pairs]
        return avals

    @property
    def stacked_bytes(self) -> int:
        """The bytes of one layer's gradients that a scan stacks (`rows`); 0 in nested scans, which cannot be cut."""
        if self.nested:
            return 0
        rows = (aval for aval, row in zip(self.in_avals, self.rows, strict=True) if row)
        return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in rows)

    @property
    def parts(self) -> int:
        """The number of shards into which the `shard_map`s around the call partition its arrays."""
        return math.prod(map(compat.manual_devices, self.within))

    @property
    def signature(self) -> tuple[Any, ...]:
        """A key that is equal for calls of the same jaxpr with the same types, whatever their module paths."""
        # Flax folds a hash of the module's path into its random keys.
        program = _FOLDED.sub(":u32[]", str(self.block.jaxpr))
        return self.key, self.live, self.free, self.same, self.shared, self.rows, self.scanned, self.batches, program

    def layers(self) -> range:
        """The positions of its iterations among all calls of its key, in forward order."""
        return range(self.position, self.position + self.stride * self.rounds, self.stride)


def calls(workload: Workload) -> list[Call]:
    """The calls of the workload's blocks in forward order.

    Raises:
      UnsupportedError: a block is inside another block, a `while` loop, or one of the model's own checkpoints; or a finished
        step takes no gradient through its blocks, or several.
      BlockError: a block is never called.
    """
    jaxpr, untrained = _traced(workload)
    arrays = [_Source(argument=True) for _ in jaxpr.in_avals]
    marked = list(_walk(jaxpr, untrained, arrays, _Place()))
    if not marked:
        raise BlockError(f"workload={workload.name!r}: its loss calls none of the blocks {workload.blocks!r}")
    return _calls(marked)


@activity("tracing the loss")
def _traced(workload: Workload) -> tuple[Any, list[bool]]:
    """The loss as a closed jaxpr, with a mark (`core.marks`) in place of every block call; and which inputs are untrained."""
    policies = workload.own.policies(dict.fromkeys(workload.blocks, EVERYTHING))
    if not workload.has_loss:
        inner = workload.inner_loss(policies)
        return inner.jaxpr, [True] * len(inner.frozen) + [False] * len(inner.trained)
    checked = replace(policies, waits=True).anew()
    loss, trained, frozen = workload.split_loss("off")
    arguments = (trained, frozen, *workload.batch)
    with scope.applying(checked) as audit:
        jaxpr = jax.make_jaxpr(lambda *args: with_blocks(checked, loss, args, {}))(*arguments)
        jaxpr = with_marked_parts(jaxpr, frozenset(workload.blocks), audit)
        missing = scope.missed(checked, audit)
    workload.own.note(audit)
    if missing is not None:
        raise missing
    count = len(jax.tree.leaves(trained))
    return jaxpr, [index >= count for index in range(len(jaxpr.in_avals))]


@dataclass(eq=False)
class _Source:
    """The origin of an array.

    `argument`: it is an argument of the loss or a view of one. `shared`: all iterations of a loop read it. `row`: it is one
    iteration's part of a scanned array. `readers`: the number of block calls that read it.
    """

    argument: bool = False
    shared: bool = False
    row: bool = False
    readers: int = 0

    @property
    def free(self) -> bool:
        return self.argument or self.shared or self.readers > 1


@dataclass(frozen=True)
class _Place:
    rounds: int = 1
    loops: tuple[Any, ...] = ()
    within: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _MarkedCall:
    eqn: JaxprEqn
    mark: Mark
    live: tuple[bool, ...]
    sources: tuple[_Source, ...]
    place: _Place


# These primitives only view an array: a view of an argument needs no memory of its own.
_VIEWS = frozenset({"broadcast_in_dim", "copy", "dynamic_slice", "reshape", "slice", "squeeze", "transpose"})


def _walk(jaxpr: ClosedJaxpr, untrained: Sequence[bool], sources: Sequence[_Source], place: _Place) -> Iterator[_MarkedCall]:
    """The block calls in the closed `jaxpr`; `untrained` flags inputs that do not depend on a trained parameter."""
    fixed = flagged(jaxpr, untrained, all_inputs)
    where: dict[Any, _Source] = dict(zip(jaxpr.jaxpr.invars, sources, strict=True))
    # A constant of the jaxpr is the same in all iterations.
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
        view = eqn.primitive.name in _VIEWS and inputs and (inputs[0].argument or inputs[0].row)
        where.update((var, inputs[0] if view else _Source()) for var in eqn.outvars)


def _inside(eqn: JaxprEqn, flags: list[bool], inputs: list[_Source], place: _Place) -> Iterator[_MarkedCall]:
    name = eqn.primitive.name
    if name == "scan":
        body = compat.closed(eqn.params["jaxpr"])
        consts, carry = compat.scan_layout(eqn)
        # A slice of a scanned argument needs no memory in addition to the argument.
        rows = [_Source(argument=source.argument, row=True) for source in inputs[consts + carry :]]
        same = [_Source(argument=source.argument, shared=True) for source in inputs[:consts]]
        deeper = replace(place, rounds=place.rounds * eqn.params["length"], loops=(*place.loops, eqn))
        untrained = inner_flags(eqn, "jaxpr", body, flags, all_inputs)
        yield from _walk(body, untrained, [*same, *(_Source() for _ in range(carry)), *rows], deeper)
    elif name == "cond":
        yield from max((list(_walk(branch, flags[1:], inputs[1:], place)) for branch in bodies(eqn)), key=len)
    elif name == "while":
        raise UnsupportedError("a block in a while loop: the loop's trip count is unknown before it runs; use lax.scan")
    elif compat.is_checkpoint(eqn):
        raise UnsupportedError(
            "a block inside one of the model's own checkpoints (nn.remat, jax.checkpoint), which discards the residuals that "
            "a plan keeps: remove own_checkpoints='keep' from the Workload, so that the plan can replace the checkpoint"
        )
    else:
        body = called(eqn)
        if body is None:
            raise UnsupportedError(f"a block inside {name!r} cannot be planned, because {name!r} is not a call, scan or cond")
        yield from _walk(body, flags, inputs, replace(place, within=(*place.within, eqn)) if name == "shard_map" else place)


def _calls(marked: Sequence[_MarkedCall]) -> list[Call]:
    """The calls, each with its block's program and its positions among the calls of its key."""
    blocks: ByIdentity[BlockUnderPolicy] = ByIdentity()
    # Two loops may share a body: count each of its equations once.
    eqns = {marked_call.eqn for marked_call in marked}
    readers = Counter(atom for eqn in eqns for atom in set(variables(eqn.invars)))
    # If a loop's body has several calls of one key, their positions alternate.
    alternating = Counter((marked_call.mark.marked.block, marked_call.place.loops) for marked_call in marked)
    in_loops = Counter(marked_call.place.loops for marked_call in marked)
    first, turn = Counter[Block](), Counter[Block]()
    calls = []
    for marked_call in marked:
        mark, place, key = marked_call.mark, marked_call.place, marked_call.mark.marked.block
        if mark not in blocks:
            blocks[mark] = _block(marked_call)
        block = blocks[mark]
        shared = (
            source.shared or (not hasattr(atom, "val") and readers[atom] > 1)
            for atom, source in zip(marked_call.eqn.invars, marked_call.sources, strict=True)
        )
        stride = alternating[key, place.loops] if place.loops else 1
        live = tuple(live and is_smooth(aval) for live, aval in zip(marked_call.live, block.jaxpr.in_avals, strict=True))
        call = Call(
            key=key,
            path=mark.path,
            block=block,
            live=live,
            free=tuple(source.free for source in marked_call.sources),
            same=tuple(source.shared for source in marked_call.sources),
            shared=tuple(shared),
            # With several calls in an iteration, a scan cannot be cut for one of them.
            rows=tuple(
                flag and source.row and in_loops[place.loops] == 1
                for flag, source in zip(live, marked_call.sources, strict=True)
            ),
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


def _block(marked_call: _MarkedCall) -> BlockUnderPolicy:
    mark = marked_call.mark
    if any(mark_of(inner) is not None for inner in equations(mark.jaxpr)):
        raise UnsupportedError(
            "blocks inside blocks: a plan needs blocks that follow each other; name only the outer or only the inner blocks"
        )
    with axes_around(marked_call.place.within, mark.batches):
        return block_under_policy(mark.jaxpr, EVERYTHING, mark.path, mark.inputs)


@contextlib.contextmanager
def axes_around(within: Sequence[Any], batches: Sequence[Batch]) -> Iterator[None]:
    """A context that binds the axis names of the `shard_map`s and `vmap`s around a call."""
    with contextlib.ExitStack() as stack:
        for eqn in within:
            stack.enter_context(compat.inner_context(eqn))
        stack.enter_context(compat.axes_of_vmaps(batches))
        yield
