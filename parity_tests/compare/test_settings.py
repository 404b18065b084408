"""Settings of both models, read before either runs and listed in every report; and the direction of masks."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx

from parity_tests.mutants.models import QUICK
from parity_tests.small_pairs import Flax, finding, named
from remat_jax.errors import ArgumentError
from remat_jax.parity import compare, excite
from remat_jax.parity.capture_flax import trace_step
from remat_jax.parity.comparison import failures
from remat_jax.parity.masks import flax_masks, torch_masks
from remat_jax.parity.semantics import differences, torch_facts

X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
HIDDEN = np.array([[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]], bool)
ADDED = np.where(HIDDEN, -1e9, 0).astype(np.float32)


def test_what_does_no_harm_is_told_and_fails_nothing() -> None:
    theirs = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2), torch.nn.Dropout(0.5)).eval()
    ours = Flax(lambda m, x: nn.Dense(2)(nn.BatchNorm(True, momentum=0.99, epsilon=1e-5)(x)))
    report = compare(theirs, ours, X[0, :, :3], **QUICK)
    assert report.passed, str(report)
    expected = {"path": "BatchNorm_0", "what": "momentum", "torch": "0.9", "flax": "0.99"}  # no rate of dropout
    assert report.differences == (expected,) and report.to_dict()["differences"] == [expected]
    assert finding(report, "settings") == "BatchNorm_0: momentum is 0.9 in PyTorch and 0.99 in Flax"
    assert "Settings that differ" in str(report)


def norms() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))


def norms_flax(epsilon: float) -> Flax:
    return Flax(lambda m, x: nn.Dense(4, name="head")(nn.LayerNorm(epsilon, name="norm")(x)))


def test_progress_is_told_also_where_no_map_makes_the_models_agree() -> None:
    messages: list[str] = []
    report = compare(norms(), norms_flax(1e-6), X, **QUICK, progress=lambda message, done, total: messages.append(message))
    assert report.weight_map == "not proven" and "no map makes the models agree" in report.checks[0].found
    assert messages[:3] == ["the settings of both models", "the PyTorch model in float64", "proposing a weight map"]
    assert "proposing a weight map: trying ways to convert the weights, 1" in messages


def test_settings_that_matter_are_named_beside_the_tensors() -> None:
    rules = """
        0.weight -> params/norm/scale
        0.bias -> params/norm/bias
        1.weight -> params/head/kernel | linear
        1.bias -> params/head/bias
    """
    report = compare(norms(), norms_flax(1e-6), X, rules=rules, **QUICK)
    assert not report.passed and named(report, "forward", "flax_path") == ("norm",)
    assert "norm: epsilon is 1e-05 in PyTorch and 1e-06 in Flax" in failures(report)
    assert [(difference["path"], difference["what"]) for difference in report.differences] == [("norm", "epsilon")]
    right = compare(norms(), norms_flax(1e-5), X, rules=rules, **QUICK)
    assert finding(right, "settings") == "no setting that modules state differs"


# Each setting of each kind of module.

Setting = tuple[str, str, Any, Any]


def settings(theirs: Any, ours: Any, variables: Any, *inputs: Any) -> list[Setting]:
    """The path, the name and both values of each setting that differs."""
    return [(each.path, each.what, each.torch, each.flax) for each in differences(theirs, ours, variables, inputs)]


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


# Masks.


class Attends(nn.Module):
    """An attention with a padding mask in PyTorch's or in Flax's convention."""

    true_hides: bool = True

    @nn.compact
    def __call__(self, x: Any, hidden: Any) -> Any:
        shown = ~hidden if self.true_hides else hidden
        return nn.MultiHeadDotProductAttention(2, name="attention")(x, mask=shown[:, None, None])


class TorchAttends(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, key_padding_mask=hidden)[0]


ATTENTION = """
    attention.in_proj_weight -> params/attention/{query,key,value}/kernel | in_proj
    attention.in_proj_bias -> params/attention/{query,key,value}/bias | in_proj_bias
    attention.out_proj.weight -> params/attention/out/kernel | heads_out
    attention.out_proj.bias -> params/attention/out/bias
