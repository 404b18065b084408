"""The weights of π0: of PyTorch's `Pi0`, whose parts have the names of `transformers`, and of OpenPI, mapped in `openpi`."""

from __future__ import annotations

from remat_jax.porting import Rules

from ..pi0_config import Pi0Config
from .choosing import named
from .openpi import jax_rules, pytorch_rules
from .siglip import ENCODER

NORM = """
    {torch}.weight -> {flax}/scale
    {torch}.dense.weight -> {flax}/modulation/kernel | linear
    {torch}.dense.bias -> {flax}/modulation/bias
"""
TEXT = """
    projector.weight -> params/vision/projector/kernel | linear
    projector.bias -> params/vision/projector/bias
    embed_tokens.weight -> params/embed_tokens/embedding
    layers.{i}.experts.{e}.self_attn.{name}.weight -> params/layers_{i}/experts_{e}/{name}/kernel | linear
    layers.{i}.experts.{e}.mlp.{name}.weight -> params/layers_{i}/experts_{e}/mlp/{name}/kernel | linear
"""
LINEAR = """
    {name}.weight -> params/{name}/kernel | linear
    {name}.bias -> params/{name}/bias
"""
LAYER = ("layers.{i}.experts.{e}", "params/layers_{i}/experts_{e}")


def rules(config: Pi0Config, scan: bool = False, names: str = "torch_ref") -> Rules:
    """Return the weight map, its layers unrolled or stacked; it also serves π0.5.

    `names`: "torch_ref", "openpi_jax" or "openpi_pytorch".

    Raises:
        ValueError: `names` is none of these.

    >>> print(rules(Pi0Config(), scan=True).rules[0])
    vision_tower.embeddings.patch_embedding.weight -> params/vision/patches/kernel | conv2d
    >>> print(rules(Pi0Config(), names="openpi_jax").rules[0])
    PaliGemma/img/embedding/kernel -> params/vision/patches/kernel
    """
    return named(names, NAMES)(config, scan)


def _torch_ref_rules(config: Pi0Config, scan: bool) -> Rules:
    tower = [f"vision_tower.{line.strip()}" for line in ENCODER.strip().splitlines()]
    norms = [_norm(f"{LAYER[0]}.{name}_layernorm", f"{LAYER[1]}/{name}_norm") for name in ("input", "post_attention")]
    norms.append(_norm("{stream}_norm", "params/{stream}_norm"))
    found = Rules.parse("\n".join(tower).replace("params/", "params/vision/") + TEXT + "".join(norms) + LINEAR)
    return found.stacked("layers_{i}", "layers") if scan else found


def _norm(torch: str, flax: str) -> str:
    return NORM.replace("{torch}", torch).replace("{flax}", flax)


NAMES = {"torch_ref": _torch_ref_rules, "openpi_jax": jax_rules, "openpi_pytorch": pytorch_rules}
