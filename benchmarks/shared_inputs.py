"""The cost of an attention mask that all layers read, if inputs are offloaded; compiled for a GPU that need not be present.

python -m benchmarks.shared_inputs [--layers N] [--target NAME] [--scan]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import remat_jax as rj

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 32, 1024, 1024, 16, 30_000
POLICIES = "full", "offload_inputs"


class Layer(nn.Module):
    """A layer as in flax's lm1b: attention with a mask, and an MLP, in bfloat16."""

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        """The layer's output; all layers get the same mask."""
        h = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, dtype=jnp.bfloat16, use_bias=False)(h, mask=mask)
        h = nn.relu(nn.Dense(4 * WIDTH, dtype=jnp.bfloat16)(nn.LayerNorm(dtype=jnp.bfloat16)(x)))
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16)(h)


class Model(nn.Module):
    """An embedding, layers that all read one float32 mask (causal, with padding), and a head."""

    layers: int
    scan: bool

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        """The logits."""
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16)
        x, mask = embed(tokens), nn.combine_masks(nn.make_attention_mask(tokens > 0, tokens > 0), nn.make_causal_mask(tokens))
        if not self.scan:
            for index in range(self.layers):
                x = Layer(name=f"layers_{index}")(x, mask)
        else:
            run = nn.scan(
                lambda layer, x, mask: (layer(x, mask), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=self.layers,
            )
            x, _ = run(Layer(name="layers"), x, mask)
        return embed.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x))


def job(layers: int, *, scan: bool) -> rj.Workload:
    """A training step with Adam, of 32 × 1024 tokens."""
    model, tokens = Model(layers, scan), jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)

    def loss(params: Any, tokens: Any) -> Any:
        logits = model.apply(params, tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return rj.Workload(loss, params, (tokens,), Layer, optimizer=optax.adam(1e-3))


def rows(workload: rj.Workload, target: str) -> Iterator[str]:
    """The rows of the table, one per policy: GB (10⁹ bytes), and ms of the modelled step."""
    for report in (rj.measure(workload, policy, target) for policy in POLICIES):
        figures = [report.device_bytes / 1e9, report.host_bytes / 1e9]
        offered = report.receipt.offered_bytes if report.receipt is not None else 0
        copies = report.overlap
        moved = (copies.out.bytes, copies.back.bytes, copies.covered) if copies is not None else (0, 0, 1.0)
        step = copies.step_seconds if copies is not None else report.seconds
        figures += [(offered or 0) / 1e9, moved[0] / 1e9, moved[1] / 1e9]
        shown = " | ".join(f"{figure:.2f}" for figure in figures)
        yield f"| {report.policy} | {shown} | {moved[2]:.0%} | {(step or 0) * 1e3:.1f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--scan", action="store_true")
    options = parser.parse_args()
    print("| policy | device GB | host | offered | copied out | back | covered | step ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows(job(options.layers, scan=options.scan), options.target):
        print(row, flush=True)


if __name__ == "__main__":
    main()
