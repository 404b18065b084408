"""Qwen-Image's `model_fn` in both frameworks: checkpoints around the blocks, without a change to the model's own code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import torch

import remat_jax as rj
import torch_ref

from ..models.diffusion import Grid, pack
from ..models.qwen_image import QwenImage, QwenImageBlock, QwenImageConfig, check_shapes
from ..models.rules.qwen_image import rules
from . import data
from .training import Batch, Pair

CONFIG = QwenImageConfig(hidden_size=64, num_layers=2, num_heads=4, text_width=32)
PATCH, HEIGHT, WIDTH, BATCH = (2, 2), 12, 16, 4
GRIDS: tuple[Grid, ...] = ((1, HEIGHT // PATCH[0], WIDTH // PATCH[1]),)


def torch_model_fn(
    model: Any,
    latents: torch.Tensor,
    text: torch.Tensor,
    time: torch.Tensor,
    grids: Sequence[Grid],
    mask: torch.Tensor,
    *,
    checkpoint_forward: Callable[..., Any] = torch_ref.gradient_checkpoint_forward,
    use_gradient_checkpointing: bool = False,
    use_gradient_checkpointing_offload: bool = False,
) -> torch.Tensor:
    """Run `QwenImageTransformer2DModel` block by block, with all arguments by keyword, as DiffSynth-Studio does.

    Raises:
        ValueError: when a shape does not fit the model, the other arguments or the grids.
    """
    check_shapes(model.config.in_channels, model.config.joint_attention_dim, latents, text, time, grids, mask)
    image = model.img_in(latents)
    text = model.txt_in(model.txt_norm(text))
    conditioning = model.time_text_embed(time.to(image.dtype), image)
    rotation = model.pos_embed([list(grids)] * len(image), max_txt_seq_len=text.shape[1], device=image.device)
    for block in model.transformer_blocks:
        text, image = checkpoint_forward(
            block,
            use_gradient_checkpointing=use_gradient_checkpointing,
            use_gradient_checkpointing_offload=use_gradient_checkpointing_offload,
            hidden_states=image,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            temb=conditioning,
            image_rotary_emb=rotation,
        )
    return model.proj_out(model.norm_out(image, conditioning))


def flax_model_fn(
    model: QwenImage,
    latents: jax.Array,
    text: jax.Array,
    time: jax.Array,
    grids: Sequence[Grid],
    mask: jax.Array,
    *,
    use_gradient_checkpointing: bool = False,
    use_gradient_checkpointing_offload: bool = False,
) -> jax.Array:
    """`torch_model_fn` for the bound Flax port, line by line: `nn.apply(flax_model_fn, model)(variables, …)`."""
    image, text, conditioning, (rotation, bias) = model.embed(latents, text, time, tuple(grids), mask)
    for block in model.layers:
        image, text = rj.gradient_checkpoint_forward(
            block,
            use_gradient_checkpointing=use_gradient_checkpointing,
            use_gradient_checkpointing_offload=use_gradient_checkpointing_offload,
            image=image,
            text=text,
            time=conditioning,
            rotation=rotation,
            bias=bias,
        )
    return model.velocity(image, conditioning)


def batches(steps: int) -> list[Batch]:
    """Noisy parts of the photographs as tokens, their captions and masks, times, and the target velocities."""
    random, images, words = np.random.default_rng(0), data.photographs(), data.captions(CONFIG.text_width)
    found = []
    for _ in range(steps):
        which = random.integers(0, len(images), BATCH)
        noisy, time, velocity = data.noised(random, data.crops(random, images, which, HEIGHT, WIDTH))
        found.append((pack(noisy, PATCH), words.embeddings[which], words.mask[which], time, pack(velocity, PATCH)))
    return found


def make_torch(config: QwenImageConfig = CONFIG) -> torch.nn.Module:
    """Return a new model of `diffusers`, always with the same weights."""
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
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


def pair() -> Pair:
    """Return the small model of both frameworks with its losses, the mean squared error of the velocity."""
    model = QwenImage(CONFIG)

    def torch_loss(original: Any, checkpoint_forward: Callable[..., Any], flags: Mapping[str, bool]) -> Any:
        def loss(latents: Any, text: Any, mask: Any, time: Any, velocity: Any) -> torch.Tensor:
            run = functools.partial(torch_model_fn, checkpoint_forward=checkpoint_forward, **flags)
            return ((run(original, latents, text, time, GRIDS, mask) - velocity) ** 2).mean()

        return loss

    def flax_loss(flags: Mapping[str, bool]) -> Any:
        def loss(variables: Any, latents: Any, text: Any, mask: Any, time: Any, velocity: Any) -> jax.Array:
            run = nn.apply(functools.partial(flax_model_fn, **flags), model)
            return ((run(variables, latents, text, time, GRIDS, mask) - velocity) ** 2).mean()

        return loss

    latents, text, mask, time, _ = batches(1)[0]
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), latents, text, time, GRIDS, mask))
    return Pair("Qwen-Image", make_torch, torch_loss, flax_loss, shapes, rules(CONFIG), QwenImageBlock)
