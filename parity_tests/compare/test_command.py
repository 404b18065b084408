"""`remat-jax parity` with mistaken arguments: our own error with the remedy, and no traceback."""

from __future__ import annotations

from pathlib import Path

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

class Wrapper:
    def __init__(self): self.module, self.params = nn.Dense(2), {}
    def __call__(self, x): return self.module.apply({"params": self.params}, x)

class Masked(nn.Module):
    @nn.compact
    def __call__(self, x, mask): return nn.Dense(2)(x) * mask

class MaskedTorch(torch.nn.Linear):
    def forward(self, x, mask): return super().forward(x) * mask

def case(**options):
    right = {"torch_module": torch.nn.Linear(3, 2), "flax_module": nn.Dense(2), "inputs": X, "rules": RULES}
    return right | {"modes": "off", "memory": False} | options

def wrapper(): return case(flax_module=Wrapper())
def wrapper_without_rules(): return case(flax_module=Wrapper(), rules="auto")
def lacking(): return case(flax_module=Masked())
def lacking_without_rules(): return case(flax_module=Masked(), rules="auto")
def lacking_torch(): return case(torch_module=MaskedTorch(3, 2))
def torch_class(): return case(torch_module=torch.nn.Linear)
def flax_class(): return case(flax_module=nn.Dense)
def exchanged(): return case(torch_module=nn.Dense(2), flax_module=torch.nn.Linear(3, 2))
def torch_twice(): return case(flax_module=torch.nn.Linear(3, 2))
def narrow(): return case(flax_module=nn.Dense(2, dtype=jnp.float32), keep_float64=False)
def asking(module): return case()

class GatedTorch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.pooler = (torch.nn.Linear(3, 3) for _ in range(3))
    def forward(self, x): return torch.nn.functional.silu(self.gate(x)) * self.up(x)

class Gated(nn.Module):
    names: tuple = ("gate", "up")
    factor: float = 1.0
    @nn.compact
    def __call__(self, x): return nn.silu(nn.Dense(3, name=self.names[0])(x)) * nn.Dense(3, name=self.names[1])(x) * self.factor

def gated(**options):
    return case(torch_module=GatedTorch(), rules="auto", modes=("off", "checkpoint"), flax_module=Gated(**options))

def crossed(): return gated(names=("up", "gate"))
def unproven(): return gated(factor=1.01)
def right(): return gated()
def float32_inside(): return gated() | {"flax_call": lambda model, x: model(x.astype(jnp.float32)).astype(x.dtype)}
"""
MASK = "missing 1 required positional argument: 'mask'; add it to inputs, or pass it in {}_call"
MISTAKES = {
    "wrapper": "give its module, a Dense, as flax_module=wrapper.module",
    "wrapper_without_rules": "give its module, a Dense, as flax_module=wrapper.module",
    "lacking": MASK.format("flax"),
    "lacking_without_rules": MASK.format("flax"),
    "lacking_torch": MASK.format("torch"),
    "torch_class": "Linear'>: expected a torch.nn.Module, or a function that builds one",
    "flax_class": "Dense'>: expected a module of Linen, NNX, Equinox or Haiku, or a function of a dtype",
    "exchanged": "expected a torch.nn.Module, or a function that builds one",
    "torch_twice": "expected a module of Linen, NNX, Equinox or Haiku, or a function of a dtype",
    "narrow": "give keep_float64=True, which runs it in float64; to compare without float64, give dtypes=('float32',)",
    "asking": "needs the arguments module: expected a function without arguments",
    "Wrapper": "gave a Wrapper: expected a dictionary of the arguments of remat_jax.parity.compare",
    "Masked": "gave a Masked: expected a dictionary of the arguments of remat_jax.parity.compare",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_with_its_remedy(name: str, tmp_path: Path) -> None:
    file = tmp_path / "port.py"
    file.write_text(CASE)
    done = CliRunner().invoke(app, ["parity", f"{file}:{name}"])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.output
    assert MISTAKES[name] in done.stderr and "Traceback" not in done.output


REPORTS = {
    "crossed": (
        1,
        "NOT PASSED: the models agree only if equal names are exchanged (gate and up); under the map of equal names",
    ),
    "unproven": (1, "NOT PASSED: the weight map is not proven; under the map that names suggest: "),
    "right": (0, "only PyTorch has pooler.weight, pooler.bias; the outputs do not depend on them"),
    "float32_inside": (0, "keep_float64=True is on, and makes them float64"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_what_a_proposed_map_tells_is_read_in_the_terminal(name: str, tmp_path: Path) -> None:
    file = tmp_path / "port.py"
    file.write_text(CASE)
    done = CliRunner().invoke(app, ["parity", f"{file}:{name}"])
    code, text = REPORTS[name]
    shown = " ".join(done.output.replace("│", " ").split())  # a long cell of a table has several lines
    assert done.exit_code == code and text in shown, done.output
    assert "checkpoint left out: the PyTorch model has no repeated modules that are called" in shown
    assert name != "crossed" or "gate.weight -> params/up/kernel | linear" in shown


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
