"""The policies of one block as columns of the exact programme: all unbeaten ones, or the best at some price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from remat_jax.solver.hull import grow, unbeaten
from remat_jax.solver.policies import BlockPolicy
from remat_jax.solver.problem import Block, Choice, HostLink
from tests.solver_oracles.exact import Prices, cheapest_policy

MOST = 3000
"""The most partial policies that the enumeration keeps."""

_PRICES = 8
_CHOICES = tuple(Choice)


def candidates(block: Block, link: HostLink | None) -> tuple[tuple[BlockPolicy, ...], bool]:
    """The unbeaten policies of one block, and whether these are all of them.

    One policy beats another if it is no worse in all of: bytes saved, bytes that the block needs during its own backward pass,
    bytes in host memory, extra seconds. Each of these is a sum over the residuals that only grows. So a partial policy that
    another one beats in these sums, with the same choices left, is beaten for good. If more than `MOST` partial policies
    remain, only the policies that are best at some price of a byte are returned.

    >>> from remat_jax.solver import ResidualCosts
    >>> block = Block("layer", (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0)
    >>> [one.choices[1].value for one in candidates(block, None)[0]]
    ['recompute', 'save']
    """
    return _candidates(replace(block, repeats=1), link)


@lru_cache(maxsize=64)
def _candidates(block: Block, link: HostLink | None) -> tuple[tuple[BlockPolicy, ...], bool]:
    # Cached: a frontier asks for the same blocks at every budget.
    coded = grow(block, link is not None, MOST)
    if coded is None:
        return _sweep(block, link), False
    policies = [BlockPolicy(block, tuple(_CHOICES[code] for code in codes)) for codes in coded]
    return tuple(_unbeaten_policies(policies, link)), True


def measures(policy: BlockPolicy, link: HostLink | None) -> tuple[float, float, float, float]:
    """The measures of a policy: bytes saved, bytes needed in its own backward pass, bytes on the host, extra seconds."""
    saved = policy.saved_bytes
    return saved, saved + policy.transient_bytes, policy.host_bytes, policy.extra_seconds(link)


def _unbeaten_policies(policies: Sequence[BlockPolicy], link: HostLink | None) -> list[BlockPolicy]:
    import numpy as np

    return [policies[index] for index in unbeaten(np.asarray([measures(policy, link) for policy in policies]))]


def _sweep(block: Block, link: HostLink | None) -> tuple[BlockPolicy, ...]:
    """Policies that are best at some price of a saved byte, in seconds, with host memory free, equally dear, or unused."""
    import numpy as np

    total = sum(residual.bytes for residual in block.residuals) or 1.0
    seconds = block.forward_seconds + block.backward_seconds + sum(residual.seconds or 0.0 for residual in block.residuals)
    policies: dict[tuple[Choice, ...], BlockPolicy] = {}
    for price in (0.0, *np.geomspace(1e-3, 1e3, _PRICES) * (seconds or 1.0) / total):
        for host_price in (0.0, price / 4, price, 1e3 * (seconds or 1.0) / total) if link is not None else (0.0,):
            policy = cheapest_policy(block, link, Prices(float(price), float(host_price)))
            policies[policy.choices] = policy
    return tuple(_unbeaten_policies(list(policies.values()), link))
