"""The site that `make docs` builds: strictly, with every public name, and without requests to other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import remat_jax
from tests.browser import Browser
from tests.doc_pages import ROOT

# Modules that are public names themselves.
MODULES = {"remat_jax.parity", "remat_jax.porting", "torch_ref.faithful"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does; a dead link or anchor fails it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def html_of(site: Path, pattern: str = "**/*.html") -> str:
    return "\n".join(page.read_text() for page in sorted(site.glob(pattern)))


def public_names() -> set[str]:
    """The names that the packages list; PyTorch's list is read from the source, not imported."""
    listed = re.search(r"__all__ = \[(.*?)\]", (ROOT / "torch_ref" / "__init__.py").read_text(), re.DOTALL)
    assert listed is not None
    names = {f"torch_ref.{name}" for name in re.findall(r'"(\w+)"', listed[1])}
    for module in (remat_jax, remat_jax.parity, remat_jax.porting):
        names |= {f"{module.__name__}.{name}" for name in module.__all__}
    return names


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """Each as its own kind: a function is not confused with the module of its name."""
    reference = html_of(site, "reference/*.html")
    anchors = set(re.findall(r'id="((?:remat_jax|torch_ref)[\w.]+)"', reference))
    doubled = {re.sub(r"\.(\w+)\.\1$", r".\1", anchor) for anchor in anchors}
    assert public_names() - anchors - doubled == set() and len(public_names()) > 100
    assert reference.count("doc-object doc-module") == len(MODULES)
    assert ">>> " not in re.sub(r"<pre.*?</pre>", "", reference, flags=re.DOTALL).replace("&gt;", ">")


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=\"?([^\s\">]+)", html_of(site))
    assert len(loaded) > 100 and [link for link in loaded if re.match(r"(?:https?:)?//", link)] == []
    styles = "".join(sheet.read_text() for sheet in site.rglob("*.css"))
    assert re.findall(r"(?:url\([\"']?|@import [\"'])(?:https?:)?//[^)\"']*", styles) == []
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_formulas_are_set_and_files_of_the_repository_are_pages(site: Path) -> None:
    planner = (site / "how" / "planner.html").read_text()
    written = (ROOT / "docs" / "how" / "planner.md").read_text()
    assert planner.count('display="block"') == written.count("$$") / 2 > 0 and planner.count("<math") > 25
    text = re.sub(r"<(pre|code|math).*?</\1>", "", planner, flags=re.DOTALL)
    assert "$" not in text and "FORMULA" not in text
    assert "class Block" in re.sub(r"<[^>]+>", "", (site / "repository/examples/models/residual.py.html").read_text())
    assert "repository/ARCHITECTURE.html" in (site / "how_it_works.html").read_text()


@pytest.mark.browser
def test_a_page_asks_for_its_own_files_only(site: Path) -> None:
    with Browser() as browser:
        tab = browser.open(site / "index.html")
        assert len(tab.requests) > 3 and tab.errors == []
        assert [url for url in tab.requests if not url.startswith((site.as_uri(), "data:", "blob:"))] == []
