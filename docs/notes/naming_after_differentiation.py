"""Why residuals are named in a block's linearisation: a name given before differentiation misses the rules that read outputs.

`exp` is differentiated as `tangent * exp(x)`: its rule reads its own output. A name on that output, saved, is another variable:
JAX keeps the named copy, and runs the matmul and `exp` again for the rule.

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
    """Two matmuls, the first one's output named after `exp`."""
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
