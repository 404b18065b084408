"""Evaluates a traced function of pytrees with arrays in host memory, with few of these arrays on the device at a time."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.core.walk import bodies, filled, interpret, retrace, variables
from remat_jax.errors import UnsupportedError

# The path of an array in a pytree.
Path = tuple[Any, ...]

_CALLS = ("jit", "call")
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@dataclasses.dataclass(frozen=True)
class FlatTrace:
    """A function of pytrees, traced to a closed jaxpr of their arrays as if all arrays were in device memory.

    `values` are the arguments' arrays, in device or host memory as they were passed. `in_paths` and `out_paths` are the paths
    of the jaxpr's inputs and outputs in the pytrees; the first key of an input's path is the argument's position. `finish`
    builds the function's result from the outputs.
    """

    jaxpr: Any
    values: tuple[Any, ...]
    in_paths: tuple[Path, ...]
    out_paths: tuple[Path, ...]
    finish: Callable[[Sequence[Any]], Any]


def trace(function: Callable[..., Any], *args: Any) -> FlatTrace:
    """`function(*args)` traced with every array in device memory; other leaves (strings, functions) are passed unchanged."""
    with_paths, treedef = jax.tree.flatten_with_path(args)
    paths, leaves = [path for path, _ in with_paths], [leaf for _, leaf in with_paths]
    places = [index for index, leaf in enumerate(leaves) if compat.is_array(leaf)]
    results: list[tuple[list[tuple[Path, Any]], Any]] = []

    def flat(*values: Any) -> list[Any]:
        outputs, structure = jax.tree.flatten_with_path(function(*jax.tree.unflatten(treedef, filled(leaves, places, values))))
        # None marks an array: a stored tracer would keep the trace alive.
        results.append(([(path, None if compat.is_array(out) else out) for path, out in outputs], structure))
        return [out for _, out in outputs if compat.is_array(out)]

    values = tuple(leaves[index] for index in places)
    jaxpr = jax.make_jaxpr(flat)(*map(compat.on_device, values))
    outputs, structure = results[-1]

    def finish(flat_outputs: Sequence[Any]) -> Any:
        arrays = iter(flat_outputs)
        return jax.tree.unflatten(structure, [next(arrays) if out is None else out for _, out in outputs])

    in_paths, out_paths = (paths[index] for index in places), (path for path, out in outputs if out is None)
    return FlatTrace(jaxpr, values, tuple(in_paths), tuple(out_paths), finish)


class Stream:
    """Evaluates the closed `jaxpr` on `args` with few arrays on the device at a time.

    Inputs are fetched from the host one by one. Outputs are copied to the host as soon as they are computed. An equation runs
    when the next output of `order` needs it; equations with effects (callbacks, prints) run once each, in the jaxpr's order.
    `tree.map` interleaves the equations of all leaves, so in the jaxpr's own
    order all leaves would be on the device before the first leaf is finished. Under `jit` an `optimization_barrier` makes each
    fetch wait for the outputs finished before it; otherwise XLA would start all fetches at once.

    Args:
      from_host: for each input, whether to fetch it to the device.
      not_before: for each input, the index of another input, such as the gradient, or None. The fetch waits until that input is
        computed.
      to_host: for each output, whether it goes to host memory.
      order: every output's index, in the order of evaluation.
    """

    def __init__(
        self,
        jaxpr: ClosedJaxpr,
        args: Sequence[Any],
        *,
        from_host: Sequence[bool],
        not_before: Sequence[int | None],
        to_host: Sequence[bool],
        order: Iterable[int],
    ) -> None:
        # Inline calls that return several arrays, because such an equation would compute several leaves at once.
        jaxpr = inlined(jaxpr, lambda eqn: compat.kind(eqn) in _CALLS and sum(var.aval.ndim > 0 for var in eqn.outvars) > 1)
        inner = jaxpr.jaxpr
        self.to_host, self.order = to_host, order
        self.outvars = inner.outvars
        self.effects = deque(eqn for eqn in inner.eqns if eqn.effects)
        self.makers = {var: eqn for eqn in inner.eqns for var in eqn.outvars}
        self.values: dict[Any, Any] = dict(zip(inner.constvars, jaxpr.consts, strict=True))
        self.away: dict[Any, Any] = {}
        for var, value, on_host in zip(inner.invars, args, from_host, strict=True):
            (self.away if on_host else self.values)[var] = value
        self.awaited = {
            var: inner.invars[other] for var, other in zip(inner.invars, not_before, strict=True) if other is not None
        }
        self.traced = any(map(compat.is_traced, (*args, *jaxpr.consts)))
        if self.traced and compat.has_ordered_effects(jaxpr):
            raise UnsupportedError(
                "tx: its init or update has a callback or a print with ordered=True. Under jit JAX cannot compile an ordered "
                "effect in a program with arrays in host memory (its own error is about safe_zip): give ordered=False. Without "
                "jit, and with the plain optimizer, ordered effects work"
            )
        # Outside `jit` an array is freed with its last reference; `readers` counts the remaining uses.
        self.readers = Counter(variables(itertools.chain(inner.outvars, *(eqn.invars for eqn in inner.eqns))))
        self.leaving: dict[Any, list[int]] = {}
        for index, (atom, leaves) in enumerate(zip(inner.outvars, to_host, strict=True)):
            if leaves and not _is_literal(atom):
                self.leaving.setdefault(atom, []).append(index)
        self.results: dict[int, Any] = {}
        self.finished: list[int] = []

    def run(self) -> list[Any]:
        """The outputs, in the jaxpr's order."""
        for index in self.order:
            atom = self.outvars[index]
            if not _is_literal(atom) and atom in self.away and self.to_host[index]:
                self._finish(index, self.away[atom])  # an unchanged input stays on the host
                continue
            self._compute(atom)
            if index not in self.results:
                self._finish(index, self._use(atom))
            self._run_effects_at_hand()
        while self.effects:
            self._compute(*self.effects[0].invars)
            self._run_effects_at_hand()
        if self.traced:
            on_host = [index for index, leaves in enumerate(self.to_host) if leaves]
            same_memory = compat.reusing_the_same_memory([self.results[index] for index in on_host])
            self.results.update(zip(on_host, same_memory, strict=True))
        return [self.results[index] for index in range(len(self.outvars))]

    def _compute(self, *atoms: Any) -> None:
        """Evaluate the equations that `atoms` need, without recursion: an update may be thousands of equations deep."""
        waiting = list(atoms)
        while waiting:
            var = waiting[-1]
            if _is_literal(var) or var in self.values:
                waiting.pop()
            elif var in self.away:
                self._fetch(var)
            else:
                eqns = self._up_to(self.makers[var])
                missing = [operand for eqn in eqns for operand in variables(eqn.invars) if operand not in self.values]
                # An equation may read what an earlier one of `eqns` computes, so compute the first missing operand first.
                if missing:
                    waiting.append(missing[0])
                else:
                    for eqn in eqns:
                        self._evaluate(eqn)

    def _up_to(self, eqn: JaxprEqn) -> list[Any]:
        """`eqn`; if it has effects, also the equations with effects that must run before it."""
        if not eqn.effects:
            return [eqn]
        return [*itertools.takewhile(lambda earlier: earlier is not eqn, self.effects), eqn]

    def _run_effects_at_hand(self) -> None:
        """Run the next equations with effects whose operands are computed: their operands need not stay on the device."""
        while self.effects and all(operand in self.values for operand in variables(self.effects[0].invars)):
            self._evaluate(self.effects[0])

    def _use(self, atom: Any) -> Any:
        if _is_literal(atom):
            return atom.val
        value = self.values[atom]
        self.readers[atom] -= 1
        if self.readers[atom] <= 0:
            self.values[atom] = None
        return value

    def _fetch(self, var: Any) -> None:
        value = self.away.pop(var)
        awaited = self.awaited.get(var)
        inputs = [awaited] if self.values.get(awaited) is not None else []
        if self.traced and (self.finished or inputs):
            held = [self.results[index] for index in self.finished] + [self.values[each] for each in inputs]
            value, *held = _together(value, *held)
            # From here on, read the barrier's outputs: XLA drops operands of a barrier if nothing reads the matching outputs.
            self.results.update(zip(self.finished, held, strict=False))
            self.values.update(zip(inputs, held[len(self.finished) :], strict=True))
            self.finished.clear()
        self.values[var] = jax.device_put(value, DEVICE)

    def _evaluate(self, eqn: JaxprEqn) -> None:
        if eqn.effects:
            self.effects.popleft()
        outputs = compat.bind(eqn, [self._use(atom) for atom in eqn.invars])
        for var, value in zip(eqn.outvars, outputs, strict=True):
            if var in self.leaving:
                # The barrier prevents fusion with other uses, so that the new leaf can reuse the old leaf's buffer.
                value = _together(value)[0] if self.traced else value
            self.values[var] = value
            for index in self.leaving.get(var, ()):
                self._finish(index, self._use(var))

    def _finish(self, index: int, value: Any) -> None:
        value = jnp.asarray(value)  # a literal is a NumPy array
        self.results[index] = jax.device_put(value, HOST) if self.to_host[index] else value
        if compat.is_traced(self.results[index]):
            self.finished.append(index)


def _together(*values: Any) -> tuple[Any, ...]:
    """`values` behind a barrier, so that XLA uses none of them before all are computed. On a CPU: `values` unchanged.

    On a CPU a barrier would only split the fusions of the plain optimizer and change the last bits of the results.
    """
    return tuple(
        jax.lax.platform_dependent(
            *values, cpu=lambda *same: same, default=lambda *tied: tuple(compat.optimization_barrier(list(tied)))
        )
    )


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def inlined(jaxpr: ClosedJaxpr, selects: Callable[[Any], bool]) -> Any:
    """The closed `jaxpr` with each call that `selects` chooses replaced by its body. Calls inside these bodies are included."""

    def visit(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        if not selects(eqn):
            return None
        with compat.eqn_context(eqn):
            return interpret(bodies(eqn)[0], inputs, visit)

    if not any(map(selects, jaxpr.jaxpr.eqns)):
        return jaxpr
    return retrace(jaxpr, lambda *args: interpret(jaxpr, args, visit))
