"""Policies as the command line takes them: a name, a text, or the file of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remat_jax.errors import ArgumentError
from remat_jax.planning.plan import Plan
from remat_jax.policy import as_block_policy
from remat_jax.workload import Workload

TAKEN = "A name, a text, or the .json file of a plan"


def check_policy(given: str) -> Any:
    """What can be said of `given` before the user's file runs: the policy, or the path of the plan.

    Raises:
      PolicyError: it is no policy.
      ArgumentError: there is no such file.
    """
    if not is_plan(given):
        return as_block_policy(given)
    path = Path(given)
    if not path.is_file():
        raise ArgumentError(f"policy={given!r}: there is no such file; write one with remat-jax plan --save")
    return path


def read_policy(given: str, workload: Workload) -> Any:
    """The policy, or those that a plan gives the blocks of `workload`.

    Raises:
      PlanningError: the file is no plan, or one of another model.
    """
    return dict(Plan.load(given, workload).policies) if is_plan(given) else given


def is_plan(given: str) -> bool:
    """Whether `given` names the file of a plan."""
    return given.endswith(".json")
