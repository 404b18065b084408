"""DiffSynth-Studio's Qwen-Image and Wan, through the functions of its pipelines and their own switch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

import torch_ref
from examples.models import qwen_image, wan
from examples.models.diffusion import pack
from examples.models.rules import qwen_image as qwen_image_rules
from examples.models.rules import wan as wan_rules
from parity_tests.small_pairs import gradients_of
from parity_tests.upstream import checkouts
from parity_tests.upstream.comparing import MODES, Pair, Step
from remat_jax.parity import keep_float64

NEEDS = ("einops", "transformers")
# Readers of pictures, videos and sound, clouds, parts of other models: imported, but not run.
SPARED = ("accelerate", "av", "controlnet_aux", "cv2", "ftfy", "imageio", "librosa", "modelscope", "pandas", "peft")
SPARED += ("sentencepiece", "soundfile", "torchaudio", "torchvision")

QWEN_IMAGE = qwen_image.QwenImageConfig(activation="quick_gelu")
# Heads of 20: the original takes a third of a head, which must be even.
WAN = wan.WanConfig(hidden_size=40, channels=4)
WORDS, GRID, VIDEO = 7, (3, 5), (2, 4, 6)
# In thousandths. PyTorch rounds the last bit of two of Qwen-Image's 128 frequencies differently, which changes features at a
# time of 500 by 1e-5; the port's features are as near to float64 as the original's.
EARLY, LATE, WAN_TIMES = 62.5, 500.0, (900.0, 312.0)
LATE_NAME = f"Qwen-Image of DiffSynth-Studio, time {LATE:.0f}"
Forward = Callable[[torch.nn.Module, Mapping[str, Any]], torch.Tensor]


def use(path: str) -> Path:
    """Make the checkout at `path` importable."""
    return checkouts.use(path, "diffsynth", NEEDS, SPARED)


def pairs() -> list[Pair]:
    """Qwen-Image, also at a late time, and Wan."""
    late = qwen_image_pair(LATE, LATE_NAME, everywhere=False)
    return [qwen_image_pair(EARLY, "Qwen-Image of DiffSynth-Studio"), late, wan_pair()]


class OneImage(qwen_image.QwenImage):
    """The port with its grid."""

    def __call__(self, *arguments: Any) -> Any:
        return super().__call__(*arguments, ((1, *GRID),))


def qwen_image_pair(at: float, name: str, **options: Any) -> Pair:
    """Qwen-Image at a time: `model_fn_qwen_image` around a small model, assembled from the modules of `QwenImageDiT`."""
    dit = importlib.import_module("diffsynth.models.qwen_image_dit")
    model_fn = importlib.import_module("diffsynth.pipelines.qwen_image").model_fn_qwen_image
    random, (rows, columns) = np.random.default_rng(0), GRID
    latents = _normal(random, 1, QWEN_IMAGE.in_channels // 4, 2 * rows, 2 * columns)
    text, time = _normal(random, 1, WORDS, QWEN_IMAGE.text_width), np.array([at], np.float32)
    given = {"latents": latents, "timestep": time, "prompt_emb": text}
    sizes = {"height": 16 * rows, "width": 16 * columns, "prompt_emb_mask": torch.ones(1, WORDS, dtype=torch.int64)}

    def forward(model: torch.nn.Module, given: Mapping[str, Any]) -> torch.Tensor:
        return pack(model_fn(dit=model, **given, **sizes).movedim(1, -1), (2, 2))

    return _pair(
        name,
        lambda: small_qwen_image(dit, QWEN_IMAGE),
        forward,
        given,
        make_flax=lambda **options: OneImage(QWEN_IMAGE, **options),
        blocks=(qwen_image.QwenImageBlock,),
        rules=lambda scan: qwen_image_rules.rules(QWEN_IMAGE, scan, "diffsynth"),
        arguments=(pack(np.moveaxis(latents, 1, -1), (2, 2)), text, time / 1000),
        loss=lambda output: (output, jnp.mean(jnp.square(output))),
        **options,
    )


def small_qwen_image(dit: Any, config: qwen_image.QwenImageConfig) -> torch.nn.Module:
    """`QwenImageDiT` of a configuration: its own constructor supports only the published widths."""
    width, model = config.hidden_size, dit.QwenImageDiT.__new__(dit.QwenImageDiT)
    torch.nn.Module.__init__(model)
    blocks = [dit.QwenImageTransformerBlock(width, config.num_heads, config.head_dim) for _ in range(config.num_layers)]
    parts = {
        "pos_embed": dit.QwenEmbedRope(theta=10000, axes_dim=list(config.rope_axes), scale_rope=True),
        "time_text_embed": dit.TimestepEmbeddings(256, width, diffusers_compatible_format=True, scale=1000),
        "txt_norm": dit.RMSNorm(config.text_width, eps=1e-6),
        "img_in": torch.nn.Linear(config.in_channels, width),
        "txt_in": torch.nn.Linear(config.text_width, width),
        "transformer_blocks": torch.nn.ModuleList(blocks),
        "norm_out": dit.AdaLayerNorm(width, single=True),
        "proj_out": torch.nn.Linear(width, config.out_channels),
    }
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def wan_pair() -> Pair:
    """Wan: `model_fn_wan_video` around a small `WanModel`."""
    dit = importlib.import_module("diffsynth.models.wan_video_dit")
    model_fn = importlib.import_module("diffsynth.pipelines.wan_video").model_fn_wan_video
    random = np.random.default_rng(0)
    latents, text = _normal(random, 2, WAN.channels, *VIDEO), _normal(random, 2, WORDS, WAN.text_width)
    time = np.array(WAN_TIMES, np.float32)

    def loss(output: Any) -> tuple[Any, Any]:
        return jnp.moveaxis(output, -1, 1), jnp.mean(jnp.square(output))

    return _pair(
        "Wan of DiffSynth-Studio",
        lambda: small_wan(dit, WAN),
        lambda model, given: model_fn(dit=model, **given),
        {"latents": latents, "timestep": time, "context": text},
        make_flax=lambda **options: wan.Wan(WAN, **options),
        blocks=(wan.WanBlock,),
        rules=lambda scan: wan_rules.rules(WAN, scan, "diffsynth"),
        arguments=(np.moveaxis(latents, 1, -1), text, time),
        loss=loss,
    )


def small_wan(dit: Any, config: wan.WanConfig) -> torch.nn.Module:
    """`WanModel` of a configuration."""
    return dit.WanModel(
        dim=config.hidden_size,
        in_dim=config.channels,
        ffn_dim=config.intermediate_size,
        out_dim=config.channels,
        text_dim=config.text_width,
        freq_dim=config.time_features,
        eps=config.norm_eps,
        patch_size=config.patch,
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        has_image_input=False,
    )


def _pair(name: str, make: Callable[[], torch.nn.Module], forward: Forward, given: Mapping[str, Any], **port: Any) -> Pair:
    """A pair whose original is a PyTorch model with DiffSynth-Studio's two flags."""
    tensors = randomised(make()).state_dict()

    def original(mode: str, dtype: str) -> Step:
        kind = getattr(torch, dtype)
        with keep_float64() if dtype == "float64" else nullcontext():
            model = make().to(kind)
            model.load_state_dict(tensors)
            inputs = {key: torch.tensor(array).to(kind) for key, array in given.items()}
            return torch_step(model, lambda: forward(model, inputs | torch_ref.modes.mode_flags(mode)))

    return Pair(name, original, tuple(MODES), ("float64", "float32"), tensors, **port)


def torch_step(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> Step:
    """The output of a model in training mode, and the gradients of its mean square; 0 for missing gradients."""
    model.train()
    output = forward()
    output.square().mean().backward()
    return Step(output.detach().numpy(), gradients_of(model))


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """`model` with every parameter perturbed: at their initial 0 and 1, gates and scales would hide a wrong map."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random) * spread(parameter.ndim))
    return model


def spread(rank: int) -> float:
    """The size of the perturbation: for matrices so small that they do not amplify the rounding of every layer."""
    return 0.1 if rank < 2 else 0.03


def _normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.normal(size=shape).astype(np.float32)
