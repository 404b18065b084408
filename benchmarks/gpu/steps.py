"""The measured steps: models, policies, their order, and the job of one measuring process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import remat_jax as rj
from examples.models import linen


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's size. A decoder has `batch` sequences of `length` tokens; the MLP has batch × length rows."""

    layers: int
    width: int
    batch: int
    length: int


LARGE = {"scanned": Shape(16, 2048, 8, 1024), "unrolled": Shape(12, 1536, 8, 1024), "mlp": Shape(16, 4096, 16, 2048)}
TINY = {name: Shape(3, 32, 2, 16) for name in LARGE}
PLANS = {"plan at 10 %": 0.1, "plan at 50 %": 0.5}
"""The plans' budgets, as shares of the way from the memory of `full` to that of `off`."""

# The most important steps come first, in case time runs out. Plans come last, because the planner works meanwhile.
ORDER = (
    ("unrolled", "off"),
    ("unrolled", "full"),
    ("unrolled", "offload_inputs"),
    ("scanned", "off"),
    ("scanned", "full"),
    ("scanned", "offload_inputs"),
    ("mlp", "off"),
    ("mlp", "full"),
    ("mlp", "offload_inputs"),
    ("scanned", "dots_with_no_batch_dims"),
    *((model, plan) for plan in PLANS for model in ("unrolled", "scanned", "mlp")),
)
"""Model and policy of the sixteen steps."""
PEERS = ("off", "checkpoint", "offload")
"""The modes in which PyTorch runs the unrolled decoder; its offload is to pinned memory."""


class Perceptron(nn.Module):
    """A residual block of two dense layers and a norm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, dtype = x.shape[-1], x.dtype
        up = nn.Dense(4 * width, dtype=dtype, param_dtype=dtype, name="up")(nn.LayerNorm(dtype=dtype, name="norm")(x))
        return x + nn.Dense(width, dtype=dtype, param_dtype=dtype, name="down")(nn.gelu(up))


class Perceptrons(nn.Module):
    """A stack of these blocks, unrolled."""

    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index in range(self.layers):
            x = Perceptron(name=f"layers_{index}")(x)
        return x


@dataclasses.dataclass(frozen=True)
class StepJob:
    """One model under one policy, to be run on the device.

    Attributes:
      policies: the policy of each block, by the name of its class; empty for no checkpointing at all.
      compiler_options: the options to compile the step with, such as a plan's memory limit.
      steps: the steps of each timed series; the result has each series' seconds per step.
      kernels: the file to write the compiled module and the kernels of one step to; None to write none.
    """

    model: str
    shape: Shape
    policies: dict[str, str]
    compiler_options: dict[str, int | str] = dataclasses.field(default_factory=dict)
    warm_up: int = 3
    steps: int = 10
    kernels: str | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> StepJob:
        """The job that `to_json` wrote.

        >>> job = StepJob("mlp", TINY["mlp"], {"Perceptron": "full"})
        >>> StepJob.from_json(job.to_json()) == job
        True
        """
        fields = json.loads(line)
        return cls(**fields | {"shape": Shape(**fields["shape"])})

    def step(self) -> Any:
        """The training step under the policies."""
        whole = workload(self.model, self.shape)
        blocks = {getattr(block, "__name__", block): block for block in whole.blocks}
        return whole.step({blocks[name]: policy for name, policy in self.policies.items()} or "off")


def workload(model: str, shape: Shape, dtype: Any = jnp.bfloat16) -> rj.Workload:
    """One of the models with Adam; nothing is allocated."""
    return _mlp(shape, dtype) if model == "mlp" else _decoder(shape, dtype, scan=model == "scanned")


def _decoder(shape: Shape, dtype: Any, *, scan: bool) -> rj.Workload:
    heads = max(2, shape.width // 128)
    sizes: dict[str, Any] = {"d_model": shape.width, "nhead": heads, "num_layers": shape.layers, "max_len": shape.length}
    model = linen.ByteDecoder(**sizes, scan=scan, param_dtype=dtype)
    tokens = jax.ShapeDtypeStruct((shape.batch, shape.length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        outputs: jax.Array = model.apply({"params": params}, tokens, targets, method="loss")
        return outputs

    name = f"decoder, {'scanned' if scan else 'unrolled'}"
    return rj.Workload(loss, params, (tokens, tokens), linen.DecoderLayer, optimizer=optax.adam(1e-4), name=name)


def _mlp(shape: Shape, dtype: Any) -> rj.Workload:
    model = Perceptrons(shape.layers)
    x = jax.ShapeDtypeStruct((shape.batch * shape.length, shape.width), dtype)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    loss: Callable[..., Any] = lambda params, x: jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)  # noqa: E731
    return rj.Workload(loss, params, (x,), Perceptron, optimizer=optax.adam(1e-3), name="deep MLP")
