"""The jitted training step of a plan: `Plan.train_step`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from remat_jax import compat
from remat_jax.apply import nnx as nnx_blocks
from remat_jax.apply.pytrees import ModelArrays
from remat_jax.errors import ArgumentError
from remat_jax.mesh import under
from remat_jax.planning.changes import CHANGES
from remat_jax.planning.changes.change import Change
from remat_jax.planning.plan_data import PlanData
from remat_jax.train import OffloadedOptimizer
from remat_jax.train.micro_batches import micro_batched
from remat_jax.train.parameters import check_trained, parted, result_structs
from remat_jax.train.updates import check_optimizer, updated
from remat_jax.warning import warn

Function = Callable[..., Any]
Shardings = tuple[Any, ...]
"""The sharding of each array of parameters and state, in the order of the tree's leaves; () if there is no mesh."""


def train_step(plan: PlanData, planned: Function, optimizer: Any, *, trainable: Any, has_aux: bool, donate: bool) -> JittedStep:
    """The jitted step of `planned`, a loss under the policies of `plan`, and `optimizer`.

    Whatever else a plan changes about its step (its gradient, the optimizer, the compiler's options) is changed here.
    """
    offloads, changes = plan.host_bytes > 0, [(name, CHANGES[name]) for name in plan.changes]
    declared = next((change.declared for _, change in changes if change.declared), None)
    gradient = functools.partial(micro_batched, n=plan.micro_batches, declared=declared)
    jit = {"donate_argnums": (0, 1) if donate else (), "compiler_options": dict(plan.compiler_options) or None}
    if isinstance(optimizer, nnx.Optimizer) or (isinstance(optimizer, type) and issubclass(optimizer, nnx.Optimizer)):
        if trainable is not None:
            raise ArgumentError(
                f"trainable={trainable!r}: an NNX step trains what its optimizer selects; give nnx.Optimizer(model, tx, wrt=…)"
            )
        return ModuleStep(planned, has_aux, offloads, jit, gradient, changes=changes)
    check_optimizer(optimizer)
    for _, change in changes:
        optimizer = change.optimizer(optimizer)
    return ArrayStep(planned, has_aux, offloads, jit, gradient, optimizer=optimizer, trainable=trainable)


class JittedStep:
    """A jitted training step, made by `Plan.train_step`.

    With an optax optimizer, `step(params, state, *batch)` returns `(params, state, loss)`. With an `nnx.Optimizer`,
    `step(model, optimizer, *batch)` writes to both and returns the loss. Like the result of `jax.jit`, a step has `lower` and
    `trace`; what they return takes an Equinox model as its arrays alone, as `eqx.filter(model, eqx.is_array)`.
    """

    def __init__(
        self, loss: Function, has_aux: bool, offloads: bool, jit: dict[str, Any], gradient: functools.partial[Any]
    ) -> None:
        self.__name__ = f"step_of_{getattr(loss, '__name__', 'loss')}"
        self._loss, self._has_aux, self._offloads = loss, has_aux, offloads
        self._gradient, self._micro_batches = gradient, gradient.keywords["n"]
        self._jit, self._donates = jit, bool(jit["donate_argnums"])
        # A step is jitted again for other shardings, and for other leaves of the model that are no arrays.
        self._jitted: dict[Hashable, Any] = {}

    def __call__(self, *args: Any) -> Any:
        """Run one step."""
        jitted, arguments, whole = self._prepared(args)
        return whole(jitted(*arguments))

    def lower(self, *args: Any) -> Any:
        """The step lowered for arguments like these, arrays or shapes. Its `compile` uses the plan's compiler options."""
        jitted, arguments, _ = self._prepared(args)
        return jitted.lower(*arguments)

    def trace(self, *args: Any) -> Any:
        """The step traced for arguments like these, arrays or shapes."""
        jitted, arguments, _ = self._prepared(args)
        return jitted.trace(*arguments)

    def init(self, params: Any) -> Any:
        """The optimizer's state for the trained parameters among `params`, arrays or shapes. An NNX step has no such state."""
        raise ArgumentError("step.init: the state of an NNX step is in nnx.Optimizer(model, tx, wrt=nnx.Param)")

    def _prepared(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], Function]:
        """The jitted function, its arguments, and a function that makes the step's results of its results."""
        raise NotImplementedError

    def _placed(self, tree: Any, batch: Sequence[Any], offloads: bool) -> tuple[Any, Shardings]:
        return _placed(tree, batch, donated=self._donates, committed=offloads or self._offloads)

    def _at(self, key: Hashable, tree: Any, jit: Callable[..., Any]) -> Any:
        """The result of `jit` (which takes the options of `jax.jit`) for this key; `tree` has the parameters and the state."""
        options = self._jit
        if options["compiler_options"] and any(map(compat.is_traced, jax.tree.leaves(tree))):
            warn(
                f"step: it is called inside another jit, and JAX takes compiler options only at the outermost one: give "
                f"jax.jit(…, compiler_options={options['compiler_options']!r}) there, or the step may need other memory than "
                "planned"
            )
            options = {**options, "compiler_options": None}
        try:
            key = key, options is self._jit
            return self._jitted[key] if key in self._jitted else self._jitted.setdefault(key, jit(**options))
        except TypeError as error:
            raise ArgumentError(f"params: a leaf of the model that is no array cannot be hashed ({error})") from None


