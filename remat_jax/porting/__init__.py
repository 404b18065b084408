"""Convert weights and gradients between PyTorch and Flax, both ways, by a weight map; every mismatch is an error."""

from __future__ import annotations

from remat_jax.porting.auto import propose
from remat_jax.porting.files import load, save
from remat_jax.porting.rules import Rule, Rules, as_rules
from remat_jax.porting.tensors import as_numpy
from remat_jax.porting.transfer import from_torch, gradients_from_torch, gradients_to_torch, restack, to_torch
from remat_jax.porting.transform import NAMED, Transform

__all__ = [
    "NAMED",
    "Rule",
    "Rules",
    "Transform",
    "as_numpy",
    "as_rules",
    "from_torch",
    "gradients_from_torch",
    "gradients_to_torch",
    "load",
    "propose",
    "restack",
    "save",
    "to_torch",
]
