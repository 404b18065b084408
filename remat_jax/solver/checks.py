"""Checks of the numbers, names and budgets of a planning problem; each error names the argument, its value and the remedy."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from remat_jax.errors import PlanningError


def check_number(where: str, value: object, *, positive: bool = False, infinite: bool = False) -> None:
    """Refuse a value that is not a number, or is NaN, negative, or infinite without ``infinite``.

    Raises:
        PlanningError: with ``where`` and the expected values.

    >>> check_number("bytes", float("nan"))
    Traceback (most recent call last):
    ...
    remat_jax.errors.PlanningError: bytes=nan; expected a finite number, at least 0.
    """
    good = isinstance(value, int | float) and not isinstance(value, bool) and (value > 0 if positive else value >= 0)
    # An integer may be larger than any float.
    good = good and (value <= sys.float_info.max or (infinite and value == math.inf))  # type: ignore[operator]
    if not good:
        kind = "a number" if infinite else "a finite number"
        raise PlanningError(f"{where}={value!r}; expected {kind}, {'greater than' if positive else 'at least'} 0.")


def check_count(where: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Refuse a value that is not an integer from ``least`` to ``most``.

    Raises:
        PlanningError: with ``where`` and the expected values.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        bound = f"at least {least}" if most is None else f"from {least} to {most}"
        raise PlanningError(f"{where}={value!r}; expected an integer, {bound}.")


def check_budget(name: str, value: object) -> None:
    """Refuse a budget that is not a positive number of bytes; infinity means no limit.

    Raises:
        PlanningError: with the argument's name.
    """
    check_number(name, value, positive=name == "budget", infinite=True)


def check_share(where: str, value: object) -> None:
    """Refuse a share of compute time that is not between 0 and 1.

    Raises:
        PlanningError: with ``where``.
    """
    check_number(where, value)
    if value > 1:  # type: ignore[operator]
        raise PlanningError(f"{where}={value!r}; expected a share of the compute time, from 0 to 1.")


def check_names(where: str, names: Iterable[str]) -> None:
    """Refuse empty names and names that occur twice.

    Raises:
        PlanningError: with these names.
    """
    listed = list(names)
    wrong = [name for name in listed if not isinstance(name, str) or not name]
    twice = sorted(name for name, count in Counter(map(str, listed)).items() if count > 1)
    if wrong or twice:
        raise PlanningError(f"{where}: names {wrong or twice} are {'not texts' if wrong else 'used twice'}; give each its own.")


def all_of(where: str, values: Any, kind: type) -> tuple[Any, ...]:
    """``values`` as a tuple of instances of ``kind``.

    Raises:
        PlanningError: ``values`` is not a sequence of such instances.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise PlanningError(f"{where}={values!r}; expected a sequence of {kind.__name__}.")
    checked = tuple(values)
    for value in checked:
        if not isinstance(value, kind):
            raise PlanningError(f"{where}: {value!r} is a {type(value).__name__}; expected {kind.__name__}.")
    return checked
