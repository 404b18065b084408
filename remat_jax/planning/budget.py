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
      argument: what a message calls it.

    Raises:
      PlanningError: it is none of these, not positive, more than the target has, or a share of a memory that is not known.

    >>> from remat_jax.hardware import target
    >>> budget_bytes("40GiB", target("h200")) == 40 * 2**30, budget_bytes(0.5, target("h200"))
    (True, 75377410048)
    """
    return device_amount(budget, target, argument, PlanningError)


def host_budget_bytes(budget: Any, target: Target) -> int | None:
    """The same of host memory; None stands for no limit, 0 for none of it.

    Raises:
      PlanningError: as `budget_bytes`; a share too, which is one of device memory.

    >>> from remat_jax.hardware import target
    >>> host_budget_bytes("1.5 kB", target("h200")), host_budget_bytes(None, target("h200"))
    (1500, None)
    """
    return None if budget is None else amount(budget, None, "host_budget", PlanningError)
