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

from parity_tests.compare.cases import QUICK, run
from parity_tests.small_pairs import DENSE, SERIES, Flax, Torch, finding, linears, named
from remat_jax import porting
from remat_jax.errors import ArgumentError, PortingError

# Functional dropout.


def dropping_block() -> Torch:
    """A block with functional dropout, which only its own mode switches on."""
    return Torch(lambda m, x: x + F.dropout(m.linear(x).tanh(), 0.5, training=m.training), linear=torch.nn.Linear(4, 4))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + jnp.tanh(nn.Dense(4, name="linear")(x))


LAYERS = """
    {i}.linear.weight -> params/layers_{i}/linear/kernel | linear
    {i}.linear.bias -> params/layers_{i}/linear/bias
"""


def test_modes_do_not_switch_functional_dropout_on() -> None:
    theirs = torch.nn.Sequential(dropping_block(), dropping_block()).eval()
    ours = Flax(lambda m, x: Block(name="layers_1")(Block(name="layers_0")(x)))
    case = {"torch_module": theirs, "flax_module": ours, "inputs": SERIES, "rules": LAYERS}
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


def norms(*, train: bool, momentum: float = 0.9) -> dict[str, Any]:
    return {
        "torch_module": torch.nn.BatchNorm1d(5).train(train),
        "flax_module": nn.BatchNorm(not train, momentum=momentum, epsilon=1e-5, use_fast_variance=False),
        "inputs": np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32),
        "rules": NORM,
        "modes": "off",
        "memory": False,
    }


def test_running_statistics_pass_in_evaluation_in_every_dtype() -> None:
    report = run(norms(train=False))
    assert report.passed, str(report)
    ratios = {row.name: sorted(row.ratios) for row in report.rows if row.kind == "state"}
    assert ratios == {"batch_stats/mean": ["float32"], "batch_stats/var": ["float32"]}


@pytest.mark.parametrize(("momentum", "is_named"), [(0.9, False), (0.8, True)])
def test_the_convention_of_statistics_is_named(momentum: float, is_named: bool) -> None:
    """PyTorch keeps the unbiased variance, larger by 7 / 6; a momentum of 0.8 moves twice as far as one of 0.9."""
    report = run(norms(train=True, momentum=momentum))
    found = finding(report, "batch statistics")
    unbiased = "PyTorch keeps the unbiased variance of the batch, 7/6 of the biased variance that Flax keeps: batch_stats/var"
    assert unbiased in found
    moved = "Flax's statistics move 2 times as far in a step as PyTorch's (its momentum differs): batch_stats/mean"
    assert (moved in found) == is_named
    wrong = {"batch_stats/var", "batch_stats/mean"} if is_named else {"batch_stats/var"}
    assert {row.name for row in report.failed_rows} == wrong


def test_statistics_that_differ_otherwise_are_not_explained() -> None:
    """The statistics of other inputs fit no convention."""
    report = run(norms(train=True), flax_call=lambda model, x: model(x * x), dtypes="float64")
    assert not report.passed and "batch statistics" not in [check.name for check in report.checks]


# Casts.


def buckets_torch(module: Torch, x: torch.Tensor) -> torch.Tensor:
    """Distances in logarithmic buckets, each with a learnt number."""
    distances = torch.arange(1, x.shape[1] + 1, dtype=torch.float64)
    return module.linear(x) + module.table(torch.log2(distances).to(torch.long))


@pytest.mark.parametrize("after", [False, True])
def test_a_cast_counts_only_where_what_is_compared_flows_through_it(after: bool) -> None:
    """The distances are float32; with `after`, the learnt numbers are cast too."""

    def buckets(module: nn.Module, x: Any) -> Any:
        distances = jnp.arange(1, x.shape[1] + 1) + 0 * jax.lax.stop_gradient(x[0, :, 0])
        chosen = nn.Embed(4, 4, name="table")(jnp.floor(jnp.log2(distances.astype(jnp.float32))).astype(jnp.int32))
        return nn.Dense(4, name="linear")(x) + (chosen.astype(jnp.float32) if after else chosen)

    theirs = Torch(buckets_torch, table=torch.nn.Embedding(4, 4), linear=torch.nn.Linear(4, 4))
    rules = f"table.weight -> params/table/embedding\n{DENSE}"
    case = {"torch_module": theirs, "flax_module": Flax(buckets), "inputs": SERIES, "rules": rules, **QUICK}
    report = run(case, keep_float64=False)
    assert report.passed != after, str(report)
    assert run(case).passed
    casts = [check.found for check in report.checks if check.name == "Flax stays in float64"]
    text = "its float64 step casts to a smaller dtype: float64 to float32 in Flax"
    assert [cast.partition("; ")[0] for cast in casts] == [text] * after


