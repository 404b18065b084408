"""Settings that differ between two models, each listed with both values; none if the models are equal."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from examples.models import gpt2
from parity_tests.third_party import ports as p
from parity_tests.third_party.of_transformers import PORTS
from remat_jax.errors import ArgumentError
from remat_jax.parity import excite
from remat_jax.parity.semantics import differences, torch_facts

Setting = tuple[str, str, Any, Any]


def settings(theirs: Any, ours: Any, variables: Any, *inputs: Any) -> list[Setting]:
    """The path, the name and both values of each setting that differs."""
    return [(each.path, each.what, each.torch, each.flax) for each in differences(theirs, ours, variables, inputs)]


def of_port(name: str, **changes: Any) -> list[Setting]:
    port = PORTS[name]
    model = port.make_flax(port.config, **changes)
    inputs = port.arguments(p.batch(port, "float32")[0])
    return settings(p.make_torch(port, "float32").eval(), model, p.shapes(port, model, port.inputs), *inputs)


@pytest.mark.parametrize(("port", "scan"), [("gpt2", False), ("bert", True)])
def test_right_ports_do_not_differ(port: str, scan: bool) -> None:
    assert of_port(port, scan=scan) == []


def test_epsilon_and_gelu_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    gelu, norm = nn.gelu, gpt2.layer_norm
    monkeypatch.setattr(nn, "gelu", lambda x, approximate: gelu(x, approximate=not approximate))

    def changed_norm(config: gpt2.GPT2Config, param_dtype: Any, name: str) -> nn.LayerNorm:
        return nn.LayerNorm(1e-6, name=name) if name == "ln_f" else norm(config, param_dtype, name)

    monkeypatch.setattr(gpt2, "layer_norm", changed_norm)
    expected = [("ln_f", "epsilon", 1e-5, 1e-6)]
    expected += [(f"layers_{index}/mlp", "GELU", "by tanh", "exact") for index in range(2)]
    assert of_port("gpt2") == expected
    assert [entry[1:] for entry in of_port("bert") if entry[1] == "GELU"] == [("GELU", "exact", "by tanh")] * 3


class Small(nn.Module):
    """A convolution, a batch norm, a dropout, a dense layer."""

    padding: Any = ((1, 1), (1, 1))
    momentum: float = 0.9
    rate: float = 0.25
    use_bias: bool = True
    dtype: Any = None
    precision: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(4, (3, 3), strides=(2, 2), padding=self.padding, name="conv")(x)
        x = nn.BatchNorm(True, momentum=self.momentum, epsilon=1e-5, name="norm")(x)
        x = nn.Dropout(self.rate, deterministic=True, name="drop")(x)
        head = nn.Dense(3, use_bias=self.use_bias, dtype=self.dtype, precision=self.precision, name="head")
        return head(x.mean((1, 2)))


def theirs() -> torch.nn.Module:
    """`Small` in PyTorch."""
    parts = {"conv": torch.nn.Conv2d(3, 4, 3, stride=2, padding=1), "norm": torch.nn.BatchNorm2d(4)}
    return torch.nn.ModuleDict(parts | {"drop": torch.nn.Dropout(0.25), "head": torch.nn.Linear(4, 3)})


ALGORITHM = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
CHANGES: dict[str, tuple[dict[str, Any], tuple[str, str, Any, Any] | None]] = {
    "none": ({}, None),
    "padding": ({"padding": "SAME"}, ("conv", "padding", ((1, 1), (1, 1)), "SAME")),
    "no padding": ({"padding": "VALID"}, ("conv", "padding", ((1, 1), (1, 1)), ((0, 0), (0, 0)))),
    "momentum": ({"momentum": 0.99}, ("norm", "momentum", 0.9, 0.99)),
    "rate": ({"rate": 0.5}, ("", "dropout rates", [0.25], [0.5])),
    "bias": ({"use_bias": False}, ("head", "bias", True, False)),
    "dtype": ({"dtype": jnp.bfloat16}, ("head", "dtype", "float32", "bfloat16")),
    "precision": ({"precision": "default"}, ("head", "precision", "highest", "default")),
    "full precision": ({"precision": "float32"}, None),
    "precisions": ({"precision": ("high", "highest")}, ("head", "precision", "highest", "high and highest")),
    "an algorithm": ({"precision": ALGORITHM}, ("head", "precision", "highest", "bf16_bf16_f32")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_setting(name: str) -> None:
    changes, expected = CHANGES[name]
    model, x = Small(**changes), jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.ones(x.shape)))
    assert settings(theirs().eval(), model, variables, x) == ([] if expected is None else [expected])


def test_running_statistics_and_those_of_the_batch() -> None:
    model, x = Small(), jnp.ones((2, 8, 8, 3))
    [setting] = differences(theirs().train(), model, model.init(jax.random.key(0), x), (x,))
    assert str(setting) == "norm: statistics is of the batch in PyTorch and running in Flax"


class Upsampling(nn.Module):
    """Modules with the names of others but not their attributes."""

    strides: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.ConvTranspose(3, (2, 2), strides=(self.strides, self.strides), padding="VALID", name="up")(x)
        return nn.BatchNorm(True, epsilon=1e-5, name="frozen")(x)


class FrozenBatchNorm(torch.nn.Module):
    """As in torchvision: no momentum, nothing trained."""

    eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class CausalConv(torch.nn.Module):
    """As in ports of state-space models: a kernel, and no readable settings."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))


def test_modules_without_the_usual_attributes_are_read_as_far_as_they_go() -> None:
    upsampling = torch.nn.ModuleDict({"up": torch.nn.ConvTranspose2d(3, 3, 2, 2), "frozen": FrozenBatchNorm()})
    x = jax.ShapeDtypeStruct((1, 4, 4, 3), jnp.float32)
    for strides, expected in ((2, []), (1, ["up: strides is (2, 2) in PyTorch and (1, 1) in Flax"])):
        model = Upsampling(strides)
        variables = jax.eval_shape(lambda model=model: model.init(jax.random.key(0), jnp.ones(x.shape)))
        assert [str(setting) for setting in differences(upsampling, model, variables, (x,))] == expected
    assert torch_facts(CausalConv()) == {"bias": False, "precision": "highest", "dtype": "float32"}


def test_nnx() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.norm = nnx.LayerNorm(3, rngs=nnx.Rngs(0))
            self.head = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(self.norm(x))

    theirs = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(3), "head": torch.nn.Linear(3, 2)})
    settings_that_differ = differences(theirs, Model(), None, (jnp.ones((1, 3)),))
    assert [str(setting) for setting in settings_that_differ] == [
        "norm: epsilon is 1e-05 in PyTorch and 1e-06 in Flax",
        "head: bias is True in PyTorch and False in Flax",
    ]


# Inputs that reveal faults.


def test_without_exciting_a_missing_bias_is_missed() -> None:
    """Zero biases hide the fault; excited biases do not, in either framework's tree."""
    plain = {"head.bias": torch.zeros(4), "head.weight": torch.arange(4.0)}
    made = excite({**plain, "tied": plain["head.bias"]}, seed=3)
    assert made["head.bias"].std() > 0.05 and made["tied"] is made["head.bias"]
    assert made["head.weight"] is plain["head.weight"]
    variance = excite({"var": np.ones(50, np.float32), "count": np.zeros(3, np.int32)}, seed=1)
    assert variance["var"].min() > 0.3 and np.std(variance["var"]) > 0.1 and variance["var"].dtype == np.float32
    assert variance["count"].tolist() == [0, 0, 0]
    with pytest.raises(ArgumentError, match=r"scale=0: expected a positive number"):
        excite(plain, scale=0)
