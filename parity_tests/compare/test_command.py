"""`remat-jax parity`: its exit status, its page, and for a mistake our own error with the remedy, and no traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from remat_jax.cli.app import app
from remat_jax.parity.report import ParityReport
from remat_jax.parity.report_data import Check, MemoryRow
from remat_jax.report.tables import render

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


def parity(folder: Path, name: str, *options: str) -> Any:
    """The command for a function of a file."""
    file = folder / "port.py"
    file.write_text(CASE.replace("model.safetensors", str(folder / "model.safetensors")))
    return CliRunner().invoke(app, ["parity", f"{file}:{name}", *options])


def test_a_right_pair_passes_and_a_page_is_written(tmp_path: Path) -> None:
    done = parity(tmp_path, "same", "--json", "--html", str(tmp_path / "out.html"))
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["passed"] and data["page"] == str(tmp_path / "out.html") and len(data["rows"]) == 5
    assert "Parity: Linear (PyTorch) and Dense (Flax)" in (tmp_path / "out.html").read_text()


MISTAKES = {
    "narrow": "give keep_float64=True, which runs it in float64; to compare without float64, give dtypes=('float32',)",
    "asking": "needs the arguments module: expected a function without arguments",
    "lacking": "lacks flax_module, inputs and has 'flaxmodule'",
    "nothing": "gave a int: expected a dictionary of the arguments",
    "nowhere": "has no 'nowhere'",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_with_its_remedy(name: str, tmp_path: Path) -> None:
    done = parity(tmp_path, name)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.output
    assert MISTAKES[name] in done.stderr and "Traceback" not in done.output


def test_a_page_without_a_folder_is_a_mistake(tmp_path: Path) -> None:
    done = parity(tmp_path, "same", "--html", str(tmp_path / "no" / "out.html"))
    assert done.exit_code == 2 and "there is no folder" in done.stderr


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
    done = parity(tmp_path, name)
    assert done.exit_code == status and message in done.stderr, done.output


def test_a_wrong_pair_is_told_in_the_terminal(tmp_path: Path) -> None:
    done = parity(tmp_path, "other")
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
