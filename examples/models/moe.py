"""A decoder with a mixture of experts in each layer (Qwen 3 MoE's layout), in Flax Linen: top-k routing with a capacity.

Attention is that of `llama`. A router sends each token to `num_active` of `num_experts` gated feed-forwards. In each row of
the batch an expert has room for `capacity` tokens, first come, first served, as in GShard; tokens without room bypass the
layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .llama import LlamaConfig, RMSNorm, SelfAttention
from .transformer import attention_bias, embed, rotations, run_blocks, wide

BALANCE = 1e-3
"""The weight of the balance in the loss, as in Qwen 3 MoE."""


@dataclass(frozen=True)
class MoeConfig(LlamaConfig):
    """The hyperparameters; the defaults are a small model.

    Attributes:
        num_experts, num_active: the experts of each layer, and the experts of each token.
        capacity_factor: room in an expert, as a multiple of its tokens if all experts got equally many.
        normalise: whether the weights of a token's experts add up to one.

    >>> MoeConfig.qwen3_235b().capacity(4096)
    320
    """

    num_experts: int = 8
    num_active: int = 2
    capacity_factor: float = 1.25
    normalise: bool = True

    @classmethod
    def qwen3_235b(cls) -> MoeConfig:
        sizes = {"num_layers": 94, "num_heads": 64, "num_kv_heads": 4, "head_dim": 128, "num_experts": 128, "num_active": 8}
        return cls(151936, 4096, 1536, **sizes, rope_theta=1e6, rms_norm_eps=1e-6, qk_norm=True)

    def capacity(self, tokens: int) -> int:
        """The number of a row's `tokens` that an expert has room for: at most all, because each goes to an expert only once."""
        return min(tokens, math.ceil(tokens * self.num_active * self.capacity_factor / self.num_experts))


def route(logits: jax.Array, config: MoeConfig) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Each token's experts, its place among the tokens of each, its weights, and the imbalance of the routing.

    Shapes: `logits` (B, T, num_experts); the first three results are (B, T, num_active). A place at or beyond the capacity
    means that the expert has no room. The last result is the scalar Σ fraction · mean probability · num_experts of the
    Switch Transformer, which is 1 if all experts get equally many tokens.

    >>> experts, places, weights, balance = route(jnp.zeros((1, 2, 4)), MoeConfig(num_experts=4, num_active=1))
    >>> experts.tolist(), places.tolist(), weights.tolist(), float(balance)
    ([[[0], [0]]], [[[0], [1]]], [[[1.0], [1.0]]], 1.0)
    """
    chances = jax.nn.softmax(logits.astype(wide(logits.dtype)), axis=-1)
    weights, experts = jax.lax.top_k(chances, config.num_active)
    if config.normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    rows, tokens, _ = logits.shape
    chosen = jax.nn.one_hot(experts.reshape(rows, tokens * config.num_active), config.num_experts, dtype=jnp.int32)
    # The number of earlier tokens of the row at the same expert.
    before = jnp.take_along_axis(jnp.cumsum(chosen, axis=1) - 1, experts.reshape(rows, -1, 1), axis=-1)
    fractions = chosen.sum(axis=(0, 1)) / chosen.sum()
    balance = config.num_experts * jnp.sum(fractions.astype(chances.dtype) * chances.mean(axis=(0, 1)))
    return experts, before.reshape(experts.shape), weights, balance


class Experts(nn.Module):
    """The gated feed-forwards of all experts, each on its tokens, (B, T, E) → the same and a scalar.

    `over` is the sharding constraint of the experts' inputs, (B, num_experts, capacity, E): if its second entry is an axis,
    experts are on several devices, and tokens travel to them and back. Before and after, arrays have the constraint
    `activations`: a device sorts its own tokens.
    """

    config: MoeConfig
    param_dtype: Any = jnp.float32
    over: PartitionSpec | None = None
    activations: PartitionSpec | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, (rows, tokens, width) = self.config, x.shape
        logits = nn.Dense(config.num_experts, use_bias=False, param_dtype=self.param_dtype, name="router")(x)
        experts, places, weights, balance = route(logits, config)
        copies = jnp.broadcast_to(x[:, :, None], (*experts.shape, width))
        room = jnp.zeros((rows, config.num_experts, config.capacity(tokens), width), x.dtype)
        sent = _at(_at(jax.vmap(_sort)(room, experts, places, copies), self.activations), self.over)
        gate, up = self._matmul("gate_proj", sent), self._matmul("up_proj", sent)
        made = _at(_at(self._matmul("down_proj", nn.silu(gate) * up), self.over), self.activations)
        back = jax.vmap(_collect)(made, experts, places)
        return jnp.einsum("btkw,btk->btw", back, weights.astype(x.dtype)), balance

    def _matmul(self, name: str, x: jax.Array) -> jax.Array:
        config = self.config
        features = config.hidden_size if name == "down_proj" else config.intermediate_size
        shape = (config.num_experts, x.shape[-1], features)
        kernel = self.param(name, nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0), shape, self.param_dtype)
        with jax.named_scope(name):
            return jnp.einsum("bxcw,xwf->bxcf", x, kernel)


# These functions handle one row. Under `vmap`, rows are batch dimensions of the scatter and the gather, so the partitioner sees
# that devices with their own rows need no communication. If the row were an index array, a policy might save the indices, and
# XLA would no longer know that they are rows. For `examples/moe_235b.py` it then gathered the tokens of all devices, 17 GB per
# layer and pass.


def _sort(room: jax.Array, experts: jax.Array, places: jax.Array, tokens: jax.Array) -> jax.Array:
    """Every token at its place; tokens beyond the capacity are dropped."""
    return room.at[experts, places].set(tokens, mode="drop", unique_indices=True)


def _collect(made: jax.Array, experts: jax.Array, places: jax.Array) -> jax.Array:
    """The results of each token's experts, zero where there was no room."""
    return made.at[experts, places].get(mode="fill", fill_value=0)


