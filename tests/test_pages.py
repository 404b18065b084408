"""The pages that need no PyTorch: their Python runs, and their figures are those of the code."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from typer.testing import CliRunner

import remat_jax as rj
from examples import byte_decoder
from remat_jax.cli.app import app
from remat_jax.hardware import target, targets
from remat_jax.planning import loop
from remat_jax.policy import NAMED
from remat_jax.report import format_bytes
from tests.doc_pages import PAGES, ROOT, commands, run
from tests.workloads import needs_gpu_compiler

SIZES = "LAYERS, WIDTH, BATCH, LENGTH = 8, 512, 32, 1024"


@pytest.fixture(autouse=True)
def a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Files go to the test's folder, from which they can be imported; one compilation suffices."""
    monkeypatch.setattr(loop, "MOST_COMPILED", 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("train", None)


def text_of(page: str, *replaced: tuple[str, str]) -> str:
    text = (ROOT / page).read_text()
    for written, instead in replaced:
        assert text.count(written) == 1, written
        text = text.replace(written, instead)
    return text


def only_bind(function: Any) -> Any:
    """Replaces a function by the binding of its signature: its own example runs what costs many compilations."""
    return inspect.signature(function).bind


@pytest.mark.parametrize(("page", "blocks"), [("docs/choosing.md", 6), ("docs/how_it_works.md", 3), ("docs/hardware.md", 2)])
def test_pages_that_compile_nothing(page: str, blocks: int) -> None:
    assert run(text_of(page), page, {"__name__": "page"}) == blocks


def test_the_page_on_libraries() -> None:
    written: dict[str, Any] = {"__name__": "page"}
    shorter = [
        ("for index in range(4)", "for index in range(2)"),
        ("Layer(rngs) for _ in range(4)", "Layer(rngs) for _ in range(2)"),
    ]
    assert run(text_of("docs/libraries.md", *shorter), "libraries.md", written) == 4
    assert written["plan"].device_bytes <= 12_000_000 and written["job"].params.layers[0].up.weight.shape == (256, 64)


@needs_gpu_compiler
def test_the_page_on_offload() -> None:
    assert run(text_of("docs/offload.md"), "offload.md", {"__name__": "page"}) == 4


def test_the_page_on_planning() -> None:
    text = text_of("docs/planning.md", ("rj.largest_batch(", "only_bind(rj.largest_batch)("), ("(256, 512)", "(512,)"))
    assert run(text, "planning.md", {"__name__": "page", "only_bind": only_bind}) == 8


def test_five_minutes_at_a_small_size() -> None:
    """The steps of the page in order: the file, its plan, the training. Another test covers `measure`."""
    batch = ("text[None, :256], text[None, 1:257]", "text[None, :64], text[None, 1:65]")
    text = text_of("docs/start.md", (SIZES, "LAYERS, WIDTH, BATCH, LENGTH = 2, 32, 2, 96"), batch)
    before, after = text.split("## 5. ")
    assert run(before, "start.md", {}) == 1
    _, line = (line for line in commands(before) if line.startswith("remat-jax "))
    small = line.replace("--target h200", "--target cpu").replace("--budget 12GiB", "--budget 1GiB")
    result = CliRunner().invoke(app, shlex.split(small)[1:])
    assert result.exit_code == 0, result.output
    names: dict[str, Any] = {}
    assert Path("plan.html").is_file() and run(after, "start.md", names) == 2
    assert names["losses"][-1] < names["losses"][0] - 0.1


def test_what_is_kept_is_what_the_tables_say() -> None:
    """At the sizes of the pages. `off` keeps what the derivative rules of the named JAX keep."""
    policies = ("off", "full") if jax.__version__ == "0.10.2" else ("full",)
    written: dict[str, Any] = {}
    run(text_of("docs/start.md").split("## 3. ")[0], "start.md", written)
    kept = {policy: format_bytes(rj.residuals(written["job"](), policy).device_bytes) for policy in policies}
    section = text_of("docs/start.md").split("## 4. ")[0]
    rows = re.findall(r"^│ (off|full) +│.*?│.*?│.*?│ +([\d.]+ \w+) │", section, re.MULTILINE)
    assert len(rows) == 2 and {policy: size for policy, size in rows if policy in policies} == kept
    rows = re.findall(r"^\| `(\w+)` \| [\d.]+ GiB \|.*?\|.*?\|.*?\| (.*?) \| (.*?) \|", text_of("docs/memory.md"), re.MULTILINE)
    rows = [row for row in rows if row[0] in policies or row[0] != "off"]
    job = byte_decoder.job()
    tables = {policy: rj.residuals(job, policy) for policy, *_ in rows}
    sizes = {policy: (format_bytes(table.device_bytes), format_bytes(table.host_bytes)) for policy, table in tables.items()}
    assert sizes == {policy: tuple(two) for policy, *two in rows} and len(rows) >= 3


def test_every_target_and_every_policy_has_its_row() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) GiB \| (.*?) GB/s", text_of("docs/hardware.md"), re.MULTILINE)
    gpus = [gpu for gpu in map(target, targets()) if gpu.kind != "cpu"]
    assert rows == [(gpu.name, f"{gpu.memory_bytes / 2**30:.1f}", f"{gpu.hbm_bytes_per_s / 1e9:,.0f}") for gpu in gpus]
    assert {name for name in NAMED if f"`{name}`" not in text_of("docs/choosing.md")} == set()


def test_extras_that_pages_install_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"(?:remat[-_]jax|'\.)\[([\w,-]+)\]", "".join(page.read_text() for page in PAGES))
    assert len(named) >= 3
    assert {extra for extras in named for extra in extras.split(",")} <= set(project["optional-dependencies"])


def test_every_note_is_in_the_index() -> None:
    notes = {path.name for path in (ROOT / "docs" / "notes").glob("*.md")} - {"README.md"}
    assert notes <= set(re.findall(r"\]\(([\w.]+)\)", text_of("docs/notes/README.md")))
