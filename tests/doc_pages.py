"""Finds the fenced blocks of the documentation's pages, and runs them in order in one namespace."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
LINKED = (*sorted(ROOT.glob("*.md")), *PAGES[1:])
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_FILE = re.compile(r"# (\w+\.py)\n")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Fenced(NamedTuple):
    """A block: its language (may be empty), its text, and the page's line where the text begins."""

    language: str
    text: str
    line: int


def fenced(text: str) -> list[Fenced]:
    """All blocks of a page's text, in order."""
    return [Fenced(match[1], match[2], text.count("\n", 0, match.start(2)) + 1) for match in _FENCE.finditer(text)]


def run(text: str, name: str, namespace: dict[str, Any]) -> int:
    """Run the Python blocks of a page and return their number.

    A block with `>>>` is a doctest: it must print what the page shows. Any other block must run. The namespace passes from
    block to block. A block that begins with `# train.py` is also written to that file, so that others can import it.

    Raises:
        AssertionError: what a block printed is not what the page says; the report has both.
    """
    blocks = [block for block in fenced(text) if block.language == "python"]
    for block in blocks:
        # Line numbers in errors are those of the page. Annotations are those that the page defines.
        if file := _FILE.match(block.text):
            Path(file[1]).write_text(block.text)
        if ">>> " in block.text:
            assert block.text.startswith(">>> "), f"{name}, line {block.line}: what stands before the first >>> would not run"
            _run_doctest(block, name, namespace)
        else:
            exec(compile("\n" * (block.line - 1) + block.text, name, "exec", dont_inherit=True), namespace)
    return len(blocks)


def _run_doctest(block: Fenced, name: str, namespace: dict[str, Any]) -> None:
    report: list[str] = []
    test = doctest.DocTestParser().get_doctest(block.text, {}, name, name, block.line - 1)
    test.globs = namespace
    failed = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(test, out=report.append, clear_globs=False).failed
    assert not failed, "".join(report)


def commands(text: str) -> list[str]:
    """The commands that a page tells the reader to type, in blocks without a language, without comments."""
    lines = [line for block in fenced(text) if not block.language for line in block.text.splitlines()]
    typed = [line.removeprefix("$ ").partition("  #")[0].strip() for line in lines]
    return [line for line in typed if line.startswith(("remat-jax ", "make ", "python "))]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    outside = _FENCE.sub("", text)
    titles = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(text: str) -> list[str]:
    """The addresses of a page's links and pictures, without those of the web."""
    matches = re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", text))
    return [link for link in matches if not re.match(r"\w+:", link)]
