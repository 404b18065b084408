"""Right pairs that a comparison once called wrong. Beside each is a similar wrong pair, whose fault must be named."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import remat_jax as rj
from parity_tests.compare.cases import run
from remat_jax import porting
from remat_jax.errors import ArgumentError, PortingError, RematError
from remat_jax.parity import ParityReport

FLOAT64: dict[str, Any] = {"modes": "off", "dtypes": "float64", "memory": False}
X = np.random.default_rng(0).normal(size=(6, 5, 4)).astype(np.float32)


def check(report: ParityReport, name: str) -> rj.parity.Check:
    return next(check for check in report.checks if check.name == name)


# Functional dropout.


class DroppingBlock(torch.nn.Module):
    """A block with functional dropout, which only its own mode switches on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.linear(x).tanh(), 0.5, training=self.training)


class DroppingTorch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([DroppingBlock(), DroppingBlock()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + jnp.tanh(nn.Dense(4, name="linear")(x))


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for index in range(2):
            x = Block(name=f"layers_{index}")(x)
        return x


LAYERS = """
    layers.{i}.linear.weight -> params/layers_{i}/linear/kernel | linear
    layers.{i}.linear.bias -> params/layers_{i}/linear/bias
"""


def test_modes_do_not_switch_functional_dropout_on() -> None:
    case = {"torch_module": DroppingTorch().eval(), "flax_module": Stack(), "inputs": X, "rules": LAYERS}
    report = run(case, modes=("checkpoint", "offload"), dtypes="float64", memory=True)
    assert report.passed, str(report)
    kept = {row.mode: (row.device_bytes, row.host_bytes) for row in report.memory if row.framework == "PyTorch"}
    assert kept == {"checkpoint": (2 * 960, 0), "offload": (960, 2 * 960)}  # the inputs of two blocks; the loss keeps one


# Running statistics.

NORM = """
    weight -> params/scale
    bias -> params/bias
    running_{name} -> batch_stats/{name}
    extra: num_batches_tracked
"""


def norms(*, train: bool, momentum: float = 0.9, channels: int = 5) -> dict[str, Any]:
    flax = nn.BatchNorm(not train, momentum=momentum, epsilon=1e-5, use_fast_variance=False)
    inputs = np.random.default_rng(1).normal(size=(7, channels)).astype(np.float32)
    return {
        "torch_module": torch.nn.BatchNorm1d(channels).train(train),
        "flax_module": flax,
        "inputs": inputs,
        "rules": NORM,
        "modes": "off",
        "memory": False,
    }


def test_running_statistics_pass_in_evaluation_in_every_dtype() -> None:
    report = run(norms(train=False))
    assert report.passed, str(report)
    assert {row.name: sorted(row.ratios) for row in report.rows if row.kind == "state"} == {
        "batch_stats/mean": ["float32"],
        "batch_stats/var": ["float32"],
    }


@pytest.mark.parametrize(("momentum", "named"), [(0.9, False), (0.8, True)])
def test_the_convention_of_statistics_is_named(momentum: float, named: bool) -> None:
    """PyTorch keeps the unbiased variance, larger by 7 / 6; a momentum of 0.8 moves twice as far as one of 0.9."""
    report = run(norms(train=True, momentum=momentum))
    statistics = check(report, "batch statistics")
    assert not statistics.passed
    assert (
        "PyTorch keeps the unbiased variance of the batch, 7/6 of the biased variance that Flax keeps: batch_stats/var"
        in statistics.found
    )
    moved = "Flax's statistics move 2 times as far in a step as PyTorch's (its momentum differs): batch_stats/mean"
    assert (moved in statistics.found) == named


def test_statistics_that_differ_otherwise_are_not_explained() -> None:
    """The statistics of other inputs fit no convention."""
    case = norms(train=True)
    report = run(case, flax_call=lambda model, x: model(x * x), dtypes="float64")
    assert not report.passed and "batch statistics" not in [check.name for check in report.checks]


# Casts.


class BucketsTorch(torch.nn.Module):
    """Distances in logarithmic buckets, each with a learnt number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distances = torch.arange(1, x.shape[1] + 1, dtype=torch.float64)
        return self.linear(x) + self.table(torch.log2(distances).to(torch.long))


class Buckets(nn.Module):
    """`BucketsTorch` with distances in float32; with `after`, the learnt numbers are cast too."""

    after: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        distances = jnp.arange(1, x.shape[1] + 1) + 0 * jax.lax.stop_gradient(x[0, :, 0])
        buckets = jnp.floor(jnp.log2(distances.astype(jnp.float32))).astype(jnp.int32)
        chosen = nn.Embed(4, 4, name="table")(buckets)
        return nn.Dense(4, name="linear")(x) + (chosen.astype(jnp.float32) if self.after else chosen)


BUCKETS = """
    table.weight -> params/table/embedding
    linear.weight -> params/linear/kernel | linear
    linear.bias -> params/linear/bias
"""


@pytest.mark.parametrize("after", [False, True])
def test_a_cast_counts_only_where_what_is_compared_flows_through_it(after: bool) -> None:
    case = {"torch_module": BucketsTorch(), "flax_module": Buckets(after), "inputs": X, "rules": BUCKETS, **FLOAT64}
    report = run(case, keep_float64=False)
    assert report.passed != after, str(report)
    assert run(case).passed
    casts = [check.found for check in report.checks if check.name == "Flax stays in float64"]
    assert [cast.partition("; ")[0] for cast in casts] == [
        "its float64 step casts to a smaller dtype: float64 to float32 in Buckets" for _ in range(after)
    ]


# What settings say, and what is a table.


class Settings(torch.nn.Module):
    """A convolution of one pixel with a stride, an activation, functional dropout, and a masking constant."""

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
    assert [tuple(difference.values()) for difference in report.differences] == expected
    assert "PyTorch's tables" not in [check.name for check in report.checks]


# Errors.


class Wrapper:
    """A module with its weights, wrapped as libraries do."""

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
            r"flax_module is a Wrapper, which holds a module but is not a module: give its module, a Stack, as",
        ),
        ({"flax_module": TwoArguments()}, r"flax_module cannot be run on inputs: TypeError: .* argument: 'mask'"),
        ({"inputs": (X, X)}, r"torch_module cannot be run on inputs: TypeError: .*forward\(\) takes 2 .* arguments"),
        ({"torch_module": failing}, r"torch_module\(\) cannot be built: ValueError: no weights"),
        ({"flax_module": failing}, r"flax_module\('float\d\d'\) cannot be made: ValueError: no weights"),
        ({"loss": failing}, r"loss cannot be computed from PyTorch's output: ValueError: no weights"),
        ({"loss": (torch.mean, failing)}, r"loss cannot be computed from Flax's output: ValueError: no weights"),
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
    with pytest.raises(ArgumentError, match=r"returns output in float32, .*; if the model intends this, give keep_float64"):
        run(case, keep_float64=False)
    report = run(case, memory=False)
    said = {check.name: check.found for check in report.checks}["Flax stays in float64"]
    assert said.startswith("its float64 step casts to float32: ") and "keep_float64=True is on" in said
    assert report.passed, str(report)
    assert max(row.error or 0 for row in report.rows) < 1e-13
    wrong = run({**case, "flax_module": Scaled(1e-4)}, keep_float64=True, **FLOAT64)
    assert wrong.divergences["forward"]["flax_path"] == "norm"
    alone = run(case, dtypes="float32", memory=False)  # widening has left no trace
    assert alone.passed, str(alone)


def test_a_map_is_proposed_for_a_model_with_float32_inside() -> None:
    with pytest.raises(PortingError, match="float32"):
        porting.propose(ScaledTorch(), Scaled(), X, keep_float64=False)
    assert len(porting.propose(ScaledTorch(), Scaled(), X).rules) == 3
