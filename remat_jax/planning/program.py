"""The program of one block's residuals: the arrays that its backward pass reads, and how to recompute each from others."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from remat_jax import compat
from remat_jax.core import BlockUnderPolicy, is_smooth
from remat_jax.core.block import decide
from remat_jax.core.products import eqn_flops
from remat_jax.core.walk import of_some
from remat_jax.cost.cost import Cost, HasSeconds, is_pass, is_view, jaxpr_cost, materialised, shares
from remat_jax.cost.flat import Array, Flat, FlatEqn, flatten, region
from remat_jax.planning.blocks import Call
from remat_jax.planning.inner import apart, inner_names
from remat_jax.policy import Policy


@dataclass(frozen=True)
class Price:
    """The cost of a policy in one block, in one step.

    Attributes:
      seconds: the time of recomputation.
      kept_seconds: the time that keeping residuals takes.
      flops: the recomputed operations of matrix products and convolutions.
      saved_bytes, host_bytes: kept from the forward to the backward pass, on the device and on the host.
    """

    seconds: float
    kept_seconds: float
    flops: int
    saved_bytes: int
    host_bytes: int

    @property
    def work_seconds(self) -> float:
        """The time of recomputing and keeping."""
        return self.seconds + self.kept_seconds


STACKED = 3
"""How often a scan passes over an array that it keeps for each of its rounds.

