"""`jax_policy`: a policy for blocks that you wrap yourself with `jax.checkpoint` or `nn.remat`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from remat_jax import compat
from remat_jax.core.matmuls import has_batch_dims
from remat_jax.errors import PolicyError
from remat_jax.policy import Action, Candidate, JaxPolicy, Policy, as_policy


def jax_policy(policy: Policy | str | JaxPolicy) -> JaxPolicy:
    """`policy` as a callable that `jax.checkpoint(f, policy=…)` and `nn.remat(Module, policy=…)` take.

    Residuals in such a checkpoint have no automatic names. So only these selectors work: `@dots`, `@dots_with_no_batch_dims`,
    `@convs`, `@primitive:NAME`, `*`, and names that the model gives with `checkpoint_name`.

    Raises:
      PolicyError: `policy` is no policy, is `off`, or has `@inputs` or a glob on automatic names.
      UnsupportedError: `jax_remat3` is on in a JAX version that would ignore such a policy.

    >>> import jax, jax.numpy as jnp
    >>> f = jax.checkpoint(lambda w, x: jnp.sin(x @ w), policy=jax_policy("dots"))
    >>> from remat_jax.cost.count import matmuls
    >>> matmuls(jax.grad(lambda w, x: f(w, x).sum()), jnp.ones((3, 3)), jnp.ones((2, 3)))
    2
    """
    checked = as_policy(policy)
    if not isinstance(checked, Policy):
        return checked
    if not checked.checkpoint:
        raise PolicyError("policy='off': jax.checkpoint has no policy that turns it off; leave jax.checkpoint out")
    unseen = [*checked.automatic_globs, *(selector for selector in checked.selectors if selector == "@inputs")]
    if unseen:
        raise PolicyError(
            f"policy={str(checked)!r}: {unseen[0]!r} selects automatic residual names, which exist only where remat_jax traces "
            "the block itself. Use remat_jax.remat or remat_jax.checkpoint_blocks with this policy, or name the array with "
            "jax.ad_checkpoint.checkpoint_name and select that name."
        )
    compat.require_named_policies()
    compat.saved_exactly.keep()
    return _JaxPolicy(checked)


@dataclass(frozen=True, repr=False)
class _JaxPolicy:
    """A policy as a function. Functions with equal policies are equal, so that JAX's caches hit."""

    policy: Policy

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> object:
        action = self.policy.action(_candidate(primitive, avals, params))
        return compat.OFFLOAD if action is Action.OFFLOAD else action is Action.SAVE

    def __repr__(self) -> str:
        return f"jax_policy({str(self.policy)!r})"


def _candidate(primitive: Any, avals: tuple[Any, ...], params: dict[str, Any]) -> Candidate:
    name = primitive.name
    if name == "name":
        return Candidate(params["name"], "name", user_named=True)
    return Candidate(f":{name}", name, has_batch_dims=has_batch_dims(name, avals, params))
