"""`make figures`: writes the tables of figures into the pages, each by the command that prints it.

    python -m benchmarks.figures                   every table of the documentation, which takes hours
    python -m benchmarks.figures convolutions      the tables whose command contains this word
    python -m benchmarks.figures --check           lists the tables with their state; runs nothing

A table is between two comments, and its text is what its command prints on standard output. Output that is not a Markdown table
is fenced. A command may begin with environment variables, `NAME=value python …`.

    <!-- figures: python -m benchmarks.convolutions @ 0f3c81d2a6b4 -->

    | policy | device memory | … |

    <!-- end of figures -->

After the @ is one of three states:

- A digest of the command's sources, as they were when the table was written. The sources are the files that the command names
  and all files of this repository's benchmarks, examples and tests that these import, without comment lines and without the
  docstrings of modules, classes and functions. The table is stale if these sources have changed. The digest does not cover
  `remat_jax`; a test reruns light commands instead.
- `older`: the table is stale and must be written again.
- `recorded DATE COMMIT`: the command printed these figures on this date, with the sources of this commit. Such a table is never
  rewritten or stale: its command takes long, needs an idle machine, or ran with several versions of JAX. To write it again,
  replace the state by `older`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDED = "recorded"
_OURS = ("benchmarks", "examples", "parity_tests", "tests")
_STATE = rf"\w+|{RECORDED} \d{{4}}-\d\d-\d\d [0-9a-f]{{7,}}"
_BLOCK = re.compile(
    rf"<!-- figures: (?P<command>[^\n]*?) @ (?P<state>{_STATE}) -->\n(?P<text>.*?)<!-- end of figures -->\n", re.DOTALL
)
_VARIABLE = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Figures:
    """A table of figures in a page: the command that prints it, its state, and its text.

    Attributes:
      state: a digest of the command's sources, `older`, or `recorded DATE COMMIT`.
    """

    page: Path
    command: str
    state: str
    text: str

    @property
    def is_recorded(self) -> bool:
        """Whether the figures are a record of one run, which is not repeated."""
        return self.state.startswith(RECORDED)

    @property
    def is_stale(self) -> bool:
        """Whether the command's sources have changed since the table was written."""
        return not self.is_recorded and self.state != digest_of(self.command)

    def run(self) -> str:
        """Run the command and return its standard output.

        Raises:
            RuntimeError: the command failed or printed nothing.
        """
        words = shlex.split(self.command)
        variables = dict(word.split("=", 1) for word in words if _VARIABLE.match(word))
        arguments = words[len(variables) + 1 :]
        process = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True
        )
        if not process.stdout or process.returncode > 1:  # 1: a claim about the figures does not hold
            raise RuntimeError(f"{self.command!r} ended with {process.returncode} and printed {len(process.stdout)} characters")
        return process.stdout


