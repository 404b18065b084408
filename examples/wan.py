"""`python examples/wan.py`: a small Wan video transformer trained in PyTorch and in JAX in every mode.

Prints losses and kept bytes. The published model of 14 billion parameters, as shapes only, is `job` at 480p and `job_720p`:

    remat-jax measure examples/wan.py:job --target h200 --policy full --policy offload_inputs

For one GPU, `lora_job` and `lora_job_720p` train only adapters of the frozen model.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

NEEDED = {"torch": "remat_jax[torch]", "diffusers": "diffusers", "sklearn": "scikit-learn"}
FRAMES, WORDS = 21, 512  # frames of latents for 81 frames of video; tokens of the prompt
RANK = 32
ADAPTED = ("*_attention/*", "*/mlp/fc?")


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
    return command.main("wan", arguments)


def job() -> Any:
    """Return the training step of the 14B model as a workload: one video of 81 frames, 832 x 480, in bfloat16.

    The VAE turns 8 x 8 pixels of 4 frames into 16 numbers, and 2 x 2 such squares are one token: 21 x 30 x 52 = 32760 tokens.
    The optimizer is plain gradient descent: parameters and gradients alone are 57 GB.

    >>> sum(leaf.size for leaf in __import__("jax").tree.leaves(job().params)) // 10**6
    14288
    """
    return _workload("Wan 14B, 480p", 480, 832)


def job_720p() -> Any:
    """Return the same step at 1280 x 720: 21 x 45 x 80 = 75600 tokens.

    >>> job_720p().batch[0].shape
    (1, 21, 90, 160, 16)
    """
    return _workload("Wan 14B, 720p", 720, 1280)


def lora_job() -> Any:
    """Return the step that trains only adapters, with AdamW: the model is frozen, the video has 832 x 480 pixels.

    The adapted layers, the rank of 32 and the learning rate are those of DiffSynth-Studio's script.

    >>> sum(leaf.size for path, leaf in lora_job().step("off").arguments[0].items()) // 10**6
    153
    """
    return _workload("Wan 14B, LoRA, 480p", 480, 832, RANK)


def lora_job_720p() -> Any:
    """Return the same step at 1280 x 720.

    >>> lora_job_720p().name
    'Wan 14B, LoRA, 720p'
    """
    return _workload("Wan 14B, LoRA, 720p", 720, 1280, RANK)


def _workload(name: str, height: int, width: int, rank: int | None = None) -> Any:
    import jax
    import jax.numpy as jnp
    import optax

    from remat_jax import Workload

    from .models import lora
    from .models.wan import Wan, WanBlock, WanConfig

    config = WanConfig.t2v_14b(query_chunk=256)
    model = Wan(config, scan=True, param_dtype=jnp.bfloat16)
    latents = jax.ShapeDtypeStruct((1, FRAMES, height // 8, width // 8, config.channels), jnp.bfloat16)
    text = jax.ShapeDtypeStruct((1, WORDS, config.text_width), jnp.bfloat16)
    time = jax.ShapeDtypeStruct((1,), jnp.float32)
    params = jax.eval_shape(lambda *x: model.init(jax.random.key(0), *x), latents, text, time)

    def loss(params, latents, text, time, velocity):
        with lora.adapters():
            outputs = model.apply(params, latents, text, time)
        return jnp.mean(jnp.square((outputs - velocity).astype(jnp.float32)))

    batch = (latents, text, time, latents)
    if rank is None:
        return Workload(loss, params, batch, WanBlock, optimizer=optax.sgd(1e-5), name=name)
    params = jax.eval_shape(lambda params: lora.with_adapters(jax.random.key(0), params, ADAPTED, rank), params)
    return Workload(loss, params, batch, WanBlock, optimizer=optax.adamw(1e-4), trainable=lora.TRAINED, name=name)


if __name__ == "__main__":
    sys.exit(main())