class ArrayStep(JittedStep):
    """`step(params, state, *batch)` with an optax optimizer returns `(params, state, loss)`."""

    def __init__(self, *loss_and_jit: Any, optimizer: Any, trainable: Any) -> None:
        super().__init__(*loss_and_jit)
        self._optimizer, self._trainable = optimizer, trainable

    def init(self, params: Any) -> Any:
        """The optimizer's state for the trained parameters among `params`, arrays or shapes."""
        trained = self._parted(ModelArrays(params).arrays)[0]
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(trained)):
            return self._optimizer.init(trained)
        return result_structs(self._optimizer.init, trained)

    def _parted(self, params: Any) -> tuple[Any, Any, Function]:
        trainable = self._trainable if self._trainable is not None else ModelArrays(params).trainable
        trained, frozen, join = parted(params, trainable)
        check_trained(trained)
        return trained, frozen, join

    def _prepared(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], Function]:
        if len(args) < 2 or isinstance(args[0], nnx.Module) or isinstance(args[1], nnx.Optimizer):
            raise ArgumentError(
                f"step called with {_types(args)}: expected step(params, state, *batch). For an NNX model, give "
                "plan.train_step an nnx.Optimizer, and call step(model, optimizer, *batch)"
            )
        params, state, *batch = args
        model = None if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params)) else ModelArrays(params)
        offloads = isinstance(self._optimizer, OffloadedOptimizer)
        state = self._optimizer.place(state) if offloads else state
        (arrays, state), shardings = self._placed((params if model is None else model.arrays, state), batch, offloads)
        whole, others = (_same, ()) if model is None else (model.whole, model.others)
        jitted = self._at(
            (shardings, others), (arrays, state), lambda **options: jax.jit(self._step(whole, shardings), **options)
        )
        return jitted, (arrays, state, *batch), lambda results: (whole(results[0]), *results[1:])

    def _step(self, whole: Function, shardings: Shardings) -> Function:
        def step(params: Any, state: Any, *batch: Any) -> Any:
            before = params, state
            trained, frozen, join = self._parted(params)

            def loss(trained: Any, frozen: Any, *batch: Any) -> Any:
                return self._loss(whole(join(trained, frozen)), *batch)

            value, gradients = self._gradient(loss, has_aux=self._has_aux)(trained, frozen, *batch)
            trained, state = updated(self._optimizer, gradients, state, trained)
            return *_pinned((join(trained, frozen), state), before, shardings), value

        step.__name__ = self.__name__
        return _under(shardings, step)


class ModuleStep(JittedStep):
    """`step(model, optimizer, *batch)` with an `nnx.Optimizer` writes to both and returns the loss."""

    def __init__(self, *loss_and_jit: Any, changes: Sequence[tuple[str, Change]]) -> None:
        super().__init__(*loss_and_jit)
        self._changes = changes

    def _prepared(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], Function]:
        if len(args) < 2 or not isinstance(args[0], nnx.Module) or not isinstance(args[1], nnx.Optimizer):
            raise ArgumentError(
                f"step called with {_types(args)}: expected step(model, optimizer, *batch), an NNX module and its "
                "nnx.Optimizer. For parameters as a pytree, give plan.train_step the optax optimizer itself"
            )
        model, optimizer, *batch = args
        for name, change in self._changes:
            if change.optimizer(optimizer.tx) is not optimizer.tx:
                given = f"; give nnx.Optimizer(model, {change.optimizer_call}, wrt=nnx.Param)" if change.optimizer_call else ""
                raise ArgumentError(f"optimizer: the plan {change.does or 'changes it'} ({name}){given}")
        offloads = isinstance(optimizer.tx, OffloadedOptimizer)
        if offloads:
            nnx.update(optimizer.opt_state, nnx.state(optimizer.tx.place(nnx.as_pure(optimizer.opt_state))))
        state = nnx.state((model, optimizer))
        placed, shardings = self._placed(state, batch, offloads)
        if placed is not state:
            nnx.update((model, optimizer), placed)
        jitted = self._at(shardings, placed, lambda **options: compat.nnx_jit(self._step(shardings), **options))
        return jitted, args, _same

    def _step(self, shardings: Shardings) -> Function:
        def step(model: Any, optimizer: Any, *batch: Any) -> Any:
            before = nnx.state((model, optimizer)) if shardings else None
            value, gradients = self._value_and_gradients(model, optimizer.wrt, batch)
            arguments = (gradients,) if isinstance(optimizer, nnx.ModelAndOptimizer) else (model, gradients)
            optimizer.update(*arguments)
            if shardings:
                nnx.update((model, optimizer), _pinned(nnx.state((model, optimizer)), before, shardings))
            return value

        step.__name__ = self.__name__
        return _under(shardings, step)

    def _value_and_gradients(self, model: Any, trained: Any, batch: Sequence[Any]) -> Any:
        if self._micro_batches == 1:
            gradient = nnx.value_and_grad(self._loss, argnums=nnx.DiffState(0, trained), has_aux=self._has_aux)
            return gradient(model, *batch)
        graphdef, params, rest = nnx.split(model, trained, ...)

        def of_params(params: Any, _: Any, rest: Any, *batch: Any) -> Any:
            merged = nnx.merge(graphdef, *jax.tree.map(lambda leaf: leaf, (params, rest)))
            with nnx_blocks.known_paths(merged):
                result = self._loss(merged, *batch)
            value, aux = result if self._has_aux else (result, None)
            return value, (aux, nnx.state(merged, nnx.Not(trained)))

        (value, (aux, rest)), gradients = self._gradient(of_params, has_aux=True, states=1)(params, (), rest, *batch)
        nnx.update(model, rest)
        return ((value, aux) if self._has_aux else value), gradients


