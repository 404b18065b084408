"""A small encoder and decoder, written once in each framework, with parts that convolutional nets and decoders alone do not
have.

Relative positions fall into buckets, which are computed in float32, and one table of biases serves both stacks. Dropout is a
function that reads `self.training`, as in BART. The inputs are keywords of one shape and type, in another order in Flax.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

WIDTH, HEADS, TOKENS, PLACES, BUCKETS = 8, 2, 11, 9, 8
RULES = """
    embed.weight -> params/embed/embedding
    positions.weight -> params/positions/embedding
    relative.table.weight -> params/relative/table/embedding
    {stack}.layers.{i}.{attn}.{part}.weight -> params/{stack}/layers_{i}/{attn}/{part}/kernel | linear
    {stack}.layers.{i}.up.weight -> params/{stack}/layers_{i}/up/kernel | linear
    {stack}.layers.{i}.up.bias -> params/{stack}/layers_{i}/up/bias
    {stack}.layers.{i}.down.weight -> params/{stack}/layers_{i}/down/kernel | linear
    {stack}.layers.{i}.down.bias -> params/{stack}/layers_{i}/down/bias
    {stack}.layers.{i}.norm{n}.weight -> params/{stack}/layers_{i}/norm{n}/scale
    {stack}.layers.{i}.norm{n}.bias -> params/{stack}/layers_{i}/norm{n}/bias
    pooler.weight -> params/pooler/kernel | linear
    pooler.bias -> params/pooler/bias
    head.weight -> params/head/kernel | linear
