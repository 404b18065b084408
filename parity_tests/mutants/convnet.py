"""A small residual convolutional net with batch norms, written once in each framework."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import torch

WIDTH, CLASSES = 8, 8  # a square head, whose transpose would fit
RULES = """
    stem.weight -> params/stem/kernel | conv2d
    stem.bias -> params/stem/bias
    norm.weight -> params/norm/scale
    norm.bias -> params/norm/bias
    norm.running_{which} -> batch_stats/norm/{which}
    blocks.{i}.conv{n}.weight -> params/blocks_{i}/conv{n}/kernel | conv2d
    blocks.{i}.conv{n}.bias -> params/blocks_{i}/conv{n}/bias
    blocks.{i}.norm.weight -> params/blocks_{i}/norm/scale
    blocks.{i}.norm.bias -> params/blocks_{i}/norm/bias
    blocks.{i}.norm.running_{which} -> batch_stats/blocks_{i}/norm/{which}
    head.weight -> params/head/kernel | linear
    head.bias -> params/head/bias
    extra: *num_batches_tracked
"""


class TorchBlock(torch.nn.Module):
    """Convolution, batch norm, GELU, convolution, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = torch.nn.Conv2d(WIDTH, WIDTH, 3, padding=1), torch.nn.Conv2d(WIDTH, WIDTH, 1)
        self.norm, self.act = torch.nn.BatchNorm2d(WIDTH), torch.nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(self.act(self.norm(self.conv1(x))))


class TorchConvNet(torch.nn.Module):
    """Images (B, 3, H, W) to logits (B, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = torch.nn.Conv2d(3, WIDTH, 3, stride=2, padding=1), torch.nn.BatchNorm2d(WIDTH)
        self.blocks = torch.nn.ModuleList([TorchBlock(), TorchBlock()])
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class BatchNorm(nn.BatchNorm):
    """Flax's batch norm; with `unbiased` it keeps n / (n - 1) times a batch's variance, as PyTorch does."""

    unbiased: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, **options: Any) -> jax.Array:
        before = self.variables.get("batch_stats", {}).get("var")
        made = super().__call__(x, **options)
        if self.unbiased and before is not None and not self.use_running_average:
            count = x.size // x.shape[-1]
            kept = self.momentum * before
            after = self.get_variable("batch_stats", "var")
            self.put_variable("batch_stats", "var", kept + (after - kept) * count / (count - 1))
        return made


def batch_norm(train: bool) -> BatchNorm:
    """The norm with PyTorch's epsilon, momentum and two-pass variance."""
    return BatchNorm(not train, momentum=0.9, epsilon=1e-5, use_fast_variance=False, name="norm")


class Block(nn.Module):
    """As `TorchBlock`, channels last."""

    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = batch_norm(self.train)(nn.Conv(WIDTH, (3, 3), padding=1, name="conv1")(x))
        return x + nn.Conv(WIDTH, (1, 1), name="conv2")(nn.gelu(y, approximate=False))


class ConvNet(nn.Module):
    """As `TorchConvNet`: images (B, H, W, 3) to logits."""

    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (3, 3), strides=2, padding=1, name="stem")(x)
        x = nn.relu(batch_norm(self.train)(x))
        for index in range(2):
            x = Block(self.train, name=f"blocks_{index}")(x)
        return nn.Dense(CLASSES, name="head")(jnp.mean(x, (1, 2)))
