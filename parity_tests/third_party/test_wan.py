"""Wan's transformer against `diffusers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from examples.models import wan
from examples.models.rules.wan import rules
from parity_tests.third_party import checks
from parity_tests.third_party.ports import Arrays, Case, Port

VIDEO = (2, 4, 6)  # latents: frames, rows, columns; rows and columns make patches of 2 x 2
BATCH, TOKENS, WORDS = 2, 12, 5
RANDOM = np.random.default_rng(0)


def make_torch(config: wan.WanConfig) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=config.patch,
        num_attention_heads=config.num_heads,
        attention_head_dim=config.head_dim,
        in_channels=config.channels,
        out_channels=config.channels,
        text_dim=config.text_width,
        freq_dim=config.time_features,
        ffn_dim=config.intermediate_size,
        num_layers=config.num_layers,
        eps=config.norm_eps,
    )


def inputs(config: wan.WanConfig) -> Arrays:
    return {
        "hidden_states": RANDOM.normal(size=(BATCH, config.channels, *VIDEO)),
        "timestep": np.array([800.0, 312.0]),  # exact in bfloat16
        "encoder_hidden_states": RANDOM.normal(size=(BATCH, WORDS, config.text_width)),
    }


class ChannelsFirst(wan.Wan):
    """The port with its output in PyTorch's order."""

    def __call__(self, *args):
        return jnp.moveaxis(super().__call__(*args), -1, 1)


SMALL = wan.WanConfig()
PORT = Port(
    config=SMALL,
    make_torch=make_torch,
    make_flax=ChannelsFirst,
    torch_block=WanTransformerBlock,
    block=wan.WanBlock,
    rules=rules,
    inputs=inputs(SMALL),
    targets={"sample": RANDOM.normal(size=(BATCH, SMALL.channels, *VIDEO))},
    arguments=lambda x: (jnp.moveaxis(x["hidden_states"], 1, -1), x["encoder_hidden_states"], x["timestep"]),
    published={wan.WanConfig.t2v_1_3b(): 1_418_996_800, wan.WanConfig.t2v_14b(): 14_288_491_584},
    paper=inputs,
    carried=BATCH * TOKENS,
)


@checks.each_check
def test_it_agrees(check: Callable[[Port], list[str]]) -> None:
    assert check(PORT) == []


def test_attention_in_chunks_agrees() -> None:
    chunked = dataclasses.replace(PORT, config=dataclasses.replace(SMALL, query_chunk=5))
    assert checks.step_differs(chunked, Case("scan", "checkpoint", "float64")) == []
