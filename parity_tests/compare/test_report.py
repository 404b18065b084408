"""The visible results of a comparison: its page, the message of an assertion, what it says about a fault, its command."""

from __future__ import annotations

import copy
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from typer.testing import CliRunner

from parity_tests.mutants import models as c
from parity_tests.mutants.models import run
from parity_tests.mutants.planting import FLIPPED, at, output, skipped
from parity_tests.small_pairs import DENSE, Flax, Torch, finding, linears
from remat_jax.cli.app import app
from remat_jax.parity import MemoryRow, ParityReport, assert_parity, explain, plugin
from remat_jax.parity.report import TreeNode, module_tree, page
from remat_jax.parity.report_data import Check
from remat_jax.report.tables import render

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


# What a report says about a fault: the wrong tensors, their dtypes, the block that draws anew, the modules that are hidden.


def refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("not to be looked into")


@pytest.mark.parametrize("inspected", [True, False])
def test_a_pytorch_block_that_draws_anew_under_a_checkpoint_is_named(inspected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's checkpoint restores the global generator's state, not that of the module's own generator.

    A search for the block that fails ends no comparison.
    """
    model, random = copy.deepcopy(c.torch_stack()), np.random.default_rng(0)

    def seed(*_: Any) -> None:
        nonlocal random
        random = np.random.default_rng(0)

    def draw(module: Any, args: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(random.normal(size=x.shape[-1])).to(x)

    model.register_forward_pre_hook(seed)
    model.layers[1].ffn.register_forward_hook(draw)
    noise = np.random.default_rng(0).normal(size=16)
    case = at("layers_1/ffn", output(lambda x: x * noise))(c.stack(torch_module=model))
    assert run(case, **c.QUICK).passed
    if not inspected:
        monkeypatch.setattr(explain, "capture_torch", refuse)
    report = run(case, **{**c.QUICK, "modes": ("off", "checkpoint")})
    assert [check.name for check in report.checks if not check.passed] == ["PyTorch, checkpoint"] and not report.failed_rows
    found = finding(report, "PyTorch, checkpoint")
    unknown = "; it is unknown whether a module's recomputation differs: torch_module cannot be run on"
    assert found.endswith("; recomputing layers/1/ffn gives different values") == inspected
    assert inspected or (unknown in found and found.endswith("RuntimeError: not to be looked into"))


def looping(module: nn.Module, x: Any) -> Any:
    def double(module: nn.Module, carried: Any) -> Any:
        return carried + nn.Dense(3, name="inner")(carried) * 0

    if module.is_initializing():  # a loop makes no parameters
        double(module, x)
    far = nn.while_loop(lambda _, carried: jnp.sum(carried**2) < 1, double, module, jax.lax.stop_gradient(x))
    return nn.Dense(3, name="layer")(x) * 1.5 + 0 * jax.lax.stop_gradient(far)


def test_modules_that_cannot_be_looked_into_are_told_in_the_report(tmp_path: Path) -> None:
    torch.manual_seed(0)
    outside = Torch(lambda m, x: m.layer(x), **linears(3, "inner", "layer"))
    outside.inner.requires_grad_(False)
    case = {"torch_module": outside, "flax_module": Flax(looping), "inputs": np.random.default_rng(0).normal(size=(4, 3))}
    report = run({**case, "rules": DENSE}, **c.QUICK)
    assert not report.passed and report.hidden == ("inner",) and report.to_dict()["hidden"] == ["inner"]
    note = "not observed, because they run in code whose arrays cannot be captured (a while loop, for example): inner"
    assert note in " ".join(str(report).split()) and note in report.to_html(tmp_path / "page.html").read_text()


def test_a_mutant_is_found_in_float32_alone() -> None:
    report = run(at("layers_0/ffn/up", FLIPPED)(c.stack()), modes="off", dtypes="float32", memory=False)
    failed = {row.name: row.problems for row in report.failed_rows}
    assert "times PyTorch's error in float32" in failed["layers.0.ffn.0.weight"][0]
    assert "layers.0.norm2.weight" not in failed


def test_a_wrong_optimizer_is_found_by_what_it_adds() -> None:
    # optax's default decay is a hundredth of PyTorch's.
    pair = (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4), optax.adamw(1e-2, eps=1e-4))
    report = run(c.stack(), **{**c.QUICK, "optimizer": pair})
    assert {row.kind for row in report.failed_rows} == {"update"}
    idle = (lambda parameters: torch.optim.SGD(parameters, lr=1e-3), optax.sgd(0.0))
    assert {row.kind for row in run(c.stack(), **{**c.QUICK, "optimizer": idle}).failed_rows} == {"update"}


# `remat-jax parity`: its exit status, its page, and for a mistake our own error with the remedy, and no traceback.

CASE = """
import flax.linen as nn, jax.numpy as jnp, numpy as np, torch
X = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
RULES = "weight -> params/kernel | linear\\nbias -> params/bias"

def case(**options):
    print("a word of the user's own")
    right = {"torch_module": torch.nn.Linear(3, 2), "flax_module": nn.Dense(2), "inputs": X, "rules": RULES}
    return right | {"modes": "off", "memory": False} | options

def same(): return case()
def other(): return case(flax_call=lambda model, x: model(x) * 2)
def narrow(): return case(flax_module=nn.Dense(2, dtype=jnp.float32), keep_float64=False)
def asking(module): return case()
def lacking(): return {"torch_module": torch.nn.Linear(3, 2), "flaxmodule": nn.Dense(2)}
def nothing(): return 3
def from_file():
    from remat_jax import porting
    open("model.safetensors", "w").close()
    return case(variables=porting.load("model.safetensors"))
def of_transformers():
    import transformers
"""


def command(folder: Path, name: str, *options: str) -> Any:
    """The command for a function of a file."""
    file = folder / "port.py"
    file.write_text(CASE.replace("model.safetensors", str(folder / "model.safetensors")))
    return CliRunner().invoke(app, ["parity", f"{file}:{name}", *options])


def test_a_right_pair_passes_and_a_page_is_written(tmp_path: Path) -> None:
    done = command(tmp_path, "same", "--json", "--html", str(tmp_path / "out.html"))
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["passed"] and data["page"] == str(tmp_path / "out.html") and len(data["rows"]) == 5
    assert "Parity: Linear (PyTorch) and Dense (Flax)" in (tmp_path / "out.html").read_text()


MISTAKES = {
    "same": "there is no folder",
    "narrow": "give keep_float64=True, which runs it in float64; to compare without float64, give dtypes=('float32',)",
    "asking": "needs the arguments module: expected a function without arguments",
    "lacking": "lacks flax_module, inputs and has 'flaxmodule'",
    "nothing": "gave a int: expected a dictionary of the arguments",
    "nowhere": "has no 'nowhere'",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_with_its_remedy(name: str, tmp_path: Path) -> None:
    done = command(tmp_path, name, *["--html", str(tmp_path / "no" / "out.html")] * (name == "same"))
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.output
    assert MISTAKES[name] in done.stderr and "Traceback" not in done.output


@pytest.mark.parametrize(
    ("missing", "name", "status", "message"),
    [
        ("torch", "same", 1, "parity compares with PyTorch, which is not installed: pip install 'remat_jax[torch]'"),
        ("safetensors", "from_file", 2, "safetensors is not installed; pip install safetensors"),
        ("transformers", "of_transformers", 2, "ModuleNotFoundError: import of transformers halted"),
    ],
)
def test_the_command_says_what_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, name: str, status: int, message: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "safetensors.numpy", raising=False)
    done = command(tmp_path, name)
    assert done.exit_code == status and message in done.stderr, done.output


def test_a_wrong_pair_is_told_in_the_terminal(tmp_path: Path) -> None:
    done = command(tmp_path, "other")
    assert done.exit_code == 1 and "NOT PASSED" in done.output, done.output


def test_the_table_of_memory_is_whole_in_a_terminal_of_80_columns() -> None:
    how = ("tracked on fake tensors, without an optimizer", "compiled for nvidia-h200, without an optimizer")
    memory = tuple(
        MemoryRow("checkpoint", framework, 123_456_789, 987_654_321, 1_234_567_890, text)
        for framework, text in zip(("PyTorch", "JAX"), how, strict=True)
    )
    report = ParityReport((), (Check("precision", True, "full"),), memory, "Net", "Net", "", ("checkpoint",), ("float32",))
    text = render(report, width=80)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.count("│") == 7]
    columns = [" ".join(filter(None, column)) for column in zip(*cells, strict=True)]
    assert columns[0] == "checkpoint checkpoint" and columns[1] == "PyTorch JAX"
    assert columns[2:5] == ["117.7 MiB 117.7 MiB", "941.9 MiB 941.9 MiB", "1.1 GiB 1.1 GiB"]
    assert columns[5] == " ".join(how)