"""


def heads(x: Any) -> Any:
    return x.reshape(2, 5, 2, 4)


SCORES = jnp.zeros((2, 5, 5))
IN_FLAX: dict[str, tuple[Any, int | None]] = {
    "where": (lambda m: jax.nn.softmax(jnp.where(m[:, None], SCORES, -jnp.inf)), 1),
    "where, inverted": (lambda m: jax.nn.softmax(jnp.where(~m[:, None], SCORES, -jnp.inf)), -1),
    "where, the least number": (lambda m: jax.nn.softmax(jnp.where(m[:, None] == 0, jnp.finfo("float32").min, SCORES)), 1),
    "a bias": (lambda m: jax.nn.softmax(SCORES + (1.0 - m[:, None].astype("float32")) * -1e9), 1),
    "a bias, inverted": (lambda m: jax.nn.softmax(SCORES + m[:, None].astype("float32") * -1e9), -1),
    "a bias of two": (lambda m: jax.nn.softmax(SCORES + jnp.where(m > 0, 0.0, -1e9)[:, None]), 1),
    "with a causal one": (lambda m: jax.nn.softmax(jnp.where(jnp.tril(m[:, None] & jnp.ones((5, 5), bool)), SCORES, -1e9)), 1),
    "in a loop": (lambda m: jax.lax.map(lambda row: jax.nn.softmax(jnp.where(row, SCORES[0], -jnp.inf)), m), 1),
    "dot_product_attention": (lambda m: jax.nn.dot_product_attention(heads(X), heads(X), heads(X), mask=m[:, None, None]), 1),
    "in both ways": (lambda m: jax.nn.softmax(jnp.where(m, 0.0, -1e9)) + jax.nn.softmax(jnp.where(m, -1e9, 0.0)), None),
    "a weight": (lambda m: jax.nn.softmax(SCORES) * m[:, None], None),
}


CAUSAL = np.where(np.arange(5) > 3, np.float32(-1e9), 0)
ADDED_IN_FLAX: dict[str, tuple[Any, int]] = {
    "added": (lambda m: jax.nn.softmax(SCORES + m[:, None]), 1),
    "subtracted": (lambda m: jax.nn.softmax(SCORES - m[:, None]), -1),
    "scaled, then added": (lambda m: jax.nn.softmax(SCORES + 2.0 * m[:, None].astype("bfloat16")), 1),
    "shown at 0": (lambda m: jax.nn.softmax(jnp.where(m[:, None] == 0, SCORES, -jnp.inf)), 1),
    "shown at 0 of a sum": (lambda m: jax.nn.softmax(jnp.where((m + CAUSAL)[:, None] == 0, SCORES, -jnp.inf)), 1),
    "shown at 0, bounded": (lambda m: jax.nn.softmax(jnp.where(jnp.maximum(m, -1e4)[:, None] == 0, SCORES, -jnp.inf)), 1),
    "hidden at 0": (lambda m: jax.nn.softmax(jnp.where(m[:, None] != 0, SCORES, -jnp.inf)), -1),
    "taken for a boolean one": (lambda m: jax.nn.softmax(jnp.where(m[:, None].astype(bool), SCORES, -jnp.inf)), -1),
    "the same, inverted": (lambda m: jax.nn.softmax(jnp.where(~m[:, None].astype(bool), SCORES, -jnp.inf)), 1),
    "hidden far below": (lambda m: jax.nn.softmax(jnp.where(m[:, None] < 0, -jnp.inf, SCORES)), 1),
    "hidden at its own number": (lambda m: jax.nn.softmax(jnp.where(m[:, None] == -1e9, -jnp.inf, SCORES)), 1),
    "not hidden at it": (lambda m: jax.nn.softmax(jnp.where(2 * m[:, None] != -2e9, -jnp.inf, SCORES)), -1),
}


TABLES = ((IN_FLAX, HIDDEN), (ADDED_IN_FLAX, ADDED))
WAYS = {name: (call, mask, sign) for table, mask in TABLES for name, (call, sign) in table.items()}


@pytest.mark.parametrize("name", WAYS)
def test_the_way_of_a_mask_in_flax(name: str) -> None:
    """How it enters the softmaxes of a function."""
    call, mask, sign = WAYS[name]
    step = trace_step(Flax(lambda m, mask: call(mask).astype("float32")), {}, (mask,), backward=False)
    signs = list(flax_masks(step.jaxpr, {0: "mask"}, step.recorder.paths, {"mask"} if mask is ADDED else set()).get("mask", {}))
    assert signs == [sign] if sign else len(signs) != 1


ZEROS, LEAST, TENSOR = torch.zeros(2, 5, 5), torch.finfo(torch.float32).min, torch.tensor(X)
IN_TORCH: dict[str, tuple[Any, np.ndarray, int]] = {
    "a bias": (lambda m: torch.softmax(ZEROS + (1.0 - m[:, None].float()) * LEAST, -1), HIDDEN, 1),
    "filled": (lambda m: ZEROS.clone().masked_fill_(m[:, None], -torch.inf).softmax(-1), HIDDEN, -1),
    "fused": (
        lambda m: F.scaled_dot_product_attention(*[TENSOR[:, None]] * 3, attn_mask=m[:, None, None]),
        HIDDEN,
        1,
    ),
    "a layer": (
        lambda m: torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()(TENSOR, src_key_padding_mask=m),
        HIDDEN,
        -1,
    ),
    "added": (lambda m: (ZEROS + m[:, None].expand(2, 5, 5)).softmax(-1), ADDED, 1),
    "filled where it is not 0": (lambda m: ZEROS.masked_fill(m.bool()[:, None], -torch.inf).softmax(-1), ADDED, 1),
    "filled where it is 0": (lambda m: ZEROS.masked_fill(~m.bool()[:, None], -torch.inf).softmax(-1), ADDED, -1),
    "filled, logical_not": (lambda m: ZEROS.masked_fill(m.logical_not()[:, None], -torch.inf).softmax(-1), ADDED, -1),
    "the module": (lambda m: torch.nn.MultiheadAttention(8, 2, batch_first=True)(*[TENSOR] * 3, m)[0], ADDED, 1),
}


@pytest.mark.parametrize("name", IN_TORCH)
def test_the_way_of_a_mask_in_pytorch(name: str) -> None:
    call, array, sign = IN_TORCH[name]
    mask, fast = torch.tensor(array), torch.backends.mha.get_fastpath_enabled()
    signs = torch_masks(lambda: call(mask), {"mask": mask}, {"mask"} if array is ADDED else set())
    assert list(signs["mask"]) == [sign] and torch.backends.mha.get_fastpath_enabled() == fast


@pytest.mark.parametrize(("true_hides", "mask", "expected"), [(True, HIDDEN, None), (False, HIDDEN, 1), (False, ADDED, 0)])
def test_a_mask_read_the_other_way_is_told_with_its_module(true_hides: bool, mask: np.ndarray, expected: int | None) -> None:
    """Flax reads a mask as true and false: the true entries of PyTorch's additive mask are hidden."""
    report = compare(TorchAttends(), Attends(true_hides), {"x": X, "hidden": mask}, rules=ATTENTION, **QUICK)
    assert report.passed == true_hides and report.proves
    seen = ("shown", "hidden") if expected == 0 else ("hidden", "shown")
    found = [tuple(difference.values()) for difference in report.differences]
    assert found == ([] if expected is None else [("attention", f"a position where hidden is {expected}", *seen)])


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
