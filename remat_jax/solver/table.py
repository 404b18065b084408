"""One block as arrays: what its policies measure, and the policy that is cheapest at given prices, by a minimum cut.

A policy is a row of codes, one for each residual, which index `CHOICES`. At given prices the cheapest policy is a minimum
closure: recomputing a residual pulls in its parents, keeping or recomputing an array that backward does not read costs what it
costs, and everything else is decided residual by residual (Picard, Management Science 22, 1976).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from remat_jax.solver.policies import BlockPolicy, Choice
from remat_jax.solver.problem import Block, HostLink

Array = Any
"""A NumPy array."""

CHOICES = tuple(Choice)
SAVE, OFFLOAD, RECOMPUTE, UNUSED = range(4)

SAVED, NEED, HOST, EXTRA = range(4)
"""The columns of `BlockTable.measures`."""

_CAPACITY, _UNCUT = 2**29, 2**30
"""The sum of the capacities that a cut may have, which SciPy takes as 32-bit integers, and one that no cut has."""

_SHARES = np.append(0.0, np.geomspace(1e-3, 1.0, 25))
"""What share of a copy's time may cost, in a cut: nothing where all of it is hidden, all where none is."""

_CUTS = 12
"""How many shares are tried, at most."""

_EXACT = 1e-6
"""How near to its bound a cost is taken as the least."""


@dataclass(frozen=True)
class Prices:
    """What memory costs, in seconds for each byte: saved, in host memory, and there while the block's backward pass runs."""

    saved: float = 0.0
    host: float = 0.0
    transient: float = 0.0


@dataclass(frozen=True)
class BlockTable:
    """A block whose residuals are rows of arrays.

    Attributes:
        block: one block; how often it repeats does not matter here.
        link: None where nothing may be offloaded.

    >>> from remat_jax.solver.problem import Residual
    >>> block = Block("layer", (Residual("x", 8.0), Residual("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0)
    >>> table = BlockTable(block, None)
    >>> codes, bound = table.cheapest(Prices(saved=0.1))
    >>> [CHOICES[code].value for code in codes], round(bound, 3), table.measures(codes[None]).tolist()
    (['save', 'recompute'], 1.3, [[8.0, 40.0, 0.0, 0.5]])
    """

    block: Block
    link: HostLink | None

    @cached_property
    def bytes(self) -> Array:
        """Of each residual."""
        return np.array([one.bytes for one in self.block.residuals], float)

    @cached_property
    def seconds(self) -> Array:
        """Of making each residual again; infinite where that is impossible."""
        return np.array([np.inf if one.seconds is None else one.seconds for one in self.block.residuals], float)

    @cached_property
    def allowed(self) -> Array:
        """Which choices each residual has, whatever the others do: residuals × `CHOICES`."""
        rows = [
            (one.may_save, one.may_offload and self.link is not None, one.seconds is not None, not one.needed)
            for one in self.block.residuals
        ]
        return np.array(rows, bool).reshape(-1, len(CHOICES))

    @cached_property
    def parents(self) -> tuple[tuple[int, ...], ...]:
        """Of each residual, the parents that backward does not read: only these are absent unless something asks for them."""
        index = {one.name: at for at, one in enumerate(self.block.residuals)}
        optional = {one.name for one in self.block.residuals if not one.needed}
        return tuple(tuple(index[name] for name in one.parents if name in optional) for one in self.block.residuals)

    def measures(self, codes: Array) -> Array:
        """Policies × (bytes saved, bytes needed in its own backward pass, bytes on the host, extra seconds)."""
        codes = np.atleast_2d(codes)
        again, away = codes == RECOMPUTE, codes == OFFLOAD
        host = away @ self.bytes
        saved = self.block.input_bytes + (codes == SAVE) @ self.bytes
        transient = self.block.working_bytes + self.block.recomputed_share * (again @ self.bytes)
        seconds = again @ np.where(np.isfinite(self.seconds), self.seconds, 0.0)
        extra = seconds
        if self.link is not None:
            hidden = self.link.hidden_share
            out = host / self.link.out_bytes_per_s - hidden * self.block.forward_seconds
            back = host / self.link.in_bytes_per_s - hidden * (self.block.backward_seconds + seconds)
            extra = seconds + np.where(host > 0, np.maximum(out, 0.0) + np.maximum(back, 0.0), 0.0)
        return np.stack([saved, saved + transient + self.block.fetched_share * host, host, extra], axis=1)

    def legal(self, codes: Array) -> Array:
        """Which policies may be: each choice is allowed, and what is recomputed has its parents."""
        codes = np.asarray(codes)
        good = self.allowed[np.arange(codes.shape[1]), codes].all(axis=1)
        for at, parents in enumerate(self.parents):
            if parents:
                good &= (codes[:, at] != RECOMPUTE) | (codes[:, list(parents)] != UNUSED).all(axis=1)
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
        """The policy for which extra seconds + prices × bytes is least, and a cost that no policy is below.

        Copies that compute does not hide are the larger of nothing and a line in what is offloaded. For any share of that
        line the problem is a cut, which bounds it from below; the cheapest of the policies that these cuts find is given.
        """
        found: list[Array] = []
        bound, shares = -np.inf, (0.0, 0.0)
        offloads = self.link is not None and self.allowed[:, OFFLOAD].any()
        while True:
            codes, least = self._cut(prices, *shares)
            found.append(codes)
            costs = self.cost(np.stack(found), prices)
            bound = max(bound, least)
            if not offloads or len(found) == _CUTS or costs.min() - bound <= _EXACT * abs(costs.min()):
                break
            shares, highest = self._next_shares(np.stack(found), costs)
            if highest - bound <= _EXACT * abs(highest):
                break
        best, cost = self._descended(found[int(costs.argmin())], prices)
        return best, min(bound, cost)

    def _next_shares(self, codes: Array, costs: Array) -> tuple[tuple[float, float], float]:
        """The shares at which a cut promises the highest bound, as far as the policies that are known tell; and that bound.

        The bound is concave in the shares, and each policy is a plane above it (Kelley, J. SIAM 8, 1960).
        """
        assert self.link is not None
        host = (codes == OFFLOAD) @ self.bytes
        again = (codes == RECOMPUTE) @ np.where(np.isfinite(self.seconds), self.seconds, 0.0)
        out = host / self.link.out_bytes_per_s - self.link.hidden_share * self.block.forward_seconds
        back = host / self.link.in_bytes_per_s - self.link.hidden_share * (self.block.backward_seconds + again)
        exposed = np.where(host > 0, np.maximum(out, 0.0) + np.maximum(back, 0.0), 0.0)
        first, second = (one[:, :, None] for one in np.meshgrid(_SHARES, _SHARES, indexing="ij"))
        planes = (costs - exposed + first * out + second * back).min(axis=2)
        one, other = np.unravel_index(int(planes.argmax()), planes.shape)
        return (float(_SHARES[one]), float(_SHARES[other])), float(planes.max())

    def _descended(self, codes: Array, prices: Prices) -> tuple[Array, float]:
        """The policy, changed in one residual after another as long as that is cheaper, and its cost."""
        cost = float(self.cost(codes[None], prices)[0])
        while self.link is not None and len(beside := self.neighbours(codes)):
            costs = self.cost(beside, prices)
            if not costs.min() < cost * (1 - 1e-9):
                break
            codes, cost = beside[int(costs.argmin())], float(costs.min())
        return codes, cost

    def _cut(self, prices: Prices, out: float, back: float) -> tuple[Array, float]:
        """The same where copies cost these shares of their time, less these shares of what could hide them."""
        costs = np.full((len(self.block.residuals), len(CHOICES)), np.inf)
        costs[:, SAVE] = prices.saved * self.bytes
        costs[:, UNUSED] = 0.0
        hidden, constant = 0.0, prices.saved * self.block.input_bytes + prices.transient * self.block.working_bytes
        if self.link is not None:
            rate = out / self.link.out_bytes_per_s + back / self.link.in_bytes_per_s
            costs[:, OFFLOAD] = (prices.host + prices.transient * self.block.fetched_share + rate) * self.bytes
            hidden = self.link.hidden_share * back
            constant -= self.link.hidden_share * (out * self.block.forward_seconds + back * self.block.backward_seconds)
        again = np.where(np.isinf(self.seconds), np.inf, np.nan_to_num(self.seconds, posinf=0.0) * (1.0 - hidden))
        costs[:, RECOMPUTE] = again + prices.transient * self.block.recomputed_share * self.bytes
        costs[~self.allowed] = np.inf
        return self._closure(costs, constant)

    def _closure(self, costs: Array, constant: float) -> tuple[Array, float]:
        kept = np.where(costs[:, SAVE] <= costs[:, OFFLOAD], SAVE, OFFLOAD)
        keeping = costs[np.arange(len(costs)), kept]
        level, slack = _levels(keeping, costs[:, RECOMPUTE], np.isfinite(costs[:, UNUSED]), self.parents)
        codes = np.where(level == 0, UNUSED, np.where(level == 1, kept, RECOMPUTE)).astype(np.int8)
        return codes, float(costs[np.arange(len(costs)), codes].sum()) + constant - slack


