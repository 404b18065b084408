"""The program of one block's residuals: the arrays that its backward pass reads, and the equations that recompute them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.core import BlockUnderPolicy, is_smooth
from remat_jax.core.decided import decide
from remat_jax.core.matmuls import MATMULS, eqn_flops
from remat_jax.core.walk import of_some
from remat_jax.cost.cost import Cost, is_pass, is_view, jaxpr_cost, materialised, shares
from remat_jax.cost.count import over_bodies
from remat_jax.cost.flat import Array, Flat, FlatEqn, flatten, region
from remat_jax.hardware.rates import Rates
from remat_jax.planning.blocks import EVERYTHING, Call, axes_around
from remat_jax.planning.inner import apart, inner_names
from remat_jax.policy import Policy


@dataclass(frozen=True)
class Price:
    """The cost of a policy in one block, for one step.

    Attributes:
      seconds, flops: the time of recomputation, and the recomputed FLOPs of matmuls and convolutions.
      kept_seconds: the time to keep residuals.
      saved_bytes, host_bytes: the bytes kept from the forward to the backward pass, on the device and on the host.
      saved, offloaded: the names of the arrays with these bytes. Policies of equal names make the same program.
    """

    seconds: float
    kept_seconds: float
    flops: int
    saved_bytes: int
    host_bytes: int
    saved: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()


@dataclass(eq=False)
class BlockProgram:
    """One block's forward computation of its residuals, with everything saved.

    Attributes:
      flat: the forward program from the block's inputs to the residuals.
      forward, backward: the cost of the forward and of the backward pass.
      stack_passes: how often a scan passes over the bytes of an array to stack it (`Backend.stack_passes`).
      fuses_into_matmuls: whether passes fuse into the matmuls that read them (`Backend.fuses_into_matmuls`).
      inputs: a dict from residual name to input array, for the inputs that the selector `@inputs` matches.
      backward_program: the backward pass as a flat program whose inputs are the residuals and the cotangents.
      own: the residuals that checkpoints inside the block's loops recompute; the model's author wants them dropped.
      dropped: the names of the residuals that the block's own checkpoints drop, inside loops or elsewhere.
    """

    call: Call
    rates: Rates
    stack_passes: int
    flat: Flat
    forward: Cost
    backward: Cost
    inputs: dict[str, Array]
    backward_program: Flat
    own: frozenset[Array] = frozenset()
    dropped: frozenset[str] = frozenset()
    fuses_into_matmuls: bool = False
    _prices: dict[Any, Price] = field(default_factory=dict, init=False)
    _names: dict[Any, tuple[frozenset[str], frozenset[str]]] = field(default_factory=dict, init=False)

    @cached_property
    def needed(self) -> tuple[Array, ...]:
        """The arrays that the backward pass reads, including inputs and parameters, each once."""
        return tuple(dict.fromkeys(array for array in self.flat.outputs if not array.literal))

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Every array of the forward program: inputs, then results in execution order."""
        return (*self.flat.inputs, *(array for eqn in self.flat.eqns for array in eqn.outputs))

    @cached_property
    def parameters(self) -> frozenset[Array]:
        """The inputs that no policy selects: parameters and random keys."""
        return frozenset(self.flat.inputs) - frozenset(self.inputs.values())

    @cached_property
    def free(self) -> frozenset[Array]:
        """The arrays that cost nothing to keep: views of parameters, inputs that are in memory anyway (`Call.free`), constants.

        Loop-invariant arrays count as constants, because JAX hoists them out of the loop. The compiler writes constants where
        they are read.
        """
        fixed = {array for array, same in zip(self.flat.inputs, self.call.same, strict=True) if same and self.call.scanned}
        views = set(self.parameters)
        for eqn in self.flat.eqns:
            if all(array in fixed or array.literal for array in eqn.inputs):
                fixed.update(eqn.outputs)
            elif is_view(eqn) and eqn.inputs[0] in views:
                views.update(eqn.outputs)
        shared = (array for array, free in zip(self.flat.inputs, self.call.free, strict=True) if free)
        return frozenset(fixed.union(views, shared))

    @cached_property
    def seconds(self) -> dict[FlatEqn, float]:
        """Seconds to recompute each equation: its part of the time to recompute all equations, or 0 if it fuses.

        A fusible equation (`is_pass`) fuses with its readers if all are fusible: they then read its operands, not its results.
        """
        again = region(self.flat.eqns, self.needed, self._given)
        seconds = shares(again, [array for array in self.needed if array not in self._given], self.rates)
        fused = (eqn for eqn in again if is_pass(eqn) and self._in_memory.isdisjoint(eqn.outputs))
        return seconds | dict.fromkeys(fused, 0.0)

    @cached_property
    def _in_memory(self) -> frozenset[Array]:
        """The arrays that are always written to memory, because equations that cannot fuse read or write them.

        If passes fuse into matmuls, an array that only passes write and only matmuls read is not written.
        Equations of the forward and of the backward pass count: a backward matmul reads operands of a forward matmul.
        """
        kept = dict(zip(self.backward_program.inputs, self.flat.outputs, strict=False))
        eqns = (*self.flat.eqns, *self.backward_program.eqns)
        roots: dict[Array, Array] = {}

        def root(array: Array) -> Array:
            array = kept.get(array, array)
            return roots.get(array, array)

        for eqn in filter(is_view, eqns):
            roots[eqn.outputs[0]] = root(eqn.inputs[0])
        stored = set[Array]()
        for eqn in eqns:
            if not is_pass(eqn):
                read = () if self.fuses_into_matmuls and eqn.primitive in MATMULS else eqn.inputs
                stored.update(map(root, (*read, *eqn.outputs)))
        return frozenset(array for array in (*self.arrays, *self.needed) if not stored.isdisjoint((array, root(array))))

    def kept_seconds(self, array: Array) -> float:
        """Seconds to keep `array`: writing it, unless it is in memory anyway, and stacking it in a scan.

        Reading costs nothing extra: without `array`, the backward pass would read the arrays from which it is recomputed.
        """
        if array in self._uncounted:
            return 0.0
        written = array not in self.flat.inputs and array not in self._in_memory
        return self.rates.seconds({}, written * array.bytes + self.call.scanned * self.stack_passes * array.bytes)

    @property
    def written_seconds(self) -> float:
        """Seconds to write the residuals that are not in memory anyway, if all are kept."""
        kept = (array for array in self.needed if array not in self._given and array not in self._in_memory)
        return self.rates.seconds({}, sum(array.bytes for array in kept))

    def names(self, policy: Policy, path: str | None = None) -> tuple[frozenset[str], frozenset[str]]:
        """The residuals that `policy` saves and those it offloads in an equal block at `path`, by their names in this block.

        If `policy` makes no checkpoint, every residual is saved except those that checkpoints inside the block drop.
        """
        if not policy.checkpoint:
            computed = frozenset(name for array in self.arrays for name in array.names) - frozenset(self.inputs)
            return computed - self.dropped, frozenset()
        key = policy, path
        if key not in self._names:
            named, own_path = self.call.block.linearised, self.call.path
            there = own_path if path is None else path
            # The policy's selectors match the names of the block at `path`.
            moved = {
                name: replace(candidate, name=_moved(name, own_path, there)) for name, candidate in named.candidates.items()
            }
            self._names[key] = decide(replace(named, candidates=moved), policy)
        return self._names[key]

    def price(self, policy: Policy, path: str | None = None) -> Price:
        """The cost of `policy` in an equal block at `path`.

        In a block without a checkpoint and outside scans, keeping residuals costs no time: XLA fuses freely there, and
        recomputes an array instead of writing it.
        """
        names = self.names(policy, path)
        if names not in self._prices:
            self._prices[names] = self._priced(*names)
        price = self._prices[names]
        return price if policy.checkpoint or self.call.scanned else replace(price, kept_seconds=0.0)

    def _priced(self, saved: frozenset[str], offloaded: frozenset[str]) -> Price:
        """The cost of saving and offloading the residuals with these names; inputs are always kept."""
        # Inputs that other blocks or iterations also read stay on the device under every policy.
        shared = {array for array, shared in zip(self.flat.inputs, self.call.shared, strict=True) if shared}
        away = {array for array in self.arrays if offloaded.intersection(array.names)} - shared
        named = {array for array in self.arrays if saved.intersection(array.names)}.union(self.flat.inputs)
        # A checkpoint recomputes a loop-invariant array that it does not save, although XLA may hoist it out of the loop.
        here = named | self._given
        again = region(self.flat.eqns, self.needed, here | away)
        read = {*self.needed, *(array for eqn in again for array in eqn.inputs)}
        # Outside scans, each block copies an offloaded constant. JAX hoists constants out of scans: that copy is neglected.
        once = self.free.difference(self.flat.inputs) if self.call.scanned else frozenset[Array]()
        host = sum(array.bytes for array in (read & away) - once)
        kept = (read & here) - away - self._uncounted
        paid = kept | (read & away)
        return Price(
            sum(map(self.seconds.__getitem__, again)),
            # Sum in program order: the order of a set differs between runs, and with it the last digit of the sum.
            sum(self.kept_seconds(array) for array in self.arrays if array in paid),
            sum(_flops(eqn.eqn) for eqn in region(self.flat.eqns, self.needed, named | away)),
            sum(array.bytes for array in kept),
            host,
            frozenset(array.names[0] for array in kept if array.names),
            frozenset(array.names[0] for array in read & away),
        )

    @property
    def saved_bytes(self) -> int:
        """The bytes of residuals that are saved if everything is saved."""
        return sum(array.bytes for array in self.needed if array not in self._uncounted)

    @property
    def constant_bytes(self) -> int:
        """The bytes of residuals that are constant or loop-invariant."""
        return sum(array.bytes for array in self.needed if array in self.free and array not in self.flat.inputs)

    @property
    def working_bytes(self) -> int:
        """An estimate of the backward pass's memory in addition to its residuals: its peak if the equations run in order.

        Arrays that are written to memory between two kernels count, including cotangents and gradients.
        """
        flat = self.backward_program
        cotangents = set(flat.inputs[len(self.flat.outputs) :])
        stored, roots = materialised(flat.eqns, flat.outputs)
        stored |= cotangents
        last = {roots.get(array, array): place for place, eqn in enumerate(flat.eqns) for array in eqn.inputs}
        kept = {roots.get(array, array) for array in flat.outputs}
        alive = peak = sum(array.bytes for array in cotangents)
        for place, eqn in enumerate(flat.eqns):
            alive += sum(array.bytes for array in eqn.outputs if array in stored)
            peak = max(peak, alive)
            read = {roots.get(array, array) for array in eqn.inputs} & stored
            alive -= sum(array.bytes for array in read - kept if last[array] == place)
        return peak

    @cached_property
    def _given(self) -> frozenset[Array]:
        """The arrays from which recomputation may start under every policy: all inputs, and `free`."""
        return self.free.union(self.flat.inputs)

    @cached_property
    def _uncounted(self) -> frozenset[Array]:
        """Parameters, random keys, and `free`, which do not count as residuals."""
        return self.parameters | self.free


