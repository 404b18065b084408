"""One block as arrays: bytes and seconds of its policies, and the cheapest policy at given prices by a minimum s-t cut.

A policy is an int8 array of shape (residuals,) whose codes index `CHOICES`. Recomputing a residual requires its parents, and an
array that the backward pass does not read may be absent. So the cheapest policy at given prices is a minimum-weight closure,
which a minimum s-t cut finds (Picard, Management Science 22, 1976). Residuals without such requirements are decided one by one.
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
"""The largest sum of finite edge capacities (SciPy takes 32-bit integers), and the capacity of an edge that no cut crosses."""
_SHARES = np.append(0.0, np.geomspace(1e-3, 1.0, 25))
"""The grid of shares s in `BlockTable.cheapest`: 0 is exact if compute hides the copy, 1 if the copy is exposed."""
_CUTS = 12
"""The maximum number of minimum cuts for one `Prices`."""
_EXACT = 1e-6
"""A cost within this relative gap of its lower bound counts as optimal."""


@dataclass(frozen=True)
class Prices:
    """Prices in seconds per byte: of saved bytes, bytes in host memory, and bytes live only in the block's backward pass."""

    saved: float = 0.0
    host: float = 0.0
    transient: float = 0.0


class BlockTable:
    """A block as arrays with one entry per residual. Arguments ``codes`` are integers of shape (policies, residuals).

    Attributes:
        link: the link to host memory; None forbids offload.
        bytes: the size of each residual, shape (residuals,).
        seconds: the time to recompute each residual, shape (residuals,); 0 if it cannot be recomputed.
        kept_seconds: the time to save or offload each residual, shape (residuals,).
        allowed: bool of shape (residuals, choices): whether the residual allows the choice.
        parents: for each residual, the indices of its parents that the backward pass does not read. Only these can be absent.

    >>> from remat_jax.solver.problem import ResidualCosts
    >>> block = Block("layer", (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0)
    >>> table = BlockTable(block, None)
    >>> codes, bound = table.cheapest(Prices(saved=0.1))
    >>> [CHOICES[code].value for code in codes], round(bound, 3), table.measures(codes[None]).tolist()
    (['save', 'recompute'], 1.3, [[8.0, 40.0, 0.0, 0.5]])
    """

    def __init__(self, block: Block, link: HostLink | None) -> None:
        self.block, self.link = block, link
        # Without a link nothing is offloaded, so these rates have no effect.
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
        """Device seconds to recompute, save, offload and copy the residuals, shape (policies,)."""
        copied = self._rates.seconds_per_byte * ((codes == OFFLOAD) @ self.bytes)
        return (codes == RECOMPUTE) @ self.seconds + (codes <= OFFLOAD) @ self.kept_seconds + copied

    def _copies(self, host: Array, work: Array) -> tuple[Array, Array, Array]:
        """Three arrays (policies,): seconds of copies out, and of copies back, minus overlapped compute; exposed seconds."""
        rates = self._rates
        out = host / rates.out_bytes_per_s - rates.hidden_share * self.block.forward_seconds
        back = host / rates.in_bytes_per_s - rates.hidden_share * (self.block.backward_seconds + work)
        return out, back, np.where(host > 0, np.maximum(out, 0.0) + np.maximum(back, 0.0), 0.0)

    def measures(self, codes: Array) -> Array:
        """Shape (policies, 4): bytes saved, bytes needed in the block's own backward pass, bytes on the host, extra seconds."""
        codes = np.atleast_2d(codes)
        host, work = (codes == OFFLOAD) @ self.bytes, self._work(codes)
        saved = self.block.input_bytes + (codes == SAVE) @ self.bytes
        transient = self.block.working_bytes + self.block.recomputed_share * ((codes == RECOMPUTE) @ self.bytes)
        *_, exposed = self._copies(host, work)
        return np.stack([saved, saved + transient + self.block.fetched_share * host, host, work + exposed], axis=1)

    def legal(self, codes: Array) -> Array:
        """Which policies are legal, shape (policies,): choices are allowed, and recomputed residuals have their parents."""
        codes = np.asarray(codes)
        good = self.allowed[np.arange(codes.shape[1]), codes].all(axis=1)
        for at, parents in enumerate(self.parents):
            if parents:
                good &= (codes[:, at] != RECOMPUTE) | (codes[:, parents] != UNUSED).all(axis=1)
        return good

    def neighbours(self, codes: Array) -> Array:
        """The legal policies that differ in one residual from the policy ``codes`` of shape (residuals,)."""
        count = len(self.block.residuals)
        changed = np.repeat(codes[None], count * len(CHOICES), axis=0)
        at, choice = np.divmod(np.arange(len(changed)), len(CHOICES))
        changed[np.arange(len(changed)), at] = choice
        return changed[self.legal(changed) & (changed != codes).any(axis=1)]

    def policy(self, codes: Sequence[int]) -> BlockPolicy:
        """The `BlockPolicy` with these codes, one per residual."""
        return BlockPolicy(self.block, tuple(CHOICES[code] for code in codes))

    def cost(self, codes: Array, prices: Prices) -> Array:
        """Extra seconds + prices × bytes of each policy, shape (policies,)."""
        saved, need, host, extra = self.measures(codes).T
        return extra + prices.saved * saved + prices.host * host + prices.transient * (need - saved)

    def cheapest(self, prices: Prices) -> tuple[Array, float]:
        """The policy found with the least cost (extra seconds + prices × bytes), and a lower bound on the least cost.

        The exposed time of a copy is max(0, x), where x is linear in the choices. Replacing max(0, x) by s · x, with a share
        s from 0 to 1, gives a lower bound that a minimum cut can minimise (Lagrangian relaxation). The returned policy is the
        cheapest policy of all cuts, after a local search.
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
        """The next shares to try, and an upper bound on the lower bounds at all shares.

        The lower bound is concave in the shares, and each policy found gives a plane above it. The next shares maximise the
        minimum of these planes (Kelley, J. SIAM 8, 1960).
        """
        out, back, exposed = self._copies((codes == OFFLOAD) @ self.bytes, self._work(codes))
        first, second = (axis[:, :, None] for axis in np.meshgrid(_SHARES, _SHARES, indexing="ij"))
        planes = (costs - exposed + first * out + second * back).min(axis=2)
        out_share, back_share = np.unravel_index(int(planes.argmax()), planes.shape)
        return (float(_SHARES[out_share]), float(_SHARES[back_share])), float(planes.max())

    def _descended(self, codes: Array, prices: Prices) -> tuple[Array, float]:
        """The policy and its cost after local search, which changes one residual at a time while a change lowers the cost."""
        cost = float(self.cost(codes[None], prices)[0])
        while self.link is not None and len(neighbours := self.neighbours(codes)):
            costs = self.cost(neighbours, prices)
            if not costs.min() < cost * (1 - 1e-9):
                break
            codes, cost = neighbours[int(costs.argmin())], float(costs.min())
        return codes, cost

    def _cut(self, prices: Prices, out: float, back: float) -> tuple[Array, float]:
        """The policy with the least cost, and this cost, with shares ``out`` and ``back`` for the copies (`cheapest`)."""
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
    """The policy of one block with the least cost that `BlockTable.cheapest` finds."""
    table = BlockTable(block, link)
    return table.policy(table.cheapest(prices)[0])


def _levels(keep: Array, again: Array, optional: Array, parents: Sequence[Sequence[int]]) -> tuple[Array, float]:
    """The cheapest level of each residual, shape (residuals,), and an upper bound on the rounding error of the cost.

    Levels are 0 (absent, only if ``optional``), 1 (kept) and 2 (recomputed, with all parents present). ``keep`` and ``again``
    are the costs of levels 1 and 2, shape (residuals,); an infinite cost forbids the level.
    """
    level = np.where(again < keep, 2, 1)
    level[optional] = 0
    weights: dict[int, float] = {}
    implied: list[tuple[int, int]] = []
    # Node 2n means "residual n is present", 2n + 1 "recomputed". Residuals that the backward pass reads are always present.
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
    """The minimum-weight closure, where a requires b for each (a, b) in ``implied``, and a bound on its rounding error."""
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