def cheapest_policy(block: Block, link: HostLink | None, prices: Prices) -> BlockPolicy:
    """The policy of one block for which extra seconds + prices × bytes is least.

    >>> from remat_jax.solver.problem import Residual
    >>> block = Block("layer", (Residual("x", 8.0), Residual("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0)
    >>> [cheapest_policy(block, None, Prices(price)).choices[1].value for price in (0.01, 0.1)]
    ['save', 'recompute']
    """
    table = BlockTable(block, link)
    return table.policy(table.cheapest(prices)[0])


def _levels(keep: Array, again: Array, optional: Array, parents: Sequence[Sequence[int]]) -> tuple[Array, float]:
    """For each residual 0 (absent, where optional), 1 (kept) or 2 (recomputed), at least cost, parents present where 2.

    An infinite cost bars a choice. Also by how much, at most, rounding of the capacities may have missed the least.
    """
    level = np.where(again < keep, 2, 1)
    level[optional] = 0
    weights: dict[int, float] = {}
    implied: list[tuple[int, int]] = []
    # The node 2n is "present", 2n + 1 "recomputed"; what backward reads is present anyway.
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
    """The nodes of least weight that hold, with a node, all that it implies; and how much rounding may have missed."""
    # A quarter of the time that importing remat_jax takes.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    nodes = list(weights)
    place = {node: number for number, node in enumerate(nodes)}
    source, sink = len(nodes), len(nodes) + 1
    finite = [abs(one) for one in weights.values() if np.isfinite(one)]
    step = (sum(finite) or 1.0) / _CAPACITY
    rows = [place[one] for one, _ in implied] + [source if one < 0 else place[node] for node, one in weights.items()]
    columns = [place[other] for _, other in implied] + [place[node] if one < 0 else sink for node, one in weights.items()]
    sizes = [_UNCUT] * len(implied) + [_UNCUT if np.isinf(one) else round(abs(one) / step) for one in weights.values()]
    graph = csr_array((np.array(sizes, np.int32), (rows, columns)), shape=(sink + 1, sink + 1))
    left = graph - maximum_flow(graph, source, sink).flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    side = breadth_first_order(left, source, return_predecessors=False)
    return {nodes[one] for one in side if one < len(nodes)}, step * len(finite)
