"""Right pairs that a comparison once called wrong; each beside a wrong pair of the same kind, which is named."""

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
from remat_jax.parity import ParityReport

FLOAT64: dict[str, Any] = {"modes": "off", "dtypes": "float64", "memory": False}
X = np.random.default_rng(0).normal(size=(6, 5, 4)).astype(np.float32)


def check(report: ParityReport, name: str) -> rj.parity.Check:
    return next(check for check in report.checks if check.name == name)


# Functional dropout.


class DroppingBlock(torch.nn.Module):
    """A block that drops out by a function, of which only its own mode says whether it does."""

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
    """PyTorch keeps the unbiased variance, of 7 / 6 the size; a momentum of 0.8 moves twice as far as one of 0.9."""
    report = run(norms(train=True, momentum=momentum))
    found = check(report, "batch statistics")
    assert not found.passed
    assert (
        "PyTorch keeps the unbiased variance of the batch, 7/6 of the biased one that Flax keeps: batch_stats/var"
        in found.found
    )
    moved = "Flax's statistics move 2 times as far in a step as PyTorch's (its momentum is another): batch_stats/mean"
    assert (moved in found.found) == named


def test_statistics_that_differ_otherwise_are_not_explained() -> None:
    """The statistics of other inputs fit no convention."""
    case = norms(train=True)
    report = run(case, flax_call=lambda model, x: model(x * x), dtypes="float64")
    assert not report.passed and "batch statistics" not in [check.name for check in report.checks]


# Casts.


class BucketsTorch(torch.nn.Module):
    """Distances in logarithmic buckets, each with a number that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distances = torch.arange(1, x.shape[1] + 1, dtype=torch.float64)
        return self.linear(x) + self.table(torch.log2(distances).to(torch.long))


class Buckets(nn.Module):
    """The same, the distances in float32; with `after`, what is learnt goes through it as well."""

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
    report = run(case)
    assert report.passed != after, str(report)
    casts = [check.found for check in report.checks if check.name == "Flax stays in float64"]
    told = (
        "it falls to less in its float64 step: float64 to float32 in Buckets; where the model means it, give keep_float64=True"
    )
    assert [text.split(", which")[0] for text in casts] == ([told] if after else [])


# A mask of the least number.


class BiasTorch(torch.nn.Module):
    """What is added to scores: a learnt bias, and the least number where a key comes after its query."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return self.bias + torch.zeros_like(self.bias).masked_fill(later, torch.finfo(x.dtype).min)


class BiasedTorch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.norm, self.linear = BiasTorch(), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        weights = (x @ x.transpose(1, 2) + self.bias(x)).softmax(-1)
        return self.linear(weights @ x)


class Bias(nn.Module):
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: Any) -> Any:
        later = ~jnp.tri(5, dtype=bool)
        bias = self.param("bias", nn.initializers.normal(), (5, 5))
        return jnp.where(later, jnp.finfo(x.dtype).min, self.scale * bias)


class Biased(nn.Module):
    """The same; with other numbers its norm or its bias is wrong."""

    epsilon: float = 1e-5
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.LayerNorm(epsilon=self.epsilon, name="norm")(x)
        weights = nn.softmax(x @ x.transpose(0, 2, 1) + Bias(self.scale, name="bias")(x))
        return nn.Dense(4, name="linear")(weights @ x)


BIAS = """
    bias.bias -> params/bias/bias
    norm.weight -> params/norm/scale
    norm.bias -> params/norm/bias
    linear.weight -> params/linear/kernel | linear
    linear.bias -> params/linear/bias
"""


@pytest.mark.parametrize(("wrong", "named"), [({}, None), ({"epsilon": 1e-3}, "norm"), ({"scale": 0.999}, "bias")])
def test_a_mask_of_the_least_number_hides_no_fault(wrong: dict[str, float], named: str | None) -> None:
    """Its own size is none to measure errors by, its own or others'."""
    report = run({"torch_module": BiasedTorch(), "flax_module": Biased(**wrong), "inputs": X, "rules": BIAS, **FLOAT64})
    assert report.passed == (not wrong), str(report)
    found = report.divergences.get("forward")
    assert (found and found["flax_path"]) == named


# Keywords, and faults at the root.


class RootTorch(torch.nn.Module):
    """Tokens with positions, of which the first is pooled; tokens and mask are of one shape and type."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(9, 4), torch.nn.Embedding(9, 4)
        self.norm, self.head = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))) * mask[..., None]
        return {"states": x, "first": x[:, 1] * 2, "pooled": self.head(x[:, 0])}


class Root(nn.Module):
    """The same with its arguments in another order."""

    shift: int = 0
    pooled: int = 0
    factor: float = 2.0

    @nn.compact
    def __call__(self, mask: Any, tokens: Any) -> Any:
        places = self.shift + jnp.arange(tokens.shape[1])
        x = nn.Embed(9, 4, name="tokens")(tokens) + nn.Embed(9, 4, name="positions")(places)
        x = nn.LayerNorm(epsilon=1e-5, name="norm")(x) * mask[..., None]
        return {"states": x, "first": self.factor * x[:, 1], "pooled": nn.Dense(4, name="head")(x[:, self.pooled])}


ROOT = """
    tokens.weight -> params/tokens/embedding
    positions.weight -> params/positions/embedding
    norm.weight -> params/norm/scale
    norm.bias -> params/norm/bias
    head.weight -> params/head/kernel | linear
    head.bias -> params/head/bias
"""
TOKENS = np.random.default_rng(2).integers(0, 9, (2, 5))
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({}, None),
        ({"shift": 1}, "input 0 of 'positions'"),
        ({"pooled": 1}, "input 0 of 'head'"),
        ({"factor": 2.01}, "output first"),
    ],
)
def test_a_fault_at_the_root_is_named_by_its_tensor(wrong: dict[str, Any], what: str | None) -> None:
    """Not as other inputs: keywords are paired by their names."""
    case = {"torch_module": RootTorch(), "flax_module": Root(**wrong), "inputs": {"tokens": TOKENS, "mask": MASK}}
    report = run(case, rules=ROOT, **FLOAT64)
    assert report.passed == (not wrong), str(report)
    found = report.divergences.get("forward")
    assert (found and (found["flax_path"], found["what"], found["note"])) == (what and ("", what, ""))


def test_other_inputs_are_named_by_their_keyword() -> None:
    def call(model: Any, tokens: Any, mask: Any) -> Any:
        return model(tokens=tokens, mask=jnp.ones_like(mask))

    case = {"torch_module": RootTorch(), "flax_module": Root(), "inputs": {"tokens": TOKENS, "mask": MASK}}
    report = run(case, rules=ROOT, flax_call=call, **FLOAT64)
    found = report.divergences["forward"]
    assert (found["flax_path"], found["what"]) == ("", "input mask")
    assert found["note"] == "the models are given other inputs"