# What settings say, and what is a table.


class QuickGELU(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.parametrize("ours", [True, False])
def test_settings_that_do_not_differ_are_not_told_and_quick_gelu_is(theirs: bool, ours: bool) -> None:
    """A convolution of one pixel with a stride, an activation, functional dropout, and a masking constant."""

    def flax(module: nn.Module, x: Any) -> Any:
        x = nn.Conv(4, (1, 1), strides=2, name="conv")(x.transpose(0, 2, 3, 1))
        x = x * nn.sigmoid(1.702 * x) if ours else nn.gelu(x, approximate=False)
        return nn.Dropout(0.1, deterministic=True)(x).transpose(0, 3, 1, 2)

    model = Torch(
        lambda m, x: F.dropout(m.act(m.conv(x)), 0.1, m.training),
        conv=torch.nn.Conv2d(3, 4, 1, stride=2),
        act=QuickGELU() if theirs else torch.nn.GELU(),
    )
    model.register_buffer("masked_bias", torch.tensor(-1e9), persistent=False)
    pixels = np.random.default_rng(0).normal(size=(2, 3, 6, 6)).astype(np.float32)
    rules = "conv.weight -> params/conv/kernel | conv2d\nconv.bias -> params/conv/bias"
    report = run({"torch_module": model.eval(), "flax_module": Flax(flax), "inputs": pixels}, rules=rules, **QUICK)
    assert report.passed == (theirs == ours), str(report)
    forms = {True: "quick", False: "exact"}
    expected = [] if theirs == ours else [("", "GELU", forms[theirs], forms[ours])]
    assert [tuple(difference.values()) for difference in report.differences] == expected
    assert "PyTorch's tables" not in [check.name for check in report.checks]


# Float32 that is written into the model.


def in_float32_torch() -> Torch:
    return Torch(
        lambda m, x: m.linear(m.norm(x.float()).softmax(-1)) * torch.sigmoid(x.float().mean()),
        norm=torch.nn.LayerNorm(4),
        **linears(4, "linear"),
    )


def in_float32(epsilon: float = 1e-5) -> Flax:
    """The same, by casts and by dtypes."""

    def run(module: nn.Module, x: Any) -> Any:
        y = nn.softmax(nn.LayerNorm(epsilon, dtype=jnp.float32, name="norm")(x.astype(jnp.float32)))
        y = nn.Dense(4, dtype=jnp.float32, name="linear")(y)
        return y * nn.sigmoid(jnp.mean(x, dtype=jnp.float32))

    return Flax(run)


def test_float32_that_is_written_into_a_model_is_widened_where_it_is_meant() -> None:
    rules = f"norm.weight -> params/norm/scale\nnorm.bias -> params/norm/bias\n{DENSE.replace('{name}', 'linear')}"
    case = {"torch_module": in_float32_torch(), "flax_module": in_float32(), "inputs": SERIES, "rules": rules, "modes": "off"}
    with pytest.raises(ArgumentError, match=r"returns output in float32, .*; if the model intends this, give keep_float64"):
        run(case, keep_float64=False)
    report = run(case, memory=False)
    said = finding(report, "Flax stays in float64")
    assert said.startswith("its float64 step casts to float32: ") and "keep_float64=True is on" in said
    assert report.passed, str(report)
    assert max(row.error or 0 for row in report.rows) < 1e-13
    wrong = run({**case, "flax_module": in_float32(1e-4)}, keep_float64=True, **QUICK)
    assert named(wrong, "forward", "flax_path") == ("norm",)
    alone = run(case, dtypes="float32", memory=False)  # widening has left no trace
    assert alone.passed, str(alone)


def test_a_map_is_proposed_for_a_model_with_float32_inside() -> None:
    with pytest.raises(PortingError, match="float32"):
        porting.propose(in_float32_torch(), in_float32(), SERIES, keep_float64=False)
    assert len(porting.propose(in_float32_torch(), in_float32(), SERIES).rules) == 3
