"""The named policies, and the conversion of names, texts and JAX policies to policies."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from remat_jax.errors import PolicyError
from remat_jax.policy.form import Policy
from remat_jax.policy.layers import LayerPolicies, is_by_layer
from remat_jax.policy.text import FACTORIES, NAMED_TEXTS

NAMED: dict[str, Policy] = {name: Policy.parse(name) for name in NAMED_TEXTS}

JaxPolicy = Callable[..., Any]


def as_policy(value: Policy | str | JaxPolicy, argument: str = "policy") -> Policy | JaxPolicy:
    """The policy that ``value`` (a policy, a name, an alias or a text) describes.

    A JAX policy object, which is a function, is returned unchanged. ``argument`` is the value's name in error messages.

    Raises:
        UnknownPolicyError: ``value`` is a single word that is not a policy's name.
        PolicyError: ``value`` is not a policy.

    >>> as_policy("nothing_saveable").name
    'full'
    """
    if isinstance(value, Policy):
        return value
    if is_by_layer(value):
        raise PolicyError(
            f"{argument}={str(value)!r} has a policy for each layer, but one policy is expected here. Policies by layer go to "
            "checkpoint_blocks, Workload, residuals, measure and doctor."
        )
    if isinstance(value, str) or not callable(value) or inspect.isclass(value):
        return Policy.parse(value, argument)  # type: ignore[arg-type]  # `parse` refuses other types
    _check_not_a_factory(value, argument)
    return value


def as_block_policy(value: Any, argument: str = "policy") -> Policy | JaxPolicy | LayerPolicies:
    """The policy or the policies by layer that ``value`` describes: `LayerPolicies`, their text, or what `as_policy` takes."""
    if isinstance(value, LayerPolicies):
        return value
    return LayerPolicies.parse(value, argument) if is_by_layer(value) else as_policy(value, argument)


def is_off(policy: object) -> bool:
    """Whether a policy is `off`, which means no checkpointing."""
    return isinstance(policy, Policy) and not policy.checkpoint


def _check_not_a_factory(value: JaxPolicy, argument: str) -> None:
    # JAX would call the factory as if it were a policy. The factory returns a function, which JAX takes as True: "save".
    name, module = getattr(value, "__name__", ""), getattr(value, "__module__", "") or ""
    if name in FACTORIES and module.split(".")[0] == "jax":
        raise PolicyError(
            f"{argument}={value!r} is not a JAX policy but a function that makes one: call it, or {FACTORIES[name]}."
        )
