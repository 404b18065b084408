"""Faults that a comparison once found but did not name: each is named by its module, or at the root by its tensor."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.compare.cases import QUICK, run
from parity_tests.small_pairs import DENSE, Flax, Torch, linears, named
from parity_tests.small_pairs import SERIES as X

NORM = "norm.weight -> params/norm/scale\nnorm.bias -> params/norm/bias\n"

# A mask of the least number.


def biased_torch() -> Torch:
    """Terms added to scores: a learnt bias, and the least number where a key follows its query."""
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    bias = Torch(
        lambda m, x: m.bias + torch.zeros_like(m.bias).masked_fill(later, torch.finfo(x.dtype).min),
        bias=torch.nn.Parameter(torch.randn(5, 5)),
    )

    def run(module: Torch, x: torch.Tensor) -> torch.Tensor:
        x = module.norm(x)
        return module.linear((x @ x.mT + module.bias(x)).softmax(-1) @ x)

    return Torch(run, bias=bias, norm=torch.nn.LayerNorm(4), **linears(4, "linear"))


class Bias(nn.Module):
    scale: float

    @nn.compact
    def __call__(self, x: Any) -> Any:
        bias = self.param("bias", nn.initializers.normal(), (5, 5))
        return jnp.where(~jnp.tri(5, dtype=bool), jnp.finfo(x.dtype).min, self.scale * bias)


@pytest.mark.parametrize(("epsilon", "scale", "wrong"), [(1e-5, 1.0, None), (1e-3, 1.0, ("norm",)), (1e-5, 0.999, ("bias",))])
def test_a_mask_of_the_least_number_hides_no_fault(epsilon: float, scale: float, wrong: Any) -> None:
    """Errors are not measured relative to the size of the mask or of another tensor."""

    def biased(module: nn.Module, x: Any) -> Any:
        x = nn.LayerNorm(epsilon=epsilon, name="norm")(x)
        weights = nn.softmax(x @ x.mT + Bias(scale, name="bias")(x))
        return nn.Dense(4, name="linear")(weights @ x)

    rules = f"bias.bias -> params/bias/bias\n{NORM}{DENSE.replace('{name}', 'linear')}"
    report = run({"torch_module": biased_torch(), "flax_module": Flax(biased), "inputs": X, "rules": rules}, **QUICK)
    assert report.passed == (wrong is None), str(report)
    assert named(report, "forward", "flax_path") == wrong


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


EMBED = "{n}.weight -> params/{n}/embedding\n"
ROOT = EMBED.format(n="tokens") + EMBED.format(n="positions") + NORM + DENSE.replace("{name}", "head")
TOKENS = np.random.default_rng(2).integers(0, 9, (2, 5))
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])


def rooted(flax: Root) -> dict[str, Any]:
    inputs = {"tokens": TOKENS, "mask": MASK}
    return {"torch_module": RootTorch(), "flax_module": flax, "inputs": inputs, "rules": ROOT, **QUICK}


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
    report = run(rooted(Root(**wrong)))
    assert report.passed == (not wrong), str(report)
    assert named(report, "forward", "flax_path", "what", "note") == (what and ("", what, ""))


def test_other_inputs_are_named_by_their_keyword() -> None:
    report = run(rooted(Root()), flax_call=lambda model, tokens, mask: model(tokens=tokens, mask=jnp.ones_like(mask)))
    expected = ("", "input mask", "the two models get different inputs")
    assert named(report, "forward", "flax_path", "what", "note") == expected
