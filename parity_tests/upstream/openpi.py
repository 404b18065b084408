"""OpenPI's π0 and π0.5: its JAX model under our switch, and its PyTorch model under its own.

OpenPI fixes the size of the images and of the vision tower; the test replaces them by small ones. Its JAX model fixes the
dtype of the rotations, and so has no float64. It rounds the angles of the time in float32, by 1e-4 late in the flow;
the comparison therefore draws early times.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

import remat_jax as rj
from examples.models import pi0
from examples.models.pi0_config import Observation, Pi0Config
from examples.models.rules import pi0 as pi0_rules
from examples.models.siglip import SiglipBlock
from parity_tests.small_pairs import gradients_of
from parity_tests.upstream import checkouts
from parity_tests.upstream.comparing import MODES, Pair, Step
from parity_tests.upstream.diffsynth import randomised, spread
from remat_jax.parity import keep_float64

NEEDS = ("augmax", "beartype", "chex", "einops", "jaxtyping", "ml_collections", "numpydantic", "safetensors", "transformers")
SPARED = ("fsspec", "gcsfs", "tqdm_loggable", "tyro")  # progress bars, command lines, cloud files
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
# The original with its small transformers, `dummy`, after the small tower of the port's configuration.
SIZES = Pi0Config()
JAX_LIMIT = 4e-6
"""In float32 the JAX model and the port both differ from the port in float64 by up to half of this; the note has the
figures.
"""
EARLY = jnp.array([0.0, 0.0005], jnp.float32)


def use(path: str) -> Path:
    """Make the checkout at `path` importable, with small images and towers."""
    root = checkouts.use(path, "src/openpi", NEEDS, SPARED)
    model, siglip, gemma = (importlib.import_module(f"openpi.models.{name}") for name in ("model", "siglip", "gemma"))
    size = (SIZES.image_size, SIZES.image_size)
    model.IMAGE_RESOLUTION = size
    model.preprocess_observation.__kwdefaults__["image_resolution"] = size
    gemma.PALIGEMMA_VOCAB_SIZE = SIZES.vocab_size
    siglip.decode_variant = lambda _: {
        "width": SIZES.vision_width,
        "depth": SIZES.vision_depth,
        "mlp_dim": SIZES.vision_mlp_dim,
        "num_heads": SIZES.vision_heads,
        "patch_size": (SIZES.patch_size, SIZES.patch_size),
    }
    return root


def pairs() -> list[Pair]:
    """π0 and π0.5, in JAX and, if OpenPI's files replace those of `transformers`, in PyTorch."""
    both = [jax_pair(adaptive) for adaptive in (False, True)]
    return both + [torch_pair(adaptive) for adaptive in (False, True)] if has_replaced_files() else both


def has_replaced_files() -> bool:
    """Whether OpenPI's files are installed in `transformers`, which has no file of this name."""
    return importlib.util.find_spec("transformers.models.siglip.check") is not None


def config_of(adaptive: bool) -> Any:
    """OpenPI's configuration."""
    return importlib.import_module("openpi.models.pi0_config").Pi0Config(
        dtype="float32",
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        action_dim=SIZES.action_dim,
        action_horizon=SIZES.horizon,
        max_token_len=SIZES.prompt_length,
        pi05=adaptive,
        pytorch_compile_mode=None,
    )


def inputs() -> tuple[Observation, np.ndarray]:
    """A batch of two observations, with a missing camera and padding, and their actions."""
    random = np.random.default_rng(0)
    images = random.uniform(-1, 1, size=(2, SIZES.num_images, SIZES.image_size, SIZES.image_size, 3)).astype(np.float32)
    prompt = random.integers(0, SIZES.vocab_size, size=(2, SIZES.prompt_length)).astype(np.int32)
    lengths = np.array([[SIZES.prompt_length - 5], [SIZES.prompt_length]])
    state = random.normal(size=(2, SIZES.action_dim)).astype(np.float32)
    mask = np.array([[True, True, False], [True, True, True]])
    actions = random.normal(size=(2, SIZES.horizon, SIZES.action_dim)).astype(np.float32)
    return Observation(images, mask, prompt, np.arange(SIZES.prompt_length) < lengths, state), actions


def _pair(name: str, adaptive: bool, names: str, noise: Any, time: Any, each: Callable[[Any], Any], **original: Any) -> Pair:
    """A pair whose port gets actions between `noise` and the actions; the output is `each` of the squared errors."""
    config = Pi0Config(adaptive=adaptive)
    observation, actions = inputs()
    # In float64, cast to the requested dtype.
    noise, actions, at = noise.astype(np.float64), actions.astype(np.float64), time.astype(np.float64)[:, None, None]

    def loss(velocity: Any) -> tuple[Any, Any]:
        squares = jnp.square(velocity - (noise - actions))
        return each(squares), jnp.mean(squares)

    return Pair(
        name=f"{'π0.5' if adaptive else 'π0'} of OpenPI, {name}",
        make_flax=lambda **options: pi0.Pi0(config, **options),
        blocks=(pi0.JointLayer, SiglipBlock),
        rules=lambda scan: pi0_rules.rules(config, scan, names),
        arguments=(observation, at * noise + (1 - at) * actions, time),
        loss=loss,
        **original,
    )


