"""`plan(train_step, args, …)`: a plan for a finished training step, without a `Workload`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from remat_jax.errors import ArgumentError
from remat_jax.workload import Workload

R = TypeVar("R")


def takes_steps(function: Callable[..., R]) -> Callable[..., R]:
    """`function`, whose first argument is a workload, so that it also takes a training step and the tuple of its arguments.

    Its other arguments follow, by position or by name.
    """

    @functools.wraps(function)
    def of_step(workload: object, *given: Any, **options: Any) -> R:
        if isinstance(workload, Workload) or not callable(workload):
            return function(workload, *given, **options)
        if "args" in options:
            given = (options.pop("args"), *given)
        if not given or not isinstance(given[0], tuple):
            shown = f"args={type(given[0]).__name__}" if given else "args is missing"
            name = getattr(workload, "__name__", "train_step")
            raise ArgumentError(
                f"{shown}: expected the tuple of the arguments of {name!r}, arrays or shapes, as in rj.plan({name}, (state, "
                'batch), budget="40GiB", target="h200")'
            )
        return function(Workload.from_step(workload, *given[0]), *given[1:], **options)

    return of_step
