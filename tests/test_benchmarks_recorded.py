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
from benchmarks.record import ROOT
from examples.others import __main__ as gallery
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
