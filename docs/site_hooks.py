"""What MkDocs does beside `mkdocs.yml`: files that pages link to become pages too, formulas become MathML, notes are listed.

Pages are written for the repository's host, where `../examples/pi0.py` is a link like any other. A site has `docs` only, so
each file that is linked to gets a page of its own under `repository/`. Formulas are set when the site is built, not when read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "repository"
PICTURES = (".png", ".svg")
_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
_LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=[)#])")
# Code is left as it is, in fences and in lines.
_CODE_OR_FORMULA = re.compile(
    r"^(`{3,}).*?^\1$|`[^`\n]+`|\$\$(.+?)\$\$|\$([^$\s](?:[^$\n]*[^$\s])?)\$", re.DOTALL | re.MULTILINE
)


def on_config(config: Any) -> None:
    """List every note behind the index of notes."""
    notes = sorted(path.name for path in (ROOT / "docs" / "notes").glob("*.md"))
    for entry in config.nav:
        if "Notes" in entry:
            entry["Notes"] += [f"notes/{name}" for name in notes if name != "README.md"]


def on_files(files: Files, config: Any) -> None:
    """Add a page for every file outside of `docs`, and every program in it, that a page leads to."""
    waiting = [ROOT / "docs" / page.src_uri for page in files.documentation_pages()]
    while waiting:
        for target in _outside(waiting.pop()):
            uri = _page_of(target)
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, content=_content(target)))
                waiting.append(target)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to these pages, and put formulas aside, that nothing in them is taken for Markdown."""
    page.meta["formulas"] = formulas = []
    origin = _origin(page.file.src_uri)

    def aside(found: re.Match[str]) -> str:
        block, line = found[2], found[3]
        if block is None and line is None:
            return found[0]
        formulas.append(convert(block or line, display="block" if block else "inline"))
        return f"FORMULA{len(formulas) - 1}ALUMROF"

    def lead(found: re.Match[str]) -> str:
        target = _uri(origin, found[0])
        return found[0] if target is None else os.path.relpath(target, PurePosixPath(page.file.src_uri).parent)

    return _LINK.sub(lead, _CODE_OR_FORMULA.sub(aside, markdown))


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Put the formulas in their places."""
    return re.sub(r"FORMULA(\d+)ALUMROF", lambda found: page.meta["formulas"][int(found[1])], html)


def _outside(origin: Path) -> Iterator[Path]:
    """The files that a page links to and that MkDocs would not make pages of."""
    if origin.suffix == ".md":
        for link in _LINK.findall(origin.read_text(encoding="utf-8")):
            target = (origin.parent / link).resolve()
            if target.is_file() and target.is_relative_to(ROOT) and _page_of(target).startswith(f"{FOLDER}/"):
                yield target


def _page_of(target: Path) -> str:
    """Where on the site a file of the repository is."""
    path = target.relative_to(ROOT)
    if path.parts[0] == "docs" and path.suffix in (".md", *PICTURES):
        return path.relative_to("docs").as_posix()
    return f"{FOLDER}/{path.as_posix()}" + ("" if path.suffix == ".md" else ".md")


def _origin(uri: str) -> Path:
    """The file of the repository that a page is made of."""
    if not uri.startswith(f"{FOLDER}/"):
        return ROOT / "docs" / uri
    path = ROOT / uri.removeprefix(f"{FOLDER}/")
    return path if path.is_file() else path.with_suffix("")


def _uri(origin: Path, link: str) -> str | None:
    target = (origin.parent / link).resolve()
    return _page_of(target) if target.is_file() and target.is_relative_to(ROOT) else None


def _content(target: Path) -> str:
    text = target.read_text(encoding="utf-8")
    if target.suffix == ".md":
        return _UNSEARCHED + text
    return f"{_UNSEARCHED}# {target.relative_to(ROOT).as_posix()}\n\n````{target.suffix.removeprefix('.')}\n{text}````\n"
