"""A workload describes one training step: a loss function, its parameters and batch, its blocks, optimizer and mesh."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from remat_jax.apply import nnx as nnx_blocks
from remat_jax.apply.blocks import AS_WRITTEN, OwnCheckpoints
from remat_jax.apply.donation import donated
from remat_jax.apply.effect import under_policies
from remat_jax.apply.find_blocks import FoundBlocks, find_blocks, find_blocks_of_step, trained_shapes
from remat_jax.apply.finished_step import of_arrays
from remat_jax.apply.inner_loss import InnerLoss, LossInside
from remat_jax.apply.module_names import with_module_names
from remat_jax.apply.pytrees import ModelArrays
from remat_jax.apply.scope import BlockPolicies, checked_blocks
from remat_jax.core.marks import Block
from remat_jax.errors import ArgumentError, UnsupportedArgumentError
from remat_jax.mesh import (
    argument_names,
    as_mesh,
    on_mesh,
    pinned,
    shardings_of_loss,
    specs_for,
    state_shardings,
    under,
    usual_shardings,
    usual_shardings_of_step,
)
from remat_jax.policy import as_block_policy, is_off
from remat_jax.step import TrainingStep
from remat_jax.train import plain
from remat_jax.train.micro_batches import fewer_rows, micro_batched
from remat_jax.train.parameters import check_batch, check_trained, check_value, parted_like, result_structs, split, structs
from remat_jax.train.updates import check_optimizer, updated


class Workload:
    """One training step of a model, described without running it.

    Args:
      loss: `loss(params, *batch)` returns a scalar, or a scalar and aux if `has_aux`.
      params: a pytree of arrays or `jax.ShapeDtypeStruct`; with the latter nothing is ever allocated. `params` may also be a
        callable model that is a pytree, such as an Equinox module: its floating-point arrays are then the parameters, as for
        `equinox.filter_value_and_grad`, and its other arrays are frozen.
      batch: a tuple of arguments, pytrees of arrays or `jax.ShapeDtypeStruct`.
      blocks: the units of checkpointing: a class whose instances are called (a Linen, NNX, Equinox or Haiku module), a method
        of a class (`Model.encode`), a function marked with `block`, a glob on module paths, `"checkpoints"` for the loss's
        `jax.checkpoint` regions, `"scans"` for the bodies of its scans, or a tuple of these. None: the blocks are found
        (`found`) when they are needed.
      optimizer: an optax optimizer; its update is then part of the step.
      trainable: which parameters have gradients and optimizer state: None for all, a glob (or a tuple of globs) on parameter
        paths such as `"*lora*"`, or a function of the path and the leaf.
      has_aux: the loss returns `(scalar, aux)`; aux is an output of the step.
      donate: the step may reuse the buffers of parameters and optimizer state. Without an optimizer nothing is donated.
      mesh: for several devices: a `jax.sharding.Mesh` or `AbstractMesh`, or sizes by axis name, `{"data": 8, "fsdp": 8}` or
        `"data=8,fsdp=8"`; the devices need not exist here. The loss is traced under this mesh.
      shardings: the tuple `(for params, for batch[0], …)`. An entry is a `PartitionSpec`, a pytree prefix of specs, or a
        function of an array's path and leaf that returns a spec; None and missing entries mean replicated. An optimizer's state
        has its parameters' shardings. By default, mesh and shardings are read from arrays that have a `NamedSharding`. A mesh
        without any shardings partitions the arrays as `on_mesh` does.
      name: the workload's name in reports.
      own_checkpoints: `"replace"`: policies replace the model's own checkpoints around the blocks, as in `checkpoint_blocks`;
        `"keep"` keeps them, with a `RematWarning`. With either value, the policy `"off"` leaves the model as written.

    Raises:
      ArgumentError: an argument is invalid; the message names it, its value, the expected values and the remedy.

    >>> import jax, jax.numpy as jnp, flax.linen as nn
    >>> model = nn.Sequential([nn.Dense(8), nn.Dense(8)])
    >>> x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> params = jax.eval_shape(model.init, jax.random.key(0), x)
    >>> job = Workload(lambda p, x: (model.apply(p, x) ** 2).mean(), params, (x,), blocks=nn.Dense)
    >>> jax.tree.leaves(jax.eval_shape(job.step("full").function, *job.step("full").arguments))[0].shape
    ()
    """

    name: str
    own_loss: Callable[..., Any] | None
    """The user's loss; None for a finished step."""
    micro_batches: int = 1
    """The number of micro-batches in which a step computes the gradient; `batch` is one of them, `whole_batch` are all."""
    whole_batch: tuple[Any, ...]
    _blocks: tuple[Block, ...] | None
    _search: Callable[[], FoundBlocks]
    """Searches the blocks once, for this workload and the same step with another loss, batch or optimizer."""
    _inside: LossInside | None = None
    """The loss inside a finished step."""
    declared: str | None = None
    """`"sum"` or `"mean"` if the loss was declared to be one over the examples, and not proved to be."""

    def __init__(
        self,
        loss: Callable[..., Any],
        params: Any,
        batch: tuple[Any, ...],
        blocks: Any = None,
        *,
        optimizer: Any = None,
        trainable: Any = None,
        has_aux: bool = False,
        donate: bool = True,
        mesh: Any = None,
        shardings: Any = None,
        name: str | None = None,
        own_checkpoints: str = "replace",
    ) -> None:
        if not callable(loss):
            raise ArgumentError(f"loss={loss!r}: expected a function loss(params, *batch)")
        check_batch(batch)
        if optimizer is not None:
            check_optimizer(optimizer)
        self.own = OwnCheckpoints(own_checkpoints)
        self.batch = self.whole_batch = structs(batch, "batch")
        self.optimizer = optimizer
        self._model = ModelArrays(params)
        self.params = structs(self._model.arrays, "params")
        arrays, usual = (self._model.arrays, *batch), lambda mesh: usual_shardings(mesh, self.params, self.batch)
        self.mesh, self.shardings = on_mesh(mesh, shardings, arrays, argument_names(batch), usual)
        self.loss, self.own_loss, self._states = under(self.mesh, self._model.loss(loss)), loss, 0
        self._blocks, self._search = None if blocks is None else checked_blocks(blocks), functools.cache(self._searched)
        self.trainable = trainable if trainable is not None else self._model.trainable
        self.has_aux, self.donate = has_aux, donate
        check_trained(split(self.params, self.trainable)[0])
        self.name = name or str(getattr(loss, "__name__", "workload"))
        self._finished: TrainingStep | None = None
        check_value(jax.eval_shape(self.loss, self.params, *self.batch), has_aux)

    @classmethod
    def from_step(
        cls,
        step: Callable[..., Any],
        *args: Any,
        blocks: Any = None,
        donate_argnums: int | Sequence[int] | None = None,
        mesh: Any = None,
        shardings: Any = None,
        name: str | None = None,
        own_checkpoints: str = "replace",
    ) -> Workload:
        """A workload of a finished train step, jitted or not, which takes its gradient itself.

        The loss that the step differentiates is found while the step is traced, so policies by layer, residuals and plans work
        as for a loss. The step may be of any kind: a closure over the batch, dropout keys, micro-batches in a scan, LoRA, an
        `nnx.Optimizer`. What the step writes to NNX objects among `args` (a model, an `nnx.Optimizer`, metrics) is a result
        of the step. `jax.jit` drops such writes; a `RematWarning` says so.

        Args:
          args: pytrees of arrays or shapes, NNX objects, callable models; values that the step's `jit` declares static.
          donate_argnums: the positions of donated arguments; by default those that the step's own `jit` donates.
          mesh, shardings: as for `Workload`, with an entry of `shardings` for each of `args`. Without shardings, the batch is
            what follows the last argument with arrays of the parameters' shapes. The step itself decides the shardings of its
            results: by its `out_shardings` or constraints, or it leaves them to the compiler.

        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> model, x = nn.Sequential([nn.Dense(8), nn.Dense(8)]), jnp.ones((4, 8))
        >>> @jax.jit
        ... def step(params, x):
        ...     gradients = jax.grad(lambda params: (model.apply(params, x) ** 2).mean())(params)
        ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        >>> job = Workload.from_step(step, model.init(jax.random.key(0), x), x, blocks=nn.Dense, donate_argnums=0)
        >>> job.gradients, [leaf.shape for leaf in jax.tree.leaves(job.parameters)]
        (1, [(8,), (8, 8), (8,), (8, 8)])
        """
        self = cls.__new__(cls)
        if not callable(step):
            raise ArgumentError(f"step={step!r}: expected a function, the training step")
        self.own = OwnCheckpoints(own_checkpoints)
        self.own_loss = self.optimizer = self.trainable = None
        self.params, self.batch, self.whole_batch, self.has_aux = None, (), (), False
        self.name = name or str(getattr(step, "__name__", "step"))
        self._blocks, self._search = None if blocks is None else checked_blocks(blocks), functools.cache(self._searched)
        places = donated(step, donate_argnums, len(args))
        finished = of_arrays(step, args, lambda tree: structs(tree, "args"))
        if shardings is not None and len(shardings) == len(args):
            shardings = tuple(shardings[place] for place in finished.places)
        names = tuple(f"args[{place}]" for place in finished.places)

        def usual(mesh: Any) -> Any:
            trained = trained_shapes(under(mesh, finished.function), finished.shapes)
            return usual_shardings_of_step(mesh, finished.shapes, trained, names)

        self.mesh, self.shardings = on_mesh(mesh, shardings, finished.arrays, names, usual)
        self.loss = under(self.mesh, finished.function)
        reused = tuple(finished.places.index(place) for place in places if place in finished.places)
        self.donate, placed = bool(reused), (self.mesh, self.shardings)
        self._finished = TrainingStep(self.loss, finished.shapes, reused, (), *placed, finished.names, finished.own)
        self._inside = LossInside(with_module_names(self.loss, self._blocks or ()), finished.shapes, self.name)
        return self

    @classmethod
    def from_nnx(
        cls, model: nnx.Module, loss: Callable[..., Any], batch: tuple[Any, ...], blocks: Any = None, **options: Any
    ) -> Workload:
        """A workload of the NNX `model` and `loss(model, *batch)`; `options` are those of `Workload`.

        The parameters are the model's `nnx.Param` state; other state (RNG counters, batch statistics, caches) reaches the loss
        unchanged.
        """
        if not isinstance(model, nnx.Module):
            raise ArgumentError(f"model={model!r}: expected an NNX module")
        of_params, params, rest = nnx_blocks.loss_of_state(model, loss)
        check_batch(batch)
        if (mesh := options.get("mesh")) is not None:
            # Check here, so that an error numbers the batch's arguments as the caller does. Other state is replicated.
            described = structs(params, "params"), structs(batch, "batch")
            of_state, *of_batch = shardings_of_loss(as_mesh(mesh), options.get("shardings"), *described)
            options["shardings"] = (of_state, None, *of_batch)
        workload = cls(of_params, params, (rest, *batch), blocks, **options)
        workload._states = 1
        return workload

    def on_mesh(self, mesh: Any, shardings: Any = None) -> Workload:
        """The same step on a new mesh, as with `remat-jax --mesh`.

        Args:
          mesh, shardings: as for `Workload`. By default the workload keeps its shardings. If it has none, the batch is
            partitioned over `data` and `fsdp`, and each parameter over `fsdp` along its largest divisible dimension.

        Raises:
          ArgumentError: the mesh lacks an axis of the shardings, or has a new axis over which no array is partitioned. Without
            shardings: an axis is neither `data` nor `fsdp`, or the mesh does not divide the batch.
          UnsupportedError: the workload is a finished step.

        >>> import jax.numpy as jnp
        >>> x, w = jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((8, 32), jnp.float32)
        >>> job = Workload(lambda w, x: (x @ w).sum(), w, (x,), blocks="*")
        >>> [one.shape for one in job.on_mesh("data=2,fsdp=4").step("off").local_arguments if hasattr(one, "shape")]
        [(8, 8), (2, 8)]
        """
        if self.own_loss is None:
            raise UnsupportedArgumentError(
                f"mesh={mesh!r}: {self.name!r} is a finished step; give the mesh to Workload.from_step(…, mesh=…, shardings=…)"
            )
        new_mesh = as_mesh(mesh)
        if shardings is None and self.mesh is not None:
            shardings = specs_for(new_mesh, self.shardings, self.mesh)
        else:
            # For an NNX model the batch starts with the model's other state, which the caller's shardings leave out.
            of_params, *of_batch = shardings_of_loss(new_mesh, shardings, self.params, self.batch[self._states :])
            shardings = (of_params, *[None] * self._states, *of_batch)
        options = {name: getattr(self, name) for name in ("optimizer", "trainable", "has_aux", "donate", "name")}
        options |= {"mesh": new_mesh, "shardings": shardings, "own_checkpoints": self.own.choice}
        workload = Workload(self.own_loss, self._model.whole(self.params), self.batch, self._blocks, **options)
        workload._states = self._states
        return workload

    @property
    def found(self) -> FoundBlocks | None:
        """The blocks that were found, and what else could be blocks; None if `blocks` were given."""
        return self.find_blocks() if self._blocks is None else None

    def find_blocks(self) -> FoundBlocks:
        """The repeated parts of the loss whose checkpoints save the most memory, also if `blocks` were given.

        Raises BlockError if nothing in the loss is repeated, or two choices are equally good.
        """
        return self._search()

    def _searched(self) -> FoundBlocks:
        if self._finished is not None:
            return find_blocks_of_step(self._finished.function, self._finished.arguments, self.name)
        loss, trained, frozen = self.split_loss("off")
        value = (lambda *args: loss(*args)[0]) if self.has_aux else loss
        return find_blocks(value, trained, (frozen, *self.batch), self.name)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The units of checkpointing, given or found."""
        return self._blocks or self.find_blocks().blocks

    def with_loss(self, loss: Callable[..., Any]) -> Workload:
        """The same step, with the same blocks, with a new loss that takes the same arguments."""
        workload = copy.copy(self)
        workload.loss, workload.own_loss = under(self.mesh, self._model.loss(loss)), loss
        return workload

    def with_optimizer(self, optimizer: Any) -> Workload:
        """The same step with another optimizer."""
        workload = copy.copy(self)
        workload.optimizer = optimizer
        return workload

    def in_micro_batches(self, n: int, declared: str | None = None) -> Workload:
        """The same step, with its gradient computed in `n` micro-batches (`train.micro_batches`)."""
        workload = copy.copy(self)
        workload.micro_batches, workload.declared = n, declared
        workload.batch = fewer_rows(self.whole_batch, n, self._states)
        return workload

    def with_policy(self, fn: Callable[..., Any], policy: Any) -> Callable[..., Any]:
        """`fn` with `policy` on the workload's blocks: a policy, policies by layer, or a mapping from block to either."""
        if isinstance(policy, dict) or not is_off(as_block_policy(policy)):
            fn = under_policies(fn, self._policies(policy), self.own.note)
        return with_module_names(fn, self._blocks or ())

    def _policies(self, policy: Any) -> BlockPolicies:
        return self.own.policies(policy if isinstance(policy, dict) else dict.fromkeys(self.blocks, policy))

    def inner_loss(self, policies: BlockPolicies | None) -> InnerLoss:
        """The loss that a finished step differentiates, under `policies`; None leaves the model as written.

        Raises:
          UnsupportedError: the step takes no gradient through its blocks, or several.
        """
        assert self._inside is not None, "a finished step"
        return self._inside.under(policies, self._policies("full"))

    @property
    def replaced_checkpoints(self) -> int:
        """How many of the model's own checkpoints a policy on the blocks replaces; a checkpoint in a scan counts once."""
        arguments = (self.params, *self.batch) if self._finished is None else self._finished.arguments
        return self.own.count(self.loss, lambda: self.blocks, arguments)

    def policy_text(self, text: str) -> str:
        """The policy's name in tables: `text`, but `as written` for `off` if the policies replace the model's checkpoints."""
        return AS_WRITTEN if text == "off" and self.replaced_checkpoints else text

    @property
    def has_loss(self) -> bool:
        """Whether the workload has a loss; False for a finished step."""
        return self._finished is None

    @property
    def parameters(self) -> Any:
        """The parameters; of a finished step, the types of the arrays along which it differentiates its loss."""
        return self.params if self.has_loss else self.split_loss("off")[1]

    @property
    def gradients(self) -> int:
        """How often a step computes the gradient: the micro-batches of a loss, or the rounds of a finished step's scans."""
        return self.micro_batches if self.has_loss else self.inner_loss(None).rounds

    def require_loss(self, wanted: str) -> None:
        """Raise UnsupportedError for a finished step; `wanted` is what needs the loss."""
        if not self.has_loss:
            raise UnsupportedArgumentError(
                f"{wanted}: workload={self.name!r} is a finished step (Workload.from_step), whose loss cannot be changed. Give "
                "its loss instead: rj.Workload(loss, params, (batch,), blocks=…, optimizer=optimizer)"
            )

    def split_loss(self, policy: Any) -> tuple[Callable[..., Any], Any, Any]:
        """The loss under `policy`, which takes `(trained, frozen, *batch)`; the trained parameters; the frozen parameters.

        Of a finished step it is the loss that the step differentiates. Everything that this loss closes over is then frozen.
        """
        if self._finished is not None:
            off = not isinstance(policy, dict) and is_off(as_block_policy(policy))
            inner = self.inner_loss(None if off else self._policies(policy))
            return inner, list(inner.trained), list(inner.frozen)
        trained, frozen, join = split(self.params, self.trainable)
        loss = self.with_policy(self.loss, policy)
        return (lambda trained, frozen, *batch: loss(join(trained, frozen), *batch)), trained, frozen

    def step(self, policy: Any) -> TrainingStep:
        """One training step under `policy`: the gradient, and the optimizer's update."""
        if self._finished is not None:
            return dataclasses.replace(self._finished, function=self.with_policy(self._finished.function, policy))
        loss, trained, frozen = self.split_loss(policy)
        n, declared = self.micro_batches, self.declared
        gradient = micro_batched(loss, n, has_aux=self.has_aux, states=self._states, declared=declared)
        batch_names = tuple(f"batch[{index}]" for index in range(len(self.batch)))
        if self.optimizer is None:
            names = ("parameters", "frozen parameters", *batch_names)
            return self._placed(TrainingStep(gradient, (trained, frozen, *self.whole_batch), (), names), (None, 0))
        state = result_structs(self.optimizer.init, trained)

        def update(trained: Any, state: Any, frozen: Any, *batch: Any) -> Any:
            value, gradients = gradient(trained, frozen, *batch)
            return *updated(self.optimizer, gradients, state, trained), value

        names = ("parameters", "optimizer state", "frozen parameters", *batch_names)
        donated = (0, 1) if self.donate else ()
        return self._placed(TrainingStep(update, (trained, state, frozen, *self.whole_batch), donated, names), (0, 1, None))

    def _placed(self, step: TrainingStep, like: tuple[int | None, ...]) -> TrainingStep:
        """`step` on the mesh; result i gets the shardings of argument `like[i]`, or no constraint if `like[i]` is None."""
        if self.mesh is None:
            return step
        params, *batch = self.shardings
        trained, frozen = parted_like(self.params, self.trainable, params)
        if self.optimizer is None:
            places: tuple[Any, ...] = (trained, frozen, *batch)
        else:
            of_state = state_shardings(plain(self.optimizer), step.arguments[1], step.arguments[0], trained)
            places = (trained, of_state, frozen, *batch)

        def function(*arguments: Any) -> Any:
            results = step.function(*arguments)
            return tuple(out if place is None else pinned(out, places[place]) for out, place in zip(results, like, strict=True))

        return dataclasses.replace(step, function=under(self.mesh, function), mesh=self.mesh, shardings=places)
