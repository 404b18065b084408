"""Predicts the device memory of candidates by a model that is fitted to the compiled steps.

The predicted peak is the maximum over the blocks of F + S + W + ρ · (recomputed bytes) + φ · (offloaded bytes) - γ · G. F is
the fixed bytes, S the bytes that this block and earlier blocks save, W the block's working set, and ρ and φ are the shares of
the block's recomputed and offloaded bytes that are in memory at its peak. G is the bytes of the gradients of earlier blocks
(`Block.late_bytes`), of which the share γ is not allocated yet. The blocks of one scan count as one block. F, ρ, φ and γ are
refitted after every compilation, with the first guess of the shares as a weak prior. The fit is then shifted to be exact at
the compiled step nearest to the budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from remat_jax.planning.candidate import FAILED, Compiled, Loads, StepCandidate, Tried, singles
from remat_jax.solver import Stack, not_yet_allocated, scans

Array = Any
"""A NumPy array."""

_PRIOR = 0.1
"""The weight of the first guess of ρ, φ and γ in the fit. A compiled step has weight 1."""
_MOST = 2.0, 4.0, 1.0
"""The maximum of ρ, φ and γ."""
_STARTS = ((0.5, 2.0, 1.0), (1.0, 4.0, 1.0), (1.0, 2.0, 0.0))
"""Starting points of the fit for (ρ, φ, γ), in addition to the first guess, in which γ is 1."""
_ROUNDS = 8

_FITTED = 2
"""Predictions count as fitted once this many steps are compiled. Earlier predictions count as guesses."""
_LEAST_ERROR, _FIRST_ERROR, _NAMED_ERROR, _OFF_ERROR = 0.005, 0.02, 0.05, 0.1
"""The errors of predictions as shares of the budget (`Fit.error`)."""
_OFF_SHARE = 0.5
"""Under `off` XLA may rematerialise by itself. This share of the saved bytes is assumed to stay in memory; a share of 0.55 was
observed."""


class Fit:
    """The compiled steps of one search, and the stack fitted to them. `guess` is the stack before any compilation.

    All amounts are in bytes. `arguments` is the size of the step's arguments, which are on the device under every policy.
    `budget` includes what other kernels may need more (`Compiled.more`); `within` does not.
    """

    def __init__(self, guess: Stack, budget: float, host_budget: float = math.inf, arguments: float = 0.0) -> None:
        self.guess, self.budget, self.host_budget, self.arguments = guess, budget, host_budget, arguments
        self.tried: list[Tried] = []
        self._fitted: dict[tuple[int, float, bool], Stack] = {}

    def learn(self, candidates: Sequence[StepCandidate], compiled: Sequence[Compiled]) -> None:
        """Add compiled candidates, with the memory that was predicted for them."""
        expected = [self.expected(candidate) for candidate in candidates]
        self.tried += map(Tried, candidates, compiled, expected)

    def learn_more(self, tried: Tried, more: int) -> None:
        """Add that a compiled step needs `more` bytes with other kernels (`Compiled.more`)."""
        self.tried[self.tried.index(tried)] = replace(tried, compiled=replace(tried.compiled, more=more))

    @property
    def compiled_budget(self) -> float:
        """The device bytes that a step with checkpoints may need as compiled (`within`)."""
        return max(0.0, self.budget - self._more(checkpoints=True, limited=False))

    def within(self, candidate: StepCandidate) -> float:
        """The device bytes that a candidate may need as compiled.

        The budget without what it needs more with other kernels. If it was not compiled with these, what steps like it need
        more: without checkpoints, or under a memory limit, XLA rematerialises by itself, which depends on the kernels.
        """
        tried = self.known(candidate)
        if tried is not None and tried.compiled.more is not None:
            return self.budget - tried.compiled.more
        return self.budget - self._more(candidate.checkpoints, candidate.memory_limit is not None)

    def _more(self, checkpoints: bool, limited: bool) -> int:
        checked = [step for step in self.tried if step.compiled.more is not None and step.candidate.checkpoints == checkpoints]
        alike = [step for step in checked if (step.candidate.memory_limit is not None) == limited]
        return max((step.compiled.more or 0 for step in alike or checked), default=0)

    @property
    def compiled(self) -> list[Tried]:
        """The steps whose compilation did not fail."""
        return [step for step in self.tried if step.compiled.device_bytes < FAILED]

    @property
    def fitting(self) -> list[Tried]:
        """The compiled steps within both budgets."""
        return [step for step in self.tried if self.fits(step)]

    @property
    def smallest(self) -> Tried:
        """The sound (`Compiled`) step with the least device memory; steps within the host budget are preferred."""
        sound = [step for step in self.tried if step.compiled.sound]
        within = [step for step in sound if step.compiled.host_bytes <= self.host_budget]
        return min(within or sound or self.tried, key=lambda step: step.compiled.device_bytes)

    def fits(self, tried: Tried) -> bool:
        """Whether a compiled step is sound and within both budgets."""
        compiled = tried.compiled
        fits = compiled.device_bytes <= self.within(tried.candidate) and compiled.host_bytes <= self.host_budget
        return compiled.sound and fits

    def known(self, candidate: StepCandidate) -> Tried | None:
        """The compiled step of a candidate; None if it was not compiled."""
        return next((step for step in self.tried if step.candidate == candidate), None)

    @property
    def host_left(self) -> float:
        """The host budget for residuals: other bytes in host memory, such as an offloaded optimizer state, are subtracted."""
        others = [step.compiled.host_bytes - step.candidate.host_bytes for step in self.compiled]
        return max(0.0, self.host_budget - max(0, min(others, default=0)))

    @property
    def stack(self) -> Stack:
        """The stack fitted to the compiled steps that are plain (`StepCandidate.is_plain`)."""
        return self.around(self.compiled_budget)

    def around(self, size: float, *, uncut: bool = False) -> Stack:
        """`stack`, but exact at the compiled step nearest to `size` bytes.

        If `uncut`, not fitted to cut steps (`is_cut`), unless no other steps are compiled.
        """
        key = len(self.tried), size, uncut
        if key not in self._fitted:
            plain = [step for step in self.compiled if step.candidate.is_plain]
            steps = [step for step in plain if not (uncut and self.is_cut(step.candidate))] or plain
            self._fitted[key] = fitted(self.guess, [(step.candidate.loads, step.compiled.device_bytes) for step in steps], size)
        return self._fitted[key]

    @property
    def shares(self) -> tuple[float, float, float]:
        """ρ, φ and γ of `stack`."""
        first = self.stack.blocks[0]
        late, guessed = (sum(block.repeats * block.late_bytes for block in each.blocks) for each in (self.stack, self.guess))
        return first.recomputed_share, first.fetched_share, late / guessed if guessed else 1.0

    def is_cut(self, candidate: StepCandidate) -> bool:
        """Whether layers of one kind keep different arrays, or a scan is cut between them."""
        kept = iter(candidate.kept)
        return bool(candidate.cuts) or any(len(set(islice(kept, block.repeats))) > 1 for block in self.guess.blocks)

    def expected(self, candidate: StepCandidate) -> int:
        """The device bytes of a candidate: compiled if known, otherwise predicted.

        A candidate that differs little from a compiled step (`StepCandidate.near`) is predicted from that step. The memory that
        cutting a scan costs is not predicted, so a candidate without cuts is predicted from steps without cuts. Without
        checkpoints, XLA may rematerialise by itself: only a share of the saved bytes counts.
        """
        if (tried := self.known(candidate)) is not None:
            return tried.compiled.device_bytes
        if candidate.expected_bytes is not None:
            return candidate.expected_bytes
        spared = 0.0 if candidate.checkpoints else (1 - _OFF_SHARE) * candidate.saved_bytes
        near = None if candidate.near is None else self.known(candidate.near)
        size = self.compiled_budget if near is None else near.compiled.device_bytes
        stack = self.around(size, uncut=not self.is_cut(candidate))
        return round(predicted(stack, candidate.loads) - spared)

    def shown(self, candidate: StepCandidate) -> int:
        """The device bytes: compiled if known, otherwise predicted by a stack that is exact near the prediction (`around`)."""
        if (tried := self.known(candidate)) is not None:
            return tried.compiled.device_bytes
        return round(predicted(self.around(predicted(self.stack, candidate.loads)), candidate.loads))

    def error(self, candidate: StepCandidate) -> float:
        """By how many bytes the prediction for a candidate may miss.

        For a mix, the error of the last fitted prediction for a mix of its sort (cut or not), and at least a share of the
        budget. Before there is one, and for other candidates, a larger share.
        """
        if candidate.family == "off":
            return _OFF_ERROR * self.budget
        if candidate.family != "mix":
            return _NAMED_ERROR * self.budget
        alike = [
            step
            for step in self.compiled[_FITTED:]
            if step.candidate.family == "mix" and self.is_cut(step.candidate) == self.is_cut(candidate)
        ]
        if not alike:
            return (_FIRST_ERROR if self.compiled else _NAMED_ERROR) * self.budget
        missed = abs(alike[-1].predicted_bytes - alike[-1].compiled.device_bytes)
        return max(_LEAST_ERROR * self.budget, missed)

    def may_fit(self, candidate: StepCandidate) -> bool:
        """Whether the prediction is over the budget by at most twice its error."""
        return self.expected(candidate) <= self.within(candidate) + 2 * self.error(candidate)

    def cannot_fit(self, candidate: StepCandidate) -> bool:
        """Whether arguments and saved bytes alone exceed the budget; without checkpoints, only half the saved bytes count."""
        share = 1 if candidate.checkpoints else _OFF_SHARE
        return self.arguments + candidate.saved_bytes * share > self.budget


def predicted(stack: Stack, loads: Loads) -> float:
    """The device bytes that a stack predicts for blocks with these loads."""
    first = stack.blocks[0]
    return stack.fixed_bytes + float(_needs(_table(stack, loads), (first.recomputed_share, first.fetched_share, 1.0)).max())


def fitted(stack: Stack, steps: Sequence[tuple[Loads, int]], budget: float) -> Stack:
    """The stack fitted to the loads and device bytes of compiled steps, exact at the step nearest to `budget`.

    >>> from remat_jax.planning.candidate import Load
    >>> from remat_jax.solver import Block, ResidualCosts
    >>> stack = Stack((Block("layer", (ResidualCosts("x", 8.0, 0.1),), 1.0, 2.0, repeats=3),))
    >>> save, recompute = (Load(8, 0, 0),) * 3, (Load(0, 8, 0),) * 3
    >>> exact = fitted(stack, [(save, 124), (recompute, 104)], 110.0)
    >>> round(predicted(exact, recompute)), round(predicted(exact, save))
    (104, 124)
    """
    if not steps:
        return stack
    sizes = np.array([device_bytes for _, device_bytes in steps], float)
    tables = [_table(stack, loads) for loads, _ in steps]
    guess = stack.blocks[0].recomputed_share, stack.blocks[0].fetched_share, 1.0
    weights = _PRIOR * np.max([np.abs(table[:, 1:]).max(axis=0) for table in tables], axis=0)

    def misfit(fit: tuple[float, ...]) -> float:
        fixed, *shares = fit
        errors = [fixed + _needs(table, shares).max() for table in tables] - sizes
        return sum(error * error for error in (*errors, *(weights * np.subtract(shares, guess))))

    # Try several starts. The shares decide which block has the peak, and only peaks are fitted. If a share starts too small,
    # a block with many recomputed or offloaded bytes does not have the peak, and cannot correct the share.
    fits = (_settled(tables, sizes, guess, start) for start in (guess, *_STARTS))
    fixed, recomputed, fetched, late = min(fits, key=misfit)
    fit = replace(with_shares(stack, (recomputed, fetched, late)), fixed_bytes=fixed)
    loads, device_bytes = min(steps, key=lambda step: abs(step[1] - budget))
    return _shifted(fit, device_bytes - predicted(fit, loads))


def with_shares(stack: Stack, shares: tuple[float, float, float]) -> Stack:
    """The stack with other ρ and φ, and with the share γ of its late bytes."""
    recomputed, fetched, late = shares
    blocks = (replace(block, recomputed_share=recomputed, fetched_share=fetched) for block in stack.blocks)
    return replace(stack, blocks=tuple(replace(block, late_bytes=late * block.late_bytes) for block in blocks))


def _table(stack: Stack, loads: Loads) -> Array:
    """An array of shape (blocks, 4), with the columns S + W (see the module), recomputed bytes, offloaded bytes, -G."""
    blocks = singles(stack)
    keys = [(load.saved, load.recomputed, load.offloaded) for load in loads]
    spans = scans(blocks, keys, [at for at, load in enumerate(loads) if load.cut])
    kept = np.cumsum([block.input_bytes + load.saved for block, load in zip(blocks, loads, strict=True)])
    late = not_yet_allocated(blocks, spans)
    nth = [at for at, (start, stop) in enumerate(spans) for _ in range(start, stop)]
    working = [block.working_bytes for block in blocks]
    return np.column_stack(
        [kept[[spans[at][1] - 1 for at in nth]] + working, *np.transpose(keys)[1:], [-late[at] for at in nth]]
    )


def _needs(table: Array, shares: Sequence[float]) -> Array:
    return table[:, 0] + table[:, 1:] @ np.array(shares)


def _settled(tables: Sequence[Array], sizes: Array, guess: Sequence[float], start: Sequence[float]) -> tuple[float, ...]:
    """F, ρ, φ and γ (see the module). Repeat until stable: find each step's peak block, then solve a least-squares problem."""
    # Imported here: SciPy takes a quarter of remat_jax's import time.
    from scipy.optimize import lsq_linear

    fixed, shares = 0.0, list(start)
    before: Array = None
    for _ in range(_ROUNDS):
        peaks = np.stack([table[_needs(table, shares).argmax()] for table in tables])
        if before is not None and np.array_equal(peaks, before):
            break
        before = peaks
        rows = np.column_stack([np.ones(len(peaks)), peaks[:, 1:]])
        scale = np.maximum(np.abs(rows).max(axis=0), 1.0)
        prior = np.diag([0.0, *(_PRIOR * scale[1:])])
        wanted = np.concatenate([sizes - peaks[:, 0], prior @ [0.0, *guess]])
        bounds = np.zeros(4), np.array([np.inf, *_MOST]) * scale
        solution = lsq_linear(np.vstack([rows, prior]) / scale, wanted, bounds, method="bvls").x / scale
        fixed, *shares = (max(0.0, float(value)) for value in solution)
    return fixed, *shares


def _shifted(stack: Stack, by: float) -> Stack:
    """The stack with `by` bytes added to its fixed bytes. If these would be negative, the working sets shrink instead."""
    fixed = stack.fixed_bytes + by
    if fixed >= 0:
        return replace(stack, fixed_bytes=fixed)
    blocks = tuple(replace(block, working_bytes=max(0.0, block.working_bytes + fixed)) for block in stack.blocks)
    return replace(stack, blocks=blocks, fixed_bytes=0.0)
