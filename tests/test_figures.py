"""Tables of figures in the pages: each is written or recorded by the command beside it, and not stale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import figures

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
    for table in TABLE.findall(text):
        head, _, *rows = table.splitlines()
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


def test_a_digest_is_of_code_and_not_of_its_words(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    main, imported = tmp_path / "benchmarks" / "speed.py", tmp_path / "benchmarks" / "other.py"
    main.write_text('"""Words."""\nfrom benchmarks import other\n\n\ndef run():\n    """More."""\n    return other.SIZE\n')
    imported.write_text("SIZE = 3\n")
    first = figures.digest_of("python -m benchmarks.speed --quick")
    main.write_text('"""Other words."""\nfrom benchmarks import other\n# why\ndef run():\n    return other.SIZE\n')
    assert figures.digest_of("python -m benchmarks.speed") == first
    imported.write_text("SIZE = 4\n")
    assert figures.digest_of("python -m benchmarks.speed") != first
    workload = tmp_path / "examples" / "job.py"
    workload.parent.mkdir()
    workload.write_text("LAYERS = 2\n")
    before = figures.digest_of("python -m benchmarks.speed examples/job.py:job --quick")
    workload.write_text("LAYERS = 3\n")
    assert figures.digest_of("python -m benchmarks.speed examples/job.py:job --quick") != before
    with pytest.raises(LookupError, match="'make tea' names no module and no file"):
        figures.digest_of("make tea")


def test_writing_replaces_one_block_and_fences_what_is_no_table(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "speed.py").write_text("import os\n\nprint(os.environ['A_B'], 'km/h  ')\n")
    command, page = "A_B='7 8' python benchmarks/speed.py", tmp_path / "page.md"
    mark = f"<!-- figures: {command} @ recorded 2026-11-24 0f3c81d -->"
    page.write_text(f"Before.\n\n{mark}\n\n| old |\n\n<!-- end of figures -->\n\nBehind.\n")
    monkeypatch.setattr(figures, "pages", lambda: [page])
    (table,) = figures.blocks()
    assert table.is_recorded and not table.is_stale
    figures.write(page, command, table.run())
    (table,) = figures.blocks()
    assert table.text == "```text\n7 8 km/h\n```" and not table.is_recorded and not table.is_stale
    assert page.read_text().startswith("Before.\n\n<!--") and page.read_text().endswith("-->\n\nBehind.\n")
    with pytest.raises(LookupError, match="has 0 blocks of 'python -m benchmarks.segments'"):
        figures.write(page, "python -m benchmarks.segments", "| new |")


def test_a_command_that_fails_writes_nothing(tmp_path) -> None:
    table = figures.Figures(tmp_path / "page.md", "python -m benchmarks.figures --neither", "older", "| old |")
    with pytest.raises(RuntimeError, match="ended with 2"):
        table.run()
