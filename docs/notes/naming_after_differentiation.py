"""Why are residuals named after differentiation? An earlier name misses the outputs that derivative rules read.

The derivative of `exp` is `tangent * exp(x)`, so its rule reads the output of `exp`. `checkpoint_name` on this output makes
another variable. If a policy saves that variable, JAX keeps it, and still recomputes the matmul and `exp` for the rule.

Run: `python docs/notes/naming_after_differentiation.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import remat_jax as rj
from remat_jax.cost.count import matmuls

w, x = jnp.ones((8, 8)), jnp.ones((4, 8))


def block(w: jax.Array, x: jax.Array) -> jax.Array:
    """Two matmuls; the `exp` of the first matmul's output is named `scores`."""
    scores = checkpoint_name(jnp.exp(x @ w), "scores")
    return jnp.sin(scores @ w)


def loss(block: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Value and gradient of the sum of `block`."""
    return jax.value_and_grad(lambda w, x: block(w, x).sum())


by_hand = jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names("scores"))
print("matmuls, no checkpoint             ", matmuls(loss(block), w, x))
print("matmuls, everything recomputed     ", matmuls(loss(jax.checkpoint(block)), w, x))
print("matmuls, `scores` saved, by hand   ", matmuls(loss(by_hand), w, x))
print("matmuls, `scores` saved, rj.remat  ", matmuls(loss(rj.remat(block, "save: scores")), w, x))
