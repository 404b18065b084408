"""What benchmarks recorded: tables and notes come from their files, and no figure is stale."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import pytest

from benchmarks import figures
from benchmarks.clusters import __main__ as command
from benchmarks.clusters import cases
from benchmarks.gpu import kernels
from benchmarks.gpu.__main__ import main as steps_command
from benchmarks.gpu.modes import main as modes_command
from benchmarks.record import ROOT
from examples.others import __main__ as gallery
from examples.others import equinox_decoder
from remat_jax.hardware import target


def test_the_decoders_have_their_published_sizes_and_their_state_goes_to_the_hosts():
    sizes = {}
    for name, case in cases.CASES.items():
        work = case.make(case.hosts[0])
        sizes[name] = sum(leaf.size for leaf in jax.tree.leaves(work.params)) / 1e9
        assert work.mesh.size == target(cases.on_gpus("h200", case.hosts[0])).devices
    assert {name: round(size, 1) for name, size in sizes.items()} == {"8b": 8.0, "70b": 70.6, "405b": 405.9, "moe": 235.1}
    moved = cases.with_state_on_hosts(cases.CASES["8b"].make(1)).step("full")
    kinds = [place.memory_kind for place in jax.tree.leaves(moved.shardings[1])]
    assert kinds.count("pinned_host") == len(kinds) - 1, "all but the step count"


def test_every_recorded_result_holds_what_the_benchmark_claims(capsys):
    files = sorted((ROOT / "benchmarks" / "results").glob("*-clusters-*.json"))
    assert files and command.main(["--show", *map(str, files)]) == 0
    shown = capsys.readouterr().out
    note = (ROOT / "docs" / "notes" / "clusters.md").read_text(encoding="utf-8")
    assert all(line.rstrip() in note for line in shown.splitlines()), "the note has the table that the command prints"
    assert {row["case"] for path in files for row in json.loads(path.read_text(encoding="utf-8"))["rows"]} >= {"8b", "70b"}


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STEPS = RESULTS / "2026-11-26-h200-jax0.11.2.json"


def test_the_tables_of_the_note_come_from_the_recorded_files(capsys: pytest.CaptureFixture[str]) -> None:
    of_kernels = [str(RESULTS / f"2026-11-26-h200-{name}-jax0.11.2.json") for name in ("kernels", "plans-kernels")]
    assert steps_command(["--show", str(STEPS)]) == steps_command(["--show", str(STEPS), "--errors"]) == 0
    assert kernels.main(["--show", *of_kernels]) == kernels.main(["--show", *of_kernels, "--kinds"]) == 0
    assert modes_command(["--show", str(RESULTS / "2026-11-26-h200-jax0.11.2-modes.json")]) == 0
    printed = capsys.readouterr().out
    for line in (
        "| scanned, full |  | 8.45 | 8.48 | 110.21 | 106.44 | 119.95 | 1.02 |",
        "| rank correlation of estimated and measured seconds | 0.99 | 0.99 |",
        "| scanned, plan for 11 GB, graphs without slice copies | 102.2 | 98.8 | 116.1 | 108.3 | 0.93 |",
        "| reduce, Triton | 219.0 | 147.0 |",
        "jax/unrolled/offload             -         3.99         4.05     0.27     56.9   1.30",
    ):
        assert line in printed
    with pytest.raises(SystemExit):
        kernels.main([])


FIGURES = re.compile(r"^(.+?): ([\d.]+) MiB", re.MULTILINE)


def test_the_example_of_an_installed_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["equinox_decoder", "--small", "--target", "cpu", "--budget", "24 MiB"])
    equinox_decoder.main()
    printed, errors = capsys.readouterr()
    assert errors == ""

    sizes = {name: float(size) for name, size in FIGURES.findall(printed)}
    assert list(sizes) == ["off", "full", "dots_with_no_batch_dims", "plan within 24 MiB"]
    assert sizes["full"] < sizes["dots_with_no_batch_dims"] < sizes["plan within 24 MiB"] <= 24 < sizes["off"]
    wall, first = re.findall(r"found in (\d+) s, the first answer that fits after (\d+) s", printed)[0]
    assert int(first) <= int(wall)
    best = r"^  best named policy that fits: dots, 2[23]\.\d\d MiB, estimated [\d.]+ ms$"
    assert re.search(best, printed, re.MULTILINE)

    steps = re.findall(r"a step of a small one (.+): loss ([\d.]+), parameters changed by ([\d.]+)", printed)
    assert [name for name, *_ in steps] == ["as written", "under full", "under its plan, Layer in one run of 4"]
    assert len({tuple(figures) for _, *figures in steps}) == 1 and float(steps[0][2]) > 0.01
    # At initialisation the loss is the logarithm of 512 words, 6.24.
    assert float(printed.split()[-1]) < 3


def test_the_table_is_what_the_files_say_that_they_printed() -> None:
    text = gallery.README.read_text(encoding="utf-8")
    assert gallery.with_table(text) == text, "run python -m examples.others"
    assert set(gallery.FILES) == {path.stem for path in gallery.HERE.glob("*.py")} - {"__init__", "__main__", "shared"}


LIGHT = "python -m benchmarks.targets"

# Pages whose command writes their tables in its own way.
WRITTEN_WHOLE = {
    "docs/notes/fuzz.md",
    "docs/notes/gallery.md",
    "docs/notes/pairs.md",
    "docs/notes/upstream.md",
    "examples/others/README.md",
}
TABLE = re.compile(r"(?:^\|.*\n){3,}", re.MULTILINE)
FIGURE = re.compile(r"[-−+×~*]*\d")


def tables_of_figures(text: str) -> list[str]:
    """The first line of each Markdown table in which more than a third of the cells begin with a digit."""
    tables = []
    for rows_of_table in TABLE.findall(text):
        head, _, *rows = rows_of_table.splitlines()
        cells = [cell.strip() for row in rows for cell in row.strip("|").split(" | ")]
        if 3 * sum(FIGURE.match(cell) is not None for cell in cells) > len(cells):
            tables.append(head)
    return tables


def test_no_block_is_stale_and_every_mark_is_a_block() -> None:
    """A misspelt mark, or one without an end, would be no block and so never stale."""
    blocks = figures.blocks()
    assert {table.command for table in blocks if table.is_stale} == set(), "run make figures ARGS=…"
    marks = sum(page.read_text(encoding="utf-8").count("<!-- figures:") for page in figures.pages())
    assert marks == len(blocks) >= 8 and all(table.text.startswith(("| ", "```text\n")) for table in blocks)
    recorded = [table.command for table in blocks if table.is_recorded]
    assert len(recorded) > 20 and all(map(figures.digest_of, recorded))


def test_a_light_command_prints_what_the_page_has() -> None:
    (table,) = (table for table in figures.blocks() if table.command == LIGHT)
    assert table.run().strip() == table.text and table.text.count("|") > 50


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.relative_to(figures.ROOT).as_posix())
def test_every_table_of_figures_has_a_mark(page: Path) -> None:
    words = "| a | b |\n| --- | --- |\n| what | 3 things |\n| and | what |\n"
    assert tables_of_figures(words) == [] and tables_of_figures(words.replace("what", "7")) == ["| a | b |"]
    if page.relative_to(figures.ROOT).as_posix() not in WRITTEN_WHOLE:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        assert tables_of_figures(re.sub(r"<!-- figures: .*?<!-- end of figures -->", "", text, flags=re.DOTALL)) == []
