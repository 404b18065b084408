"""One block as arrays: the bytes and seconds of its policies, and the cheapest policy at given prices, by a minimum cut.

A policy is a row of codes, one for each residual, which index `CHOICES`. At given prices the cheapest policy is a
minimum-weight closure: a recomputed residual requires its parents, and an array that the backward pass does not read is present
only at its own cost. All other residuals are independent of each other (Picard, Management Science 22, 1976).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remat_jax.solver.policies import BlockPolicy
from remat_jax.solver.problem import Block, Choice, HostLink

Array = Any
"""A NumPy array."""
CHOICES = tuple(Choice)
SAVE, OFFLOAD, RECOMPUTE, UNUSED = range(4)

SAVED, NEED, HOST, EXTRA = range(4)
"""The columns of `BlockTable.measures`."""
_CAPACITY, _UNCUT = 2**29, 2**30
"""The largest sum of finite capacities, which SciPy takes as 32-bit integers, and a capacity above every cut."""
_SHARES = np.append(0.0, np.geomspace(1e-3, 1.0, 25))
"""The shares of a copy's time that a cut may charge: 0 if compute hides the copy, 1 if it does not."""
_CUTS = 12
"""The most cuts for one list of prices."""
_EXACT = 1e-6
"""The relative gap to its bound at which a cost counts as the least."""


@dataclass(frozen=True)
class Prices:
    """Prices of a byte in seconds: saved on the device, in host memory, and in use during the block's backward pass."""

    saved: float = 0.0
    host: float = 0.0
    transient: float = 0.0


