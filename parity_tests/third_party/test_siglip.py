"""SigLIP's vision tower against `transformers`."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from examples.models import siglip
from examples.models.rules.siglip import rules
from parity_tests.third_party import checks
from parity_tests.third_party.ports import Port

# A size that the patches do not fill: the last two rows and columns of pixels are left out.
SMALL = siglip.SiglipConfig(image_size=22)
RANDOM = np.random.default_rng(0)


def make_torch(config: siglip.SiglipConfig) -> SiglipVisionModel:
    return SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            image_size=config.image_size,
            patch_size=config.patch_size,
            num_channels=config.num_channels,
            layer_norm_eps=config.layer_norm_eps,
            attn_implementation="eager",
        )
    )


PORT = Port(
    config=SMALL,
    make_torch=make_torch,
    make_flax=siglip.SiglipVision,
    torch_block=SiglipEncoderLayer,
    block=siglip.SiglipBlock,
    rules=rules,
    inputs={"pixel_values": RANDOM.normal(size=(2, 3, 22, 22))},
    targets={"last_hidden_state": RANDOM.normal(size=(2, 16, 32)), "pooler_output": RANDOM.normal(size=(2, 32))},
    arguments=lambda x: (jnp.moveaxis(x["pixel_values"], 1, -1),),
    published={siglip.SiglipConfig.base_patch16_224(): 92_884_224, siglip.SiglipConfig.so400m_patch14_384(): 428_225_600},
)


@checks.each_check
def test_it_agrees(check: Callable[[Port], list[str]]) -> None:
    assert check(PORT) == []
