"""`make figures`: writes the figures of the pages by the commands that print them.

    python -m benchmarks.figures                   every block of figures in the documentation, which takes hours
    python -m benchmarks.figures convolutions      the blocks whose command has this in it
    python -m benchmarks.figures --check           names the blocks that are stale, and runs nothing

A block stands between two comments, and its text is what its command prints on standard output:

    <!-- figures: python -m benchmarks.convolutions @ 0f3c81d2a6b4 -->

    | policy | device memory | … |

    <!-- end of figures -->

Behind the @ is the digest of the command's own sources when the block was written: its module, and what that imports of
benchmarks, examples and tests, without comments and docstrings. A block is stale if these have changed since. `older` stands
for a block that was stale when it got its marks. The digest leaves out `remat_jax` itself; a test runs light commands again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OLDER = "older"
_OURS = ("benchmarks", "examples", "parity_tests", "tests")
_BLOCK = re.compile(r"<!-- figures: (?P<command>.*?) @ (?P<digest>\w+) -->\n(?P<text>.*?)<!-- end of figures -->\n", re.DOTALL)


@dataclass(frozen=True)
class Figures:
    """A block of figures: its page, the command that prints it, the digest that it was written with, and its text."""

    page: Path
    command: str
    digest: str
    text: str

    @property
    def is_stale(self) -> bool:
        """Whether the command's sources have changed since the block was written."""
        return self.digest != digest_of(self.command)

    def run(self) -> str:
        """What the command prints now."""
        words = shlex.split(self.command)
        done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if not done.stdout or done.returncode > 1:  # 1: a claim about the figures does not hold
            raise RuntimeError(f"{self.command!r} ended with {done.returncode} and printed {len(done.stdout)} letters")
        return done.stdout


def pages() -> list[Path]:
    """The pages that may have figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def blocks() -> list[Figures]:
    """All blocks of figures, page by page."""
    return [
        Figures(page, match["command"], match["digest"], match["text"].strip())
        for page in pages()
        for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def write(page: Path, command: str, text: str) -> None:
    """Replace the block of `command` in `page` by `text`, with the digest of today's sources.

    Raises:
        LookupError: the page has no block of this command, or several.
    """
    old = page.read_text(encoding="utf-8")
    places = [match for match in _BLOCK.finditer(old) if match["command"] == command]
    if len(places) != 1:
        raise LookupError(f"{page} has {len(places)} blocks of {command!r}, expected one: <!-- figures: {command} @ older -->")
    start, end = places[0].span()
    page.write_text(old[:start] + block(command, text) + old[end:], encoding="utf-8")


def block(command: str, text: str) -> str:
    """A block with today's digest."""
    return f"<!-- figures: {command} @ {digest_of(command)} -->\n\n{text.strip()}\n\n<!-- end of figures -->\n"


def markdown(columns: list[str], rows: list[tuple[Any, ...]]) -> str:
    """A table in Markdown; columns of figures stand at the right.

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
    for path in sorted(_sources(_start(command))):
        content.update(f"{path.relative_to(ROOT).as_posix()}\n{_code(path.read_text(encoding='utf-8'))}\n".encode())
    return content.hexdigest()[:12]


def _code(source: str) -> str:
    """The lines of a module without docstrings, lines of comments and empty lines; the same in every Python."""
    lines = dict(enumerate(source.splitlines(), 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1):
                del lines[number]
    return "\n".join(line for line in lines.values() if line.strip() and not line.lstrip().startswith("#"))


def _start(command: str) -> Path:
    """The file that a command begins with: a module, a script, or the workload that `remat-jax` is given.

    Raises:
        LookupError: the command names none.
    """
    for word in shlex.split(command):
        path = ROOT / word.partition(":")[0] if ".py" in word else _file(word)
        if path is not None and path.is_file():
            return path
    raise LookupError(f"{command!r} names no module and no file of {', '.join(_OURS)}")


def _file(module: str) -> Path | None:
    if module.partition(".")[0] not in _OURS:
        return None
    base = ROOT.joinpath(*module.split("."))
    candidates = (base.with_suffix(".py"), base / "__main__.py", base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def _sources(start: Path) -> set[Path]:
    """The file and all files of ours that it imports, directly or not."""
    found, waiting = set[Path](), [start]
    while waiting:
        path = waiting.pop()
        if path not in found and path != Path(__file__):  # what only writes tables changes no figure
            found.add(path)
            waiting += [file for name in _imported(path) if (file := _file(name)) is not None]
    return found


def _imported(path: Path) -> Iterator[str]:
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            yield base or ""
            yield from (f"{base}.{alias.name}" for alias in node.names)


def main() -> int:
    """Write the blocks whose command is asked for; with `--check`, 1 if one is stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="", help="of the command")
    parser.add_argument("--check", action="store_true", help="only name the stale blocks")
    options = parser.parse_args()
    chosen = [one for one in blocks() if options.part in one.command]
    if not chosen:
        parser.error(f"part={options.part!r}: no command has this in it; they are {sorted({one.command for one in blocks()})}")
    stale = 0
    for one in chosen:
        name = f"{one.page.relative_to(ROOT)}: {one.command}"
        if options.check:
            stale += one.is_stale
            print(f"{'stale  ' if one.is_stale else 'current'} {name}")
        else:
            print(name, flush=True)
            write(one.page, one.command, one.run())
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
