"""The training step over a mesh: its workload, its state, its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_jax as rj

from .. import text
from ..models import llama
from ..models.functions import cross_entropy
from .processes import check_batch
from .setting import Setting

State = dict[str, Any]
"""`params` and the optimizer's `state`: the contents of a checkpoint."""
VOCABULARY = 256  # bytes


def workload(setting: Setting, mesh: Any) -> rj.Workload:
    """The step as a workload on `mesh`: a `jax.sharding.Mesh`, or sizes by axis for devices that are not present.

    The batch is divided over all axes, parameters and the optimizer's state over `fsdp`.

    Raises:
      ArgumentError: the batch cannot be divided.

    >>> workload(Setting(layers=1, width=32), {"data": 2, "fsdp": 4}).batch[0].shape
    (32, 256)
    """
    sizes = dict(mesh.shape) if isinstance(mesh, Mesh) else dict(mesh)
    check_batch(setting.batch, sizes)
    rows = P(tuple(sizes))
    model = _model(setting, activations=rows)
    tokens = jax.ShapeDtypeStruct((setting.batch, setting.length), jnp.int32)

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda leaf: leaf.astype(setting.dtype), params)
        return cross_entropy(model.apply({"params": params}, tokens), targets)

    return rj.Workload(
        loss,
        jax.eval_shape(initial_params(setting)),
        (tokens, tokens),
        llama.LlamaBlock,
        optimizer=optax.adamw(setting.learning_rate),
        mesh=mesh,
        shardings=(lambda _, leaf: over_fsdp(leaf.shape, sizes.get("fsdp", 1)), rows, rows),
        name="train anywhere",
    )


def initial_params(setting: Setting) -> Callable[[], Any]:
    """A function that draws the parameters: the same on every mesh, because JAX's random numbers do not depend on the mesh."""
    # Sharding constraints on activations need a mesh, and there is none yet.
    model = _model(setting, activations=None)
    return lambda: model.init(jax.random.key(setting.seed), jnp.zeros((1, setting.length), jnp.int32))["params"]


def _model(setting: Setting, activations: P | None) -> llama.Llama:
    head_dim = setting.width // setting.heads
    config = llama.LlamaConfig(
        VOCABULARY, setting.width, 3 * setting.width, setting.layers, setting.heads, setting.heads, head_dim
    )
    return llama.Llama(config, setting.scan, jnp.dtype(setting.param_dtype), activations)


def over_fsdp(shape: tuple[int, ...], devices: int) -> P:
    """Partition over `fsdp` the largest dimension that `devices` divides; an array without such a dimension is replicated.

    >>> [tuple(over_fsdp(shape, 4)) for shape in ((8, 24), (3,))]
    [(None, 'fsdp'), ()]
    """
    divisible = [dimension for dimension, size in enumerate(shape) if size % devices == 0]
    if devices == 1 or not divisible:
        return P()
    dimension = max(divisible, key=lambda one: shape[one])
    return P(*[None] * dimension, "fsdp")


def batch_of(setting: Setting, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The whole batch of a step, tokens and targets. It depends only on the step and the seed, not on earlier steps.

    >>> one, other = batch_of(Setting(), 7), batch_of(Setting(), 7)
    >>> one[0].shape, bool((one[0] == other[0]).all())
    ((32, 256), True)
    """
    return text.batches((setting.seed, step), setting.batch, setting.length, steps=1)[0]


class Trainer:
    """The step on a mesh with devices, under a policy, compiled with a plan's options.

    Attributes:
      structs: the state as shapes with shardings.
      parameters: the number of parameters.
    """

    def __init__(
        self,
        setting: Setting,
        mesh: Mesh,
        job: rj.Workload,
        policy: Any,
        compiler_options: Mapping[str, int | str] | None = None,
    ) -> None:
        self._setting, self._job = setting, job
        step = job.step(policy)
        places = jax.tree.map(lambda one: NamedSharding(mesh, one.spec, memory_kind=one.memory_kind), step.shardings)
        self._arguments = jax.tree.map(
            lambda one, at: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=at), step.arguments, places
        )
        self.structs: State = {"params": self._arguments[0], "state": self._arguments[1]}
        self._of_batch = places[3:]
        options = dict(compiler_options or {})
        self._jitted = jax.jit(step.function, donate_argnums=step.donate_argnums, compiler_options=options)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(job.params))

    def compile(self) -> tuple[int, int]:
        """Compile the step before the first use; returns the bytes needed on one device, and on the host for it."""
        self._step = self._jitted.lower(*self._arguments).compile()
        sizes = self._step.memory_analysis()
        held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return int(held + sizes.temp_size_in_bytes), int(sizes.host_temp_size_in_bytes)

    def initial(self) -> State:
        """The initial state. Each device makes its own part."""
        places = jax.tree.map(lambda struct: struct.sharding, self.structs)
        params = jax.jit(initial_params(self._setting), out_shardings=places["params"])()
        return {"params": params, "state": jax.jit(self._job.optimizer.init, out_shardings=places["state"])(params)}

    def step(self, state: State, number: int) -> tuple[State, jax.Array]:
        """The state after the step, and the loss before it. The step consumes `state`."""
        whole = batch_of(self._setting, number)
        batch = [
            jax.make_array_from_callback(array.shape, place, array.__getitem__)
            for array, place in zip(whole, self._of_batch, strict=True)
        ]
        params, optimizer, loss = self._step(state["params"], state["state"], {}, *batch)
        return {"params": params, "state": optimizer}, loss
