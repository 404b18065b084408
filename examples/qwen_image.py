"""`python examples/qwen_image.py`: Qwen-Image's transformer, a small one, trained in PyTorch and in JAX in every mode.

Prints losses and kept bytes. The published model at its true size, as shapes only, is `job`:

    remat-jax measure examples/qwen_image.py:job --target h200 --policy full --policy offload_inputs
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

NEEDED = {"torch": "remat_jax[torch]", "diffusers": "diffusers", "sklearn": "scikit-learn"}
SIDE, WORDS = 1328, 512  # pixels of a square image, tokens of the prompt


def main(arguments: list[str] | None = None) -> int:
    """Run the training; the exit status is 0, 1 when losses differ, or 2 for bad usage."""
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

    The VAE makes 16 numbers of 8 x 8 pixels, and 2 x 2 of them are one token: 83 x 83 tokens. Plain gradient descent: the
    state of Adam alone would be 82 GB, and an H200 has 68 left beside parameters and gradients.

    >>> sum(leaf.size for leaf in __import__("jax").tree.leaves(job().params)) // 10**6
    20430
    """
    import jax
    import jax.numpy as jnp
    import optax

    from remat_jax import Workload

    from .models.qwen_image import QwenImage, QwenImageBlock, QwenImageConfig

    config, tokens = QwenImageConfig.published(query_chunk=512), SIDE // 16
    model, grids = QwenImage(config, scan=True, param_dtype=jnp.bfloat16), ((1, tokens, tokens),)
    latents = jax.ShapeDtypeStruct((1, tokens * tokens, config.in_channels), jnp.bfloat16)
    text = jax.ShapeDtypeStruct((1, WORDS, config.text_width), jnp.bfloat16)
    time = jax.ShapeDtypeStruct((1,), jnp.bfloat16)
    params = jax.eval_shape(lambda *x: model.init(jax.random.key(0), *x, grids), latents, text, time)

    def loss(params, latents, text, time, velocity):
        found = model.apply(params, latents, text, time, grids)
        return jnp.mean(jnp.square((found - velocity).astype(jnp.float32)))

    return Workload(loss, params, (latents, text, time, latents), QwenImageBlock, optimizer=optax.sgd(1e-5), name="Qwen-Image")


if __name__ == "__main__":
    sys.exit(main())
