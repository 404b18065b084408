"""Policies as data: which residuals are saved, offloaded or recomputed. Does not import JAX."""

from __future__ import annotations

from remat_jax.policy.form import Policy
from remat_jax.policy.layers import LayerPolicies
from remat_jax.policy.named import NAMED, JaxPolicy, as_block_policy, as_policy, is_off
from remat_jax.policy.rule import CONVOLUTION, CONVS, DOTS, DOTS_WITH_NO_BATCH_DIMS, Action, Candidate, PolicyRule, matches
from remat_jax.policy.text import ALIASES

__all__ = [
    "ALIASES",
    "CONVOLUTION",
    "CONVS",
    "DOTS",
    "DOTS_WITH_NO_BATCH_DIMS",
    "NAMED",
    "Action",
    "Candidate",
    "JaxPolicy",
    "LayerPolicies",
    "Policy",
    "PolicyRule",
    "as_block_policy",
    "as_policy",
    "is_off",
    "matches",
]
