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
