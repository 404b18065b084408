"""Policies as data: which residuals are saved, offloaded or recomputed. Does not import JAX."""

from __future__ import annotations

from remat_jax.policy.form import Policy as Policy
from remat_jax.policy.layers import LayerPolicies as LayerPolicies
from remat_jax.policy.named import NAMED as NAMED
from remat_jax.policy.named import JaxPolicy as JaxPolicy
from remat_jax.policy.named import as_block_policy as as_block_policy
from remat_jax.policy.named import as_policy as as_policy
from remat_jax.policy.named import is_off as is_off
from remat_jax.policy.rule import CONVOLUTION as CONVOLUTION
from remat_jax.policy.rule import CONVS as CONVS
from remat_jax.policy.rule import DOTS as DOTS
from remat_jax.policy.rule import DOTS_WITH_NO_BATCH_DIMS as DOTS_WITH_NO_BATCH_DIMS
from remat_jax.policy.rule import Action as Action
from remat_jax.policy.rule import Candidate as Candidate
from remat_jax.policy.rule import PolicyRule as PolicyRule
from remat_jax.policy.rule import matches as matches
from remat_jax.policy.text import ALIASES as ALIASES
from remat_jax.policy.text import MEANINGS as MEANINGS
