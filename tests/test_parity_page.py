"""The page of a large report in a browser: it sorts, filters, and makes no requests."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from remat_jax.parity.report import ParityReport
from remat_jax.parity.report_data import MemoryRow, TensorRow
from tests.browser import Browser, Tab
from tests.report_pages import parity_report

MODES = ("off", "checkpoint", "offload")
INSIDE = [f"{where}.{parameter}" for where in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
          for parameter in ("weight", "bias")]  # fmt: skip
LAYERS = [f"h.{i}.{name}" for i in range(12) for name in INSIDE]
PARAMETERS = ["wte.weight", "wpe.weight", *LAYERS, "ln_f.weight", "ln_f.bias"]
WRONG = ["h.2.ln_2.bias", "h.3.attn.c_attn.bias", "h.3.attn.c_attn.weight"]

pytestmark = pytest.mark.browser


@functools.cache
def report() -> ParityReport:
    """A comparison of the size of GPT-2, 124 million parameters, with three wrong gradients."""
    made = random.Random(0)
    rows = []
    for kind, name in [("output", "logits"), ("output", "loss"), *itertools.product(("gradient", "update"), PARAMETERS)]:
        errors = {mode: made.uniform(1e-17, 1e-14) for mode in MODES}
        rows.append(TensorRow(kind, name, f"params/{name.replace('.', '/')}", (768, 2304), made.uniform(1e-6, 1e3), errors))
        if kind == "gradient" and name in WRONG:
            rows[-1].fail("2.0 off in float64", "off")
    memory = [MemoryRow(mode, side, 1 << 33, 1 << 30, 1 << 34, "compiled") for mode in MODES for side in ("PyTorch", "JAX")]
    names = {"torch": "GPT2LMHeadModel", "rules": "wte.weight -> params/wte/embedding", "modes": MODES, "dtypes": ("float64",)}
    divergence = {"torch_path": "h/3/attn", "flax_path": "h_3/attn", "error": 2.0, "reference": 1.0}
    names["divergences"] = {"forward": None, "backward": divergence}
    return dataclasses.replace(parity_report(), rows=tuple(rows), memory=tuple(memory), **names)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report().to_html(tmp_path_factory.mktemp("page") / "parity.html")


@pytest.fixture
def tab(browser: Browser, file: Path) -> Tab:
    return browser.open(file)


def shown(tab: Tab, column: int) -> list[str]:
    """The cells of a column in the visible rows."""
    return tab.value(
        "[...document.querySelectorAll('#rows tbody tr')].filter(row => row.getClientRects().length)"
        f".map(row => row.cells[{column}].textContent)"
    )


def test_a_click_on_a_head_sorts_and_another_turns_the_order_round(tab: Tab, file: Path) -> None:
    norms = [f"{row.norm:.1e}" for row in sorted(report().rows, key=lambda row: row.norm or 0)]
    assert shown(tab, 4) != norms
    tab.click("#rows th button", nth=4)
    assert shown(tab, 4) == norms
    assert tab.value("document.querySelectorAll('#rows th')[4].ariaSort") == "ascending"
    tab.click("#rows th button", nth=4)
    assert shown(tab, 4) == norms[::-1]
    assert tab.value("[...document.querySelectorAll('#rows th')].map(head => head.ariaSort).join()").count("none") == 6
    tab.click("#rows th button", nth=1)  # names: the layers in numerical order
    layers = [name.split(".")[1] for name in shown(tab, 1) if name.startswith("h.")]
    assert layers == sorted(layers, key=int) and layers[-1] == "11"
    assert tab.requests == [file.as_uri()] and tab.errors == []


def test_what_is_typed_chooses_the_rows(tab: Tab) -> None:
    assert tab.value("document.querySelector('#count').textContent") == "298 of 298"
    tab.type("#filter", "H.11.mlp")
    assert shown(tab, 1) == [name for name in LAYERS if name.startswith("h.11.mlp")] * 2
    assert tab.value("document.querySelector('#count').textContent") == "8 of 298"
    for _ in range(len("H.11.mlp")):
        tab.press("Backspace", 8)
    assert len(shown(tab, 1)) == 298
    tab.click("#failed")
    assert sorted(shown(tab, 1)) == WRONG


def test_everything_is_reached_by_the_keyboard(tab: Tab) -> None:
    tab.click("#filter")
    tab.press("Tab", 9)
    tab.press("Tab", 9)
    assert tab.value("document.activeElement.dataset.column") == "0"
    tab.send("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    assert tab.value("document.querySelectorAll('#rows th')[0].ariaSort") == "ascending"


def test_it_opens_where_it_went_wrong(tab: Tab) -> None:
    opened = tab.value(
        "[...document.querySelectorAll('.tree details[open] > summary')].map(one => one.textContent.split(' ')[0])"
    )
    assert opened == ["GPT2LMHeadModel", "h", "2", "ln_2", "3", "attn", "c_attn"]
    # Residuals on device and host, and the peak, in two panels; the peak's bars have one part each.
    assert tab.value("document.querySelectorAll('.broad rect:has(title)').length") == (2 * 2 + 1) * 6
