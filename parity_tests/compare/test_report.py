"""The visible results of a comparison: the page, the message of an assertion, the command line."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from parity_tests.compare import cases as c
from parity_tests.compare.cases import run
from parity_tests.mutants.planting import FLIPPED, at, skipped
from remat_jax.cli.app import app
from remat_jax.parity import MemoryRow, ParityReport, assert_parity, plugin
from remat_jax.parity.report import TreeNode, module_tree, page

parity = plugin.parity
ROOT = Path(__file__).resolve().parents[2]
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
    assert not re.search(r"https?:|@import|url\(", text)
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
    assert (
        "<script>alert" not in text
        and "&lt;script&gt;alert" in text
        and "<b>" not in text.replace("<b>1 B</b>", "").replace("<b>0 B</b>", "")
    )


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


def test_a_page_is_written(wrong: ParityReport, tmp_path: Path) -> None:
    target = wrong.to_html(tmp_path / "parity.html")
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")


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


CASE = """
import torch, numpy as np, flax.linen as nn
rules = "weight -> params/kernel | linear"
def same():
    print("a word of the user's own")
    return {"torch_module": torch.nn.Linear(3, 2, bias=False), "flax_module": nn.Dense(2, use_bias=False),
            "inputs": np.ones((4, 3), np.float32) / 3, "rules": rules, "modes": "off"}
def other():
    return {**same(), "flax_call": lambda model, x: model(x) * 2}
def lacking():
    return {"torch_module": torch.nn.Linear(3, 2), "flaxmodule": nn.Dense(2)}
def nothing():
    return 3
def from_file():
    from remat_jax import porting
    open("model.safetensors", "w").close()
    return {**same(), "variables": porting.load("model.safetensors")}
def of_transformers():
    import transformers
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "port.py"
    path.write_text(CASE.replace("model.safetensors", str(tmp_path / "model.safetensors")))
    return path


def test_the_command_passes_and_writes_a_page(file: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["parity", f"{file}:same", "--json", "--html", str(tmp_path / "out.html")])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["passed"] and data["page"] == str(tmp_path / "out.html") and len(data["rows"]) == 4
    assert "Parity: Linear (PyTorch) and Dense (Flax)" in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize(
    ("missing", "name", "status", "message"),
    [
        ("torch", "same", 1, "parity compares with PyTorch, which is not installed: pip install 'remat_jax[torch]'"),
        ("safetensors", "from_file", 2, "safetensors is not installed; pip install safetensors"),
        ("transformers", "of_transformers", 2, "ModuleNotFoundError: import of transformers halted"),
    ],
)
def test_the_command_says_what_is_not_installed(
    file: Path, monkeypatch: pytest.MonkeyPatch, missing: str, name: str, status: int, message: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "safetensors.numpy", raising=False)
    done = CliRunner().invoke(app, ["parity", f"{file}:{name}"])
    assert done.exit_code == status and message in done.stderr, done.output


def test_the_command_exits_1_where_models_differ_and_2_for_bad_usage(file: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["parity", f"{file}:other"])
    assert done.exit_code == 1 and "NOT PASSED" in done.stdout
    for name, message in (
        ("lacking", "lacks flax_module, inputs and has 'flaxmodule'"),
        ("nothing", "gave a int: expected a dictionary of the arguments"),
        ("nowhere", "has no 'nowhere'"),
    ):
        done = CliRunner().invoke(app, ["parity", f"{file}:{name}"])
        assert done.exit_code == 2 and message in done.stderr, done.output
    done = CliRunner().invoke(app, ["parity", f"{file}:same", "--html", str(tmp_path / "no" / "out.html")])
    assert done.exit_code == 2 and "there is no folder" in done.stderr
