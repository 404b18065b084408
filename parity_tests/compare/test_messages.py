"""What a comparison says of settings, of what it cannot run, and of float32 that is written into a model."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from parity_tests.compare.cases import run
from parity_tests.compare.test_false_alarms import FLOAT64, LAYERS, DroppingTorch, Stack, X
from remat_jax import porting
from remat_jax.errors import ArgumentError, PortingError, RematError

# What settings say, and what is a table.


class Settings(torch.nn.Module):
    """A convolution of one pixel with a stride, an activation, functional dropout, and a number to mask with."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.conv, self.act = torch.nn.Conv2d(3, 4, 1, stride=2), act
        self.register_buffer("masked_bias", torch.tensor(-1e9), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.act(self.conv(x)), 0.1, self.training)


class QuickGELU(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


class SettingsFlax(nn.Module):
    quick: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(4, (1, 1), strides=2, name="conv")(x.transpose(0, 2, 3, 1))
        x = x * nn.sigmoid(1.702 * x) if self.quick else nn.gelu(x, approximate=False)
        return nn.Dropout(0.1, deterministic=True)(x).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.parametrize("ours", [True, False])
def test_settings_that_do_not_differ_are_not_told_and_quick_gelu_is(theirs: bool, ours: bool) -> None:
    act = QuickGELU() if theirs else torch.nn.GELU()
    pixels = np.random.default_rng(0).normal(size=(2, 3, 6, 6)).astype(np.float32)
    rules = "conv.weight -> params/conv/kernel | conv2d\nconv.bias -> params/conv/bias"
    report = run(
        {"torch_module": Settings(act).eval(), "flax_module": SettingsFlax(ours), "inputs": pixels}, rules=rules, **FLOAT64
    )
    assert report.passed == (theirs == ours), str(report)
    forms = {True: "quick", False: "exact"}
    expected = [] if theirs == ours else [("", "GELU", forms[theirs], forms[ours])]
    assert [tuple(one.values()) for one in report.differences] == expected
    assert "PyTorch's tables" not in [check.name for check in report.checks]


# Errors.


class Wrapper:
    """As a library wraps a module with its weights."""

    def __init__(self) -> None:
        self.module, self.params = Stack(), {}

    def __call__(self, x: Any) -> Any:
        return self.module.apply({"params": self.params}, x)


class TwoArguments(nn.Module):
    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        return nn.Dense(4)(x) * mask


def failing(*_: Any) -> Any:
    raise ValueError("no weights")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"flax_module": Wrapper()},
            r"flax_module is a Wrapper, which holds a module and is none: give its module, a Stack, as",
        ),
        ({"flax_module": TwoArguments()}, r"flax_module cannot be run on inputs: TypeError: .* argument: 'mask'"),
        ({"inputs": (X, X)}, r"torch_module cannot be run on inputs: TypeError: .*forward\(\) takes 2 .* arguments"),
        ({"torch_module": failing}, r"torch_module\(\) cannot be built: ValueError: no weights"),
        ({"flax_module": failing}, r"flax_module\('float\d\d'\) cannot be made: ValueError: no weights"),
        ({"loss": failing}, r"loss cannot be computed of PyTorch's output: ValueError: no weights"),
        ({"loss": (torch.mean, failing)}, r"loss cannot be computed of Flax's output: ValueError: no weights"),
    ],
)
def test_what_cannot_be_run_is_an_error_with_the_remedy(wrong: dict[str, Any], text: str) -> None:
    case = {"torch_module": DroppingTorch().eval(), "flax_module": Stack(), "inputs": X, "rules": LAYERS, **FLOAT64}
    with pytest.raises(RematError, match=text) as error:
        run({**case, **wrong})
    assert type(error.value) is ArgumentError


# Float32 that is written into the model.


class ScaledTorch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x.float()).softmax(-1)) * torch.sigmoid(x.float().mean())


class Scaled(nn.Module):
    """The same, by casts and by dtypes."""

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.softmax(nn.LayerNorm(self.epsilon, dtype=jnp.float32, name="norm")(x.astype(jnp.float32)))
        y = nn.Dense(4, dtype=jnp.float32, name="linear")(y)
        return y * nn.sigmoid(jnp.mean(x, dtype=jnp.float32))


SCALED = """
    norm.weight -> params/norm/scale
    norm.bias -> params/norm/bias
    linear.weight -> params/linear/kernel | linear
    linear.bias -> params/linear/bias
"""


def test_float32_that_is_written_into_a_model_is_widened_where_it_is_meant() -> None:
    case: dict[str, Any] = {
        "torch_module": ScaledTorch(),
        "flax_module": Scaled(),
        "inputs": X,
        "rules": SCALED,
        "modes": "off",
    }
    with pytest.raises(ArgumentError, match=r"gives output in float32 .*; where the model means it, give keep_float64=True"):
        run(case)
    report = run(case, keep_float64=True, memory=False)
    assert report.passed, str(report)
    assert max(row.error or 0 for row in report.rows) < 1e-13
    wrong = run({**case, "flax_module": Scaled(1e-4)}, keep_float64=True, **FLOAT64)
    assert wrong.divergences["forward"]["flax_path"] == "norm"
    alone = run(case, dtypes="float32", memory=False)  # the widening has left no trace
    assert alone.passed, str(alone)


def test_a_map_is_proposed_for_a_model_with_float32_inside() -> None:
    with pytest.raises(PortingError, match="float32"):
        porting.propose(ScaledTorch(), Scaled(), X)
    assert len(porting.propose(ScaledTorch(), Scaled(), X, keep_float64=True).rules) == 4