def _moved(name: str, path: str, to: str) -> str:
    """A residual name of the block at `path`, renamed for an equal block at `to`; a user's own name is unchanged."""
    return to + name[len(path) :] if name.startswith((path + ":", path + "/")) else name


def _flops(eqn: JaxprEqn) -> int:
    """The FLOPs of an equation's matmuls and convolutions, times the trip counts of loops; custom kernels do not count."""
    return eqn_flops(eqn) + over_bodies(eqn, lambda body: sum(_flops(inner.eqn) for inner in flatten(body).eqns))


def block_program(call: Call, rates: Rates, stack_passes: int, fuses_into_matmuls: bool = False) -> BlockProgram:
    """The program of the block that `call` calls.

    A block that depends on no trained parameter has no backward pass and no residuals.
    """
    if not any(call.live):
        only_inputs = Flat(tuple(Array(aval) for aval in call.in_avals), (), ())
        return BlockProgram(call, rates, stack_passes, only_inputs, _forward_cost(call), Cost(), {}, Flat((), (), ()))
    block = replace(call.block, policy=EVERYTHING)
    with axes_around(call.within, call.batches):
        # `linearised` is cached on the block. Compute it here, where the axes are bound.
        (forward, backward), linearised = _passes(block, call), call.block.linearised.jaxpr
    names = [array.names for array in flatten(linearised).inputs[: len(call.live)]]
    flat = flatten(compat.dce(forward))
    for array, linearised_names in zip(flat.inputs, names, strict=True):
        array.names[:] = dict.fromkeys((*linearised_names, *array.names))
    dropped = inner_names(linearised)
    flat, inner_residuals = apart(flat, dropped)
    inputs = {
        name: array
        for array in flat.inputs
        for name in array.names
        if name in block.named.candidates and block.named.candidates[name].is_input
    }
    costs = _forward_cost(call), jaxpr_cost(backward)
    return BlockProgram(
        *(call, rates, stack_passes, flat, *costs, inputs, flatten(compat.dce(backward))),
        own=inner_residuals,
        dropped=dropped,
        fuses_into_matmuls=fuses_into_matmuls,
    )


