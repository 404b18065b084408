"""The pages of a report and of a comparison in a browser: what moves, light and dark, their requests, accessibility."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import remat_jax as rj
from remat_jax.parity.report import ParityReport
from remat_jax.parity.report_data import MemoryRow, TensorRow
from remat_jax.report import format_bytes
from tests.browser import Browser, Tab
from tests.report_pages import JOB, PLAN, POLICIES, parity_report

pytestmark = pytest.mark.browser

CONTRASTS = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parts = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const linear = [r, g, b].map(one => one / 255).map(one => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const behind = node => {
    for (let one = node; one; one = one.parentElement) {
      const found = parts(getComputedStyle(one).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255];
  };
  const found = [];
  document.querySelectorAll("details").forEach(one => { one.open = true; });
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walk.nextNode(); text; text = walk.nextNode()) {
    const node = text.parentElement;
    if (!text.textContent.trim() || !node.getClientRects().length || node.matches("script, title")) continue;
    const style = getComputedStyle(node);
    const front = parts(node instanceof SVGElement ? style.fill : style.color), back = behind(node);
    const [high, low] = [light(front), light(back)].sort((a, b) => b - a);
    found.push([(high + 0.05) / (low + 0.05), text.textContent.trim().slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    return rj.save_report(path, JOB, POLICIES, "cpu", plan=PLAN, parity=parity_report())


@pytest.fixture
def tab(browser: Browser, file: Path) -> Tab:
    opened = browser.open(file)
    prefer(opened, "light")
    return opened


def prefer(tab: Tab, scheme: str) -> None:
    tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


def figures(tab: Tab) -> dict[str, str]:
    """The value below the slider, by its name."""
    names, values = (
        tab.value(f"[...document.querySelectorAll('.figures:not([hidden]) {tag}')].map(one => one.textContent)")
        for tag in ("dt", "dd")
    )
    return dict(zip(names, values, strict=True))


def colours(tab: Tab) -> list[str]:
    """Of the page, its text, and a picture's background and text."""
    page = "getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color"
    picture = ", ".join(f"getComputedStyle(document.querySelector('.picture {tag}')).fill" for tag in ("rect", "text"))
    return tab.value(f"[{page}, {picture}]")


def layers(tab: Tab) -> str:
    return tab.value("document.querySelector('#parts').innerText")


def ring(tab: Tab) -> list[str]:
    """The position of the picture's dashed ring."""
    wide = "document.querySelector('#frontier .broad .selected')"
    return tab.value(f"['cx', 'cy'].map(name => {wide}.getAttribute(name))")


def test_the_slider_moves_along_the_frontier(tab: Tab) -> None:
    chosen, least = PLAN.frontier[1], PLAN.frontier[0]
    before = figures(tab)
    assert before["device memory"] == format_bytes(chosen.device_bytes) == "4.0 MiB"
    assert before["left of the budget"] == "2.0 MiB" and before["host memory"] == "24.0 MiB"
    layers_before, ring_before = layers(tab), ring(tab)
    tab.value("document.querySelector('#at').focus()")
    tab.press("ArrowLeft", 37)
    after = figures(tab)
    assert after["device memory"] == format_bytes(least.device_bytes) == "2.0 MiB"
    assert after["estimated step"] == "13 ms, traced program" and after["over keeping everything"] == "1.1 ms (9.2 %)"
    assert tab.value("document.querySelector('#at').getAttribute('aria-valuetext')").startswith("2.0 MiB (predicted), 13 ms")
    ring_of_least = ring(tab)
    for _ in range(2):
        tab.press("ArrowRight", 39)
    assert figures(tab)["over the budget"] == "3.0 MiB"
    assert float(ring_of_least[0]) < float(ring_before[0]) < float(ring(tab)[0])
    assert tab.value("document.querySelector('#says').textContent").endswith("over the budget")
    assert layers(tab) != layers_before
    tab.click("#back")
    assert figures(tab) == before and layers(tab) == layers_before and ring(tab) == ring_before
    tab.value("document.querySelector(\"#frontier .broad [data-series='frontier'] circle\").dispatchEvent(new Event('click'))")
    assert figures(tab) == after and ring(tab) == ring_of_least


def test_light_and_dark_follow_the_system_and_the_switch(tab: Tab) -> None:
    light = colours(tab)
    prefer(tab, "dark")
    dark = colours(tab)
    assert all(one != other for one, other in zip(light, dark, strict=True)) and light[0] == "rgb(255, 255, 255)"
    tab.click("[name=theme]", nth=1)
    assert colours(tab) == light
    prefer(tab, "light")
    tab.click("[name=theme]", nth=2)
    assert colours(tab) == dark
    tab.click("[name=theme]", nth=0)
    assert colours(tab) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(tab: Tab, scheme: str) -> None:
    prefer(tab, scheme)
    contrasts = tab.value(CONTRASTS)
    # WCAG 2.2's least contrast at level AA for text of this size (1.4.3).
    assert [contrast for contrast in contrasts if contrast[0] < 4.5] == [] and len(contrasts) > 200


def test_it_asks_nobody_and_its_console_is_empty(tab: Tab, file: Path) -> None:
    tab.click(".sortable button")
    tab.click("#back")
    tab.type("#filter", "up")
    tab.click("summary")
    assert tab.requests == [file.as_uri()] and tab.errors == [] and tab.console == []


