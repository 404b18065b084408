"""The ports of models of `diffusers`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from diffusers import QwenImageTransformer2DModel, WanTransformer3DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from examples.models import qwen_image, wan
from examples.models.rules.qwen_image import rules as qwen_image_rules
from examples.models.rules.wan import rules as wan_rules
from parity_tests.third_party.ports import Arrays, Port

BATCH = 2
RANDOM = np.random.default_rng(0)

# Two images of odd sizes: a generated one, and the one that it is generated from.
GRIDS = ((1, 3, 5), (1, 2, 3))
QWEN_TOKENS, QWEN_WORDS = 21, 7


def qwen_image_original(config: qwen_image.QwenImageConfig) -> QwenImageTransformer2DModel:
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


def qwen_image_inputs(config: qwen_image.QwenImageConfig) -> Arrays:
    """The second prompt has padding, at the end and inside."""
    mask = np.array([[1] * QWEN_WORDS, [1, 1, 0, 1, 1, 0, 0]])
    return {
        "hidden_states": RANDOM.normal(size=(BATCH, QWEN_TOKENS, config.in_channels)),
        "encoder_hidden_states": RANDOM.normal(size=(BATCH, QWEN_WORDS, config.text_width)),
        "encoder_hidden_states_mask": mask,
        # Exact in bfloat16: the original rounds a time before it rotates by up to 1000 radians.
        "timestep": np.array([0.875, 0.3125]),
    }


VIDEO = (2, 4, 6)  # latents: frames, rows, columns; rows and columns make patches of 2 x 2
WAN_TOKENS, WAN_WORDS = 12, 5


def wan_original(config: wan.WanConfig) -> WanTransformer3DModel:
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


def wan_inputs(config: wan.WanConfig) -> Arrays:
    return {
        "hidden_states": RANDOM.normal(size=(BATCH, config.channels, *VIDEO)),
        "timestep": np.array([800.0, 312.0]),  # exact in bfloat16
        "encoder_hidden_states": RANDOM.normal(size=(BATCH, WAN_WORDS, config.text_width)),
    }


class ChannelsFirst(wan.Wan):
    """The port with its output in PyTorch's order."""

    def __call__(self, *args):
        return jnp.moveaxis(super().__call__(*args), -1, 1)


QWEN_IMAGE, WAN = qwen_image.QwenImageConfig(out_channels=8), wan.WanConfig()
PORTS = {
    "qwen_image": Port(
        config=QWEN_IMAGE,
        make_torch=qwen_image_original,
        make_flax=qwen_image.QwenImage,
        torch_block=QwenImageTransformerBlock,
        block=qwen_image.QwenImageBlock,
        rules=qwen_image_rules,
        inputs=qwen_image_inputs(QWEN_IMAGE),
        constants={"img_shapes": [list(GRIDS)] * BATCH},
        targets={"sample": RANDOM.normal(size=(BATCH, QWEN_TOKENS, QWEN_IMAGE.out_channels))},
        arguments=lambda x: (
            *(x[name] for name in ("hidden_states", "encoder_hidden_states", "timestep")),
            *(GRIDS, x["encoder_hidden_states_mask"]),
        ),
        published={qwen_image.QwenImageConfig.published(): 20_430_401_088},
        paper=qwen_image_inputs,
        carried=BATCH * (QWEN_TOKENS + QWEN_WORDS),
    ),
    "wan": Port(
        config=WAN,
        make_torch=wan_original,
        make_flax=ChannelsFirst,
        torch_block=WanTransformerBlock,
        block=wan.WanBlock,
        rules=wan_rules,
        inputs=wan_inputs(WAN),
        targets={"sample": RANDOM.normal(size=(BATCH, WAN.channels, *VIDEO))},
        arguments=lambda x: (jnp.moveaxis(x["hidden_states"], 1, -1), x["encoder_hidden_states"], x["timestep"]),
        published={wan.WanConfig.t2v_1_3b(): 1_418_996_800, wan.WanConfig.t2v_14b(): 14_288_491_584},
        paper=wan_inputs,
        carried=BATCH * WAN_TOKENS,
    ),
}