def _forward_cost(call: Call) -> Cost:
    jaxpr = call.block.jaxpr
    if call.batches:
        jaxpr = jax.make_jaxpr(call.batched(compat.jaxpr_function(jaxpr)))(*call.in_avals)
    return jaxpr_cost(jaxpr)


def _passes(block: BlockUnderPolicy, call: Call) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Two closed jaxprs: from the block's inputs to its residuals, and from residuals and cotangents to gradients."""
    run, places = call.batched(block.checkpointed(prevent_cse=False)), [nth for nth, flag in enumerate(call.live) if flag]
    outputs = jax.eval_shape(run, *call.in_avals)
    structure: jax.tree_util.PyTreeDef | None = None

    def forward(*primals: Any) -> list[Any]:
        def of_live(*changed: Any) -> list[Any]:
            return [out for out in of_some(run, primals, places)(*changed) if is_smooth(out)]

        nonlocal structure
        _, pullback = jax.vjp(of_live, *(primals[index] for index in places))
        leaves, structure = jax.tree.flatten(pullback)
        return leaves

    forward_jaxpr = jax.make_jaxpr(forward)(*call.in_avals)
    cotangents = [out for out in outputs if is_smooth(out)]
    backward = jax.make_jaxpr(lambda leaves, outs: jax.tree.unflatten(structure, leaves)(outs))(
        list(forward_jaxpr.out_avals), cotangents
    )
    return forward_jaxpr, backward
