"""The visible results of a comparison: the page, and the message of an assertion."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from parity_tests.compare import cases as c
from parity_tests.compare.cases import run
from parity_tests.mutants.planting import FLIPPED, at, skipped
from remat_jax.parity import MemoryRow, ParityReport, assert_parity, plugin
from remat_jax.parity.report import TreeNode, module_tree, page

parity = plugin.parity
FAULT = at("layers_0/ffn/up", FLIPPED)


@pytest.fixture(scope="module")
def wrong() -> ParityReport:
    """A sign flipped in the first layer's feed-forward."""
    return run(FAULT(c.stack()), **{**c.QUICK, "memory": True})


class Page(HTMLParser):
    """The tags of a page, the rows of its tables, and its requests."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_a_page_has_every_tensor_and_loads_nothing(wrong: ParityReport) -> None:
    text = page(wrong)
    parsed = Page(text)
    assert not [tag for tag, attributes in parsed.tags if {"src", "href"} & attributes.keys()]
    assert text.startswith("<!doctype html>") and not re.search(r"https?:|@import|url\(", text)
    tensors = [row for row in parsed.rows if row[0] in ("output", "gradient")]
    assert len(tensors) == len(wrong.rows)
    assert sum(attributes.get("class") == "failed" and tag == "tr" for tag, attributes in parsed.tags) == len(wrong.failed_rows)
    assert [attributes["data-column"] for tag, attributes in parsed.tags if tag == "button"] == list(map(str, range(7)))
    weight_row = next(row for row in tensors if row[1] == "layers.0.ffn.0.weight")
    assert weight_row[2:4] == ["params/layers_0/ffn/up/kernel", "64×16"] and "off in float64" in weight_row[-1]


def test_bars_are_as_long_as_their_bytes(wrong: ParityReport) -> None:
    tooltip = r"<title>off, (\w+): [A-Z] \w+, ([\w ]+) [\d.]+ \w+, [\d.]+ % \(([\d,]+) bytes\)</title>"
    parts = {"on the device": "device_bytes", "on the host": "host_bytes", "of both passes": "peak_bytes"}
    sizes = {(row.framework, kind): getattr(row, name) for row in wrong.memory for kind, name in parts.items()}
    assert len(sizes) == 6
    assert min(sizes["JAX", "on the device"], sizes["PyTorch", "of both passes"], sizes["JAX", "of both passes"]) > 0
    drawn = set()
    for picture in page(wrong).split('<div class="broad">')[1:]:
        # The panel of bytes comes first; the panel of shares repeats its bars.
        bytes_alone = picture.partition("</svg>")[0].partition(">Shares<")[0]
        bars = re.findall(rf'width="([\d.]+)" height="[\d.]+" [^>]*>{tooltip}', bytes_alone)
        by_kind = {(framework, kind): (float(width), int(size.replace(",", ""))) for width, framework, kind, size in bars}
        scale = max(width / size for width, size in by_kind.values() if size)
        assert [width for width, _ in by_kind.values()] == pytest.approx(
            [scale * size for _, size in by_kind.values()], abs=0.02
        )
        assert {key: size for key, (_, size) in by_kind.items()} == {key: sizes[key] for key in by_kind}
        drawn |= by_kind.keys()
    assert drawn == sizes.keys()


def test_text_of_the_users_is_no_markup() -> None:
    report = ParityReport(
        (), (), (MemoryRow("<b>", "JAX", 1, 0),), "<script>alert(1)</script>", "Dense", "", ("off",), ("float64",)
    )
    text = page(report)
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text
    assert "<b>" not in text.replace("<b>1 B</b>", "").replace("<b>0 B</b>", "")


def test_the_tree_marks_where_it_goes_wrong(wrong: ParityReport) -> None:
    divergence = {"torch_path": "layers.0.ffn.0", "flax_path": "layers_0/ffn/up", "error": 2.0, "reference": 1.0}
    report = ParityReport(**{**vars(wrong), "divergences": {"forward": None, "backward": divergence}})
    tree = module_tree(report)

    def node(*path: str) -> TreeNode:
        here = tree
        for part in path:
            here = here.children[part]
        return here

    assert node("layers", "0", "ffn", "0").mark == "◀ first difference, backward (2.0e+00)"
    assert not node("layers", "0", "ffn").passed and node("layers", "1", "ffn").passed
    assert node("layers", "1", "norm2", "weight").text.startswith("gradient ")
    assert "◀ first difference, backward" in page(report)


def test_an_assertion_names_every_wrong_tensor(wrong: ParityReport) -> None:
    with pytest.raises(AssertionError) as raised:
        assert_parity(**FAULT(c.stack()), **c.QUICK)
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("NOT PASSED: ")
    named = {line.split()[1].rstrip(":") for line in lines if line.startswith("  gradient ")}
    assert named == {row.name for row in wrong.failed_rows}


def test_the_fixture_passes_or_leaves_a_page(parity: Any, tmp_path: Path) -> None:
    assert parity(**c.stack(), **c.QUICK).passed
    with pytest.raises(AssertionError, match=r"gradient .*\n  the whole report: .*parity\.html"):
        parity(**at("layers_1", skipped)(c.stack()), **c.QUICK)
    assert (tmp_path / "parity.html").is_file()
