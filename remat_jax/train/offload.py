"""`offload_optimizer`: an optax optimizer whose state lives in host memory and comes to the device leaf by leaf."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from remat_jax import compat
from remat_jax.errors import ArgumentError, NoEffectError
from remat_jax.train.parameters import path_text
from remat_jax.train.streaming import FlatTrace, Path, Stream, trace

# First keys of paths in the arguments `(gradients, state, …)` and in the results `(updates, state)` of an update.
_PARAMETERS, _STATE = jax.tree_util.SequenceKey(0), jax.tree_util.SequenceKey(1)


def _state_shardings(traced: FlatTrace, to_host: Sequence[bool]) -> list[NamedSharding] | None:
    """The sharding of each array of the state that a traced `init` returns; None unless a parameter is on several devices.

    An array of the state has its parameter's sharding if their shapes are equal; all other arrays are replicated. Outside
    a trace `zeros_like` would copy these shardings, but a traced `init` sees only shapes.
    """
    params = traced.values
    # A tracer's sharding is unknown; the compiler or the caller of `jit` decides.
    shardings = [None if compat.is_traced(param) else getattr(param, "sharding", None) for param in params]
    divided = [sharding for sharding in shardings if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1]
    if not divided:
        return None
    # Parameters may use several meshes of the same devices; an array without a parameter may use any of these meshes.
    replicated = NamedSharding(divided[0].mesh, PartitionSpec())
    of_params = [(_PARAMETERS, *path[1:]) for path in traced.in_paths]
    owners = _owners([*of_params, *((_STATE, *path) for path in traced.out_paths)])[len(params) :]
    state_shardings = []
    for array, owner, on_host in zip(traced.jaxpr.out_avals, owners, to_host, strict=True):
        like = shardings[owner] if owner is not None and params[owner].shape == array.shape else None
        sharding = like if isinstance(like, NamedSharding) else replicated
        state_shardings.append(sharding.with_memory_kind("pinned_host" if on_host else "device"))
    return state_shardings


def _owners(paths: Sequence[Path]) -> list[int | None]:
    """For each path in the state that ends in a parameter's path, the index of the parameter; None for all other paths."""
    first = {path[1:]: index for index, path in enumerate(paths) if path[0] == _PARAMETERS}

    def owner(path: Path) -> int | None:
        if path[0] != _STATE:
            return None
        return next((first[path[start:]] for start in range(1, len(path) + 1) if path[start:] in first), None)

    return [owner(path) for path in paths]


def update_order(paths: Sequence[Path], made: Sequence[tuple[int, ...]]) -> list[int]:
    """The order in which to compute an optimizer's outputs `(updates, state)`, as indices, parameter by parameter.

    A parameter's state comes before its update, which reads the state. Parameters come in the order in which the backward pass
    computes their gradients, so no gradient waits for another parameter's update. `made` has each gradient's position in
    the trace (`_made_at`). Parameters with equal positions come in reverse order of their paths.
    """
    groups: dict[int, list[int]] = {index: [] for index, path in enumerate(paths) if path[0] == _PARAMETERS}
    rest: list[int] = []
    for index, (path, owner) in enumerate(zip(paths, _owners(paths), strict=True)):
        if path[0] != _PARAMETERS:
            (rest if owner is None else groups[owner]).append(index)
    backwards = sorted(groups, key=lambda index: _natural(path_text(paths[index])), reverse=True)
    backwards.sort(key=lambda index: made[index])
    return [output for index in backwards for output in (*groups[index], index)] + rest


def _made_at(leaf: Any) -> tuple[int, ...]:
    """Where `leaf` is computed in its trace: a tuple with the index of the equation that computes it.

    If this equation is a call, the index inside the call's body follows, and so on. `()` if no equation computes `leaf`.
    """
    made = compat.made_by(leaf)
    return () if made is None else (made[0], *_made_inside(*made[1:]))


def _made_inside(eqn: JaxprEqn, var: Any) -> tuple[int, ...]:
    """Where the body of a call (`jit`, `checkpoint`, …) computes the call's output `var`, as in `_made_at`; else `()`."""
    bodies = [compat.closed(value).jaxpr for value in eqn.params.values() if compat.is_jaxpr(value)]
    if len(bodies) != 1 or len(bodies[0].outvars) != len(eqn.outvars):
        return ()
    inner = next((within for out, within in zip(eqn.outvars, bodies[0].outvars, strict=True) if out is var), None)
    for place, maker in enumerate(bodies[0].eqns):
        if any(out is inner for out in maker.outvars):
            return (place, *_made_inside(maker, inner))
    return ()


def _natural(text: str) -> list[Any]:
    """A sort key that compares the numbers in a text as numbers: a list in which texts and numbers alternate."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """An array of an optimizer's state: its path, its bytes, and whether it lives in host memory."""

    path: str
    nbytes: int
    on_host: bool


