"""Keeps the backward pass of a block in the order in which JAX traces it.

For a matmul y = x w, JAX traces w̄ = xᵀ ȳ and x̄ = ȳ wᵀ one after the other, while x and ȳ are alive. XLA:GPU delays the
weight gradients w̄ to the end of the block's backward pass, where the last barrier of its tie (`ties`) waits for all of them.
It also computes the cotangent of attention values after the cotangent of attention scores. Several arrays of the size of the
attention probabilities are then alive at once, which costs more device memory than offloading the block's inputs frees.

So barriers make each matmul that computes a cotangent x̄ wait for earlier results: for the cotangents that earlier matmuls
computed and later equations read, and for every w̄ that is at least two matmuls old. Waiting for a newer w̄ would keep XLA from
fusing the element-wise backward pass of an activation function with the recomputation of the function's output. Then one more
array would be in device memory.

XLA:TPU drops barriers, but only after it has chosen layouts and fusions. An array of the size of the attention probabilities
that passes through a barrier is copied to another layout, which costs more memory than the offload frees. So on a TPU such a
barrier holds only w̄ that are two matmuls old, if there are any, and the matmul's operands.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.core.matmuls import MATMULS, eqn_flops
from remat_jax.core.walk import evaluate_equations, interpret, retrace, value_of, values_of_inputs, variables


def in_program_order(
    backward: ClosedJaxpr,
    residuals: Sequence[Any],
    cotangents: Sequence[Any],
    fetched: Mapping[int, Any],
    others: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Evaluate the closed jaxpr `backward` in equation order. Returns its gradients, and the `others` in device memory.

    Args:
      fetched: residuals that have already been fetched: index among the residuals → array in device memory.
      others: arrays in host memory to fetch while this backward pass runs.
    """
    flat = retrace(backward, lambda *args: interpret(backward, args, _region_opened))
    jaxpr = flat.jaxpr
    on_device = {jaxpr.invars[place]: value for place, value in fetched.items()}
    env = values_of_inputs(flat, [*residuals, *cotangents])
    barriers = _barriers(jaxpr, len(residuals))
    fetches = _Fetches(others, _starts(jaxpr, list(barriers), others), [*cotangents, *fetched.values()])
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == "device_put" and all(not hasattr(atom, "val") and atom in on_device for atom in eqn.invars):
            env.update((var, on_device[atom]) for atom, var in zip(eqn.invars, eqn.outvars, strict=True))
            continue
        if _is_fetch(eqn):
            env[eqn.outvars[0]] = compat.fetched(value_of(eqn.invars[0], env), cotangents)
            continue
        barrier = barriers.get(index, _NO_BARRIER)
        values = fetches.before(index, [env[var] for var in barrier.held], barrier.on_tpu)
        env.update(zip(barrier.held, values, strict=True))
        evaluate_equations([eqn], env, lambda *_: None)
    return [value_of(atom, env) for atom in jaxpr.outvars], fetches.values


def _is_fetch(eqn: JaxprEqn) -> bool:
    """Whether an equation copies an array from host to device memory, and does nothing else."""
    if eqn.primitive.name != "device_put" or len(eqn.invars) > 1:
        return False
    source = getattr(eqn.invars[0].aval, "memory_space", None)
    return source is jax.memory.Space.Host and eqn.params.get("devices") == (jax.memory.Space.Device,)