It fills the stack of all rounds with zeros, and reads each round's array to copy it into the stack.
"""


@dataclass(eq=False)
class BlockProgram:
    """One block's forward computation of the residuals of its backward pass, with everything saved.

    Attributes:
      call: the call of the block.
      flat: the program: from the block's inputs to the residuals.
      forward, backward: the cost of the two passes.
      inputs: the arrays that `@inputs` selects, by name.
      backward_program: the backward pass as a flat program of the residuals and the cotangents.
      own: the residuals that checkpoints in the block's loops recompute for themselves; their author does not want them kept.
      dropped: the names of the residuals that the block's own checkpoints drop, in loops or elsewhere.
    """

    call: Call
    flat: Flat
    forward: Cost
    backward: Cost
    inputs: dict[str, Array]
    backward_program: Flat
    own: frozenset[Array] = frozenset()
    dropped: frozenset[str] = frozenset()
    _prices: dict[Any, Price] = field(default_factory=dict)
    _names: dict[Any, tuple[frozenset[str], frozenset[str]]] = field(default_factory=dict)
    _seconds: dict[int, tuple[HasSeconds, dict[FlatEqn, float]]] = field(default_factory=dict)

    @cached_property
    def needed(self) -> tuple[Array, ...]:
        """The arrays that the backward pass reads, including inputs and parameters, each once."""
        return tuple(dict.fromkeys(array for array in self.flat.outputs if not array.literal))

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Every array of the program: inputs, then results in order."""
        return (*self.flat.inputs, *(array for one in self.flat.eqns for array in one.outputs))

    @cached_property
    def free(self) -> frozenset[Array]:
        """The arrays that cost nothing to keep: views of parameters, inputs shared with the loss or other blocks, constants.

        JAX hoists loop-invariant values out of a loop, and the compiler writes constants where they are read.
        """
        fixed = {array for array, same in zip(self.flat.inputs, self.call.same, strict=True) if same and self.call.scanned}
        parameters = set(self.flat.inputs) - set(self.inputs.values())
        for one in self.flat.eqns:
            if all(array in fixed or array.literal for array in one.inputs):
                fixed.update(one.outputs)
            elif is_view(one) and one.inputs[0] in parameters:
                parameters.update(one.outputs)
        fixed |= parameters
        there = (array for array, free in zip(self.flat.inputs, self.call.free, strict=True) if free)
        return frozenset(fixed.union(there))

    def seconds(self, rates: HasSeconds) -> dict[FlatEqn, float]:
        """Seconds to recompute each equation: its share of the time to recompute all, and 0 for a pass that fuses.

        A pass whose results are read by passes alone fuses into these. It then reads its operands in place of its results.
        """
        if id(rates) not in self._seconds:
            again = region(self.flat.eqns, self.needed, self._given)
            found = shares(again, [array for array in self.needed if array not in self._given], rates)
            fused = (one for one in again if is_pass(one) and not any(map(self._is_in_memory, one.outputs)))
            self._seconds[id(rates)] = rates, found | dict.fromkeys(fused, 0.0)
        return self._seconds[id(rates)][1]

    def _is_in_memory(self, array: Array) -> bool:
        """Whether an array is in memory whenever it is computed, because a kernel other than a pass reads or writes it."""
        in_memory, roots = self._in_memory
        return not in_memory.isdisjoint((array, roots.get(array, array)))

    @cached_property
    def _in_memory(self) -> tuple[frozenset[Array], dict[Array, Array]]:
        """The arrays that kernels other than passes read or write, in either pass, and for each view the array behind it.

        What a product of the backward pass reads is the operand of a product of the forward pass.
        """
        kept = dict(zip(self.backward_program.inputs, self.flat.outputs, strict=False))
        eqns = (*self.flat.eqns, *self.backward_program.eqns)
        roots: dict[Array, Array] = {}

        def root(array: Array) -> Array:
            array = kept.get(array, array)
            return roots.get(array, array)

        for eqn in filter(is_view, eqns):
            roots[eqn.outputs[0]] = root(eqn.inputs[0])
        return frozenset(root(array) for eqn in eqns if not is_pass(eqn) for array in (*eqn.inputs, *eqn.outputs)), roots

    def kept_seconds(self, array: Array, rates: HasSeconds) -> float:
        """Seconds that keeping `array` takes: writing it, unless it is in memory anyway, and stacking it in a scan.

        The backward pass reads a kept array, or what the array is recomputed from: that costs the same.
        """
        if array in self._uncounted:
            return 0.0
        written = array not in self.flat.inputs and not self._is_in_memory(array)
        return rates.seconds({}, written * array.bytes + self.call.scanned * STACKED * array.bytes)

    def written_seconds(self, rates: HasSeconds) -> float:
        """Seconds to write the residuals that are not in memory anyway, if all are kept."""
        kept = (array for array in self.needed if array not in self._given and not self._is_in_memory(array))
        return rates.seconds({}, sum(array.bytes for array in kept))

    def names(self, policy: Policy, path: str | None = None) -> tuple[frozenset[str], frozenset[str]]:
        """The names in this block of the residuals that `policy` saves, and offloads, in an equal block at `path`.

        A block without a checkpoint keeps every residual except those that its own checkpoints drop.
        """
        if not policy.checkpoint:
            return _all_names(self) - self.dropped, frozenset()
        key = policy, path
        if key not in self._names:
            own, named = self.call.path, self.call.block.linearised
            renamed = {name: _moved(name, own, path if path is not None else own) for name in named.candidates}
            back = {new: name for name, new in renamed.items()}
            there = replace(
                named,
                candidates={renamed[name]: replace(one, name=renamed[name]) for name, one in named.candidates.items()},
                shapes={renamed[name]: shape for name, shape in named.shapes.items()},
            )
            saved, offloaded = decide(there, policy)
            self._names[key] = frozenset(map(back.__getitem__, saved)), frozenset(map(back.__getitem__, offloaded))
        return self._names[key]

    def price(self, policy: Policy, rates: HasSeconds, path: str | None = None) -> Price:
        """The cost of `policy` in an equal block at `path`.

        Keeping costs nothing in a block without a checkpoint outside of scans: XLA fuses there as it likes, and recomputes
        rather than writes.
        """
        found = self.price_of(*self.names(policy, path), rates)
        return found if policy.checkpoint or self.call.scanned else replace(found, kept_seconds=0.0)

    def price_of(self, saved: frozenset[str], offloaded: frozenset[str], rates: HasSeconds) -> Price:
        """The cost of saving and offloading residuals by name; inputs are always kept."""
        key = saved, offloaded, id(rates)
        if key not in self._prices:
            self._prices[key] = self._priced(saved, offloaded, rates)
        return self._prices[key]

    def _priced(self, saved: frozenset[str], offloaded: frozenset[str], rates: HasSeconds) -> Price:
        away = {array for array in self.arrays if offloaded.intersection(array.names)} - self._shared
        here = {array for array in self.arrays if saved.intersection(array.names)} | self._given
        again = region(self.flat.eqns, self.needed, here | away)
        read = {*self.needed, *(array for one in again for array in one.inputs)}
        # Each block copies an offloaded constant. JAX hoists the constant out of a loop, and copies it once.
        once = self.free.difference(self.flat.inputs) if self.call.scanned else frozenset[Array]()
        host = sum(array.bytes for array in (read & away) - once)
        kept = (read & here) - away - self._uncounted
        return Price(
            sum(map(self.seconds(rates).__getitem__, again)),
            sum(self.kept_seconds(array, rates) for array in kept | (read & away)),
            sum(flat_flops(again)),
            sum(array.bytes for array in kept),
            host,
        )

    @cached_property
    def _shared(self) -> frozenset[Array]:
        """The inputs that other blocks or rounds also read: they stay on the device under every policy."""
        return frozenset(array for array, shared in zip(self.flat.inputs, self.call.shared, strict=True) if shared)

    @property
    def saved_bytes(self) -> int:
        """The bytes kept if everything is saved."""
        return sum(array.bytes for array in self.needed if array not in self._uncounted)

    @property
    def constant_bytes(self) -> int:
        """The bytes of residuals that are constant or loop-invariant."""
        return sum(array.bytes for array in self.needed if array in self.free and array not in self.flat.inputs)

    @cached_property
    def working_bytes(self) -> int:
        """A first guess of the memory of the backward pass beside its inputs: its peak, run in the order of its jaxpr.

        Arrays in memory between two kernels count, including cotangents and gradients.
        """
        flat = self.backward_program
        cotangents = set(flat.inputs[len(self.flat.outputs) :])
        stored, roots = materialised(flat.eqns, flat.outputs)
        stored |= cotangents
        last: dict[Array, int] = {}
        for place, one in enumerate(flat.eqns):
            last.update((roots.get(array, array), place) for array in one.inputs)
        kept = {roots.get(array, array) for array in flat.outputs}
        alive = sum(array.bytes for array in cotangents)
        most = alive
        for place, one in enumerate(flat.eqns):
            alive += sum(array.bytes for array in one.outputs if array in stored)
            most = max(most, alive)
            read = {roots.get(array, array) for array in one.inputs} & stored
            alive -= sum(array.bytes for array in read - kept if last[array] == place)
        return most

    @cached_property
    def _given(self) -> frozenset[Array]:
        """The arrays that no policy has to keep: all inputs, and `free`."""
        return self.free.union(self.flat.inputs)

    @cached_property
    def _uncounted(self) -> frozenset[Array]:
        """Parameters, keys, and `free`: these are no residuals."""
        return (frozenset(self.flat.inputs) - frozenset(self.inputs.values())) | self.free


