"""A report about a fault: the wrong tensors, their dtypes, and the setting that differs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from parity_tests.compare import cases as c
from parity_tests.compare.cases import QUICK, run
from parity_tests.mutants.planting import FLIPPED, at, output
from parity_tests.small_pairs import DENSE, Flax, Torch, linears
from remat_jax.parity import ParityReport, explain


def failed(report: ParityReport) -> dict[str, list[str]]:
    return {row.name: row.problems for row in report.failed_rows}


def test_the_weight_that_is_planted_may_be_the_one_at_fault() -> None:
    """A square kernel that the map forgot to transpose is right when a planted fault transposes it."""
    x = np.random.default_rng(0).normal(size=(4, 3))
    pair = {"torch_module": torch.nn.Linear(3, 3), "flax_module": nn.Dense(3), "inputs": x}
    report = run({**pair, "rules": "weight -> params/kernel\nbias -> params/bias"}, **QUICK)
    assert not report.passed and report.proves
    check = next(check for check in report.checks if check.name == "planted weight in float64")
    assert check.passed and check.found.startswith("params/kernel transposed: ")
    assert check.found.endswith(" off, and without this change the outputs differ")
    right = run({**pair, "rules": "weight -> params/kernel | linear\nbias -> params/bias"}, **QUICK)
    assert right.passed and "without this change" not in str(right)


def test_a_pytorch_block_that_draws_anew_under_a_checkpoint_is_named() -> None:
    """PyTorch's checkpoint restores the global generator's state, not that of the module's own generator."""
    model, random = copy.deepcopy(c.original("stack")), np.random.default_rng(0)

    def seed(*_: Any) -> None:
        nonlocal random
        random = np.random.default_rng(0)

    def draw(module: Any, args: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(random.normal(size=x.shape[-1])).to(x)

    model.register_forward_pre_hook(seed)
    model.layers[1].ffn.register_forward_hook(draw)
    noise = np.random.default_rng(0).normal(size=16)
    case = at("layers_1/ffn", output(lambda x: x * noise))(c.stack(torch_module=model))
    assert run(case, **QUICK).passed
    report = run(case, **{**QUICK, "modes": ("off", "checkpoint")})
    assert [check.name for check in report.checks if not check.passed] == ["PyTorch, checkpoint"] and not report.failed_rows
    finding = next(check for check in report.checks if not check.passed).found
    assert finding.endswith("; recomputing layers/1/ffn gives different values")


def test_a_search_that_fails_ends_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says that PyTorch's checkpoint draws again, even for a model that refuses to be inspected."""
    random = np.random.default_rng(0)

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor(random.normal(size=3)).to(x)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not to be looked into")

    def call(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal random
        random = np.random.default_rng(0)
        result: torch.Tensor = model(x)
        return result

    ours = Flax(lambda m, x: nn.Dense(3, name="layer")(x) * np.random.default_rng(0).normal(size=3))
    case = {"torch_module": torch.nn.Sequential(torch.nn.Linear(3, 3), Block()), "flax_module": ours, "inputs": np.ones((4, 3))}
    rules = "0.weight -> params/layer/kernel | linear\n0.bias -> params/layer/bias"
    monkeypatch.setattr(explain, "capture_torch", refuse)
    options = {**QUICK, "modes": ("off", "checkpoint"), "torch_blocks": Block, "flax_blocks": nn.Dense}
    report = run({**case, "rules": rules}, torch_call=call, **options)
    finding = next(check.found for check in report.checks if check.name == "PyTorch, checkpoint")
    assert "; it is unknown whether a module's recomputation differs: torch_module cannot be run on" in finding
    assert finding.endswith("RuntimeError: not to be looked into")


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
    report = run({**case, "rules": DENSE}, **QUICK)
    assert not report.passed and report.hidden == ("inner",) and report.to_dict()["hidden"] == ["inner"]
    note = "not observed, because they run in code whose arrays cannot be captured (a while loop, for example): inner"
    assert note in " ".join(str(report).split()) and note in report.to_html(tmp_path / "page.html").read_text()


def test_a_mutant_is_found_in_float32_alone() -> None:
    report = run(at("layers_0/ffn/up", FLIPPED)(c.stack()), modes="off", dtypes="float32", memory=False)
    assert "times PyTorch's error in float32" in failed(report)["layers.0.ffn.0.weight"][0]
    assert "layers.0.norm2.weight" not in failed(report)


def test_a_wrong_optimizer_is_found_by_what_it_adds() -> None:
    # optax's default decay is a hundredth of PyTorch's.
    pair = (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4), optax.adamw(1e-2, eps=1e-4))
    report = run(c.stack(), **{**QUICK, "optimizer": pair})
    assert {row.kind for row in report.failed_rows} == {"update"}
    idle = (lambda parameters: torch.optim.SGD(parameters, lr=1e-3), optax.sgd(0.0))
    assert {row.kind for row in run(c.stack(), **{**QUICK, "optimizer": idle}).failed_rows} == {"update"}
