"""Tables on a narrow terminal: no word is broken, columns are left out, and the caption names them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from remat_jax.cli import output
from remat_jax.cli.app import app
from remat_jax.diagnosis import Diagnosis, Finding
from remat_jax.planning.batches import BatchRow, BatchTable
from remat_jax.planning.explain import beyond_table, named_table, plan_table
from remat_jax.planning.plan_data import Beyond, Point
from remat_jax.policy import NAMED
from remat_jax.report.tables import render, table
from tests.plan_by_hand import plan

PLAN = plan(
    assumed_rates=("flops",),
    named=tuple(Point(name, 2**30 * at, 2**28, 0.01 * (at + 1), True, timed=True) for at, name in enumerate(NAMED)),
)


def cells(text: str) -> list[list[str]]:
    """The rows of a printed table; a cell over several lines is joined."""
    rows, row = [], None
    for line in text.splitlines():
        if line[:1] == "│":
            parts = [part.strip() for part in line.strip("│").split("│")]
            if row is None or parts[0]:
                rows.append(row := [[] for _ in parts])
            for cell, part in zip(row, parts, strict=True):
                cell += part.split()
    return [[" ".join(cell) for cell in row] for row in rows]


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(120, ""), (80, "memory, time, over keeping everything."), (60, "memory, host, step, time, over keeping everything.")],
)
def test_the_named_policies_keep_their_names_and_verdicts(width: int, left_out: str) -> None:
    text = render(named_table(PLAN), width)
    assert max(map(len, text.splitlines())) <= width
    rows = cells(text)
    assert {row[0] for row in rows} == {"this plan", *NAMED} and {row[-1] for row in rows} == {"fits", "too large"}
    assert {row[1] for row in rows} >= {"1.0 GiB", "6.0 GiB"}
    caption = " ".join(text.partition("┘")[2].split())
    assert caption == (f"Left out for lack of room: {left_out}" if left_out else "")
    if width > 60:
        assert {row[4 if width > 80 else 3] for row in rows} >= {"8.5 ms to 14 ms", "51 ms to 81 ms"}


FLAG = "XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator"
BEYOND = plan(assumed_rates=("flops",), beyond=(Beyond("micro_batches", 2**30, 0.012), Beyond("head_in_chunks", 2**30, 0.013)))
FINDING = Finding("miscompiled_offload", "offload_dot_with_no_batch_dims", "train.py:1 (f)", "it is wrong", f"Use {FLAG}")
BATCHES = BatchTable(tuple(BatchRow(size, PLAN, 2**29) for size in (1024, 2048)), "h200", 2**30)


TABLES = {
    "policies": lambda width: of_command("policies", width),
    "targets": lambda width: of_command("targets", width),
    "plan": lambda width: render(plan_table(PLAN), width),
    "changes": lambda width: render(beyond_table(BEYOND), width),
    "batches": lambda width: render(BATCHES, width),
    "doctor": lambda width: render(Diagnosis("job", "offload_dot_with_no_batch_dims", "h200", (FINDING,), 1), width),
}


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("shown", TABLES.values(), ids=TABLES)
def test_no_table_breaks_a_word(shown: Any, width: int) -> None:
    narrow, letters = shown(width), r"[^\s│┃━─┏┓┗┛┡┩└┘┳┻╇┴┬]+"
    assert max(map(len, narrow.splitlines())) <= width and "…" not in narrow.replace("allow=…", "")
    words = {word.rstrip(".,") for word in re.findall(letters, f"{shown(300)} Left out for lack of room:")}
    assert {word.rstrip(".,") for word in re.findall(letters, narrow)} - words == set(), narrow


def of_command(command: str, width: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_WIDTH_WITHOUT_TERMINAL", width)
        return CliRunner().invoke(app, [command]).stdout


def test_a_word_wider_than_the_terminal_is_broken_after_a_separator() -> None:
    name = "decoder/layers/self_attention/query_projection:dot_general#0"
    rows = render(table("", ["residual", "size"], [[name, 12]]), 41)
    assert [line.split("│")[1].strip() for line in rows.splitlines() if line[0] == "│"] == [
        "decoder/layers/self_attention/",
        "query_projection:dot_general#0",
    ]


def test_a_title_that_fits_the_terminal_is_in_one_line() -> None:
    title = "On the device at the peak: 4.5 GiB"
    lines = render(table(title, ("module", "bytes"), [("up", "4.2 GiB")])).splitlines()
    assert lines[0].strip() == title and len(lines[1]) == len(title)