def _moved(name: str, path: str, to: str) -> str:
    """A residual name of the block at `path`, renamed for an equal block at `to`; a user's own name stays."""
    return to + name[len(path) :] if name.startswith((path + ":", path + "/")) else name


def _all_names(program: BlockProgram) -> frozenset[str]:
    return frozenset(name for array in program.arrays for name in array.names) - frozenset(program.inputs)


def flat_flops(eqns: Collection[Any]) -> list[int]:
    """The operations of the matrix products and convolutions of each equation, loops unrolled."""
    return [_flops(one.eqn) for one in eqns]


def _flops(eqn: Any) -> int:
    if eqn.primitive.name == "cond":
        return max(_inside(compat.closed(one)) for one in eqn.params["branches"])
    rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    bodies = [compat.closed(value) for value in eqn.params.values() if compat.is_jaxpr(value)]
    return eqn_flops(eqn) + rounds * sum(map(_inside, bodies))


def _inside(jaxpr: Any) -> int:
    return sum(flat_flops(flatten(jaxpr).eqns))


_EVERYTHING = Policy.parse("everything")


def block_program(call: Call) -> BlockProgram:
    """The program of the block that `call` calls.

    A block that depends on no trained parameter has no backward pass and no residuals.
    """
    if not any(call.live):
        only_inputs = Flat(tuple(Array(aval) for aval in call.in_avals), (), ())
        return BlockProgram(call, only_inputs, _cost(call), Cost(), {}, Flat((), (), ()))
    block = replace(call.block, policy=_EVERYTHING)
    with contextlib.ExitStack() as stack:
        for around in call.within:
            stack.enter_context(compat.inner_context(around))
        stack.enter_context(compat.axes_of_vmaps(call.batches))
        # Computed here, where the axes are bound: `linearised` is cached on the block for later readers.
        (forward, backward), linearised = _passes(block, call), call.block.linearised.jaxpr
    names = [array.names for array in flatten(linearised).inputs[: len(call.live)]]
    flat = flatten(compat.dce(forward))
    for array, given in zip(flat.inputs, names, strict=True):
        array.names[:] = dict.fromkeys((*given, *array.names))
    dropped = inner_names(linearised)
    flat, own = apart(flat, dropped)
    inputs = {
        name: array
        for array in flat.inputs
        for name in array.names
        if name in block.named.candidates and block.named.candidates[name].is_input
    }
    costs = _cost(call), jaxpr_cost(backward)
    return BlockProgram(call, flat, *costs, inputs, flatten(compat.dce(backward)), own, dropped)


def _cost(call: Call) -> Cost:
    """The cost of the block's forward pass."""
    if not call.batches:
        return jaxpr_cost(call.block.jaxpr)
    return jaxpr_cost(jax.make_jaxpr(call.batched(compat.jaxpr_function(call.block.jaxpr)))(*call.in_avals))


def _passes(block: BlockUnderPolicy, call: Call) -> tuple[Any, Any]:
    """Two closed jaxprs: from the block's inputs to the residuals, and from residuals and cotangents to the gradients."""
    run, places = call.batched(block.checkpointed(prevent_cse=False)), [nth for nth, flag in enumerate(call.live) if flag]
    outputs = jax.eval_shape(run, *call.in_avals)
    kept: list[Any] = []

    def forward(*primals: Any) -> Any:
        def of_live(*changed: Any) -> list[Any]:
            return [out for out in of_some(run, primals, places)(*changed) if is_smooth(out)]

        _, pullback = jax.vjp(of_live, *(primals[index] for index in places))
        leaves, structure = jax.tree.flatten(pullback)
        kept.append(structure)
        return leaves

    known = jax.make_jaxpr(forward)(*call.in_avals)
    cotangents = [out for out in outputs if is_smooth(out)]
    backward = jax.make_jaxpr(lambda leaves, outs: jax.tree.unflatten(kept[-1], leaves)(outs))(
        list(known.out_avals), cotangents
    )
    return known, backward
