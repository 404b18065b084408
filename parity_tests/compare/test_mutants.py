"""Faults that people make in ports, planted one at a time in two models: each is found, by the tensors that it touches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from parity_tests.compare import cases as c
from parity_tests.compare.cases import at, output, run
from remat_jax.parity import ParityReport
from remat_jax.parity.asserting import failures

FLIPPED, DOUBLED = (output(c.scaled_cotangent(factor)) for factor in (-1.0, 2.0))
SWAPPED = output(c.swapped_queries_and_keys)


class Fault(NamedTuple):
    """What is changed, a tensor that has to be named as wrong, whether the outputs are too, and the module that is at fault."""

    change: Callable[[c.Call], c.Call] | None
    named: str
    forward: bool = True
    module: str = ""
    rules: tuple[str, str] | None = None


STACK = {
    "a sign flipped": Fault(at("layers_0/ffn/up", FLIPPED), "layers.0.ffn.0.weight", forward=False, module="layers/0/ffn/0"),
    "a gradient doubled": Fault(
        at("layers_1/ffn/down", DOUBLED), "layers.1.ffn.2.bias", forward=False, module="layers/1/ffn/2"
    ),
    "an input detached": Fault(at("layers_0/ffn", c.detached), "layers.0.norm1.weight", forward=False),
    "a bias without a gradient": Fault(
        at("layers_0/self_attn/in_proj", c.without_bias_gradient), "layers.0.self_attn.in_proj_bias", forward=False
    ),
    "a layer left out": Fault(at("layers_1", c.skipped), "output", module="layers/1"),
    "query and key swapped": Fault(at("layers_0/self_attn/in_proj", SWAPPED), "output", module="layers/0/self_attn"),
    "another epsilon": Fault(at("layers_1/norm2", c.another_epsilon(1e-6)), "output", module="layers/1/norm2"),
    "a square kernel not transposed": Fault(
        None, "output", rules=("self_attn/out_proj/kernel | linear", "self_attn/out_proj/kernel")
    ),
}
GPT2 = {
    "a sign flipped": Fault(
        at("layers_1/attn/c_proj", FLIPPED),
        "transformer.h.1.attn.c_proj.weight",
        forward=False,
        module="transformer/h/1/attn/c_proj",
    ),
    "a gradient doubled": Fault(
        at("layers_0/mlp", DOUBLED), "transformer.h.0.mlp.c_fc.weight", forward=False, module="transformer/h/0/mlp"
    ),
    "an embedding detached": Fault(at("wpe", output(jax.lax.stop_gradient)), "transformer.wpe.weight", forward=False),
    "a layer left out": Fault(at("layers_0", c.skipped), "output", module="transformer/h/0"),
    "query and key swapped": Fault(at("layers_1/attn/c_attn", SWAPPED), "output", module="transformer/h/1/attn/c_attn"),
    "another epsilon": Fault(at("ln_f", c.another_epsilon(1e-6)), "output", module="transformer/ln_f"),
    "the mask inverted": Fault(
        lambda call: lambda model, **x: call(model, **{**x, "attention_mask": 1 - x["attention_mask"]}), "output"
    ),
}


def failed(report: ParityReport) -> dict[str, list[str]]:
    return {row.name: row.problems for row in report.failed_rows}


def faulty(case: dict[str, Any], fault: Fault) -> ParityReport:
    if fault.change:
        case["flax_call"] = fault.change(case.get("flax_call", c.plain))
    if fault.rules:
        case["rules"] = case["rules"].replace(*fault.rules)
    return run(case, **c.QUICK)


def check_found(report: ParityReport, fault: Fault) -> None:
    wrong = failed(report)
    assert not report.passed and report.proves
    assert report.verdict() == f"NOT PASSED: {len(wrong)} of {len(report.rows)} tensors"
    assert fault.named in wrong
    # By its value: another shape or dtype would be found without any arithmetic.
    assert all(" off in float64" in problem for problems in wrong.values() for problem in problems)
    assert ("output" in wrong) == fault.forward
    if fault.module:
        first = report.divergences["forward" if fault.forward else "backward"]
        assert first["torch_path"] == fault.module
        assert f"{fault.module} (" in str(report)


@pytest.mark.parametrize("name", STACK)
def test_a_fault_in_the_stack_is_found(name: str) -> None:
    check_found(faulty(c.stack(), STACK[name]), STACK[name])


@pytest.mark.parametrize("name", GPT2)
def test_a_fault_in_gpt2_is_found(name: str) -> None:
    check_found(faulty(c.gpt2(), GPT2[name]), GPT2[name])


def test_the_other_gelu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = nn.gelu
    monkeypatch.setattr(nn, "gelu", lambda x, approximate: exact(x, approximate=False))
    report = run(c.gpt2(), **c.QUICK)
    assert "output" in failed(report)
    assert 1e-7 < (next(row.error for row in report.rows if row.name == "output") or 0) < 1e-2


def test_the_setting_that_differs_is_named() -> None:
    config = dataclasses.replace(c.GPT2.config, layer_norm_eps=1e-6)
    report = run({**c.gpt2(), "flax_module": c.GPT2.make_flax(config)}, **c.QUICK)
    assert not report.passed
    assert {(one["what"], one["torch"], one["flax"]) for one in report.differences} == {("epsilon", "1e-05", "1e-06")}
    assert report.divergences["forward"]["torch_path"] == "transformer/h/0/ln_1"
    assert "layers_1/ln_2: epsilon is 1e-05 in PyTorch and 1e-06 in Flax" in failures(report)


def test_only_the_gradients_behind_the_fault_are_wrong() -> None:
    fault = STACK["a gradient doubled"]
    behind = failed(faulty(c.stack(), fault))
    before = {name for name, _ in c.original("stack").named_parameters() if name.startswith("layers.1.norm2")}
    assert before.isdisjoint(behind)
    assert {"layers.1.ffn.2.weight", "layers.0.self_attn.in_proj_weight", "input:0"} <= behind.keys()


def test_a_loss_that_is_normalised_otherwise_is_found() -> None:
    losses = (lambda output: (output**2).mean(), lambda output: jnp.mean(output[0] ** 2))
    report = run(c.stack(loss=losses), **c.QUICK)
    assert {"loss", "layers.0.norm1.bias"} <= failed(report).keys()
    assert "output" not in failed(report)


def test_a_mutant_is_found_in_float32_alone() -> None:
    fault = STACK["a sign flipped"]
    case = c.stack(flax_call=fault.change(c.plain) if fault.change else None)
    report = run(case, modes="off", dtypes="float32", memory=False)
    assert "times PyTorch's error in float32" in failed(report)[fault.named][0]
    assert "layers.0.norm2.weight" not in failed(report)


def test_a_wrong_optimizer_is_found_by_what_it_adds() -> None:
    import optax
    import torch

    # optax's default decay is a hundredth of PyTorch's.
    pair = (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4), optax.adamw(1e-2, eps=1e-4))
    report = run(c.stack(), **{**c.QUICK, "optimizer": pair})
    assert {row.kind for row in report.failed_rows} == {"update"}
    idle = (lambda parameters: torch.optim.SGD(parameters, lr=1e-3), optax.sgd(0.0))
    assert {row.kind for row in run(c.stack(), **{**c.QUICK, "optimizer": idle}).failed_rows} == {"update"}