"""


def texts() -> dict[str, np.ndarray]:
    """Tokens with padding at their ends, the padding mask, and the target tokens."""
    random = np.random.default_rng(0)
    mask = (np.arange(6) < np.array([[6], [4]])).astype(np.int64)
    return {"tokens": random.integers(0, TOKENS, (2, 6)), "mask": mask, "targets": random.integers(0, TOKENS, (2, 6))}


class TorchRelative(torch.nn.Module):
    """A bias for each head and pair of positions: (heads, length, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(BUCKETS, HEADS)

    def forward(self, length: int) -> torch.Tensor:
        places = torch.arange(length)
        distance = places[None] - places[:, None]
        bucket = (1.5 * torch.log1p(distance.abs().float())).long().clamp(max=BUCKETS // 2 - 1)
        return self.table(bucket + BUCKETS // 2 * (distance > 0)).permute(2, 0, 1)


class TorchAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        weights = (q @ k.mT / math.sqrt(WIDTH // HEADS) + bias).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class TorchLayer(torch.nn.Module):
    """Attention to itself, in a decoder also to the encoder's states, and a feed-forward layer, each after a norm."""

    def __init__(self, crosses: bool) -> None:
        super().__init__()
        self.norm1, self.self_attn = torch.nn.LayerNorm(WIDTH), TorchAttention()
        if crosses:
            self.norm3, self.cross_attn = torch.nn.LayerNorm(WIDTH), TorchAttention()
        self.norm2 = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, memory: Any = None, seen: Any = None) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.dropped(self.self_attn(y, y, bias))
        if memory is not None:
            x = x + self.dropped(self.cross_attn(self.norm3(x), memory, seen))
        return x + self.dropped(self.down(F.gelu(self.up(self.norm2(x)))))

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.1, training=self.training)


class TorchStack(torch.nn.Module):
    def __init__(self, depth: int, crosses: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(TorchLayer(crosses) for _ in range(depth))

    def forward(self, x: torch.Tensor, bias: torch.Tensor, memory: Any = None, seen: Any = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, bias, memory, seen)
        return x


class TorchEncoderDecoder(torch.nn.Module):
    """Logits of the targets, and a state pooled from the encoder's first token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = torch.nn.Embedding(TOKENS, WIDTH), torch.nn.Embedding(PLACES, WIDTH)
        self.relative, self.encoder, self.decoder = TorchRelative(), TorchStack(1, False), TorchStack(2, True)
        self.pooler, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        length, least = tokens.shape[1], torch.finfo(self.embed.weight.dtype).min
        places, near = self.positions(torch.arange(length)), self.relative(length)
        seen = torch.zeros(mask.shape, dtype=near.dtype).masked_fill(mask == 0, least)[:, None, None]
        states = self.encoder(self.embed(tokens) + places, near + seen)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        made = self.decoder(self.embed(targets) + places, near.masked_fill(later, least), states, seen)
        return {"logits": self.head(made) * WIDTH**-0.5, "pooled": self.pooler(states[:, 0]).tanh()}


def buckets(distance: jax.Array, count: int = BUCKETS) -> jax.Array:
    """The bucket of a relative position, by the logarithm of its size in float32."""
    size = (jnp.abs(distance) / 1).astype(jnp.float32)
    bucket = jnp.minimum((1.5 * jnp.log1p(size)).astype(int), count // 2 - 1)
    return bucket + count // 2 * (distance > 0)


def padding_bias(mask: jax.Array, dtype: Any) -> jax.Array:
    """The mask for padding keys: the least number."""
    return jnp.where(mask == 0, jnp.finfo(dtype).min, jnp.zeros((), dtype))[:, None, None]


def causal_bias(near: jax.Array) -> jax.Array:
    """The causal mask: the least number where a key follows its query."""
    return jnp.where(jnp.tri(*near.shape[1:], dtype=bool), near, jnp.finfo(near.dtype).min)


class Relative(nn.Module):
    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        places = jnp.arange(length)
        table = nn.Embed(BUCKETS, HEADS, name="table")
        return table(buckets(places[None] - places[:, None])).transpose(2, 0, 1)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, bias: jax.Array) -> jax.Array:
        q, k, v = (
            nn.Dense(WIDTH, use_bias=False, name=name)(y).reshape(*y.shape[:2], HEADS, -1).swapaxes(1, 2)
            for name, y in (("q", x), ("k", memory), ("v", memory))
        )
        weights = nn.softmax(q @ k.mT / math.sqrt(WIDTH // HEADS) + bias)
        mixed = (weights @ v).swapaxes(1, 2).reshape(x.shape)
        return nn.Dense(WIDTH, use_bias=False, name="out")(mixed)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array, memory: Any = None, seen: Any = None) -> jax.Array:
        norms = [nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=f"norm{n}") for n in (1, 2, 3)]
        y = norms[0](x)
        x = x + Attention(name="self_attn")(y, y, bias)
        if memory is not None:
            x = x + Attention(name="cross_attn")(norms[2](x), memory, seen)
        hidden = nn.gelu(nn.Dense(2 * WIDTH, name="up")(norms[1](x)), approximate=False)
        return x + nn.Dense(WIDTH, name="down")(hidden)


class Stack(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array, memory: Any = None, seen: Any = None) -> jax.Array:
        for index in range(self.depth):
            x = Layer(name=f"layers_{index}")(x, bias, memory, seen)
        return x


class EncoderDecoder(nn.Module):
    """As `TorchEncoderDecoder`."""

    @nn.compact
    def __call__(self, mask: jax.Array, targets: jax.Array, tokens: jax.Array) -> dict[str, jax.Array]:
        embed, length = nn.Embed(TOKENS, WIDTH, name="embed"), tokens.shape[1]
        places = nn.Embed(PLACES, WIDTH, name="positions")(jnp.arange(length))
        near = Relative(name="relative")(length)
        seen = padding_bias(mask, near.dtype)
        states = Stack(1, name="encoder")(embed(tokens) + places, near + seen)
        made = Stack(2, name="decoder")(embed(targets) + places, causal_bias(near), states, seen)
        logits = nn.Dense(TOKENS, use_bias=False, name="head")(made) * WIDTH**-0.5
        return {"logits": logits, "pooled": jnp.tanh(nn.Dense(WIDTH, name="pooler")(states[:, 0]))}
