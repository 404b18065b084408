"""Micro-batches on a mesh: every device keeps its own rows, so work and memory are those of one micro-batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def told(on_eight_devices: Callable[..., Path]) -> dict[str, Any]:
    return dict(json.loads(on_eight_devices("tests.accumulate_on_mesh", "told.json").read_text()))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_device_computes_its_own_rows_and_no_others(told: dict[str, Any], kind: str) -> None:
    figures = told[kind]
    assert figures["error"] < 1e-5
    whole = figures["1"]
    for n in (2, 4, 8):
        micro = figures[str(n)]
        # The loop body counts once; 1 % is for sums of gradients and the rows' addresses.
        assert micro["flops"] * n == pytest.approx(whole["flops"], rel=0.01)
        assert micro["temp"] < 0.8 * whole["temp"]
        assert [micro[name] for name in ("all-gather", "all-to-all", "collective-permute")] == [0, 0, 0]


def test_rows_that_explicit_axes_cannot_divide_are_refused(told: dict[str, Any]) -> None:
    refusal = "a micro-batch of batch[0] has 4 rows, which do not divide over the 8 devices of 'data'; n can be 1, 2, 4, 8;"
    assert refusal in told["Explicit"]["refusal"] and told["Auto"]["refusal"] == ""
