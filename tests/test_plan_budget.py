"""Budgets: the meaning of each form, and errors."""

from __future__ import annotations

import time

import numpy as np
import pytest

import remat_jax as rj
from remat_jax.errors import PlanningError
from remat_jax.hardware import target
from remat_jax.planning import make_plan
from remat_jax.planning.check_budget import budget_bytes, host_budget_bytes
from tests.small_models import Mlp, make_loss

H200 = target("h200")
MEMORY = 150_754_820_096


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (40 * 2**30, 40 * 2**30),
        (np.int64(7), 7),
        (1, 1),
        ("1", 1),
        ("40GiB", 40 * 2**30),
        (" 38 GB ", 38 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("40 Gib", 40 * 2**30),
        ("512 kb", 512_000),
        ("3B", 3),
        ("0.1 TB", 10**11),
        (1.0, MEMORY),
        (0.25, MEMORY // 4),
        ("80%", int(MEMORY * 0.8)),
        ("100 %", MEMORY),
        ("0.25", MEMORY // 4),
        (".25", MEMORY // 4),
    ],
)
def test_a_budget_is_so_many_bytes(budget, expected):
    assert budget_bytes(budget, H200) == expected


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (0, "budget=0: expected more than 0 bytes"),
        ("0 GiB", "expected more than 0 bytes"),
        (-5, "budget=-5: expected a number of bytes"),
        ("-5 GB", "budget='-5 GB': expected a number of bytes"),
        (0.0, "a share of memory is above 0 and at most 1"),
        (-0.5, "a share of memory is above 0"),
        (float("nan"), "budget=nan: a share"),
        (float("inf"), "budget=inf: a share"),
        (40e9, "bytes are an integer, such as 40_000_000_000"),
        ("nan", "budget='nan': expected"),
        ("120%", "budget='120%': a share of memory is above 0 and at most 1"),
        ("0%", "a share of memory is above 0"),
        ("1.5", "a share of memory"),
        ("40G", "'G' is not a unit of bytes; the units are B, kB, .* Did you mean 'GiB' or 'GB'"),
        ("40 gbits", "is not a unit of bytes"),
        ("lots", "budget='lots': expected a number of bytes"),
        ("", "budget='': expected"),
        ("4 0 GiB", "expected a number of bytes"),
        ("1e3 GB", "expected a number of bytes"),
        (True, "budget=True: expected"),
        (10**400, "budget=10{400}: expected a number of bytes"),
        (None, "budget=None: expected a number of bytes"),
        ([1], r"budget=\[1\]: expected"),
        ("200GiB", "is 200.0 GiB, but the h200 has 140.4 GiB"),
    ],
)
def test_what_is_no_budget_is_refused_by_name_and_value(budget, message):
    with pytest.raises(PlanningError, match=message):
        budget_bytes(budget, H200)


def test_a_share_needs_a_memory_that_is_known():
    with pytest.raises(PlanningError, match="'cpu' has no memory_bytes; give bytes"):
        budget_bytes("80%", target("cpu"))
    assert budget_bytes("80 MB", target("cpu")) == 80_000_000


def test_a_host_budget_may_be_nothing_or_no_limit_but_no_share():
    assert [host_budget_bytes(budget) for budget in (None, 0, "0 B", "64GiB")] == [None, 0, 0, 64 * 2**30]
    for share in (0.5, "50%"):
        with pytest.raises(PlanningError, match="host_budget=.*a share refers to device memory; give the host's bytes"):
            host_budget_bytes(share)


def test_the_time_of_a_plan_begins_with_the_call(monkeypatch):
    """What is checked before the search may trace the step."""
    given, (model, params, x) = [], make_loss()
    monkeypatch.setattr(make_plan, "_check", lambda *_: time.sleep(0.2))
    monkeypatch.setattr(make_plan, "_Planner", lambda *args: given.append(args[4]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rj.plan(rj.Workload(model, params, (x,), Mlp), "1GiB", "cpu", timeout=10)
    assert given[0] <= 9.8
