"""The largest batch whose training step fits a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from remat_jax.errors import ArgumentError
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT
from remat_jax.planning.check_budget import budget_bytes, host_budget_bytes
from remat_jax.planning.compile_candidates import Progress
from remat_jax.planning.make_plan import leanest, plan
from remat_jax.planning.plan import Plan
from remat_jax.report.tables import format_bytes, render, table
from remat_jax.workload import Workload

MOST = 2**24


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits, and the plan for it.

    Attributes:
      batch: the batch size passed to `make_workload`.
      plan: the plan for the workload of that batch.
      tried: the pair (batch, bytes) for each batch tried, in order. The bytes are the least device memory of the steps
        compiled for this batch; None if nothing was compiled, because the step's arguments alone exceed the budget.
    """

    batch: int
    plan: Plan
    tried: tuple[tuple[int, int | None], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        return {"batch": self.batch, "plan": self.plan.to_dict(), "tried": [list(pair) for pair in self.tried]}

    def __rich__(self) -> Any:
        budget = self.plan.budget
        rows = [
            (batch, format_bytes(size), "fits" if size is not None and size <= budget else "too large")
            for batch, size in self.tried
        ]
        within = f"{format_bytes(budget)}{self.plan.per_device}"
        title = f"Largest batch of {self.plan.workload} on {self.plan.target} within {within}: {self.batch}"
        return table(title, ("batch", "least memory", ""), rows)

    def __str__(self) -> str:
        return f"{render(self)}\n{self.plan}"


def largest_batch(
    make_workload: Callable[[int], Workload],
    budget: str | float,
    target: str | Target,
    host_budget: str | float | None = None,
    *,
    start: int = 1,
    timeout: float = DEFAULT_TIMEOUT,
    progress: Progress | None = None,
) -> LargestBatch:
    """The largest batch whose training step fits a memory budget, and the plan for it.

    The batch is doubled until it does not fit, then bisected. Once two batches are compiled, linear extrapolation of their
    memory predicts the largest batch that fits, and this batch is tried next. For each batch `full` is compiled. If it does
    not fit, the policy with the least predicted memory is compiled too. A plan is made only for the largest batch. For a TPU, a
    compilation of this search is ended once the memory is known, long before its machine code.

    Args:
      make_workload: returns the workload for a batch size. Any integer of at least 1 may be tried, and a larger batch must
        not need less memory. On a mesh, take the number as the batch per device: multiply it by the number of devices.
      budget, target, host_budget: as for `plan`.
      start: the first batch to try.
      timeout: seconds for the compilations of each batch, and separately for the plan.
      progress: called as by `plan`, but during the search for the batch its two numbers count batches, not compiled steps.

    Raises:
      InfeasibleBudget: a batch of 1 does not fit. The message states the least memory reached and what occupies it.
      ArgumentError: `make_workload` is not a function or returns no workload, `start` is invalid, or a batch of 2²⁴ fits.
      PlanningError, TargetError, CompileError: as in `plan`.

    >>> import jax, jax.numpy as jnp, flax.linen as nn
    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return x + nn.Dense(32)(nn.gelu(nn.Dense(64)(x)))
    >>> model = nn.Sequential([Block(), Block()])
    >>> def of(batch):
    ...     x = jax.ShapeDtypeStruct((batch, 32), jnp.float32)
    ...     params = jax.eval_shape(model.init, jax.random.key(0), x)
    ...     return Workload(lambda p, x: (model.apply(p, x) ** 2).mean(), params, (x,), blocks=Block)
    >>> found = largest_batch(of, "1 MB", "cpu")
    >>> found.plan.device_bytes <= 10**6, found.batch > 300
    (True, True)
    """
    workload = workload_maker(make_workload)
    if not is_batch(start):
        raise ArgumentError(f"start={start!r}: expected a batch size, a whole number from 1 to {MOST}")
    described = target if isinstance(target, Target) else target_named(target)
    device, host = budget_bytes(budget, described), host_budget_bytes(host_budget)
    tried: list[tuple[int, int | None]] = []

    def fits(batch: int) -> bool:
        if progress is not None:
            progress(f"batch {batch}: compiling the step of least memory", len(tried), len(tried) + 1)
        size, error = leanest(workload(batch), device, described, host, timeout=timeout)
        tried.append((batch, size))
        if error is not None and batch == 1:
            raise error
        return error is None

    batch = _largest(start, fits, tried, device)
    made = plan(workload(batch), device, described, host, timeout=timeout, progress=progress)
    return LargestBatch(batch, made, tuple(tried))


def workload_maker(make_workload: object) -> Callable[[int], Workload]:
    """`make_workload`, checked; the function that is returned raises ArgumentError if it gets no workload."""
    if not callable(make_workload):
        raise ArgumentError(f"make_workload={make_workload!r}: expected a function from a batch size to a workload")

    def workload(batch: int) -> Workload:
        made = make_workload(batch)
        if not isinstance(made, Workload):
            raise ArgumentError(f"make_workload({batch}) returned {made!r}: expected a remat_jax.Workload")
        return made

    return workload


def is_batch(size: object) -> bool:
    """Whether `size` is a batch size: a whole number from 1 to `MOST`."""
    return isinstance(size, Integral) and not isinstance(size, bool) and 1 <= int(size) <= MOST


def _largest(start: int, fits: Callable[[int], bool], tried: list[tuple[int, int | None]], budget: int) -> int:
    """The largest batch that fits. `fits` appends the batch and its bytes to `tried`."""
    low, batch, span = 0, start, 2 * MOST
    high: int | None = None
    while high is None or high - low > 1:
        if fits(batch):
            low = batch
        else:
            high = batch
        if low >= MOST:
            raise ArgumentError(f"make_workload: a batch of {low} still fits; memory does not seem to grow with the batch")
        aim = _limit(sorted((batch, size) for batch, size in tried if size is not None), budget)
        if high is None:
            # Once the predicted batch fits, try the next larger batch.
            batch = 2 * low if aim is None else max(low + 1, min(aim, 16 * low))
            continue
        span_before, span = span, high - low
        last = [batch for batch, _ in tried[-2:]]
        crept = len(last) == 2 and abs(last[1] - last[0]) == 1
        # If memory does not grow linearly, the predictions advance in small steps: bisect instead.
        slow = crept if aim is not None and aim <= low else 2 * span > span_before
        batch = max(1, (low + high) // 2) if aim is None or slow else min(max(aim, low + 1), high - 1)
    return low


def _limit(sizes: list[tuple[int, int]], budget: int) -> int | None:
    """The largest batch within `budget`, extrapolated from the last two pairs (batch, bytes); None unless the bytes grow."""
    if len(sizes) < 2:
        return None
    (first, small), (last, large) = sizes[-2:]
    return math.floor(last + (budget - large) * (last - first) / (large - small)) if large > small else None
