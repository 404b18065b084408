"""Budgets as people write them: bytes, text with a unit, a share of the target's memory."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

from remat_jax.errors import PlanningError, nearest
from remat_jax.hardware import Target
from remat_jax.report.tables import format_bytes

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_FORMS = "a number of bytes, a text such as '40GiB', '38 GB' or '80%', or a share of the target's memory above 0 and up to 1.0"
_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?|\.\d{1,18})\s*([A-Za-z]+|%)?")
_BY_LOWER = {unit.lower(): unit for unit in UNITS}


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
    found = _amount(budget, argument, target)
    if found <= 0:
        raise PlanningError(f"{argument}={budget!r}: expected more than 0 bytes; {_FORMS}")
    if target.memory_bytes is not None and found > target.memory_bytes:
        raise PlanningError(
            f"{argument}={budget!r} is {format_bytes(found)}, and the {target.name} has {format_bytes(target.memory_bytes)}: "
            "ask for less, for '100%', or for another target"
        )
    return found


def host_budget_bytes(budget: Any, target: Target) -> int | None:
    """The same of host memory; None stands for no limit, 0 for none of it.

    Raises:
      PlanningError: as `budget_bytes`; a share too, which is one of device memory.

    >>> from remat_jax.hardware import target
    >>> host_budget_bytes("1.5 kB", target("h200")), host_budget_bytes(None, target("h200"))
    (1500, None)
    """
    return None if budget is None else _amount(budget, "host_budget", None)


def _amount(budget: Any, argument: str, target: Target | None) -> int:
    """`budget` in bytes, 0 or more; a share is one of the memory of `target`."""
    if isinstance(budget, str):
        return _written(budget, argument, target)
    if isinstance(budget, float):
        return _share(budget, budget, argument, target)
    try:
        found = operator.index(budget)
    except TypeError:
        found = -1
    # No memory is larger, and an integer may be larger than any float.
    if isinstance(budget, bool) or not 0 <= found < 2**63:
        raise PlanningError(f"{argument}={budget!r}: expected {_FORMS}")
    return found


def _written(text: str, argument: str, target: Target | None) -> int:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise PlanningError(f"{argument}={text!r}: expected {_FORMS}")
    number, unit = match.groups()
    if unit == "%":
        return _share(text, float(number) / 100, argument, target)
    if unit is None:
        return int(number) if number.isdigit() else _share(text, float(number), argument, target)
    if unit.lower() not in _BY_LOWER:
        hint = nearest(unit, [*UNITS]) if len(unit) > 1 else f" Did you mean {unit.upper() + 'iB'!r} or {unit.upper() + 'B'!r}?"
        raise PlanningError(f"{argument}={text!r}: {unit!r} is no unit of bytes; the units are {', '.join(UNITS)} and %.{hint}")
    return math.floor(float(number) * UNITS[_BY_LOWER[unit.lower()]])


def _share(given: Any, share: float, argument: str, target: Target | None) -> int:
    if not 0 < share <= 1:  # NaN is none of these either
        remedy = "; bytes are an integer, such as 40_000_000_000" if isinstance(given, float) and share > 1 else ""
        raise PlanningError(f"{argument}={given!r}: a share of memory is above 0 and at most 1 (100%){remedy}. Give {_FORMS}")
    if target is None:
        raise PlanningError(f"{argument}={given!r}: a share is one of device memory; give bytes of the host, as '64GiB'")
    if target.memory_bytes is None:
        raise PlanningError(
            f"{argument}={given!r}: the target {target.name!r} does not say how much memory it has; give bytes, as '40GiB'"
        )
    return math.floor(share * target.memory_bytes)