class BlockTable:
    """A block as arrays with one row for each residual. Its repeats are ignored.

    Attributes:
        link: the link to host memory; None without offload.
        bytes: the size of each residual.
        seconds: the time to recompute each residual; 0 where that is impossible.
        kept_seconds: the time that keeping each residual takes.
        allowed: the choices that each residual allows by itself: residuals × `CHOICES`.
        parents: each residual's parents that the backward pass does not read: only these can be absent.

    >>> from remat_jax.solver.problem import ResidualCosts
    >>> block = Block("layer", (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0)
    >>> table = BlockTable(block, None)
    >>> codes, bound = table.cheapest(Prices(saved=0.1))
    >>> [CHOICES[code].value for code in codes], round(bound, 3), table.measures(codes[None]).tolist()
    (['save', 'recompute'], 1.3, [[8.0, 40.0, 0.0, 0.5]])
    """

    def __init__(self, block: Block, link: HostLink | None) -> None:
        self.block, self.link = block, link
        # Without a link nothing is offloaded, so any rates serve.
        self._rates = link or HostLink(1.0, 1.0)
        residuals = block.residuals
        self.bytes = np.array([residual.bytes for residual in residuals], float)
        self.seconds = np.array([residual.seconds or 0.0 for residual in residuals], float)
        self.kept_seconds = np.array([residual.kept_seconds for residual in residuals], float)
        allowed = [[choice in residual.choices for choice in CHOICES] for residual in residuals]
        self.allowed = np.array(allowed, bool).reshape(-1, len(CHOICES))
        self.allowed[:, OFFLOAD] &= link is not None
        self.parents = [[parent for parent in parents if not residuals[parent].needed] for parents in block.parents]

    def _work(self, codes: Array) -> Array:
        """The seconds that recomputing, keeping and copying take on the device, for each policy."""
        copied = self._rates.seconds_per_byte * ((codes == OFFLOAD) @ self.bytes)
        return (codes == RECOMPUTE) @ self.seconds + (codes <= OFFLOAD) @ self.kept_seconds + copied

    def _copies(self, host: Array, work: Array) -> tuple[Array, Array, Array]:
        """By how much copies out and back outlast the compute beside them, negative if hidden; and the exposed seconds."""
        rates = self._rates
        out = host / rates.out_bytes_per_s - rates.hidden_share * self.block.forward_seconds
        back = host / rates.in_bytes_per_s - rates.hidden_share * (self.block.backward_seconds + work)
        return out, back, np.where(host > 0, np.maximum(out, 0.0) + np.maximum(back, 0.0), 0.0)

    def measures(self, codes: Array) -> Array:
        """Policies × (bytes saved, bytes needed in its own backward pass, bytes on the host, extra seconds)."""
        codes = np.atleast_2d(codes)
        host, work = (codes == OFFLOAD) @ self.bytes, self._work(codes)
        saved = self.block.input_bytes + (codes == SAVE) @ self.bytes
        transient = self.block.working_bytes + self.block.recomputed_share * ((codes == RECOMPUTE) @ self.bytes)
        *_, exposed = self._copies(host, work)
        return np.stack([saved, saved + transient + self.block.fetched_share * host, host, work + exposed], axis=1)

    def legal(self, codes: Array) -> Array:
        """Which policies are legal: each choice is allowed, and each recomputed residual has its parents."""
        codes = np.asarray(codes)
        good = self.allowed[np.arange(codes.shape[1]), codes].all(axis=1)
        for at, parents in enumerate(self.parents):
            if parents:
                good &= (codes[:, at] != RECOMPUTE) | (codes[:, parents] != UNUSED).all(axis=1)
        return good

    def neighbours(self, codes: Array) -> Array:
        """The legal policies that differ from `codes` in one residual."""
        count = len(self.block.residuals)
        changed = np.repeat(codes[None], count * len(CHOICES), axis=0)
        at, choice = np.divmod(np.arange(len(changed)), len(CHOICES))
        changed[np.arange(len(changed)), at] = choice
        return changed[self.legal(changed) & (changed != codes).any(axis=1)]

    def policy(self, codes: Sequence[int]) -> BlockPolicy:
        """A row of codes as a policy."""
        return BlockPolicy(self.block, tuple(CHOICES[code] for code in codes))

    def cost(self, codes: Array, prices: Prices) -> Array:
        """Extra seconds + prices × bytes of each policy."""
        saved, need, host, extra = self.measures(codes).T
        return extra + prices.saved * saved + prices.host * host + prices.transient * (need - saved)

    def cheapest(self, prices: Prices) -> tuple[Array, float]:
        """The policy with the least extra seconds + prices × bytes, and a lower bound of this cost.

        The exposed time of copies is the maximum of 0 and a linear function of the offloaded bytes. A minimum cut that charges
        a share of the linear function bounds the cost from below. The cheapest policy of these cuts is returned.
        """
        policies: list[Array] = []
        bound, shares = -np.inf, (0.0, 0.0)
        offloads = self.allowed[:, OFFLOAD].any()
        while True:
            codes, least = self._cut(prices, *shares)
            policies.append(codes)
            costs = self.cost(np.stack(policies), prices)
            bound = max(bound, least)
            if not offloads or len(policies) == _CUTS or costs.min() - bound <= _EXACT * abs(costs.min()):
                break
            shares, highest = self._next_shares(np.stack(policies), costs)
            if highest - bound <= _EXACT * abs(highest):
                break
        best, cost = self._descended(policies[int(costs.argmin())], prices)
        return best, min(bound, cost)

    def _next_shares(self, codes: Array, costs: Array) -> tuple[tuple[float, float], float]:
        """The shares for which the policies so far allow the highest bound, and this bound.

        The bound is concave in the shares, and each policy is a plane above it (Kelley, J. SIAM 8, 1960).
        """
        out, back, exposed = self._copies((codes == OFFLOAD) @ self.bytes, self._work(codes))
        first, second = (axis[:, :, None] for axis in np.meshgrid(_SHARES, _SHARES, indexing="ij"))
        planes = (costs - exposed + first * out + second * back).min(axis=2)
        out_share, back_share = np.unravel_index(int(planes.argmax()), planes.shape)
        return (float(_SHARES[out_share]), float(_SHARES[back_share])), float(planes.max())

    def _descended(self, codes: Array, prices: Prices) -> tuple[Array, float]:
        """The policy and its cost after descent: change one residual at a time while that lowers the cost."""
        cost = float(self.cost(codes[None], prices)[0])
        while self.link is not None and len(neighbours := self.neighbours(codes)):
            costs = self.cost(neighbours, prices)
            if not costs.min() < cost * (1 - 1e-9):
                break
            codes, cost = neighbours[int(costs.argmin())], float(costs.min())
        return codes, cost

    def _cut(self, prices: Prices, out: float, back: float) -> tuple[Array, float]:
        """The cheapest policy and its cost if exposed copies are replaced by these shares of their linear functions."""
        block, rates = self.block, self._rates
        hidden = rates.hidden_share * back
        kept_seconds = (1.0 - hidden) * self.kept_seconds
        copy_seconds = out / rates.out_bytes_per_s + back / rates.in_bytes_per_s
        costs = np.zeros((len(block.residuals), len(CHOICES)))
        costs[:, SAVE] = prices.saved * self.bytes + kept_seconds
        costs[:, OFFLOAD] = (prices.host + prices.transient * block.fetched_share + copy_seconds) * self.bytes
        costs[:, OFFLOAD] += kept_seconds + (1.0 - hidden) * rates.seconds_per_byte * self.bytes
        costs[:, RECOMPUTE] = (1.0 - hidden) * self.seconds + prices.transient * block.recomputed_share * self.bytes
        costs[~self.allowed] = np.inf
        constant = prices.saved * block.input_bytes + prices.transient * block.working_bytes
        constant -= rates.hidden_share * (out * block.forward_seconds + back * block.backward_seconds)
        return self._closure(costs, constant)

    def _closure(self, costs: Array, constant: float) -> tuple[Array, float]:
        kept = np.where(costs[:, SAVE] <= costs[:, OFFLOAD], SAVE, OFFLOAD)
        keep_costs = costs[np.arange(len(costs)), kept]
        level, slack = _levels(keep_costs, costs[:, RECOMPUTE], np.isfinite(costs[:, UNUSED]), self.parents)
        codes = np.where(level == 0, UNUSED, np.where(level == 1, kept, RECOMPUTE)).astype(np.int8)
        return codes, float(costs[np.arange(len(costs)), codes].sum()) + constant - slack


