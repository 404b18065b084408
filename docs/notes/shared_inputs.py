"""What an attention mask that all layers read costs under an offload of inputs: flax's lm1b in small words.

python docs/notes/shared_inputs.py [--layers N] [--scan]
"""

from __future__ import annotations

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import remat_jax as rj


class Layer(nn.Module):
    """A layer of flax's lm1b in bfloat16: attention with a mask, and an MLP."""

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        h = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        x = x + nn.MultiHeadDotProductAttention(8, dtype=jnp.bfloat16, use_bias=False)(h, mask=mask)
        h = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        h = nn.relu(nn.Dense(2048, dtype=jnp.bfloat16)(h))
        return x + nn.Dense(512, dtype=jnp.bfloat16)(h)


class Model(nn.Module):
    """Embedding, layers that all read one mask, head."""

    layers: int
    scanned: bool

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(30_000, 512, dtype=jnp.bfloat16)
        x = embed(tokens)
        mask = nn.combine_masks(nn.make_attention_mask(tokens > 0, tokens > 0), nn.make_causal_mask(tokens))
        if self.scanned:
            scan = nn.scan(
                lambda layer, x, mask: (layer(x, mask), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=self.layers,
            )
            x, _ = scan(Layer(name="layers"), x, mask)
        else:
            for index in range(self.layers):
                x = Layer(name=f"layers_{index}")(x, mask)
        return embed.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x))


def job(layers: int, scanned: bool) -> rj.Workload:
    """The gradient for 32 × 1024 tokens."""
    import optax

    model, tokens = Model(layers, scanned), jax.ShapeDtypeStruct((32, 1024), jnp.int32)

    def loss(params: Any, tokens: Any) -> Any:
        logits = model.apply(params, tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return rj.Workload(loss, params, (tokens,), Layer, optimizer=optax.adam(1e-3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--scan", action="store_true")
    options = parser.parse_args()
    work = job(options.layers, options.scan)
    for policy in ("offload_inputs", "full"):
        report = rj.measure(work, policy, target="h200")
        print(report, flush=True)
    print(rj.residuals(work, "offload_inputs"))


if __name__ == "__main__":
    main()