def _at(x: jax.Array, place: PartitionSpec | None) -> jax.Array:
    return x if place is None else jax.lax.with_sharding_constraint(x, place)


class MoeBlock(nn.Module):
    """One layer, ((B, T, E), scalar) → the same, the scalar plus the layer's balance: the class to checkpoint."""

    config: MoeConfig
    param_dtype: Any = jnp.float32
    activations: PartitionSpec | None = None
    over: PartitionSpec | None = None

    @nn.compact
    def __call__(
        self, carry: tuple[jax.Array, jax.Array], rotation: tuple[jax.Array, jax.Array], bias: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x, balance = carry
        x = _at(x, self.activations)
        attend = SelfAttention(self.config, self.param_dtype, name="self_attn")
        x = x + attend(self._norm("input_norm")(x), rotation, bias)
        experts = Experts(self.config, self.param_dtype, self.over, self.activations, name="mlp")
        made, own = experts(self._norm("post_attention_norm")(x))
        return x + made, balance + own

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.config.rms_norm_eps, self.param_dtype, name=name)


class Moe(nn.Module):
    """A causal language model: tokens (B, T) → logits (B, T, vocab_size), and the mean of the layers' balance.

    `scan` stacks the layers' parameters on axis 0. `activations` and `over` are the sharding constraints of the arrays between
    layers and of the experts' inputs.

    >>> model = Moe(MoeConfig())
    >>> tokens = jnp.zeros((2, 5), jnp.int32)
    >>> logits, balance = model.apply(model.init(jax.random.key(0), tokens), tokens)
    >>> logits.shape, balance.shape
    ((2, 5, 97), ())
    """

    config: MoeConfig
    scan: bool = False
    param_dtype: Any = jnp.float32
    activations: PartitionSpec | None = None
    over: PartitionSpec | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, length = self.config, tokens.shape[-1]
        table = nn.Embed(config.vocab_size, config.hidden_size, param_dtype=self.param_dtype, name="embed")
        x = embed(table, tokens, config.padding)
        rotation = rotations(jnp.arange(length)[None], config.head_dim, config.rope_theta, x.dtype, config.rope_scaling)
        bias = attention_bias(None, length, x.dtype, causal=True)

        def block(name: str) -> MoeBlock:
            return MoeBlock(config, self.param_dtype, self.activations, self.over, name=name)

        carry = x, jnp.zeros((), wide(x.dtype))
        x, balance = run_blocks(block, config.num_layers, carry, rotation, bias, scan=self.scan)
        x = RMSNorm(config.rms_norm_eps, self.param_dtype, name="norm")(x)
        head = nn.Dense(config.vocab_size, use_bias=False, param_dtype=self.param_dtype, name="lm_head")
        return head(x), balance / config.num_layers
