"""SigLIP's vision tower against `transformers`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from examples.models import siglip
from examples.models.rules.siglip import rules
from parity_tests.third_party import checks
from parity_tests.third_party.ports import Case, Port

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


@checks.cases
def test_a_step_agrees(case: Case) -> None:
    assert checks.step_differs(PORT, case) == []


def test_weights_come_back_bit_equal() -> None:
    assert checks.round_trip_differs(PORT) == []


def test_published_sizes() -> None:
    assert checks.published_differs(PORT) == []


def test_layers_keep_the_same_bytes() -> None:
    assert checks.layers_keep_differently(PORT) == []