@dataclasses.dataclass(frozen=True)
class StatePlacement:
    """Where an optimizer's state lives between steps, leaf by leaf."""

    leaves: tuple[StateLeaf, ...]

    @property
    def host_bytes(self) -> int:
        """Bytes of the state in host memory."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.on_host)

    @property
    def device_bytes(self) -> int:
        """Bytes of the state in device memory."""
        return sum(leaf.nbytes for leaf in self.leaves if not leaf.on_host)


class OffloadedOptimizer(optax.GradientTransformationExtraArgs):
    """The result of `offload_optimizer`: an optax transformation that also reports where its state lives."""

    _inner: Any
    _fraction: float

    def apply(self, gradients: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """`(params, state)` after one step: `update` and `optax.apply_updates` in one, parameter by parameter.

        Two separate calls need more memory, because XLA applies the updates late and keeps all of them until the end.
        """

        def applied(gradients: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
            updates, state = self._inner.update(gradients, state, params, **extra)
            return optax.apply_updates(params, updates), state

        return _streamed(applied, self._fraction, gradients, state, params, extra)

    def place(self, state: Any) -> Any:
        """`state` with every array (or shape) in the memory in which it lives between steps.

        A state from `init` or from a step is there already; a state that was loaded may not be.
        """
        leaves, treedef = jax.tree.flatten(state)
        arrays = [(index,) for index, leaf in enumerate(leaves) if compat.is_array(leaf)]
        moved = _moved(arrays, [leaves[index] for (index,) in arrays], self._fraction) if self._fraction else ()
        return jax.tree.unflatten(
            treedef, [_in_host_memory(leaf) if (index,) in moved else leaf for index, leaf in enumerate(leaves)]
        )

    def placement(self, params: Any) -> StatePlacement:
        """Where the state for `params` (arrays or shapes) lives between steps; raises NoEffectError if no array would move."""
        traced, moved = _traced_init(self._inner, self._fraction, params)
        leaves = zip(traced.out_paths, traced.jaxpr.out_avals, strict=True)
        return StatePlacement(
            tuple(StateLeaf(path_text(path), compat.tree_bytes(aval), path in moved) for path, aval in leaves)
        )


def offload_optimizer(tx: Any, fraction: float = 1.0) -> OffloadedOptimizer:
    """`tx` with its state in host memory between steps; the updates and the pytree of state are those of `tx`.

    In a step, the state comes to the device parameter by parameter: a leaf is fetched after the previous parameter's leaves
    have gone back to the host. Leaves of rank 0 (step counts, hyperparameters) stay on the device. If `fraction` is below 1,
    the largest leaves are chosen first, up to this share of the bytes; `placement` lists where each leaf lives. `apply` needs
    less memory than `update`.

    It works for any optax optimizer, alone or inside a chain, under `jit`, with donated state (the host buffers are reused),
    and on a mesh (each array of the state has its parameter's sharding). A state saved under `tx` or under the returned
    optimizer can be loaded into the other. Under `jit` the updates are bit-equal to those of `tx`; without `jit` they agree
    within rounding, because optax compiles parts of an update.

    Put the parameters with `jax.device_put(params, jax.devices()[0])` before the first step: then JAX compiles the step once.
    Otherwise it compiles it twice (and the plain optimizer's step once), because a program with host memory commits its results
    to their device, and the second step gets committed parameters where the first got uncommitted ones. This is so in any
    program with host memory, also without this function.

    A state that is still in device memory, as after loading one of `tx`, goes to the host in the first step. It may be donated,
    but no result reuses its buffers in that step.

    Some arrays are on the device together, because one equation reads them: all layers of a `scan` (stacked, they are one
    leaf); everything under `optax.MultiSteps`, which updates in one `cond` (use `accumulate_gradients` instead); and all
    updates, if their norm is computed. If layers are unrolled and a norm of all gradients is computed, XLA's schedule can need
    more memory than with `tx`, unless the blocks offload too (`offload_inputs`); check with `measure`. The method is that of
    ZeRO-Offload and Megatron-LM's `HybridDeviceOptimizer`, but here the update runs on the device.

    Args:
      tx: an optax optimizer.
      fraction: from 0 (nothing moves) to 1.

    Raises:
      ArgumentError: `tx` is not an optax optimizer, or `fraction` is outside [0, 1].
      UnsupportedError: `init` or `update` is traced (`jit`) and has a callback or a print with `ordered=True`, which JAX cannot
        compile together with arrays in host memory. Other effects run as with `tx`, once each.
      NoEffectError: from `init`, if a `fraction` above 0 moves no array, as for plain SGD, which has no state.

    >>> import jax.numpy as jnp
    >>> tx = offload_optimizer(optax.adam(1e-3))
    >>> state = tx.init({"w": jnp.ones((4, 4))})
    >>> jax.typeof(state[0].mu["w"]).memory_space
    MemorySpace.Host
    >>> placement = tx.placement({"w": jnp.ones((4, 4))})
    >>> placement.host_bytes, placement.device_bytes  # two moments; the step count
    (128, 4)
    """
    inner = _checked(tx, fraction)

    def updated(updates: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
        return inner.update(updates, state, params, **extra)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return _streamed(updated, fraction, updates, state, params, extra)

    offloaded = OffloadedOptimizer(functools.partial(_init, inner, fraction), update)
    offloaded._inner, offloaded._fraction = inner, fraction
    return offloaded


def _traced_init(tx: Any, fraction: float, params: Any) -> tuple[FlatTrace, set[Path]]:
    """The traced `init`, and the paths of the leaves of state that live on the host."""
    traced = trace(tx.init, params)
    return traced, _moved(traced.out_paths, traced.jaxpr.out_avals, fraction)


def _init(tx: Any, fraction: float, params: Any) -> Any:
    # `optax.tree_map_params` calls `init` with a placeholder without arrays, to find the state that belongs to parameters.
    is_placeholder = not jax.tree.leaves(params) and not isinstance(params, dict | list | tuple)
    if is_placeholder or not fraction:
        return tx.init(params)
    traced, moved = _traced_init(tx, fraction, params)
    inputs, to_host = len(traced.values), [path in moved for path in traced.out_paths]
    order = range(len(to_host))

    def made(*values: Any) -> list[Any]:
        from_host, not_before = [False] * inputs, [None] * inputs
        return Stream(traced.jaxpr, values, from_host=from_host, not_before=not_before, to_host=to_host, order=order).run()

    shardings = _state_shardings(traced, to_host)
    if shardings:
        return traced.finish(jax.jit(made, out_shardings=shardings)(*traced.values))
    return traced.finish([_committed(leaf, traced.values) for leaf in made(*traced.values)])


def _committed(leaf: Any, params: Sequence[Any]) -> Any:
    """An array of the state, committed to the parameters' device.

    A step commits its results, so JAX would compile it a second time for a state that was not committed at first.
    """
    if compat.is_traced(leaf):
        return leaf
    devices = [param.devices() for param in params if not compat.is_traced(param) and getattr(param, "committed", False)]
    (device,) = devices[0] if devices else leaf.devices()
    return jax.device_put(leaf, SingleDeviceSharding(device, memory_kind=leaf.sharding.memory_kind))


def _in_host_memory(leaf: Any) -> Any:
    """`leaf`, an array or a shape, in host memory. A tracer stays where it is: only the caller of the trace can move it."""
    if compat.is_traced(leaf):
        return leaf
    sharding = leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
    on_host = (sharding or SingleDeviceSharding(jax.devices()[0])).with_memory_kind("pinned_host")
    if not isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host)
    return leaf if compat.is_on_host(leaf) else jax.device_put(leaf, on_host)


def _streamed(function: Callable[..., Any], fraction: float, *args: Any) -> Any:
    """`function(*args)` with the moved leaves of the state (the second argument and the second result) in host memory."""
    if not fraction:
        return function(*args)
    traced = trace(function, *args)
    inputs = zip(traced.in_paths, traced.jaxpr.in_avals, strict=True)
    state = {path[1:]: aval for path, aval in inputs if path[0] == _STATE}
    moved = _moved(state.keys(), state.values(), fraction)
    stream = Stream(
        traced.jaxpr,
        traced.values,
        from_host=[path[0] == _STATE and path[1:] in moved for path in traced.in_paths],
        not_before=_owners(traced.in_paths),
        to_host=[path[0] == _STATE and path[1:] in moved for path in traced.out_paths],
        order=update_order(traced.out_paths, [_made_at(leaf) for leaf in traced.values]),
    )
    return traced.finish(stream.run())


def plain(tx: Any) -> Any:
    """The optimizer that `tx` offloads; `tx` itself if it does not offload."""
    return tx._inner if isinstance(tx, OffloadedOptimizer) else tx


def _checked(tx: Any, fraction: Any) -> optax.GradientTransformationExtraArgs:
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise ArgumentError(f"tx={tx!r}: expected an optax optimizer, such as optax.adam(1e-3)")
    number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if not number or not 0 <= fraction <= 1:
        raise ArgumentError(f"fraction={fraction!r}: expected a number from 0 (nothing moves) to 1 (all of the state moves)")
    return optax.with_extra_args_support(tx)


def _moved(paths: Iterable[Path], avals: Iterable[Any], fraction: float) -> set[Path]:
    """The paths of the leaves to keep on the host: the largest leaves first, then smaller leaves that still fit.

    Together they have at most `fraction` of the bytes of the leaves that can move (rank 1 or more, no random keys).
    """
    sizes = {
        path: compat.tree_bytes(aval)
        for path, aval in zip(paths, avals, strict=True)
        if aval.ndim and aval.size and not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    }
    quota = fraction * sum(sizes.values())
    moved: set[Path] = set()
    for path, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size <= quota:
            moved.add(path)
            quota -= size
    if fraction > 0 and not moved:
        least = min(sizes.values(), default=0)
        reason = (
            f"its smallest leaf is {least / sum(sizes.values()):.3g} of the state; give at least that"
            if sizes
            else "the optimizer keeps no array of rank 1 or more (plain SGD has no state); use it as it is"
        )
        raise NoEffectError(f"fraction={fraction!r}: no optimizer state would move to the host: {reason}")
    return moved
