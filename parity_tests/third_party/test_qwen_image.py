"""Qwen-Image's transformer against `diffusers`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock

from examples.models import qwen_image
from examples.models.rules.qwen_image import rules
from parity_tests.third_party import checks
from parity_tests.third_party.ports import Arrays, Port

# Two images of odd sizes: a generated one, and the one that it is generated from.
GRIDS = ((1, 3, 5), (1, 2, 3))
BATCH, TOKENS, WORDS = 2, 21, 7
RANDOM = np.random.default_rng(0)
PUBLISHED = qwen_image.QwenImageConfig.published()


def make_torch(config: qwen_image.QwenImageConfig) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=1,
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        num_layers=config.num_layers,
        attention_head_dim=config.head_dim,
        num_attention_heads=config.num_heads,
        joint_attention_dim=config.text_width,
        axes_dims_rope=config.rope_axes,
    )


def inputs(config: qwen_image.QwenImageConfig) -> Arrays:
    """The second prompt has padding, at the end and inside."""
    mask = np.array([[1] * WORDS, [1, 1, 0, 1, 1, 0, 0]])
    return {
        "hidden_states": RANDOM.normal(size=(BATCH, TOKENS, config.in_channels)),
        "encoder_hidden_states": RANDOM.normal(size=(BATCH, WORDS, config.text_width)),
        "encoder_hidden_states_mask": mask,
        # Exact in bfloat16: the original rounds a time before it rotates by up to 1000 radians.
        "timestep": np.array([0.875, 0.3125]),
    }


SMALL = qwen_image.QwenImageConfig(out_channels=8)
PORT = Port(
    config=SMALL,
    make_torch=make_torch,
    make_flax=qwen_image.QwenImage,
    torch_block=QwenImageTransformerBlock,
    block=qwen_image.QwenImageBlock,
    rules=rules,
    inputs=inputs(SMALL),
    constants={"img_shapes": [list(GRIDS)] * BATCH},
    targets={"sample": RANDOM.normal(size=(BATCH, TOKENS, SMALL.out_channels))},
    arguments=lambda x: (x["hidden_states"], x["encoder_hidden_states"], x["timestep"], GRIDS, x["encoder_hidden_states_mask"]),
    published={PUBLISHED: 20_430_401_088},
    paper=inputs,
    carried=BATCH * (TOKENS + WORDS),
)


@checks.each_check
def test_it_agrees(check: Callable[[Port], list[str]]) -> None:
    assert check(PORT) == []
