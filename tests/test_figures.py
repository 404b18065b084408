"""Figures of the pages: written by the commands that are named beside them, and not stale."""

from __future__ import annotations

import pytest

from benchmarks import figures

LIGHT = ["python -m benchmarks.targets"]
# Not run again since their blocks got their marks. A command that was run leaves this list, and none is added.
OLDER = {
    "python -m benchmarks.chunked_head --batch 8 32",
    "python -m benchmarks.convolutions",
    "python -m benchmarks.published --markdown",
}


def test_no_block_is_stale() -> None:
    stale = {one.command for one in figures.blocks() if one.is_stale}
    assert stale - OLDER == set(), "run make figures ARGS=…"
    assert OLDER - stale == set(), "was run: take it off the list"


@pytest.mark.parametrize("command", LIGHT)
def test_light_commands_print_what_the_page_has(command: str) -> None:
    (one,) = (one for one in figures.blocks() if one.command == command)
    assert one.run().strip() == one.text and one.text.count("|") > 50


def test_every_mark_is_a_block() -> None:
    """A mark that is misspelt, or has no end, would be no block and so never stale."""
    marks = sum(page.read_text(encoding="utf-8").count("<!-- figures:") for page in figures.pages())
    assert marks == len(figures.blocks()) >= 8
    assert all(one.text.startswith("| ") for one in figures.blocks())


def test_a_digest_is_of_code_and_not_of_its_words(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    main, other = tmp_path / "benchmarks" / "speed.py", tmp_path / "benchmarks" / "other.py"
    main.write_text('"""Words."""\nfrom benchmarks import other\n\n\ndef run():\n    """More."""\n    return other.SIZE\n')
    other.write_text("SIZE = 3\n")
    first = figures.digest_of("python -m benchmarks.speed --quick")
    main.write_text('"""Other words."""\nfrom benchmarks import other\n# why\ndef run():\n    return other.SIZE\n')
    assert figures.digest_of("python -m benchmarks.speed") == first
    other.write_text("SIZE = 4\n")
    assert figures.digest_of("python -m benchmarks.speed") != first
    with pytest.raises(LookupError, match="'make tea' names no module and no file"):
        figures.digest_of("make tea")


def test_writing_replaces_one_block_and_nothing_else(tmp_path) -> None:
    command, page = LIGHT[0], tmp_path / "page.md"
    page.write_text(f"Before.\n\n<!-- figures: {command} @ older -->\n\n| old |\n\n<!-- end of figures -->\n\nBehind.\n")
    figures.write(page, command, "| new |\n")
    digest = figures.digest_of(command)
    assert page.read_text() == (
        f"Before.\n\n<!-- figures: {command} @ {digest} -->\n\n| new |\n\n<!-- end of figures -->\n\nBehind.\n"
    )
    with pytest.raises(LookupError, match="has 0 blocks of 'python -m benchmarks.segments'"):
        figures.write(page, "python -m benchmarks.segments", "| new |")


def test_a_command_that_fails_writes_nothing(tmp_path) -> None:
    one = figures.Figures(tmp_path / "page.md", "python -m benchmarks.segments neither", "older", "| old |")
    with pytest.raises(RuntimeError, match="ended with 2"):
        one.run()
