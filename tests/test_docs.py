"""The documentation: commands exist, links resolve, code is tested; and what runs on GitHub."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from examples.distributed import command
from examples.distributed.processes import parsed_mesh
from remat_jax.cli.app import app
from tests.doc_pages import LINKED, PAGES, ROOT, anchors, commands, fenced, links
from tests.versions import VERSIONS

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


def test_the_workflow_runs_what_a_developer_runs() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert [step["run"] for step in jobs["all"]["steps"] if "run" in step] == [".ci/run"]
    for job in jobs.values():
        assert job["steps"][0]["with"]["fetch-depth"] == 0, "without tags there is no version"
    rows = {(row["jax"], row["flags"]) for row in jobs["versions"]["strategy"]["matrix"]["include"]}
    assert rows == {(version.jax, version.flag_names) for version in VERSIONS}
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