def cheapest_policy(block: Block, link: HostLink | None, prices: Prices) -> BlockPolicy:
    """The policy of one block with the least extra seconds + prices × bytes."""
    table = BlockTable(block, link)
    return table.policy(table.cheapest(prices)[0])


def _levels(keep: Array, again: Array, optional: Array, parents: Sequence[Sequence[int]]) -> tuple[Array, float]:
    """The cheapest level of each residual, and the most that rounding of the capacities may have missed.

    Levels are 0 (absent, only if optional), 1 (kept) and 2 (recomputed, with all parents present). An infinite cost forbids a
    choice.
    """
    level = np.where(again < keep, 2, 1)
    level[optional] = 0
    weights: dict[int, float] = {}
    implied: list[tuple[int, int]] = []
    # Node 2n is "present", 2n + 1 "recomputed". Residuals that the backward pass reads are always present.
    for at, above in enumerate(parents):
        present, recomputed = 2 * at, 2 * at + 1
        if optional[at]:
            implied.append((recomputed, present))
            weights[present] = keep[at]
            if np.isinf(keep[at]):
                implied.append((present, recomputed))
                weights[present], weights[recomputed] = again[at], 0.0
        if optional[at] or above:
            weights.setdefault(recomputed, np.inf if np.isinf(again[at]) else again[at] - keep[at])
            implied += [(recomputed, 2 * parent) for parent in above]
    if not implied:
        return level, 0.0
    chosen, slack = _least_closure(weights, implied)
    for at in range(len(parents)):
        if 2 * at + 1 in weights:
            level[at] = 2 if 2 * at + 1 in chosen else 1 if 2 * at in chosen or not optional[at] else 0
    return level, slack


def _least_closure(weights: dict[int, float], implied: Sequence[tuple[int, int]]) -> tuple[set[int], float]:
    """The minimum-weight closure under ``implied``, and the most that rounding may have missed."""
    # Imported here: SciPy takes a quarter of remat_jax's import time.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    nodes = list(weights)
    place = {node: number for number, node in enumerate(nodes)}
    source, sink = len(nodes), len(nodes) + 1
    finite = [abs(weight) for weight in weights.values() if np.isfinite(weight)]
    step = (sum(finite) or 1.0) / _CAPACITY
    edges = [(place[node], place[required], _UNCUT) for node, required in implied]
    for node, weight in weights.items():
        ends = (source, place[node]) if weight < 0 else (place[node], sink)
        edges.append((*ends, _UNCUT if np.isinf(weight) else round(abs(weight) / step)))
    rows, columns, capacities = zip(*edges, strict=True)
    graph = csr_array((np.array(capacities, np.int32), (rows, columns)), shape=(sink + 1, sink + 1))
    capacity_left = graph - maximum_flow(graph, source, sink).flow
    capacity_left.data[capacity_left.data < 0] = 0
    capacity_left.eliminate_zeros()
    source_side = breadth_first_order(capacity_left, source, return_predecessors=False)
    return {nodes[place] for place in source_side if place < len(nodes)}, step * len(finite)