def jax_pair(adaptive: bool) -> Pair:
    """OpenPI's JAX model, whose layers are Linen modules behind `ToNNX`, under `rj.enable_gradient_checkpointing`."""
    model = config_of(adaptive).create(jax.random.key(0))
    graph, state = nnx.split(model)
    blocks = (
        importlib.import_module("openpi.models.gemma").Block,
        importlib.import_module("openpi.models.siglip").Encoder1DBlock,
    )
    tree = flatten_dict(nnx.to_pure_dict(state), sep="/")
    random = np.random.default_rng(1)
    tensors = {
        name: np.asarray(x) + spread(x.ndim) * random.normal(size=x.shape).astype(np.float32) for name, x in tree.items()
    }
    nnx.replace_by_pure_dict(state, unflatten_dict(tensors, sep="/"))
    observation, actions = jax.tree.map(jnp.asarray, inputs())
    given = as_openpi(importlib.import_module("openpi.models.model").Observation, observation)
    key = jax.random.key(2)
    # Drawn as in `compute_loss`.
    noise = np.asarray(jax.random.normal(jax.random.split(key, 3)[1], actions.shape))
    time = np.asarray(EARLY * 0.999 + 0.001)

    def original(mode: str, _: str) -> Step:
        switched = rj.enable_gradient_checkpointing(nnx.merge(graph, state), MODES[mode], blocks=blocks)
        definition, parameters = nnx.split(switched)

        def loss(parameters: Any) -> Any:
            each = nnx.merge(definition, parameters).compute_loss(key, given, actions, train=False)
            return jnp.mean(each), each

        with mock.patch.object(jax.random, "beta", lambda *_: EARLY):
            gradients, output = jax.jit(jax.grad(loss, has_aux=True))(parameters)
        named = flatten_dict(nnx.to_pure_dict(gradients), sep="/")
        return Step(np.asarray(output), {name: np.asarray(gradient) for name, gradient in named.items()})

    each = functools.partial(jnp.mean, axis=-1)
    options = {"modes": tuple(MODES), "dtypes": ("float32",), "limits": {"float32": JAX_LIMIT}, "tensors": tensors}
    return _pair("JAX", adaptive, "openpi_jax", noise, time, each, original=original, **options)


def torch_pair(adaptive: bool) -> Pair:
    """OpenPI's PyTorch model, which has a switch for checkpointing but none for offload."""
    tensors = randomised(small_torch(adaptive)).state_dict()
    observation, actions = inputs()
    random = np.random.default_rng(3)
    noise, time = random.normal(size=actions.shape).astype(np.float32), np.array([0.3, 0.8], np.float32)

    def original(mode: str, dtype: str) -> Step:
        kind = getattr(torch, dtype)
        with keep_float64() if dtype == "float64" else contextlib.nullcontext():
            model = small_torch(adaptive).to(kind)
            model.load_state_dict(tensors)
            # In training its forward pass switches the expert's checkpoints on.
            model.train(mode == "checkpoint")
            if mode == "checkpoint":
                model.gradient_checkpointing_enable()
            output = model(_given(observation, kind), *(torch.tensor(x).to(kind) for x in (actions, noise, time)))
            output.mean().backward()
        # The head computes nothing.
        gradients = {name: gradient for name, gradient in gradients_of(model).items() if "lm_head" not in name}
        return Step(output.detach().numpy(), gradients)

    switch = {"modes": ("off", "checkpoint"), "dtypes": ("float64", "float32")}
    return _pair("PyTorch", adaptive, "openpi_pytorch", noise, time, lambda x: x, original=original, tensors=tensors, **switch)


def as_openpi(kind: Callable[..., Any], observation: Observation, **more: Any) -> Any:
    """An observation as OpenPI's models take it."""
    return kind(
        images={name: observation.images[:, index] for index, name in enumerate(CAMERAS)},
        image_masks={name: observation.image_mask[:, index] for index, name in enumerate(CAMERAS)},
        state=observation.state,
        tokenized_prompt=observation.prompt,
        tokenized_prompt_mask=observation.prompt_mask,
        **more,
    )


def _given(observation: Observation, dtype: torch.dtype) -> SimpleNamespace:
    """An observation for the PyTorch model: channels first."""
    images, mask, prompt, words, state = map(torch.tensor, observation)
    given = Observation(images.permute(0, 1, 4, 2, 3).to(dtype), mask, prompt, words, state.to(dtype))
    return as_openpi(SimpleNamespace, given, token_ar_mask=None, token_loss_mask=None)


def small_torch(adaptive: bool) -> torch.nn.Module:
    """`PI0Pytorch` with the small tower, and without randomness in its image processing."""
    gemma = importlib.import_module("openpi.models_pytorch.gemma_pytorch")
    module = importlib.import_module("openpi.models_pytorch.pi0_pytorch")
    preprocess = importlib.import_module("openpi.models_pytorch.preprocessing_pytorch").preprocess_observation_pytorch
    make = importlib.import_module("transformers").PaliGemmaForConditionalGeneration

    def small(config: Any) -> Any:
        sizes = {
            "hidden_size": SIZES.vision_width,
            "intermediate_size": SIZES.vision_mlp_dim,
            "num_hidden_layers": SIZES.vision_depth,
            "num_attention_heads": SIZES.vision_heads,
            "image_size": SIZES.image_size,
            "projection_dim": SIZES.widths[0],
        }
        for name, size in sizes.items():
            setattr(config.vision_config, name, size)
        config.text_config.vocab_size = SIZES.vocab_size
        return make(config)

    def unchanged(observation: Any, *, train: bool) -> Any:
        return preprocess(observation, train=False, image_resolution=(SIZES.image_size, SIZES.image_size))

    gemma.PaliGemmaForConditionalGeneration = small
    module._preprocessing = SimpleNamespace(preprocess_observation_pytorch=unchanged)
    precision = torch.get_float32_matmul_precision()
    with contextlib.redirect_stdout(io.StringIO()):
        model = module.PI0Pytorch(config_of(adaptive))
    torch.set_float32_matmul_precision(precision)  # its constructor lowers it
    return model
