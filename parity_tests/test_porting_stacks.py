"""`propose` on stacked arrays: experts in scanned layers, two scanned stacks in one model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import torch

from parity_tests.pairs import own
from remat_jax import porting

EXPERTS, WIDTH, HIDDEN = own.EXPERTS, own.WIDTH, own.HIDDEN


class Mixture(nn.Module):
    """The experts' weights are three arrays beside the router."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        weights, chosen = jax.lax.top_k(nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="gate")(x)), 2)
        weights = weights / weights.sum(-1, keepdims=True)
        shares = (weights[..., None] * jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype)).sum(-2)
        array = functools.partial(self.param, init_fn=nn.initializers.lecun_normal())
        first, gated = (array(name, shape=(EXPERTS, WIDTH, HIDDEN)) for name in ("wi_0", "wi_1"))
        hidden = nn.silu(jnp.einsum("btd,edf->btef", x, first)) * jnp.einsum("btd,edf->btef", x, gated)
        return jnp.einsum("bte,btef,efd->btd", shares, hidden, array("wo", shape=(EXPERTS, HIDDEN, WIDTH)))


class Scanned(nn.Module):
    mixer: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        scan = nn.scan(lambda layer, x, _: (layer(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.LayerNorm(epsilon=1e-5, name="norm")(scan(own.ResidualFlax(self.mixer, name="layers"), x, None)[0])


class Both(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = own.Stack(own.Mixture), own.Stack(own.Expert)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


class BothFlax(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Scanned(own.ExpertFlax, name="decoder")(Scanned(own.MixtureFlax, name="encoder")(x))


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], nn.Module, list[str]]] = {
    "arrays in scanned layers": (
        lambda: own.Stack(own.Mixture),
        Scanned(Mixture),
        [
            f"layers.{{i}}.mixer.experts.{{j}}.{expert}.weight -> params/layers/mixer/{array}[{{i}}, {{j}}] | linear"
            for expert, array in (("w1", "wi_0"), ("w3", "wi_1"), ("w2", "wo"))
        ],
    ),
    "two stacks, with modules of experts": (
        Both,
        BothFlax(),
        [
            "encoder.layers.{i}.mixer.experts.{j}.w{k}.weight "
            "-> params/encoder/layers/mixer/experts/w{k}/kernel[{i}, {j}] | linear",
            "decoder.layers.{i}.mixer.w{j}.weight -> params/decoder/layers/mixer/w{j}/kernel[{i}] | linear",
        ],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_stacked_weights_are_found(name: str) -> None:
    theirs, ours, lines = MODELS[name]
    torch.manual_seed(0)
    rules = str(porting.propose(theirs(), ours, (own.SERIES,))).splitlines()
    assert set(lines) <= set(rules) and len(rules) == len(lines) + 5, rules
