"""The published steps: one of them made small is compiled, and a miss is a failure."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from benchmarks.published import __main__ as command
from benchmarks.published.__main__ import Row, missed, note, ratios, row
from benchmarks.published.cases import ABSOLUTE, CASES, Case
from benchmarks.published.model import Shape, workload

SMALL = Shape(2, 256, 512, 2, 1024, kv_heads=1)


def test_a_small_step_is_compiled_for_its_gpus() -> None:
    policy = CASES[0].policy
    alone = Case("small", SMALL, 2, 256, "h200", policy, 1.0, "", "")
    found = row(alone)
    assert 0 < found.compute == found.seconds < 1e-2
    divided = row(dataclasses.replace(alone, target="8xh100", mesh={"data": 1, "fsdp": 8}))
    assert divided.seconds > divided.compute > 0, "parameters are gathered"


@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_has_the_parameters_of_its_shape(tied: bool) -> None:
    shape = dataclasses.replace(SMALL, tied=tied)
    count = sum(leaf.size for leaf in jax.tree.leaves(workload(shape, 1, 128).params))
    attention, feed_forward = 256 * 256 * 2 + 256 * 128 * 2, 3 * 256 * 512
    assert count == 2 * (attention + feed_forward + 2 * 256) + (1 if tied else 2) * 1024 * 256 + 256


def test_every_case_names_its_source_and_what_it_is_compared_with() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 12
    assert all(case.told and "/" in case.source and case.seconds > 0 for case in CASES)
    assert all(case.beside in names for case in CASES if case.beside)
    assert all(case.differs for case in CASES if case.ratio_bound > 0.04)


def test_what_misses_is_told() -> None:
    cases = [dataclasses.replace(CASES[0], name=str(number), seconds=1.0) for number in range(6)]
    good = [Row(case, 1 + 0.9 * ABSOLUTE, 1.0) for case in cases]
    assert missed(good) == []
    bad = [Row(case, 1 - 1.1 * ABSOLUTE, 1.0) for case in cases[: command.MOST_MISSED + 1]]
    assert len(missed([*bad, *good])) == command.MOST_MISSED + 1 and "-22 %" in missed(bad)[0]
    assert missed([*bad[:-1], *good]) == []
    beside = dataclasses.replace(cases[1], seconds=1.3, beside="0")
    pair = [Row(cases[0], 1.0, 1.0), Row(beside, 1.2, 1.2)]
    assert [(told, seen) for _, told, seen in ratios(pair)] == [(1.3, 1.2)]
    assert missed(pair) == ["1: 1.200 times the step without recomputation, published 1.300"]


def test_the_note_keeps_what_stands_around_its_tables() -> None:
    text = "# Title\n<!-- table -->\nold\n<!-- end -->\nBehind.\n"
    made = note([Row(CASES[0], 0.75, 0.7)], text)
    assert (
        made.startswith("# Title\n<!-- table -->\n| step |") and made.endswith("<!-- end -->\nBehind.\n") and "old" not in made
    )
    assert "| 720 ms | 750 ms | +4 % | 50 ms |" in made and note([Row(CASES[0], 0.75, 0.7)], made) == made
