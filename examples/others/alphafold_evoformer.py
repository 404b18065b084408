"""AlphaFold's Evoformer with Adam, 256 residues, 128 clustered and 1024 extra sequences, one H200.

    git clone https://github.com/google-deepmind/alphafold && git -C alphafold checkout c77e5d2
    pip install dm-haiku ml_collections
    PYTHONPATH=.:alphafold python -m examples.others.alphafold_evoformer
    PYTHONPATH=.:alphafold remat-jax measure examples/others/alphafold_evoformer.py:job --target h200

A Haiku model: 4 blocks on the extra sequences, then 48 on the clustered ones, each stack in AlphaFold's own `layer_stack`
under `hk.remat`; the policy given here takes the place of `hk.remat`. The step trains on masked amino acids, without templates,
the structure module and the loop of recycling. Relative positions are off: JAX 0.10 has no `jnp.clip(a_min=…)`.

Printed by commit c77e5d2 (22 April 2026) with JAX 0.10.2:

    as written: 11.8 GiB, 941 ms
    full: 11.8 GiB, 940 ms
    dots_with_no_batch_dims: 99.8 GiB, 929 ms
    plan within 50%: 25.1 GiB, estimated 925 ms, EvoformerIteration in runs of 4 and 48
      found in 136 s, the first answer that fits after 102 s
      best named policy that fits: full, 11.8 GiB, estimated 940 ms
      as written: 11.8 GiB, estimated 941 ms
    a step of a small one as written: loss 3.148382, parameters changed by 0.078321
    a step of a small one under full: loss 3.148382, parameters changed by 0.078321
    a step of a small one under its plan, EvoformerIteration in runs of 2 and 2: loss 3.148382, parameters changed by 0.078321

Other work kept the two cores busy. One compilation took about two minutes, and the search ended at its timeout of 300 s.
"""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from alphafold.model import config, modules

import remat_jax as rj

from .shared import show


def job(residues: int = 256, clusters: int = 128, extra: int = 1024, **sizes: Any) -> rj.Workload:
    """A training step on one protein, with the loss of masked amino acids; `sizes` are AlphaFold's own names."""
    settings = config.model_config("model_5").model
    settings.global_config.use_remat = True
    settings.embeddings_and_evoformer.update(sizes | {"max_relative_feature": 0})

    def forward(features: dict[str, Any]) -> jax.Array:
        batch = {name: feature.astype(jnp.float32) if feature.dtype == bool else feature for name, feature in features.items()}
        trunk = modules.EmbeddingsAndEvoformer(settings.embeddings_and_evoformer, settings.global_config)
        head = modules.MaskedMsaHead(settings.heads.masked_msa, settings.global_config)
        return head.loss(head(trunk(batch, is_training=True), batch, is_training=True), batch)["loss"]

    net, batch = hk.transform(forward), features(settings.embeddings_and_evoformer, residues, clusters, extra)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(net.init, key, batch)
    block, optimizer = modules.EvoformerIteration, optax.adam(1e-3)
    return rj.Workload(net.apply, params, (key, batch), block, optimizer=optimizer, name="Evoformer")


def features(sizes: Any, residues: int, clusters: int, extra: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The features of a protein that the Evoformer and its loss read; masks are booleans."""
    msa, more = (clusters, residues), (extra, residues)
    shapes: dict[Any, dict[str, tuple[int, ...]]] = {
        jnp.bool: {"seq_mask": (residues,), "msa_mask": msa, "bert_mask": msa, "extra_msa_mask": more},
        jnp.int32: {"aatype": (residues,), "true_msa": msa, "extra_msa": more},
        jnp.float32: {
            "target_feat": (residues, 22),
            "msa_feat": (*msa, 49),
            "extra_has_deletion": more,
            "extra_deletion_value": more,
            "prev_pos": (residues, 37, 3),
            "prev_msa_first_row": (residues, sizes.msa_channel),
            "prev_pair": (residues, residues, sizes.pair_channel),
        },
    }
    return {name: jax.ShapeDtypeStruct(shape, dtype) for dtype, kind in shapes.items() for name, shape in kind.items()}


def small() -> rj.Workload:
    """Two blocks of each stack, with narrow channels."""
    channels = {"msa_channel": 16, "extra_msa_channel": 8, "pair_channel": 16, "seq_channel": 16}
    return job(8, 4, 6, evoformer_num_block=2, extra_msa_stack_num_block=2, **channels)


if __name__ == "__main__":
    show(job, small, "50%")
