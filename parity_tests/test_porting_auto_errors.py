"""The models that `porting.propose` accepts and refuses, and that an error names the framework."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.small_pairs import DENSE, Flax, Torch, linears
from parity_tests.test_porting_auto import F64, in_a_row, in_a_row_flax, random_input
from remat_jax import porting
from remat_jax.errors import PortingError


def test_a_function_that_builds_the_model_is_taken_and_errors_say_whose_they_are() -> None:
    theirs, ours = in_a_row, in_a_row_flax()
    assert str(porting.propose(theirs, ours, random_input(3, 4))) == DENSE
    with pytest.raises(PortingError, match=r"torch_module=3: expected a torch\.nn\.Module, or a function that builds one"):
        porting.propose(3, ours, random_input(3, 4))
    with pytest.raises(PortingError, match=r"torch_module\(\) gave a dict: expected a torch\.nn\.Module"):
        porting.propose(dict, ours, random_input(3, 4))
    with jax.enable_x64(True):
        variables = ours.init(jax.random.key(0), np.ones((3, 4)))
    with pytest.raises(PortingError, match=r"torch_module: Torch cannot be run on inputs: RuntimeError: .*shapes"):
        porting.propose(theirs(), ours, random_input(3, 5), variables=variables)
    narrow = {"flax_call": lambda model, x: model(x[:, :3]), "variables": variables}
    with pytest.raises(PortingError, match=r"flax_module: Flax cannot be run on inputs: TypeError: dot_general"):
        porting.propose(theirs(), ours, random_input(3, 4), **narrow)


def test_what_cannot_be_proved_is_refused_before() -> None:
    with pytest.raises(PortingError, match=r"dropout is on in 1; call torch_module.eval\(\) first"):
        dropping = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1))
        porting.propose(dropping, nn.Dense(4, **F64), random_input(3, 4))
    with pytest.raises(PortingError, match=r"no map fits the shapes: PyTorch has 1 modules with weights, Flax 1"):
        porting.propose(torch.nn.Linear(4, 5), nn.Dense(4, **F64), random_input(3, 4))
    with pytest.raises(PortingError, match="expected a module of Linen, NNX, Equinox or Haiku"):
        porting.propose(torch.nn.Linear(4, 4), 3, random_input(3, 4))


def angles() -> Any:
    """A table of rotations, by position and pair of features."""
    return np.outer(np.arange(4), 1 / 3 ** np.arange(4))


def turned(x: Any, sin: Any, cos: Any, stack: Any) -> Any:
    first, second = x[..., 0::2], x[..., 1::2]
    return stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(x.shape)


def turned_torch() -> Torch:
    """Attention with rotated queries and keys; weights as small as at initialisation hide the rotation."""

    def run(module: Torch, x: torch.Tensor) -> torch.Tensor:
        sin, cos = (torch.from_numpy(table(angles())) for table in (np.sin, np.cos))
        query, key = (turned(part(x), sin, cos, torch.stack) for part in (module.query, module.key))
        return (query @ key.mT).softmax(-1) @ module.value(x)

    torch.manual_seed(0)
    model = Torch(run, **linears(8, "query", "key", "value"))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return model


def turned_flax(module: nn.Module, x: Any) -> Any:
    query, key, value = (nn.Dense(8, name=name, **F64)(x) for name in ("query", "key", "value"))
    sin, cos = (table(angles()).astype("float32") for table in (np.sin, np.cos))
    query, key = (turned(part, sin, cos, jnp.stack) for part in (query, key))
    return jax.nn.softmax(query @ key.mT) @ value


def test_a_map_that_a_float32_table_hides_is_answered_with_the_remedy() -> None:
    case = turned_torch(), Flax(turned_flax), random_input(2, 4, 8)
    with pytest.raises(PortingError, match=r"no map was found.* size of float32's rounding.*give keep_float64=True"):
        porting.propose(*case, keep_float64=False)
    assert len(porting.propose(*case, keep_float64=True).rules) == 2
