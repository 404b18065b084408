"""`python examples/qwen_image.py`: a small Qwen-Image transformer trained in PyTorch and in JAX in every mode.

Prints losses and kept bytes. The published model at its true size, as shapes only, is `job`:

    remat-jax measure examples/qwen_image.py:job --target h200 --policy full --policy offload_inputs

For one GPU, `lora_job` trains only adapters of the frozen model, and `edit_lora_job` those of Qwen-Image-Edit.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

NEEDED = {"torch": "remat_jax[torch]", "diffusers": "diffusers", "sklearn": "scikit-learn"}
SIDE, WORDS = 1328, 512  # pixels of a square image, tokens of the prompt
RANK = 32
ADAPTED = ("*/attention/*", "*/image_mlp/fc2", "*/text_mlp/fc2", "*/image_modulation", "*/text_modulation")


def main(arguments: list[str] | None = None) -> int:
    """Run the training; the exit status is 0, 1 if losses differ, or 2 for bad usage."""
    missing = [source for module, source in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"error: this compares with diffusers on photographs: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    if __package__:
        command = importlib.import_module(".diffusion.command", __package__)
    else:  # run as a file, which belongs to no package until the folder above is on the path
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        command = importlib.import_module("examples.diffusion.command")
    return command.main("qwen_image", arguments)


def job() -> Any:
    """Return the published model's training step as a workload: one image of 1328², 512 tokens of text, in bfloat16.

    The VAE turns 8 x 8 pixels into 16 numbers, and 2 x 2 such squares are one token: 83 x 83 tokens. The optimizer is plain
    gradient descent: Adam's state alone would be 82 GB, but beside parameters and gradients an H200 has only 68 GB left.

    >>> sum(leaf.size for leaf in __import__("jax").tree.leaves(job().params)) // 10**6
    20430
    """
    return _workload("Qwen-Image", [SIDE])


def lora_job() -> Any:
    """Return the step that trains only adapters, with AdamW: the model is frozen, image and text are as above.

    The adapted layers, the rank of 32 and the learning rate are those of DiffSynth-Studio's script.

    >>> round(sum(leaf.size for leaf in lora_job().step("off").arguments[0].values()) / 1e6)
    236
    """
    return _workload("Qwen-Image, LoRA", [SIDE], RANK)


def edit_lora_job() -> Any:
    """Return the same step for Qwen-Image-Edit: the tokens of a source image of 1024² follow those of the noisy image.

    >>> edit_lora_job().batch[0].shape
    (1, 10985, 64)
    """
    return _workload("Qwen-Image-Edit, LoRA", [SIDE, 1024], RANK)


def _workload(name: str, sides: list[int], rank: int | None = None) -> Any:
    import jax
    import jax.numpy as jnp
    import optax

    from remat_jax import Workload

    from .models import lora
    from .models.qwen_image import QwenImage, QwenImageBlock, QwenImageConfig

    config, grids = QwenImageConfig.published(query_chunk=512), tuple((1, side // 16, side // 16) for side in sides)
    model, made = QwenImage(config, scan=True, param_dtype=jnp.bfloat16), grids[0][1] * grids[0][2]
    latents = jax.ShapeDtypeStruct((1, sum(rows * columns for _, rows, columns in grids), config.in_channels), jnp.bfloat16)
    target = jax.ShapeDtypeStruct((1, made, config.out_channels), jnp.bfloat16)
    text = jax.ShapeDtypeStruct((1, WORDS, config.text_width), jnp.bfloat16)
    time = jax.ShapeDtypeStruct((1,), jnp.bfloat16)
    params = jax.eval_shape(lambda *x: model.init(jax.random.key(0), *x, grids), latents, text, time)

    def loss(params, latents, text, time, velocity):
        with lora.adapters():
            outputs = model.apply(params, latents, text, time, grids)[:, :made]
        return jnp.mean(jnp.square((outputs - velocity).astype(jnp.float32)))

    batch = (latents, text, time, target)
    if rank is None:
        return Workload(loss, params, batch, QwenImageBlock, optimizer=optax.sgd(1e-5), name=name)
    params = jax.eval_shape(lambda params: lora.with_adapters(jax.random.key(0), params, ADAPTED, rank), params)
    return Workload(loss, params, batch, QwenImageBlock, optimizer=optax.adamw(1e-4), trainable=lora.TRAINED, name=name)


if __name__ == "__main__":
    sys.exit(main())
