"""Settings of both models, read before either runs and listed in every report; and the direction of masks."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.compare.cases import QUICK
from parity_tests.small_pairs import Flax, finding, named
from parity_tests.third_party import ports as p
from parity_tests.third_party.of_transformers import PORTS
from parity_tests.third_party.ports import Port
from remat_jax.parity import compare
from remat_jax.parity.capture_flax import trace_step
from remat_jax.parity.comparison import failures
from remat_jax.parity.masks import flax_masks, torch_masks

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


def test_settings_and_the_module_are_named_where_no_map_makes_the_models_agree() -> None:
    messages: list[str] = []
    report = compare(norms(), norms_flax(1e-6), X, **QUICK, progress=lambda message, done, total: messages.append(message))
    assert report.weight_map == "not proven" and "no map makes the models agree" in report.checks[0].found
    assert re.match("NOT PASSED: the weight map is not proven; under the map that names suggest: .* tensors", report.verdict())
    assert [(difference["path"], difference["what"]) for difference in report.differences] == [("norm", "epsilon")]
    assert named(report, "forward", "flax_path") == ("norm",)
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
    assert (
        finding(compare(norms(), norms_flax(1e-5), X, rules=rules, **QUICK), "settings")
        == "no setting that modules state differs"
    )


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


def ways_in_flax(call: Any, mask: np.ndarray, added: bool = False) -> list[int | None]:
    """How a mask enters the softmaxes of a function."""
    step = trace_step(Flax(lambda m, mask: call(mask).astype("float32")), {}, (mask,), backward=False)
    signs = flax_masks(step.jaxpr, {0: "mask"}, step.recorder.paths, {"mask"} if added else set())
    return list(signs.get("mask", {}))


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


@pytest.mark.parametrize("name", IN_FLAX)
def test_the_way_of_a_mask_in_flax(name: str) -> None:
    call, sign = IN_FLAX[name]
    signs = ways_in_flax(call, HIDDEN)
    assert signs == [sign] if sign else len(signs) != 1


def torch_bias(m: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.zeros(2, 5, 5) + (1.0 - m[:, None].float()) * torch.finfo(torch.float32).min, -1)


def torch_filled(m: torch.Tensor) -> torch.Tensor:
    scores = torch.zeros(2, 5, 5)
    return scores.masked_fill_(m[:, None], float("-inf")).softmax(-1)


def torch_sdpa(m: torch.Tensor) -> torch.Tensor:
    x = torch.tensor(X)[:, None]
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=m[:, None, None])


def torch_layer(m: torch.Tensor) -> torch.Tensor:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    return layer(torch.tensor(X), src_key_padding_mask=m)


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


@pytest.mark.parametrize("name", ADDED_IN_FLAX)
def test_the_way_of_a_mask_to_be_added_in_flax(name: str) -> None:
    call, sign = ADDED_IN_FLAX[name]
    assert ways_in_flax(call, ADDED, added=True) == [sign]


ADDED_IN_TORCH: dict[str, tuple[Any, int]] = {
    "added": (lambda m: (torch.zeros(2, 5, 5) + m[:, None].expand(2, 5, 5)).softmax(-1), 1),
    "filled where it is not 0": (lambda m: torch.zeros(2, 5, 5).masked_fill(m.bool()[:, None], -torch.inf).softmax(-1), 1),
    "filled where it is 0": (lambda m: torch.zeros(2, 5, 5).masked_fill(~m.bool()[:, None], -torch.inf).softmax(-1), -1),
    "filled, logical_not": (lambda m: torch.zeros(2, 5, 5).masked_fill(m.logical_not()[:, None], -torch.inf).softmax(-1), -1),
    "the module": (
        lambda m: torch.nn.MultiheadAttention(8, 2, batch_first=True)(*[torch.tensor(X)] * 3, key_padding_mask=m)[0],
        1,
    ),
}


@pytest.mark.parametrize("name", ADDED_IN_TORCH)
def test_the_way_of_a_mask_to_be_added_in_pytorch(name: str) -> None:
    (call, sign), mask = ADDED_IN_TORCH[name], torch.tensor(ADDED)
    assert list(torch_masks(lambda: call(mask), {"mask": mask}, {"mask"})["mask"]) == [sign]


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_a_mask_to_be_added_that_is_read_the_other_way_is_told(dtype: str) -> None:
    """Flax reads a mask as true and false: the true entries of PyTorch's additive mask are hidden."""
    mask = ADDED if dtype == "float32" else HIDDEN
    report = compare(TorchAttends(), Attends(False), {"x": X, "hidden": mask}, rules=ATTENTION, **QUICK)
    which = 0 if dtype == "float32" else 1
    [difference] = report.differences
    assert difference["what"] == f"a position where hidden is {which}" and not report.passed
    assert (difference["torch"], difference["flax"]) == (("shown", "hidden") if which == 0 else ("hidden", "shown"))


IN_TORCH = {torch_bias: 1, torch_filled: -1, torch_sdpa: 1, torch_layer: -1}


@pytest.mark.parametrize("call", IN_TORCH, ids=lambda call: call.__name__)
def test_the_way_of_a_mask_in_pytorch(call: Any) -> None:
    mask = torch.tensor(HIDDEN)
    fast = torch.backends.mha.get_fastpath_enabled()
    assert list(torch_masks(lambda: call(mask), {"mask": mask})["mask"]) == [IN_TORCH[call]]
    assert torch.backends.mha.get_fastpath_enabled() == fast


@pytest.mark.parametrize("port", [PORTS[name] for name in ("gpt2", "bert", "llama")], ids=["gpt2", "bert", "llama"])
def test_ports_read_their_masks_as_transformers_does(port: Port) -> None:
    inputs = p.tensors(port.inputs, "float32")
    model = p.make_torch(port, "float32")
    masks = {"attention_mask": inputs["attention_mask"]}
    assert list(torch_masks(lambda: p.torch_outputs(port, model, inputs), masks)["attention_mask"]) == [1]
    ours, (arrays, _) = port.make_flax(port.config, scan=True), p.batch(port, "float32")
    step = trace_step(ours, p.shapes(port, ours, arrays), port.arguments(arrays), backward=False)
    place = len(step.jaxpr.jaxpr.invars) - len(port.arguments(arrays)) + 1
    [(sign, module)] = flax_masks(step.jaxpr, {place: "mask"}, step.recorder.paths)["mask"].items()
    assert sign == 1 and "att" in module


@pytest.mark.parametrize("true_hides", [True, False])
def test_a_mask_read_the_other_way_is_told_with_its_module(true_hides: bool) -> None:
    report = compare(TorchAttends(), Attends(true_hides), {"x": X, "hidden": HIDDEN}, rules=ATTENTION, **QUICK)
    assert report.passed == true_hides and report.proves
    expected = {"path": "attention", "what": "a position where hidden is 1", "torch": "hidden", "flax": "shown"}
    assert report.differences == (() if true_hides else (expected,))
