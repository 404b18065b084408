"""The documentation: its commands exist, its links lead somewhere, its code is run; torch's part is in `parity_tests`."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer

from remat_jax.cli.app import app
from tests.doc_pages import PAGES, ROOT, anchors, commands, fenced, links, run

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
TYPED = sorted({line for page in PAGES for line in commands(page.read_text())})


@pytest.mark.parametrize("line", TYPED)
def test_commands_have_these_names_and_options(line: str) -> None:
    program, *arguments = shlex.split(line)
    if program == "make":
        assert subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True).returncode == 0
    elif program == "python":
        assert (ROOT / arguments[0]).is_file()
    else:
        known = typer.main.get_command(app).commands
        # It reads the arguments and calls nothing.
        known[arguments[0]].make_context(arguments[0], arguments[1:])


def test_there_are_commands_to_look_at() -> None:
    assert len(TYPED) >= 8 and {line.split()[0] for line in TYPED} == {"make", "remat-jax"}
    with pytest.raises(typer.Exit if False else Exception, match="No such option"):
        typer.main.get_command(app).commands["plan"].make_context("plan", ["a.py:job", "--bugdet", "1"])


@pages
def test_what_is_named_in_passing_exists(page: Path) -> None:
    known = set(typer.main.get_command(app).commands)
    text = page.read_text()
    assert set(re.findall(r"`remat-jax ([a-z]+)", text)) <= known
    assert [one for one in re.findall(r"\bpython\s+(examples/\w+\.py)", text) if not (ROOT / one).is_file()] == []
    assert [one for one in re.findall(r"`((?:examples|docs|parity_tests|torch_ref|remat_jax)/[\w/]+\.\w+)", text) if not (ROOT / one).exists()] == []


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pages
def test_code_is_run_somewhere(page: Path) -> None:
    """A page with Python is run in `parity_tests/test_docs.py`, where PyTorch is: all of them compare with it."""
    has_code = any(block.language == "python" for block in fenced(page.read_text()))
    assert has_code == (f'"{page.name}"' in (ROOT / "parity_tests" / "test_docs.py").read_text())


def test_blocks_share_their_names_and_figures_are_compared() -> None:
    page = "# A\n```python\nx = 2\n```\nthen\n```python\n>>> x + 1\n{}\n```\n"
    assert run(page.format(3), "page.md", {}) == 2
    with pytest.raises(AssertionError, match=r'File "page.md", line 7.*Expected:\s+4\s+Got:\s+3'.replace(" line 7", ".*")):
        run(page.format(4), "page.md", {})
    with pytest.raises(ZeroDivisionError):
        run("```python\n1 / 0\n```\n", "page.md", {})


def test_headings_are_linked_as_on_github() -> None:
    assert anchors("## 2. `torch.utils.checkpoint.checkpoint`\n### Is it, really?\n") == {"2-torchutilscheckpointcheckpoint", "is-it-really"}