def test_a_small_window_scrolls_in_one_direction_only(tab: Tab) -> None:
    heading = "document.querySelector('#policies-table thead').offsetHeight"
    height = tab.value(heading)
    tab.send("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    assert tab.value("new Promise(done => setTimeout(() => done(document.documentElement.scrollWidth), 200))") == 390
    assert tab.value(heading) == height < 40  # the words of hidden columns are not stacked
    # Every picture is drawn for this width, so that letters keep their size.
    seen = tab.value("[...document.querySelectorAll('.picture svg')].filter(one => one.getClientRects().length).length")
    assert seen == tab.value("document.querySelectorAll('.picture .narrow svg').length") - 2  # those of hidden points
    inside = "text => { const box = text.getBoundingClientRect(); return box.left >= 0 && box.right <= 390; }"
    assert tab.value(f"[...document.querySelectorAll('.narrow text')].every({inside})")
    size = "one => one.getBoundingClientRect().width / one.viewBox.baseVal.width"
    assert tab.value(f"[...document.querySelectorAll('#frontier .narrow svg')].map({size})") == [1]


def test_a_screen_reader_is_told_what_things_are(tab: Tab) -> None:
    tab.send("Accessibility.enable")
    nodes = [node for node in tab.send("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    named = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes}
    for role in ("button", "checkbox", "image", "link", "radio", "region", "searchbox", "slider", "table"):
        mine = [name for kind, name in named if kind == role]
        assert mine and (role == "table" or all(mine)), role
    assert ("slider", "Way to run the step") in named and ("navigation", "sections") in named
    assert any(role == "image" and name.startswith("full: ") and "A arguments and results" in name for role, name in named)
    levels = [int(node["properties"][0]["value"]["value"]) for node in nodes if node["role"]["value"] == "heading"]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))


def test_parts_differ_in_more_than_their_colours(tab: Tab) -> None:
    texts = "[...document.querySelectorAll('{} .broad text')].map(one => one.textContent).filter(one => /^[A-Z]$/.test(one))"
    for section in ("#modules", "#parts [data-point]:not([hidden])"):
        letters = tab.value(texts.format(section))
        assert len(set(letters)) >= 2 and letters[-len(set(letters)) :] == sorted(set(letters))
    # Three bars in two panels, one of which has nothing in host memory; and the legend.
    assert tab.value("document.querySelectorAll('#parts [data-point]:not([hidden]) .broad .hatch').length") >= 3


# The page of a comparison with PyTorch.


MODES = ("off", "checkpoint", "offload")
INSIDE = [f"{where}.{parameter}" for where in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
          for parameter in ("weight", "bias")]  # fmt: skip
LAYERS = [f"h.{i}.{name}" for i in range(12) for name in INSIDE]
PARAMETERS = ["wte.weight", "wpe.weight", *LAYERS, "ln_f.weight", "ln_f.bias"]
WRONG = ["h.2.ln_2.bias", "h.3.attn.c_attn.bias", "h.3.attn.c_attn.weight"]


@functools.cache
def large_parity() -> ParityReport:
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
    return replace(parity_report(), rows=tuple(rows), memory=tuple(memory), **names)


@pytest.fixture(scope="module")
def parity_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_parity().to_html(tmp_path_factory.mktemp("page") / "parity.html")


@pytest.fixture
def parity(browser: Browser, parity_file: Path) -> Tab:
    return browser.open(parity_file)


def shown(tab: Tab, column: int) -> list[str]:
    """The cells of a column in the visible rows."""
    return tab.value(
        "[...document.querySelectorAll('#rows tbody tr')].filter(row => row.getClientRects().length)"
        f".map(row => row.cells[{column}].textContent)"
    )


def test_a_click_on_a_head_sorts_and_another_turns_the_order_round(parity: Tab, parity_file: Path) -> None:
    norms = [f"{row.norm:.1e}" for row in sorted(large_parity().rows, key=lambda row: row.norm or 0)]
    assert shown(parity, 4) != norms
    parity.click("#rows th button", nth=4)
    assert shown(parity, 4) == norms
    assert parity.value("document.querySelectorAll('#rows th')[4].ariaSort") == "ascending"
    parity.click("#rows th button", nth=4)
    assert shown(parity, 4) == norms[::-1]
    assert parity.value("[...document.querySelectorAll('#rows th')].map(head => head.ariaSort).join()").count("none") == 6
    parity.click("#rows th button", nth=1)  # names: the layers in numerical order
    layers = [name.split(".")[1] for name in shown(parity, 1) if name.startswith("h.")]
    assert layers == sorted(layers, key=int) and layers[-1] == "11"
    assert parity.requests == [parity_file.as_uri()] and parity.errors == []


def test_what_is_typed_chooses_the_rows(parity: Tab) -> None:
    assert parity.value("document.querySelector('#count').textContent") == "298 of 298"
    parity.type("#filter", "H.11.mlp")
    assert shown(parity, 1) == [name for name in LAYERS if name.startswith("h.11.mlp")] * 2
    assert parity.value("document.querySelector('#count').textContent") == "8 of 298"
    for _ in range(len("H.11.mlp")):
        parity.press("Backspace", 8)
    assert len(shown(parity, 1)) == 298
    parity.click("#failed")
    assert sorted(shown(parity, 1)) == WRONG


def test_everything_is_reached_by_the_keyboard(parity: Tab) -> None:
    parity.click("#filter")
    parity.press("Tab", 9)
    parity.press("Tab", 9)
    assert parity.value("document.activeElement.dataset.column") == "0"
    parity.send("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    assert parity.value("document.querySelectorAll('#rows th')[0].ariaSort") == "ascending"


def test_it_opens_where_it_went_wrong(parity: Tab) -> None:
    opened = parity.value(
        "[...document.querySelectorAll('.tree details[open] > summary')].map(one => one.textContent.split(' ')[0])"
    )
    assert opened == ["GPT2LMHeadModel", "h", "2", "ln_2", "3", "attn", "c_attn"]
    # Residuals on device and host, and the peak, in two panels; the peak's bars have one part each.
    assert parity.value("document.querySelectorAll('.broad rect:has(title)').length") == (2 * 2 + 1) * 6
