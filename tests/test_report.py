"""Number formats, tables and pictures of `remat_jax.report`; tables on a narrow terminal."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from remat_jax.cli import output
from remat_jax.cli.app import app
from remat_jax.diagnosis import Diagnosis, Finding
from remat_jax.planning.batches import BatchRow, BatchTable
from remat_jax.planning.explain import beyond_table, named_table, plan_table
from remat_jax.planning.plan_data import Beyond, Point
from remat_jax.policy import NAMED
from remat_jax.report import format_bytes, format_error, format_ratio, table
from remat_jax.report.chart import Panel, Series, chart
from remat_jax.report.svg import INK
from remat_jax.report.tables import render
from tests.plan_by_hand import plan

MIB = 2**20


# --- numbers


def test_bytes_are_written_in_the_smallest_unit_below_1024():
    written = {0: "0 B", 1: "1 B", 1023: "1023 B", 1024: "1.0 KiB", 972 * 1024: "972.0 KiB", MIB - 52: "1023.9 KiB"}
    written |= {MIB - 51: "1.0 MiB", 7 * MIB // 2: "3.5 MiB", 40 * 2**30: "40.0 GiB", 2**50: "1024.0 TiB", None: "n/a"}
    written |= {-3 * MIB: "-3.0 MiB"}
    assert {size: format_bytes(size) for size in written} == written
    assert format_bytes(np.int64(2048)) == "2.0 KiB"
    assert [format_bytes(1536, unit=unit) for unit in ("B", "KiB", "GiB")] == ["1536 B", "1.5 KiB", "0.0 GiB"]
    with pytest.raises(TypeError, match=r"n=2048\.0 is not a number of bytes: expected an integer"):
        format_bytes(2048.0)
    with pytest.raises(ValueError, match=r"unit='MB' is not a unit of bytes: use one of B, KiB, MiB"):
        format_bytes(1, unit="MB")


def test_ratios_and_errors_have_two_digits_or_more():
    ratios = {0: "0.00×", 1: "1.00×", 0.995: "0.99×", 9.994: "9.99×", 9.996: "10.0×", 99.96: "100×", 0.00213: "0.0021×"}
    ratios |= {-1.5: "-1.50×", math.nan: "nan", math.inf: "inf", None: "n/a"}
    assert {ratio: format_ratio(ratio) for ratio in ratios} == ratios
    errors = {0: "0", 1.249e-16: "1.2e-16", 9.96e-13: "1.0e-12", 1.33: "1.3e+00", math.nan: "nan", None: "n/a"}
    assert {error: format_error(error) for error in errors} == errors
    with pytest.raises(ValueError, match=r"error=-1e-16 is negative: expected a norm"):
        format_error(-1e-16)


# --- tables


def test_columns_of_numbers_stand_on_the_right():
    result = table(
        "what each mode costs",
        ["mode", "device", "time", "target", "nothing"],
        [["off", 3 * MIB, 1.0, "8xh100", None], ["checkpoint", None, 1.25, "4xa100", None]],
        formats={"device": format_bytes, "time": format_ratio},
    )
    assert [column.justify for column in result.columns] == ["left", "right", "right", "left", "left"]
    assert [str(cell) for cell in result.columns[1].cells] == ["3.0 MiB", "n/a"]
    assert [str(cell) for cell in result.columns[2].cells] == ["1.00×", "1.25×"]


def test_square_brackets_are_no_markup():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table("blocks[bold]", ["name[b]"], [["model/blocks[0]:dot_general"], ["[red]x[/red]"]]))
    rendered = console.export_text()
    assert all(text in rendered for text in ("blocks[bold]", "name[b]", "model/blocks[0]:dot_general", "[red]x[/red]"))


def test_rows_and_formats_must_fit_the_columns():
    with pytest.raises(ValueError, match=r"rows\[1\] has 1 values, expected 2, one for each of \['a', 'b'\]"):
        table("t", ["a", "b"], [[1, 2], [1]])
    with pytest.raises(ValueError, match=r"formats names \['c'\], which are not among the columns \['a', 'b'\]"):
        table("t", ["a", "b"], [], formats={"c": format_bytes})


# --- pictures


def test_another_ending_is_an_error_that_names_svg(tmp_path):
    with pytest.raises(ValueError, match=r"ends in '\.png': pictures are written as SVG; expected a name that ends in \.svg"):
        chart([Panel("", "x", "y", [Series("a", INK, [(1, 1)])])]).save(tmp_path / "new" / "time.png")
    assert not (tmp_path / "new").exists()


# --- tables on a narrow terminal: no word is broken, columns are left out, and the caption names them


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
