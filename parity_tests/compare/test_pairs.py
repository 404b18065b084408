"""Correct pairs pass, with a correct report."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import torch_ref
from examples import pytorch
from parity_tests import support as s
from parity_tests.mutants import models as c
from parity_tests.mutants.models import QUICK, run, transformer
from parity_tests.small_pairs import DENSE, LINEAR, SERIES, Flax, Torch, finding, linears
from parity_tests.third_party.of_transformers import PORTS
from remat_jax.parity import ParityReport, compare
from remat_jax.parity.case import Case
from remat_jax.parity.memory import torch_peak
from remat_jax.parity.torch_side import TorchSide


@pytest.fixture(scope="module")
def stack() -> ParityReport:
    return run(c.stack(), optimizer="adamw")


def test_a_correct_pair_passes_in_every_mode(stack: ParityReport) -> None:
    assert stack.passed and "PASSED: DecoderStack" in str(stack), str(stack)
    assert stack.proves
    data = json.loads(json.dumps(stack.to_dict()))
    assert data["passed"] is True and len(data["rows"]) == len(stack.rows) and data["optimizer"] == "adamw"
    assert {tuple(row.errors) for row in stack.rows} == {stack.modes} == {("off", "checkpoint", "offload")}
    assert max(row.error or 0 for row in stack.rows if row.kind != "update") < 1e-13
    assert {tuple(row.ratios) for row in stack.rows} == {("float32",)}


def test_there_is_a_row_for_every_tensor(stack: ParityReport) -> None:
    named = dict(c.torch_stack().named_parameters())
    kinds = {kind: {row.name for row in stack.rows if row.kind == kind} for kind in ("output", "gradient", "update")}
    assert kinds["output"] == {"output", "loss"}
    assert kinds["gradient"] == {*named, "input:0"}
    rows = {row.name: row for row in stack.rows if row.kind == "gradient"}
    assert {name: rows[name].shape for name in named} == {name: tuple(x.shape) for name, x in named.items()}
    assert rows["layers.1.ffn.0.weight"].flax == "params/layers_1/ffn/up/kernel"
    assert kinds["update"] == {row.flax for row in stack.rows if row.kind == "gradient"} - {""}


def test_every_flipped_sign_would_have_been_found(stack: ParityReport) -> None:
    gradients = [row for row in stack.rows if row.kind == "gradient"]
    assert all(row.caught == {"float64": True, "float32": True} for row in gradients)
    assert len(gradients) == 2 * 12 + 1
    assert finding(stack, "planted faults in float64") == "gradients, sign: 25 of 25 found, doubled: 25 of 25 found"


def test_a_block_keeps_its_input_and_no_more(stack: ParityReport) -> None:
    kept = {(row.mode, row.framework): (row.device_bytes, row.host_bytes) for row in stack.memory}
    # Two layers, and the loss keeps one array of the output's shape; the first layer's input is the model's.
    stream = np.prod(c.stack()["inputs"][0].shape) * 4
    assert kept["checkpoint", "PyTorch"][0] == 2 * stream
    for mode, framework in itertools.product(("checkpoint", "offload"), ("PyTorch", "JAX")):
        assert kept[mode, framework][0] < kept["off", framework][0] / 5
    assert kept["offload", "JAX"][1] == kept["offload", "PyTorch"][1] == 2 * stream
    assert kept["off", "JAX"][1] == kept["off", "PyTorch"][1] == 0


def test_what_only_one_framework_keeps_is_the_whole_difference(stack: ParityReport) -> None:
    alone = {(residual.mode, residual.framework, residual.place): 0 for residual in stack.kept_alone}
    for residual in stack.kept_alone:
        alone[residual.mode, residual.framework, residual.place] += residual.bytes
    for mode, place in itertools.product(stack.modes, ("device", "host")):
        rest = {
            row.framework: getattr(row, f"{place}_bytes") - alone.get((mode, row.framework, place), 0)
            for row in stack.memory
            if row.mode == mode
        }
        assert rest["PyTorch"] == rest["JAX"]
    # Only the loss differs. Both keep the difference that it squares, but PyTorch keeps one array less in a layer's norm.
    names = {residual.name for residual in stack.kept_alone if residual.mode == "off" and residual.framework == "JAX"}
    assert any(name.startswith("DecoderStack/layers_1/norm2:") for name in names), names
    assert "Kept by only one framework" in str(stack)


def test_both_frameworks_peaks_are_told_in_every_mode(stack: ParityReport) -> None:
    peaks = {(row.mode, row.framework): row.peak_bytes for row in stack.memory}
    floor = sum(int(np.prod(x.shape)) * 4 for x in c.torch_stack().parameters())
    assert set(peaks) == set(itertools.product(stack.modes, ("PyTorch", "JAX")))
    assert all(peak is not None and peak > floor for peak in peaks.values())
    assert {row.peak_from for row in stack.memory} == {
        f"{how}, without an optimizer" for how in ("tracked on fake tensors", "compiled for cpu")
    }
    model, x = c.torch_stack(), c.stack()["inputs"][0]

    def build() -> torch_ref.TrainingStep:
        sizes = {name: s.SIZES["DecoderStack"][name] for name in ("num_layers", "d_model", "nhead")}
        made = type(model)(**sizes)
        given = torch.zeros(x.shape, requires_grad=True)
        return torch_ref.TrainingStep(made, lambda x: ((made(x) - torch.zeros(x.shape)) ** 2).sum(), (given,))

    assert peaks["off", "PyTorch"] == pytest.approx(torch_ref.peak_bytes(build).device_bytes, rel=0.02)


def test_pytorchs_peak_is_that_of_its_mode() -> None:
    """A batch so large that the peak is in the last layer; with a smaller batch the peak is at the end, where all gradients are
    alive.
    """
    options = {name: parameter.default for name, parameter in inspect.signature(compare).parameters.items()}
    given = {field.name: options[field.name] for field in dataclasses.fields(Case) if field.init}
    module = pytorch.DecoderStack(num_layers=6, d_model=16, nhead=4)
    inputs = np.ones((64, 32, 16), np.float32)
    peaks, x64 = {}, jax.enable_x64(True)
    with x64:
        case = {**given, "torch_module": module, "flax_module": c.stack()["flax_module"], "inputs": inputs, "rules": c.STACK}
        side = TorchSide(Case(**case))
    for mode in ("off", "checkpoint", "offload"):
        peaks[mode], _ = torch_peak(side, "float32", mode)
    stream = inputs.nbytes
    # At the peak, in the last layer's backward pass, the other layers' inputs are on the device, or on the host.
    assert peaks["off"] > peaks["checkpoint"] + 4 * 10 * stream
    assert peaks["checkpoint"] - peaks["offload"] == pytest.approx(5 * stream, rel=0.2)


def small(**options: Any) -> dict[str, Any]:
    """A linear layer, with memory."""
    pair = {"torch_module": torch.nn.Linear(3, 2), "flax_module": nn.Dense(2), "rules": LINEAR}
    return {**pair, "inputs": np.ones((4, 3), np.float32), **QUICK, "memory": True, **options}


UNTRACKED = {
    "a value": "value of a fake tensor",
    "nothing said": "the step does not run on fake tensors: AssertionError",
    "a constant": "the step does not run on fake tensors: ",
}


@pytest.mark.parametrize("cause", UNTRACKED)
def test_a_peak_that_cannot_be_tracked_is_said_with_the_reason(cause: str) -> None:
    constant = torch.zeros(2)

    def call(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if cause == "a value":
            assert x.sum().item() < 1e6
        elif cause == "nothing said" and isinstance(x, FakeTensor):
            raise AssertionError
        result: torch.Tensor = model(x)
        return result + constant.to(x.dtype) if cause == "a constant" else result

    blocks = {"torch_blocks": torch.nn.Linear, "flax_blocks": nn.Dense}
    report = run(small(modes="checkpoint", dtypes="float32", torch_call=call, **blocks))
    assert report.passed, str(report)
    theirs, ours = report.memory
    assert theirs.peak_bytes is None and UNTRACKED[cause] in theirs.peak_from
    assert ours.peak_bytes and theirs.device_bytes > 0


def test_a_target_is_compiled_for() -> None:
    theirs, ours = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2))), Flax(two_layers)
    rules = "{i}.weight -> params/layers_{i}/kernel | linear\n{i}.bias -> params/layers_{i}/bias"
    case = {"torch_module": theirs, "flax_module": ours, "inputs": np.ones((8, 64), np.float32), "rules": rules}
    report = run(case, modes="checkpoint", dtypes="float32", target="h200")
    theirs_kept, kept = report.memory
    assert [theirs_kept.peak_from, kept.peak_from] == [
        f"{how}, without an optimizer" for how in ("tracked on fake tensors", "compiled for h200")
    ]
    # At least the parameters, their gradients and a checkpoint's kept arrays; a whole step without checkpoints needs more.
    floor = 2 * sum(x.nbytes for x in theirs.parameters()) + kept.device_bytes
    assert kept.peak_bytes is not None and floor <= kept.peak_bytes <= 4 * floor


def two_layers(module: nn.Module, x: Any) -> Any:
    return nn.Dense(64, name="layers_1")(nn.Dense(64, name="layers_0")(x))


def test_another_optimizer_in_nnx() -> None:
    report = run(c.stack("nnx"), optimizer="sgd", **QUICK)
    assert report.passed, str(report)
    assert finding(report, "training in float64").startswith("3 steps, losses at most ")
    assert sum(row.kind == "update" for row in report.rows) == 24


def test_nnx_under_a_policy_of_ones_own(stack: ParityReport) -> None:
    policy = "save: @dots_with_no_batch_dims"
    report = run(c.stack("nnx"), modes=policy, dtypes="float32")
    assert report.passed, str(report)
    kept = {(row.mode, row.framework): row.device_bytes for row in (*report.memory, *stack.memory)}
    assert all(kept[policy, framework] > kept["checkpoint", framework] for framework in ("JAX", "PyTorch"))


def test_a_model_of_transformers_in_half_precision() -> None:
    report = run(transformer(PORTS["gpt2"], scan=True), modes="offload", dtypes="bfloat16", optimizer="adamw", memory=False)
    assert report.passed, str(report)
    rows = {row.name: row for row in report.rows}
    assert rows["transformer.wte.weight"].flax == "params/wte/embedding"
    assert rows["transformer.h.1.ln_2.bias"].flax == "params/layers/ln_2/bias"
    assert rows["logits"].ratio("bfloat16") is not None


def test_a_proposed_map_and_a_loss_of_ones_own(stack: ParityReport) -> None:
    report = run(c.stack(rules="auto"), loss=lambda output: (output**4).mean(), **QUICK)
    assert report.passed, str(report)
    assert "layers.{i}.self_attn.out_proj.weight" in report.rules
    norms = [{row.name: row.norm for row in compared.rows} for compared in (report, stack)]
    assert norms[0]["loss"] != norms[1]["loss"] and norms[0]["output"] == norms[1]["output"]


def test_tables_in_float32_want_a_function_that_builds_the_model() -> None:
    """`.double()` keeps the rounding of rotary frequencies; the report says so, with the remedy."""

    def theirs() -> Torch:
        model = Torch(lambda m, x: m.linear(x) * (100 * m.inv_freq).cos(), **linears(4, "linear"))
        frequencies = 10 ** -(torch.arange(4, dtype=torch.float64) / 3)
        model.register_buffer("inv_freq", frequencies.float(), persistent=False)
        return model

    ours = Flax(lambda m, x: nn.Dense(4, name="linear")(x) * jnp.cos(100 / 10 ** (jnp.arange(4, dtype=x.dtype) / 3)))
    case = {"flax_module": ours, "inputs": SERIES, "rules": DENSE, **QUICK}
    rounded = run({**case, "torch_module": theirs()})
    assert not rounded.passed and rounded.proves
    assert "inv_freq" in finding(rounded, "PyTorch's tables")
    exact = run({**case, "torch_module": theirs})
    assert exact.passed, str(exact)
