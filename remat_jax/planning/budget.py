"""Budgets of a plan: device memory and host memory, in bytes."""

from __future__ import annotations

from typing import Any

from remat_jax.errors import PlanningError
from remat_jax.hardware import Target
from remat_jax.hardware.amounts import amount, device_amount


def budget_bytes(budget: Any, target: Target, argument: str = "budget") -> int:
    """The bytes of device memory that `budget` stands for on `target`.

    Args:
      budget: an integer of bytes; a float above 0 and up to 1, a share of the target's memory; or a text: `"40GiB"` (1024³),
        `"38 GB"` (1000³), `"80%"`, `"0.8"`, or digits alone for bytes.
      argument: the argument's name in error messages.

    Raises:
      PlanningError: the budget has none of these forms, is not positive, exceeds the target's memory, or is a share of an
        unknown memory.

    >>> from remat_jax.hardware import target
    >>> budget_bytes("40GiB", target("h200")) == 40 * 2**30, budget_bytes(0.5, target("h200"))
    (True, 75377410048)
    """
    return device_amount(budget, target, argument, PlanningError)


def host_budget_bytes(budget: Any, target: Target) -> int | None:
    """The bytes of host memory that `budget` stands for; None means no limit, 0 means no host memory.

    Raises:
      PlanningError: as `budget_bytes`, and for a share: shares are of device memory only.

    >>> from remat_jax.hardware import target
    >>> host_budget_bytes("1.5 kB", target("h200")), host_budget_bytes(None, target("h200"))
    (1500, None)
    """
    return None if budget is None else amount(budget, None, "host_budget", PlanningError)