def _same(value: Any) -> Any:
    return value


def _types(args: tuple[Any, ...]) -> str:
    return f"({', '.join(type(arg).__name__ for arg in args)})"


def _placed(tree: Any, batch: Sequence[Any], *, donated: bool, committed: bool) -> tuple[Any, Shardings]:
    """`tree`, and the sharding that each of its arrays keeps: () unless the compiler divides arrays over several devices.

    Args:
      batch: the other arguments of the step.
      donated: copy an array that occurs again, because JAX refuses to donate a buffer twice.
      committed: commit the arrays to their device, as a step with arrays in host memory does with its results. Otherwise JAX
        compiles the second step again.
    """
    given, treedef = jax.tree.flatten(tree)
    shardings = [_sharding(leaf) for leaf in given]
    leaves = _distinct(given) if donated else given
    mesh = _divided_by_compiler([*shardings, *map(_sharding, jax.tree.leaves(batch))])
    if mesh is not None:
        # An array on one device, such as an optimizer's count, is replicated: so would the first step return it.
        replicated = NamedSharding(mesh, PartitionSpec())
        shardings = [
            replicated.with_memory_kind(one.memory_kind) if isinstance(one, SingleDeviceSharding) else one or replicated
            for one in shardings
        ]
    if committed or mesh is not None:
        leaves = [_committed(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
    if any(new is not leaf for new, leaf in zip(leaves, given, strict=True)):
        tree = jax.tree.unflatten(treedef, leaves)
    return tree, () if mesh is None else tuple(shardings)


def _divided_by_compiler(shardings: Sequence[Any]) -> jax.sharding.Mesh | None:
    """The mesh of several devices that an array is on, if all its axes have the type Auto; else None."""
    meshes = (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1)
    mesh = next(meshes, None)
    return None if mesh is None or any(kind is not AxisType.Auto for kind in mesh.axis_types) else mesh


def _committed(leaf: object, sharding: jax.sharding.Sharding | None) -> object:
    if not isinstance(leaf, jax.Array) or compat.is_traced(leaf) or (leaf.committed and leaf.sharding == sharding):
        return leaf
    return jax.device_put(leaf, sharding)


def _distinct(leaves: Sequence[Any]) -> list[Any]:
    """`leaves` with a copy of each array that occurs again."""
    if len(set(map(id, leaves))) == len(leaves):
        return list(leaves)
    first = {id(leaf): index for index, leaf in reversed(list(enumerate(leaves)))}
    return [
        jnp.copy(leaf) if first[id(leaf)] != index and isinstance(leaf, jax.Array) else leaf
        for index, leaf in enumerate(leaves)
    ]


def _sharding(leaf: object) -> jax.sharding.Sharding | None:
    # Reading the sharding of a tracer is slow: it formats a long error first.
    return None if compat.is_traced(leaf) else getattr(leaf, "sharding", None)


def _pinned(tree: Any, before: Any, shardings: Shardings) -> Any:
    """`tree` with the shardings of the arrays at the same paths in `before`."""
    if not shardings:
        return tree
    by_path = {path: sharding for (path, _), sharding in zip(jax.tree.leaves_with_path(before), shardings, strict=True)}
    return jax.tree.map_with_path(
        lambda path, leaf: jax.lax.with_sharding_constraint(leaf, by_path[path]) if path in by_path else leaf, tree
    )


def _under(shardings: Shardings, step: Function) -> Function:
    """`step` traced under the mesh of the shardings, as a workload's loss is."""
    return under(shardings[0].mesh.abstract_mesh if shardings else None, step)
