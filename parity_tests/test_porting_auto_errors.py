"""The models that `porting.propose` accepts and refuses, and that an error names the framework."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.test_porting_auto import F64, NAMES, SquareFlax, SquareTorch, random_input
from remat_jax import porting
from remat_jax.errors import PortingError
from remat_jax.porting.float64 import keep_float64


def test_a_function_that_builds_the_model_is_taken_and_errors_say_whose_they_are() -> None:
    rules = porting.propose(SquareTorch, SquareFlax(NAMES, (False,) * 3), random_input(3, 4))
    assert str(rules) == "{name}.weight -> params/{name}/kernel | linear\n{name}.bias -> params/{name}/bias"
    with pytest.raises(PortingError, match=r"torch_module=3: expected a torch\.nn\.Module, or a function that builds one"):
        porting.propose(3, nn.Dense(4, **F64), random_input(3, 4))
    with pytest.raises(PortingError, match=r"torch_module\(\) gave a dict: expected a torch\.nn\.Module"):
        porting.propose(dict, nn.Dense(4, **F64), random_input(3, 4))
    with pytest.raises(PortingError, match=r"torch_module: SquareTorch cannot be run on inputs: RuntimeError: .*shapes"):
        porting.propose(SquareTorch(), SquareFlax(NAMES, (False,) * 3), random_input(3, 5), variables=square_variables())
    with pytest.raises(PortingError, match=r"flax_module: SquareFlax cannot be run on inputs: TypeError: dot_general"):
        porting.propose(
            SquareTorch(),
            SquareFlax(NAMES, (False,) * 3),
            random_input(3, 4),
            flax_call=lambda model, x: model(x[:, :3]),
            variables=square_variables(),
        )


def square_variables() -> Any:
    with jax.enable_x64(True):
        return SquareFlax(NAMES, (False,) * 3).init(jax.random.key(0), np.ones((3, 4)))


def test_what_cannot_be_proved_is_refused_before() -> None:
    with pytest.raises(PortingError, match=r"dropout is on in 1; call torch_module.eval\(\) first"):
        porting.propose(
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1)), nn.Dense(4, **F64), random_input(3, 4)
        )
    with pytest.raises(PortingError, match=r"no map fits the shapes: PyTorch has 1 modules with weights, Flax 1"):
        porting.propose(torch.nn.Linear(4, 5), nn.Dense(4, **F64), random_input(3, 4))
    with pytest.raises(PortingError, match="expected a module of Linen, NNX, Equinox or Haiku"):
        porting.propose(torch.nn.Linear(4, 4), 3, random_input(3, 4))


def test_casts_from_float64_are_left_out() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with keep_float64():
        kept = (x.float(), x.half(), x.to(torch.bfloat16), x.to(dtype=torch.float32), x.softmax(0, dtype=torch.float32))
        assert {each.dtype for each in kept} == {torch.float64}
        assert x.long().dtype == torch.int64
    assert x.float().dtype == torch.float32


def angles() -> Any:
    """A table of rotations, by position and pair of features."""
    return np.outer(np.arange(4), 1 / 3 ** np.arange(4))


def turned(x: Any, sin: Any, cos: Any, stack: Any) -> Any:
    first, second = x[..., 0::2], x[..., 1::2]
    return stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(x.shape)


class TurnedTorch(torch.nn.Module):
    """Attention with rotated queries and keys; weights as small as at initialisation hide the rotation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("query", "key", "value"):
            setattr(self, name, torch.nn.Linear(8, 8))
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sin, cos = (torch.from_numpy(table(angles())) for table in (np.sin, np.cos))
        query, key = (turned(part(x), sin, cos, torch.stack) for part in (self.query, self.key))
        return (query @ key.mT).softmax(-1) @ self.value(x)


class TurnedFlax(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        query, key, value = (nn.Dense(8, name=name, **F64)(x) for name in ("query", "key", "value"))
        sin, cos = (table(angles()).astype("float32") for table in (np.sin, np.cos))
        query, key = (turned(part, sin, cos, jnp.stack) for part in (query, key))
        return jax.nn.softmax(query @ key.mT) @ value


def test_a_map_that_a_float32_table_hides_is_answered_with_the_remedy() -> None:
    with pytest.raises(PortingError, match=r"no map was found.* size of float32's rounding.*give keep_float64=True"):
        porting.propose(TurnedTorch(), TurnedFlax(), random_input(2, 4, 8), keep_float64=False)
    assert len(porting.propose(TurnedTorch(), TurnedFlax(), random_input(2, 4, 8), keep_float64=True).rules) == 2
