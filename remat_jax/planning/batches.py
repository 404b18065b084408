"""Examples per second for each batch size, each under its fastest plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from remat_jax.errors import ArgumentError, InfeasibleBudget
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT, check_timeout
from remat_jax.planning.batch import MOST, is_batch, largest_batch, workload_maker
from remat_jax.planning.check_budget import budget_bytes, host_budget_bytes
from remat_jax.planning.explain import time_text
from remat_jax.planning.make_plan import plan
from remat_jax.planning.plan import Plan
from remat_jax.policy import NAMED
from remat_jax.report.tables import ASSUMED_RANGE, format_bytes, render, table
from remat_jax.workload import Workload

FLAT = 0.01
"""Rates that differ by less than this share count as equal: the estimate does not tell them apart."""
_LONGEST = 40


@dataclass(frozen=True)
class BatchRow:
    """A batch size and the fastest plan for it.

    Attributes:
      batch: the batch size passed to `make_workload`.
      plan: the plan for the workload of that batch; None if nothing fits.
      least_bytes: if nothing fits, the least device memory reached; None if that is unknown.
    """

    batch: int
    plan: Plan | None
    least_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether a plan fits."""
        return self.plan is not None

    @property
    def device_bytes(self) -> int | None:
        """The plan's device memory; without a plan, the least memory reached."""
        return self.least_bytes if self.plan is None else self.plan.device_bytes

    @property
    def host_bytes(self) -> int | None:
        """The plan's host memory."""
        return None if self.plan is None else self.plan.host_bytes

    @property
    def seconds(self) -> float | None:
        """The estimated time of a step."""
        return None if self.plan is None else self.plan.seconds

    @property
    def examples_per_second(self) -> float | None:
        """The batch divided by the estimated time of a step."""
        return self.batch / self.seconds if self.seconds else None

    @property
    def extra_share(self) -> float:
        """The share of the step's time that is recomputation and copies, over a step that keeps everything."""
        return 0.0 if self.plan is None or not self.plan.seconds else 1 - min(1.0, self.plan.base_seconds / self.plan.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        names = ("batch", "fits", "device_bytes", "host_bytes", "seconds", "examples_per_second", "extra_share")
        return {name: getattr(self, name) for name in names} | {"plan": self.plan and self.plan.to_dict()}


@dataclass(frozen=True)
class BatchTable:
    """Batch sizes with their plans and their examples per second, the smallest batch first.

    Attributes:
      rows: a `BatchRow` for each batch.
      target: the target's name. budget: the budget in bytes.
    """

    rows: tuple[BatchRow, ...]
    target: str
    budget: int

    @property
    def best(self) -> BatchRow:
        """The row with the most examples per second."""
        return max((row for row in self.rows if row.fits), key=lambda row: row.examples_per_second or 0.0)

    @property
    def why(self) -> str:
        """Why a larger batch than the best gains nothing, as a sentence."""
        best = self.best
        larger = [row for row in self.rows if row.batch > best.batch]
        fitting = [row for row in larger if row.fits]
        if fitting:
            return _why_slower(best, fitting[-1])
        smaller = [row for row in self.rows if row.batch < best.batch]
        flat = smaller and _gain(smaller[-1], best) < FLAT
        sentences = (
            [f"From batch {smaller[-1].batch} to {best.batch} the rate is flat: {_percent(smaller[-1], best)} more."]
            if flat
            else []
        )
        if not larger:
            sentences.append(f"Batch {best.batch} is the largest that was planned, and it fits.")
        elif larger[0].least_bytes is None:
            sentences.append(f"Batch {larger[0].batch} does not fit.")
        else:
            least, budget = format_bytes(larger[0].least_bytes), format_bytes(self.budget)
            sentences.append(f"Batch {larger[0].batch} does not fit: it needs at least {least}, and the budget is {budget}.")
        return " ".join(sentences)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names, and `best` is the best batch size."""
        rows = [row.to_dict() for row in self.rows]
        return {"target": self.target, "budget": self.budget, "best": self.best.batch, "why": self.why, "rows": rows}

    def __rich__(self) -> Any:
        columns = ("batch", "device", "host", "step", "examples/s", "over keeping everything", "policy", "")
        plan = self.best.plan
        each = plan.per_device if plan else ""
        title = f"Batches of {plan and plan.workload} on {self.target} within {format_bytes(self.budget)}{each}"
        narrow = ("over keeping everything", "host", "policy", "step", "device")
        cells = [_cells(row, row is self.best) for row in self.rows]
        return table(title, columns, cells, caption=self.why, optional=narrow)

    def __str__(self) -> str:
        return render(self)


def batches(
    make_workload: Callable[[int], Workload],
    budget: str | float,
    target: str | Target,
    host_budget: str | float | None = None,
    *,
    batches: Iterable[int] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    progress: Callable[[str, int, int], None] | None = None,
) -> BatchTable:
    """The fastest plan for each batch size, and its examples per second.

    A larger batch uses the target better, until recomputation and copies cost more than it gains, or until it does not fit.
    All rates are estimates, as `Plan.seconds`.

    Args:
      make_workload, budget, target, host_budget: as for `largest_batch`.
      batches: the batch sizes. By default 1, 2, 4, … up to the largest batch that fits, which is the last row with a plan
        (`largest_batch`), and one batch that does not fit.
      timeout: seconds for each plan, as for `plan`.
      progress: called as by `largest_batch`.

    Raises:
      InfeasibleBudget: no batch fits.
      ArgumentError: `make_workload` is not a function or returns no workload, or a batch size is invalid.
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
    >>> asked = batches(of, "1 MB", "cpu", batches=(64, 4096))
    >>> [(row.batch, row.fits) for row in asked.rows], asked.best.batch
    ([(64, True), (4096, False)], 64)
    """
    workload = workload_maker(make_workload)
    sizes = None if batches is None else checked_batches(batches)
    described = target if isinstance(target, Target) else target_named(target)
    device, host = budget_bytes(budget, described), host_budget_bytes(host_budget)
    check_timeout(timeout)
    rows: list[BatchRow] = []
    if sizes is None:
        largest = largest_batch(make_workload, device, described, host, timeout=timeout, progress=progress)
        sizes = [2**power for power in range(largest.batch.bit_length()) if 2**power < largest.batch]
        too_large = sorted((batch, size) for batch, size in largest.tried if batch > largest.batch)
        rows = [BatchRow(largest.batch, largest.plan), *(BatchRow(batch, None, size) for batch, size in too_large[:1])]
    planned: list[BatchRow] = []
    for batch in sizes:
        if not rows and planned and not planned[-1].fits:
            # A larger batch needs no less memory.
            planned.append(BatchRow(batch, None))
            continue
        told = progress and _of_batch(progress, batch)
        try:
            planned.append(BatchRow(batch, plan(workload(batch), device, described, host, timeout=timeout, progress=told)))
        except InfeasibleBudget as error:
            if not any(row.fits for row in (*planned, *rows)):
                raise
            planned.append(BatchRow(batch, None, None if error.least_bytes is None else int(error.least_bytes)))
    return BatchTable((*planned, *rows), described.name, device)


def _of_batch(progress: Callable[[str, int, int], None], batch: int) -> Callable[[str, int, int], None]:
    return lambda activity, done, of: progress(f"batch {batch}: {activity}", done, of)


def checked_batches(sizes: Iterable[int]) -> list[int]:
    """The batch sizes in ascending order, each once."""
    listed = [] if isinstance(sizes, str | bytes) or not isinstance(sizes, Iterable) else list(sizes)
    if not listed or not all(map(is_batch, listed)):
        raise ArgumentError(f"batches={sizes!r}: expected batch sizes, whole numbers from 1 to {MOST}, such as (1, 2, 4)")
    return sorted(set(map(int, listed)))


# --- in words -----------------------------------------------------------------------------------------------------------


def _gain(row: BatchRow, other: BatchRow) -> float:
    """The share by which `other` has more examples per second than `row`; negative if it has fewer."""
    return (other.examples_per_second or 0.0) / (row.examples_per_second or 1.0) - 1


def _percent(row: BatchRow, other: BatchRow) -> str:
    return f"{100 * abs(_gain(row, other)):.2g} %"


def _why_slower(best: BatchRow, row: BatchRow) -> str:
    """Why `row`, a larger batch that fits, has fewer examples per second than the best row."""
    if _gain(best, row) > -FLAT:
        return f"From batch {best.batch} to {row.batch} the rate is flat: {_percent(best, row)} less."
    less = f"Batch {row.batch} has {_percent(best, row)} fewer examples per second"
    if row.extra_share > best.extra_share:
        shares = f"{100 * row.extra_share:.2g} % of its time, and {100 * best.extra_share:.2g} % at batch {best.batch}"
        return f"{less}: to fit, it recomputes and copies more ({shares})."
    return f"{less}: its compute takes longer for each example, by the estimate."


def _cells(row: BatchRow, is_best: bool) -> tuple[Any, ...]:
    if row.plan is None:
        return (
            row.batch,
            f"{format_bytes(row.least_bytes)}" if row.least_bytes else None,
            None,
            None,
            None,
            None,
            "",
            "too large",
        )
    rate = row.examples_per_second
    verdict = "best" if is_best else "fits"
    made = row.plan
    return (
        row.batch,
        format_bytes(made.device_bytes),
        format_bytes(made.host_bytes),
        time_text(made, made.seconds),
        None if rate is None else _rate_text(rate, bool(made.assumed_rates)),
        f"{100 * row.extra_share:.2g} %",
        _in_short(made),
        verdict,
    )


def _rate_text(rate: float, assumed: bool) -> str:
    """Examples per second; a range if the estimate uses an assumed rate."""
    shares = [1 / share for share in reversed(ASSUMED_RANGE)] if assumed else [1.0]
    return " to ".join(f"{float(f'{share * rate:.3g}'):,.6g}" for share in shares)


def _in_short(made: Plan) -> str:
    """The plan's policies as text; if that is long, the number of residuals that each run of layers saves and offloads."""
    text = "; ".join(dict.fromkeys(made.texts.values()))
    if made.is_off or len(text) <= _LONGEST or not made.parts:
        return text
    return " | ".join(f"{part.layers} × {_what(part)}" for part in made.parts)


def _what(part: Any) -> str:
    if part.policy in NAMED:
        return str(part.policy)
    counts = [(action, sum(row.action == action for row in part.rows)) for action in ("save", "offload")]
    return ", ".join(f"{action} {count}" for action, count in counts if count) or "full"
