"""The documentation: its commands exist, its links resolve, and its code is tested."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from examples.distributed import command
from examples.distributed.processes import parsed_mesh
from remat_jax.cli.app import app
from tests.doc_pages import LINKED, PAGES, ROOT, anchors, commands, fenced, links, run

linked = pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
TYPED = sorted({line for page in PAGES for line in commands(page.read_text())})
# Names in running text: commands of the command line, examples, and files by their path.
NAMED = re.compile(r"`remat-jax ([a-z]+)")
EXAMPLE = re.compile(r"\bpython\s+(examples/\w+\.py)")
FILE = re.compile(r"`((?:examples|docs|parity_tests|torch_ref|remat_jax)/[\w/]+\.\w+)")


@functools.cache
def known_commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands


def read(line: str) -> None:
    """Let a command parse its arguments without running it."""
    name, *arguments = shlex.split(line.removeprefix("remat-jax "))
    known_commands()[name].make_context(name, arguments)


def read_by_script(line: str) -> None:
    """Let the training script parse its arguments; `--help` ends it."""
    arguments = [word for word in shlex.split(line)[2:] if word != "$TRAIN_ANYWHERE"]
    if arguments == ["--help"]:
        return
    options = command.parser().parse_args(arguments)
    command.setting_of(options)
    assert options.mesh is None or parsed_mesh(options.mesh)


@pytest.mark.parametrize("line", TYPED)
def test_commands_have_these_names_and_options(line: str) -> None:
    if line.startswith("remat-jax "):
        read(line)
    elif line.startswith("python examples/train_anywhere.py "):
        read_by_script(line)
    elif line.startswith("python "):
        assert any(f"# {line.removeprefix('python ')}\n" in page.read_text() for page in PAGES)  # a script that the page shows
    else:
        program, *arguments = shlex.split(line)
        assert program == "make" and subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True).returncode == 0


def test_an_option_or_a_command_that_is_not_there_would_be_seen() -> None:
    assert len(TYPED) >= 8 and {line.split()[0] for line in TYPED} == {"make", "python", "remat-jax"}
    for line, error in {"plan a.py:job --bugdet 1": "No such option: --bugdet", "mesure a.py:job": "mesure"}.items():
        with pytest.raises(Exception, match=error):
            read(f"remat-jax {line}")
    with pytest.raises(SystemExit):
        read_by_script("python examples/train_anywhere.py --polcy full")


@linked
def test_links_and_what_is_named_in_passing_exist(page: Path) -> None:
    text = page.read_text()
    assert set(NAMED.findall(text)) <= set(known_commands())
    assert [path for path in (*EXAMPLE.findall(text), *FILE.findall(text)) if not (ROOT / path).is_file()] == []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_code_is_run() -> None:
    """Pages that compare with PyTorch are run in `parity_tests`."""
    runners = [(ROOT / name).read_text() for name in ("parity_tests/test_docs.py", "tests/test_pages.py")]
    with_code = [page for page in PAGES if any(block.language == "python" for block in fenced(page.read_text()))]
    assert [page for page in with_code if not any(f'"{page.relative_to(ROOT)}"' in runner for runner in runners)] == []


def test_blocks_share_their_names_and_what_they_print_is_compared() -> None:
    page = "# A\n```python\nx = 2\n```\nthen\n```python\n>>> x + 1\n{}\n```\n"
    assert run(page.format(3), "page.md", {}) == 2
    with pytest.raises(AssertionError, match=r'(?s)File "page.md", line 7.*Expected:\s+4\s+Got:\s+3'):
        run(page.format(4), "page.md", {})
    with pytest.raises(ZeroDivisionError):
        run("```python\n1 / 0\n```\n", "page.md", {})


def test_headings_are_linked_as_on_github() -> None:
    found_anchors = anchors("## 2. `torch.utils.checkpoint.checkpoint`\n```python\n# no heading\n```\n### Is it, really?\n")
    assert found_anchors == {"2-torchutilscheckpointcheckpoint", "is-it-really"}
