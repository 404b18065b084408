"""OpenPI's π0 at its published size with Adam, 32 observations, one H200.

    git clone https://github.com/Physical-Intelligence/openpi && git -C openpi checkout 15a9616
    pip install jaxtyping==0.2.36 beartype==0.19.0 augmax numpydantic einops ml_collections filelock fsspec safetensors torch
    PYTHONPATH=.:openpi/src python -m examples.others.openpi_pi0
    PYTHONPATH=.:openpi/src remat-jax measure examples/others/openpi_pi0.py:job --target h200

OpenPI's model is NNX around Linen modules, with `nn.remat` around the layers of Gemma and SigLIP; the policy given here
takes the place of these checkpoints. Printed by commit 15a9616 (16 June 2026) with JAX 0.10.2:

    as written: 55.0 GiB, 910 ms
    full: 55.0 GiB, 910 ms
    dots_with_no_batch_dims: 98.0 GiB, 831 ms
    plan within 50%: 69.5 GiB, estimated 853 ms, Encoder1DBlock in runs of 74, 6 and 1, Block in runs of 13, 4 and 1
      found in 260 s, the first answer that fits after 65 s
      best named policy that fits: full, 55.0 GiB, estimated 910 ms
      as written: 55.0 GiB, estimated 910 ms
    a step of a small one as written: loss 1.083287, parameters changed by 0.059942
    a step of a small one under full: loss 1.083287, parameters changed by 0.059942
    a step of a small one under its plan, Encoder1DBlock in one run of 6, Block in one run of 4: loss 1.083276, parameters
    changed by 0.059944

Other work kept the two cores busy.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import optax
from flax import nnx

import remat_jax as rj

from .shared import show, without

without("tqdm_loggable", "tyro", "gcsfs")  # progress bars, command lines, cloud files

from openpi.models import gemma, pi0_config, siglip  # noqa: E402
from openpi.shared import array_typing  # noqa: E402


def job(batch: int = 32, **settings: Any) -> rj.Workload:
    """A training step; every parameter is trained."""
    config = pi0_config.Pi0Config(**settings)
    model = nnx.eval_shape(config.create, jax.random.key(0))
    observation, actions = config.inputs_spec(batch_size=batch)

    def loss(model: Any, key: jax.Array, observation: Any, actions: Any) -> jax.Array:
        return model.compute_loss(key, observation, actions, train=True).mean()

    key = jax.eval_shape(lambda: jax.random.key(0))
    blocks = (gemma.Block, siglip.Encoder1DBlock)
    with array_typing.disable_typechecking():  # the arguments are shapes, not arrays
        return rj.Workload.from_nnx(model, loss, (key, observation, actions), blocks, optimizer=optax.adam(1e-4), name="OpenPI")


def small() -> rj.Workload:
    """OpenPI's own `dummy` towers, with two layers of width 32 instead of its fixed vision tower."""
    published = siglip.decode_variant
    shallow = published("mu/14") | {"depth": 2}
    with mock.patch.object(siglip, "decode_variant", lambda _: shallow):
        return job(2, paligemma_variant="dummy", action_expert_variant="dummy")


if __name__ == "__main__":
    show(job, small, "50%")