def pages() -> list[Path]:
    """The pages that may have figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def blocks() -> list[Figures]:
    """All tables of figures, page by page."""
    return [
        Figures(page, match["command"], match["state"], match["text"].strip())
        for page in pages()
        for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def write(page: Path, command: str, text: str) -> None:
    """Replace the table of `command` in `page` by `text`, with the digest of the current sources.

    Raises:
        LookupError: the page has no table of this command, or several.
    """
    old = page.read_text(encoding="utf-8")
    places = [match for match in _BLOCK.finditer(old) if match["command"] == command]
    if len(places) != 1:
        raise LookupError(f"{page} has {len(places)} blocks of {command!r}, expected one: <!-- figures: {command} @ older -->")
    start, end = places[0].span()
    page.write_text(old[:start] + block(command, text) + old[end:], encoding="utf-8")


def block(command: str, text: str) -> str:
    """The marked text with the digest of the current sources; output that is not a Markdown table is fenced."""
    text = text.strip()
    if not text.startswith("| "):
        text = "```text\n" + "\n".join(line.rstrip() for line in text.splitlines()) + "\n```"
    return f"<!-- figures: {command} @ {digest_of(command)} -->\n\n{text}\n\n<!-- end of figures -->\n"


def markdown(columns: list[str], rows: list[tuple[Any, ...]]) -> str:
    """A table in Markdown; columns of figures are right-aligned.

    >>> print(markdown(["policy", "device", "host"], [("full", "1.0 GiB", ""), ("off", "2.0 GiB", "")]))
    | policy | device | host |
    | --- | ---: | --- |
    | full | 1.0 GiB |  |
    | off | 2.0 GiB |  |
    """
    texts = [[str(row[at]) for row in rows if row[at] != ""] for at in range(len(columns))]
    marks = ["---:" if cells and all(cell.lstrip("-+")[0].isdigit() for cell in cells) else "---" for cells in texts]
    lines = [columns, marks, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def digest_of(command: str) -> str:
    """The digest of the sources of a command, without comments and docstrings."""
    content = hashlib.sha256()
    for path in sorted(_sources(_named_files(command))):
        content.update(f"{path.relative_to(ROOT).as_posix()}\n{_code(path.read_text(encoding='utf-8'))}\n".encode())
    return content.hexdigest()[:12]


@functools.cache
def _code(source: str) -> str:
    """A module's lines without docstrings, comment lines and empty lines; independent of the Python version."""
    lines = dict(enumerate(source.splitlines(), 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1):
                del lines[number]
    return "\n".join(line for line in lines.values() if line.strip() and not line.lstrip().startswith("#"))


def _named_files(command: str) -> list[Path]:
    """The files that a command names: a module, a script, a workload.

    Raises:
        LookupError: the command names no file of this repository.
    """
    words = [word.rstrip(";") for word in shlex.split(command)]
    paths = [ROOT / word.partition(":")[0] if ".py" in word else _file(word) for word in words]
    files = [path for path in paths if path is not None and path.is_file()]
    if not files:
        raise LookupError(f"{command!r} names no module and no file of {', '.join(_OURS)}")
    return files


def _file(module: str) -> Path | None:
    if module.partition(".")[0] not in _OURS:
        return None
    base = ROOT.joinpath(*module.split("."))
    candidates = (base.with_suffix(".py"), base / "__main__.py", base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def _sources(files: list[Path]) -> set[Path]:
    """`files`, and all files of this repository that they import, directly or indirectly."""
    sources, waiting = set[Path](), list(files)
    while waiting:
        path = waiting.pop()
        if path not in sources and path != Path(__file__):  # this module changes no figure
            sources.add(path)
            package = path.relative_to(ROOT).parent.parts
            names = _imported(path.read_text(encoding="utf-8"), package)
            waiting += [file for name in names if (file := _file(name)) is not None]
    return sources


@functools.cache
def _imported(source: str, package: tuple[str, ...]) -> frozenset[str]:
    """The modules that a file of `package` may import."""
    names = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            names |= {base or "", *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def main() -> int:
    """Write the tables whose command contains `part`, except recorded ones; with `--check`, return 1 if a table is stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="", help="of the command")
    parser.add_argument("--check", action="store_true", help="only list the tables with their state")
    options = parser.parse_args()
    chosen = [table for table in blocks() if options.part in table.command]
    if not chosen:
        commands = sorted({table.command for table in blocks()})
        parser.error(f"part={options.part!r}: no command contains this; the commands are {commands}")
    for table in chosen:
        name = f"{table.page.relative_to(ROOT)}: {table.command}"
        if options.check:
            state = table.state if table.is_recorded else "stale" if table.is_stale else "current"
            print(f"{state:27} {name}")
        elif not table.is_recorded:
            print(name, flush=True)
            write(table.page, table.command, table.run())
    return int(options.check and any(table.is_stale for table in chosen))


if __name__ == "__main__":
    sys.exit(main())
