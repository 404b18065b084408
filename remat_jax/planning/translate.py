"""Between the planner's choices and policies."""

from __future__ import annotations

from typing import Any

from remat_jax.errors import PlanningError
from remat_jax.planner import BlockPolicy
from remat_jax.planning.fitting import block_policies
from remat_jax.planning.model import block_name
from remat_jax.planning.problem import Described, Kind, plan_of, policy_of
from remat_jax.planning.search import Candidate
from remat_jax.policy import LayerPolicies, Policy
from remat_jax.workload import Workload

Policies = dict[type | str, Any]


def policies_of(described: Described, candidate: Candidate) -> Policies:
    """Block → policy, or a policy for each layer where they differ.

    Raises:
      PlanningError: the layers of a block are not those that its kinds have.
    """
    keys = dict.fromkeys(kind.block for kind in described.kinds)
    if candidate.name == "off":
        return {key: Policy.parse("off") for key in keys}
    layers: dict[Any, dict[int, Policy]] = {key: {} for key in keys}
    chosen = iter(block_policies(described.stack, candidate.choices))
    for kind, block in zip(described.kinds, described.stack.blocks, strict=True):
        for position in kind.layers[: block.repeats]:
            layers[kind.block][position] = policy_of(kind, next(chosen))
    return {key: _one_or_many(key, found) for key, found in layers.items()}


def _one_or_many(key: type | str, layers: dict[int, Policy]) -> Any:
    if sorted(layers) != list(range(len(layers))):
        raise PlanningError(f"block {block_name(key)!r}: its layers are {sorted(layers)}, expected 0 to {len(layers) - 1}")
    if len(set(layers.values())) == 1:
        return layers[0]
    return LayerPolicies.of([layers[position] for position in range(len(layers))])


def choices_of(described: Described, workload: Workload, policy: str) -> Candidate:
    """A named policy as a candidate; `off` as one that keeps everything.

    Raises:
      PolicyError: the policy has no effect on this workload.
    """
    found = plan_of(described, workload, "everything" if policy == "off" else policy)
    choices = tuple(one.policy.choices for one in found.ranges for _ in range(one.count))
    return Candidate(policy, choices, found.extra_seconds, found.host_bytes)


def policy_text(kind: Kind, policy: BlockPolicy) -> str:
    """The text of what a block does, by its name where it has one."""
    found = policy_of(kind, policy)
    return found.name or str(found)


def name_of(kind: Kind) -> str:
    """What reports call the block of a kind."""
    return block_name(kind.block)
