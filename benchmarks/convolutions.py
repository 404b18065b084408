"""A ResNet-50 under several policies, compiled for a GPU that need not be present: the table of docs/choosing.md.

python -m benchmarks.convolutions [--images N] [--size PIXELS] [--target NAME]

The blocks are the bottlenecks. bfloat16, SGD with momentum, norms by the batch's own statistics. Nothing is run.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import remat_jax as rj
from benchmarks.figures import markdown
from remat_jax.report import format_bytes

CLASSES = 1000
STAGES = 3, 4, 6, 3
POLICIES = "off", "save: @convs", "full", "offload_inputs", "offload: @convs"

_conv = functools.partial(nn.Conv, use_bias=False, dtype=jnp.bfloat16)
_norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=jnp.bfloat16)


class Bottleneck(nn.Module):
    """Three normalised convolutions; their result is added to the input, or to a projection of the input."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """(batch, rows, columns, any) → (batch, rows / stride, columns / stride, 4 · channels)."""
        y = nn.relu(_norm()(_conv(self.channels, (1, 1))(x)))
        y = nn.relu(_norm()(_conv(self.channels, (3, 3), strides=self.stride)(y)))
        y = _norm(scale_init=nn.initializers.zeros)(_conv(4 * self.channels, (1, 1))(y))
        if x.shape != y.shape:
            x = _norm()(_conv(4 * self.channels, (1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """The network of He et al. 2016, but the stride is in the 3 × 3 convolution."""

    stages: Sequence[int] = STAGES

    @nn.compact
    def __call__(self, images: Any) -> Any:
        """The logits in float32."""
        x = nn.relu(_norm()(_conv(64, (7, 7), strides=2)(images)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(self.stages):
            for index in range(blocks):
                x = Bottleneck(64 * 2**stage, 2 if stage and not index else 1)(x)
        return nn.Dense(CLASSES, dtype=jnp.bfloat16)(x.mean((1, 2))).astype(jnp.float32)


def job(images: int, size: int) -> rj.Workload:
    """One training step on `images` images of size × size pixels."""
    model = ResNet()
    batch = jax.ShapeDtypeStruct((images, size, size, 3), jnp.bfloat16), jax.ShapeDtypeStruct((images,), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), batch[0])

    def loss(params: Any, images: Any, labels: Any) -> Any:
        # The updated running averages are dropped, because the loss does not read them.
        states = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables["batch_stats"])
        logits, _ = model.apply({"params": params, "batch_stats": states}, images, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return rj.Workload(loss, variables["params"], batch, Bottleneck, optimizer=optax.sgd(0.1, momentum=0.9))


def rows(workload: rj.Workload, target: str) -> Iterator[tuple[str, ...]]:
    """The rows of the table, one per policy."""
    for policy in POLICIES:
        report = rj.measure(workload, policy, target)
        on_host = format_bytes(report.host_bytes) if report.host_bytes else ""
        seconds = f"{report.seconds * 1e3:.1f} ms" if report.seconds is not None else ""
        yield f"`{policy}`", format_bytes(report.device_bytes), on_host, seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--target", default="h200")
    options = parser.parse_args()
    workload = job(options.images, options.size)
    kept = format_bytes(rj.residuals(workload, "off").device_bytes or 0)
    print(f"residuals without a checkpoint: {kept}", file=sys.stderr)
    print(markdown(["policy", "device memory", "on the host", "modelled step"], list(rows(workload, options.target))))


if __name__ == "__main__":
    main()
