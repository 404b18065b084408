"""Amounts of memory as users write them: bytes, a text with a unit, or a share of a target's memory."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

from remat_jax.errors import RematError, nearest
from remat_jax.hardware.target import Target
from remat_jax.report.tables import format_bytes

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_FORMS = "a number of bytes, a text such as '40GiB', '38 GB' or '80%', or a share of the target's memory above 0 and up to 1.0"
_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?|\.\d{1,18})\s*([A-Za-z]+|%)?")
_BY_LOWER = {unit.lower(): unit for unit in UNITS}


def device_amount(given: Any, target: Target, argument: str, error: type[RematError]) -> int:
    """The bytes of device memory that `given` means on `target`: more than 0, and no more than the target has.

    `planning.check_budget.budget_bytes` lists the forms of `given`. An invalid `given` raises `error`, which names `argument`.
    """
    nbytes = amount(given, target, argument, error)
    if nbytes <= 0:
        raise error(f"{argument}={given!r}: expected more than 0 bytes; {_FORMS}")
    if target.memory_bytes is not None and nbytes > target.memory_bytes:
        raise error(
            f"{argument}={given!r} is {format_bytes(nbytes)}, but the {target.name} has {format_bytes(target.memory_bytes)}: "
            "ask for less, for '100%', or for another target"
        )
    return nbytes


def amount(given: Any, target: Target | None, argument: str, error: type[RematError]) -> int:
    """`given` in bytes, 0 or more. A share refers to the target's device memory; without a target a share raises `error`."""
    if isinstance(given, str):
        return _written(given, target, argument, error)
    if isinstance(given, float):
        return _share(given, given, target, argument, error)
    try:
        nbytes = operator.index(given)
    except TypeError:
        nbytes = -1
    # No memory has 2**63 bytes, and a larger integer might not convert to a float.
    if isinstance(given, bool) or not 0 <= nbytes < 2**63:
        raise error(f"{argument}={given!r}: expected {_FORMS}")
    return nbytes


def _written(text: str, target: Target | None, argument: str, error: type[RematError]) -> int:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise error(f"{argument}={text!r}: expected {_FORMS}")
    number, unit = match.groups()
    if unit == "%":
        return _share(text, float(number) / 100, target, argument, error)
    if unit is None:
        return int(number) if number.isdigit() else _share(text, float(number), target, argument, error)
    if unit.lower() not in _BY_LOWER:
        hint = nearest(unit, UNITS) if len(unit) > 1 else f" Did you mean {unit.upper() + 'iB'!r} or {unit.upper() + 'B'!r}?"
        raise error(f"{argument}={text!r}: {unit!r} is not a unit of bytes; the units are {', '.join(UNITS)} and %.{hint}")
    return int(float(number) * UNITS[_BY_LOWER[unit.lower()]])


def _share(value: Any, share: float, target: Target | None, argument: str, error: type[RematError]) -> int:
    if not 0 < share <= 1:  # also refuses NaN
        remedy = "; bytes are an integer, such as 40_000_000_000" if isinstance(value, float) and share > 1 else ""
        raise error(f"{argument}={value!r}: a share of memory is above 0 and at most 1 (100%){remedy}. Give {_FORMS}")
    if target is None:
        raise error(f"{argument}={value!r}: a share refers to device memory; give the host's bytes, as '64GiB'")
    if target.memory_bytes is None:
        raise error(f"{argument}={value!r}: the target {target.name!r} has no memory_bytes; give bytes, as '40GiB'")
    return math.floor(share * target.memory_bytes)
