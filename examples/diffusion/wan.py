"""Wan's `model_fn` in both frameworks: checkpoints around the blocks, without a change to the model's own code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import torch

import remat_jax as rj
import torch_ref

from ..models.diffusion import check_conditions, check_patches
from ..models.rules.wan import rules
from ..models.wan import Wan, WanBlock, WanConfig
from . import data
from .training import Batch, Pair

CONFIG = WanConfig(hidden_size=64, intermediate_size=128, num_heads=4, text_width=32)
FRAMES, HEIGHT, WIDTH, BATCH = 3, 8, 12, 4


def torch_model_fn(
    model: Any,
    latents: torch.Tensor,
    text: torch.Tensor,
    time: torch.Tensor,
    *,
    checkpoint_forward: Callable[..., Any] = torch_ref.gradient_checkpoint_forward,
    use_gradient_checkpointing: bool = False,
    use_gradient_checkpointing_offload: bool = False,
) -> torch.Tensor:
    """Run `WanTransformer3DModel` on videos (B, C, F, H, W), with blocks called by position, as in DiffSynth-Studio.

    Raises:
        ValueError: when a shape does not fit the model or the other arguments, or patches do not fill a video.
    """
    channels, patch = model.config.in_channels, tuple(model.config.patch_size)
    if latents.ndim != 5 or latents.shape[1] != channels:
        expected = f"(batch, {channels}, frames, height, width)"
        raise ValueError(f"latents have shape {tuple(latents.shape)}, expected {expected}: the channels come first here")
    # The convolution would drop pixels that fill no patch.
    check_patches(tuple(latents.shape[2:]), patch)
    check_conditions(len(latents), model.config.text_dim, text, time)
    rotation = model.rope(latents)
    cut = model.patch_embedding(latents)
    x = cut.flatten(2).transpose(1, 2).contiguous()
    conditioning, modulation, text, _ = model.condition_embedder(time, text)
    modulation = modulation.unflatten(1, (6, -1))
    for block in model.blocks:
        x = checkpoint_forward(
            block,
            use_gradient_checkpointing,
            use_gradient_checkpointing_offload,
            x,
            text,
            modulation,
            rotation,
        )
    shift, scale = (model.scale_shift_table + conditioning[:, None]).chunk(2, dim=1)
    tokens = model.proj_out(model.norm_out(x) * (1 + scale) + shift)
    made = tokens.reshape(len(x), *cut.shape[2:], *model.config.patch_size, -1)
    return made.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(latents.shape)


def flax_model_fn(
    model: Wan,
    latents: jax.Array,
    text: jax.Array,
    time: jax.Array,
    *,
    use_gradient_checkpointing: bool = False,
    use_gradient_checkpointing_offload: bool = False,
) -> jax.Array:
    """`torch_model_fn` for the bound Flax port, on videos (B, F, H, W, C): `nn.apply(flax_model_fn, model)(variables, …)`."""
    x, text, conditioning, modulation, rotation = model.embed(latents, text, time)
    for block in model.layers:
        x = rj.gradient_checkpoint_forward(
            block,
            use_gradient_checkpointing=use_gradient_checkpointing,
            use_gradient_checkpointing_offload=use_gradient_checkpointing_offload,
            x=x,
            text=text,
            time=modulation,
            rotation=rotation,
        )
    return model.velocity(x, conditioning, latents.shape)


def batches(steps: int) -> list[Batch]:
    """Noisy videos that pan to the right over parts of the photographs, their captions, times, and the target velocities."""
    random, images, words = np.random.default_rng(0), data.photographs(), data.captions(CONFIG.text_width)
    found = []
    for _ in range(steps):
        which = random.integers(0, len(images), BATCH)
        wide = data.crops(random, images, which, HEIGHT, WIDTH + FRAMES - 1)
        videos = np.stack([wide[:, :, frame : frame + WIDTH] for frame in range(FRAMES)], axis=1)
        noisy, time, velocity = data.noised(random, videos)
        found.append((noisy, words.embeddings[which], 1000 * time, velocity))
    return found


def make_torch(config: WanConfig = CONFIG) -> torch.nn.Module:
    """Return a new model of `diffusers`, always with the same weights."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
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


def pair() -> Pair:
    """Return the small model of both frameworks with its losses, the mean squared error of the velocity."""
    model = Wan(CONFIG)

    def torch_loss(original: Any, checkpoint_forward: Callable[..., Any], flags: Mapping[str, bool]) -> Any:
        def loss(latents: Any, text: Any, time: Any, velocity: Any) -> torch.Tensor:
            found = torch_model_fn(
                original, latents.permute(0, 4, 1, 2, 3), text, time, checkpoint_forward=checkpoint_forward, **flags
            )
            return ((found - velocity.permute(0, 4, 1, 2, 3)) ** 2).mean()

        return loss

    def flax_loss(flags: Mapping[str, bool]) -> Any:
        def loss(variables: Any, latents: Any, text: Any, time: Any, velocity: Any) -> jax.Array:
            run = nn.apply(functools.partial(flax_model_fn, **flags), model)
            return ((run(variables, latents, text, time) - velocity) ** 2).mean()

        return loss

    arrays = batches(1)[0][:3]
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *arrays))
    return Pair("Wan", make_torch, torch_loss, flax_loss, shapes, rules(CONFIG), WanBlock)
