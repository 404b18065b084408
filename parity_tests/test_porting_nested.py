"""`porting.propose` on lists in lists: the map says each once."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import torch

from parity_tests.test_porting_auto import F64, random_input
from remat_jax import porting


class DeepTorch(torch.nn.Module):
    """Stages of blocks, a list in a list, as a residual network has them, and a table that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(3, 4), requires_grad=False)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(4) for _ in range(2))
        self.stages = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(blocks)) for blocks in (2, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.table
        for norm, stage in zip(self.norms, self.stages, strict=True):
            x = norm(x)
            for block in stage:
                x = block(x).tanh()
        return x


class DeepFlax(nn.Module):
    """The same with numbers as names, the norms counted from one, and the table behind a stop."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        class Numbered(nn.Module):
            number: int
            blocks: int

            @nn.compact
            def __call__(self, x: Any) -> Any:
                for block in range(self.blocks):
                    x = jnp.tanh(nn.Dense(4, name=str(block), **F64)(x))
                return x

        table = self.param("table", nn.initializers.normal(), (3, 4), jnp.float64)
        x = x + jax.lax.stop_gradient(table)
        for number, blocks in enumerate((2, 3)):
            x = nn.LayerNorm(epsilon=1e-5, name=f"norm{number + 1}", **F64)(x)
            x = Numbered(number, blocks, name=f"stages_{number}")(x)
        return x


def test_nested_numbers_become_placeholders_and_a_frozen_weight_is_mapped() -> None:
    rules = porting.propose(DeepTorch(), DeepFlax(), random_input(2, 3, 4))
    assert str(rules).splitlines() == [
        "table -> params/table",
        "norms.{i}.weight -> params/norm{i+1}/scale",
        "norms.{i}.bias -> params/norm{i+1}/bias",
        "stages.{i}.{j}.weight -> params/stages_{i}/{j}/kernel | linear",
        "stages.{i}.{j}.bias -> params/stages_{i}/{j}/bias",
    ]
