"""Faults that a comparison once found but did not name: each is named by its module, or at the root by its tensor."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.compare.cases import run

FLOAT64: dict[str, Any] = {"modes": "off", "dtypes": "float64", "memory": False}
X = np.random.default_rng(0).normal(size=(6, 5, 4)).astype(np.float32)


# A mask of the least number.


class BiasTorch(torch.nn.Module):
    """Terms added to scores: a learnt bias, and the least number where a key follows its query."""

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
    """`BiasedTorch` in Flax; another `epsilon` makes the norm wrong, another `scale` the bias."""

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
    """Errors are not measured relative to the size of the mask or of another tensor."""
    report = run({"torch_module": BiasedTorch(), "flax_module": Biased(**wrong), "inputs": X, "rules": BIAS, **FLOAT64})
    assert report.passed == (not wrong), str(report)
    divergence = report.divergences.get("forward")
    assert (divergence and divergence["flax_path"]) == named


# Keywords, and faults at the root.


class RootTorch(torch.nn.Module):
    """Tokens with positions, the first of which is pooled; tokens and mask have one shape and type."""

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
    """The report does not blame the inputs: keywords are paired by their names."""
    case = {"torch_module": RootTorch(), "flax_module": Root(**wrong), "inputs": {"tokens": TOKENS, "mask": MASK}}
    report = run(case, rules=ROOT, **FLOAT64)
    assert report.passed == (not wrong), str(report)
    divergence = report.divergences.get("forward")
    assert (divergence and (divergence["flax_path"], divergence["what"], divergence["note"])) == (what and ("", what, ""))


def test_other_inputs_are_named_by_their_keyword() -> None:
    def call(model: Any, tokens: Any, mask: Any) -> Any:
        return model(tokens=tokens, mask=jnp.ones_like(mask))

    case = {"torch_module": RootTorch(), "flax_module": Root(), "inputs": {"tokens": TOKENS, "mask": MASK}}
    report = run(case, rules=ROOT, flax_call=call, **FLOAT64)
    divergence = report.divergences["forward"]
    assert (divergence["flax_path"], divergence["what"]) == ("", "input mask")
    assert divergence["note"] == "the two models get different inputs"
