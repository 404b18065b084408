"""`blocks=None` where a part and the layer around it save almost equally much, alone but not with the other blocks."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj

WIDTH, HEADS = 256, 8


def perceptron(x: Any) -> Any:
    return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class EncoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return perceptron(x + nn.SelfAttention(HEADS)(nn.LayerNorm()(x)))


class DecoderLayer(nn.Module):
    @nn.compact
    def __call__(self, y: Any, memory: Any) -> Any:
        h = nn.LayerNorm()(y)
        y = y + nn.SelfAttention(HEADS)(h, mask=nn.make_causal_mask(h[..., 0]))
        return perceptron(y + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(y), memory))


class Translator(nn.Module):
    @nn.compact
    def __call__(self, x: Any, y: Any) -> Any:
        for _ in range(2):
            x = EncoderLayer()(x)
        for _ in range(2):
            y = DecoderLayer()(y, x)
        return nn.LayerNorm()(y)


@pytest.mark.filterwarnings("ignore:SelfAttention")
def test_the_layers_are_taken_where_with_the_others_they_save_more_than_their_parts() -> None:
    model, x = Translator(), jax.ShapeDtypeStruct((64, 256, WIDTH), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x, x)
    found = rj.Workload(lambda p, x, y: jnp.mean(model.apply(p, x, y) ** 2), params, (x, x)).find_blocks()
    saved = {each.name: each.saved for each in (*found.taken, *found.others)}
    assert abs(saved["DecoderLayer"] - saved["SelfAttention"]) < 0.005 * found.residual_bytes
    assert [(each.name, each.calls) for each in found.taken] == [("DecoderLayer", 2), ("EncoderLayer", 2)]