def _region_opened(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    """Inline a checkpoint region, but not the regions nested in it. Inserted barriers still prevent CSE of recomputation."""
    if not compat.is_checkpoint(eqn):
        return None
    body, _ = compat.checkpoint_parts(eqn)
    with compat.eqn_context(eqn):
        return list(compat.jaxpr_function(body)(*inputs))


_MATMULS = MATMULS | {"conv_general_dilated"}
_MOVES = ("transpose", "reshape", "convert_element_type", "broadcast_in_dim", "pad")
_MATMULS_LATE = 2  # a matmul waits for weight gradients that are at least this many matmuls old


class _Barrier(NamedTuple):
    """The variables that pass through a barrier, and the places of those that pass through it on a TPU."""

    held: list[Any]
    on_tpu: list[int]


_NO_BARRIER = _Barrier([], [])


def _barriers(jaxpr: Jaxpr, num_residuals: int) -> dict[int, _Barrier]:
    """The barriers to insert: index of an equation → the barrier before it."""
    order, barriers = _Order(jaxpr, num_residuals), {}
    for index, eqn in enumerate(jaxpr.eqns):
        if (barrier := order.before(index, eqn)).held:
            barriers[index] = barrier
        order.after(index, eqn)
    return barriers


class _Fetches:
    """Fetches arrays from the host while a backward pass runs, at most two at a time.

    XLA runs two copies at once and waits for one of them before it starts a third, so many copies at the beginning would block
    the pass. So the starts are spread over the pass: if the earlier copies have 30 % of all bytes, a copy starts when 30 %
    of the pass's FLOPs are done. The largest copies come last, so that a copy still runs at the end.
    """

    def __init__(self, on_host: Sequence[Any], starts: Mapping[int | None, Sequence[int]], waits: Sequence[Any]) -> None:
        self.values = list(on_host)
        self._waits = waits
        self._starts = starts
        self._under_way: list[int] = []
        self.before(None, *_NO_BARRIER)

    def before(self, index: int | None, held: list[Any], on_tpu: Sequence[int]) -> list[Any]:
        """Start the copies that are due before equation `index`. Returns the values `held`, passed through a `_Barrier`."""
        for number in self._starts.get(index, []):
            earlier = self._under_way[-2:-1]
            copies = [self.values[place] for place in earlier]
            places = [*on_tpu, *range(len(held), len(held) + len(copies) + 1)]
            held, copies, value = compat.optimization_barrier((held, copies, self.values[number]), on_tpu=places)
            for place, copy in zip(earlier, copies, strict=True):
                self.values[place] = copy
            self.values[number] = compat.fetched(value, self._waits)
            self._under_way.append(number)
        return held if index in self._starts else compat.optimization_barrier(held, on_tpu=on_tpu)


def _starts(jaxpr: Jaxpr, places: Sequence[int], others: Sequence[Any]) -> dict[int | None, list[int]]:
    """When to start each fetch: index of an equation in `places` (None: the pass's start) → indices of `others` to fetch."""
    work = list(itertools.accumulate(map(eqn_flops, jaxpr.eqns), initial=0))
    sizes = [compat.array_bytes(other.shape, other.dtype) for other in others]
    starts: dict[int | None, list[int]] = {}
    copied = 0
    for number in sorted(range(len(others)), key=sizes.__getitem__):
        begun = [place for place in places if work[place] * sum(sizes) <= copied * work[-1]]
        starts.setdefault(begun[-1] if begun else None, []).append(number)
        copied += sizes[number]
    return starts


class _Order:
    """Decides which variables a matmul of a backward pass waits for. Recomputed matmuls read no cotangent and never wait."""

    def __init__(self, jaxpr: Jaxpr, num_residuals: int) -> None:
        self._gradients = set(variables(jaxpr.outvars))
        self._last_use = {atom: index for index, eqn in enumerate(jaxpr.eqns) for atom in variables(eqn.invars)}
        # Gradients, and variables that only `_MOVES` separate from a gradient.
        self._leaving = set(self._gradients)
        for eqn in reversed(jaxpr.eqns):
            if eqn.primitive.name in _MOVES and eqn.outvars[0] in self._leaving:
                self._leaving.update(variables(eqn.invars))
        self._travelling = dict.fromkeys(jaxpr.invars[num_residuals:])
        self._matmuls = 0
        self._made: dict[Any, int] = {}  # finished gradient for which no matmul has waited yet → matmuls before it
        self._parked: dict[Any, None] = {}  # cotangents that a matmul computed and later equations read

    def before(self, index: int, eqn: JaxprEqn) -> _Barrier:
        """The barrier before equation `index`; it holds nothing for most equations."""
        operands = [atom for atom in variables(eqn.invars) if atom in self._travelling]
        if eqn.primitive.name not in _MATMULS or not operands:
            return _NO_BARRIER
        self._matmuls += 1
        if eqn.outvars[0] in self._leaving:
            return _NO_BARRIER
        late = [var for var, at in self._made.items() if self._matmuls - at >= _MATMULS_LATE]
        waited_for = [*late, *(var for var in self._parked if var not in operands)]
        for var in late:
            del self._made[var]
        alive = [var for var in self._travelling if var not in self._leaving and self._last_use.get(var, -1) >= index]
        held = list(dict.fromkeys([*waited_for, *alive])) if waited_for else []
        on_tpu = {*late, *operands} if late else set()
        return _Barrier(held, [place for place, var in enumerate(held) if var in on_tpu])

    def after(self, index: int, eqn: JaxprEqn) -> None:
        """Record the outputs of equation `index`."""
        if not any(atom in self._travelling for atom in variables(eqn.invars)):
            return
        name = eqn.primitive.name
        self._travelling.update(dict.fromkeys(eqn.outvars))
        if (name in _MATMULS and eqn.outvars[0] not in self._leaving) or (name in _MOVES and eqn.invars[0] in self._parked):
            self._parked[eqn.outvars[0]] = None
        self._parked = {var: None for var in self._parked if self._last_use.get(var, -1) > index}
        finished = [var for var in eqn.outvars if var in self._gradients and self._last_use.get(var, -1) <= index]
        self._made.update(dict.fromkeys(finished, self._matmuls))
