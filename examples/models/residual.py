"""A residual block in PyTorch, Linen and NNX, x + down(gelu(up(x))), and a row of them: the models of `docs/porting.md`."""

from __future__ import annotations

import flax.linen as nn
import torch
from flax import nnx


class TorchBlock(torch.nn.Module):
    """The block in PyTorch."""

    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class TorchModel(torch.nn.Module):
    """Blocks in a row."""

    def __init__(self, depth=4):
        super().__init__()
        self.blocks = torch.nn.ModuleList(TorchBlock() for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """The block in Linen."""

    @nn.compact
    def __call__(self, x):
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1], name="up")(x), approximate=False)
        return x + nn.Dense(x.shape[-1], name="down")(hidden)


class Model(nn.Module):
    """Blocks in a row."""

    depth: int = 4

    def setup(self):
        self.blocks = [Block() for _ in range(self.depth)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class NnxBlock(nnx.Module):
    """The block in NNX."""

    def __init__(self, width=64, *, rngs):
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x), approximate=False))


class NnxModel(nnx.Module):
    """Blocks in a row."""

    def __init__(self, depth=4, *, rngs):
        self.blocks = nnx.List([NnxBlock(rngs=rngs) for _ in range(depth)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x
