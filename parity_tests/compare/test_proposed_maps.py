"""`rules="auto"` on wrong ports: exchanged names are said first, and a module is named without a proven map."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.compare.cases import QUICK, run
from parity_tests.small_pairs import Flax, Torch, linears, named
from remat_jax import porting
from remat_jax.errors import PortingError
from remat_jax.warning import RematWarning

X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
DENSE = ("gate", "up", "down", "query", "key", "value")


def layer_torch(module: Torch, x: torch.Tensor) -> torch.Tensor:
    """Attention without heads, and a gated feed-forward layer, both with a residual connection."""
    y = module.norm(x)
    x = x + (module.query(y) @ module.key(y).mT).softmax(-1) @ module.value(y)
    return x + module.down(torch.nn.functional.silu(module.gate(x)) * module.up(x))


def model_torch() -> Torch:
    torch.manual_seed(0)
    dense = ({name: torch.nn.Linear(8, 8, bias=name != "down") for name in DENSE} for _ in range(2))
    layers = torch.nn.ModuleList(Torch(layer_torch, norm=torch.nn.LayerNorm(8), **each) for each in dense)
    return Torch(lambda m, x: m.layers[1](m.layers[0](x)), layers=layers)


class Untransposed(nn.Module):
    """A dense layer that does not transpose its kernel."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (8, 8))
        return x @ kernel.T + self.param("bias", nn.initializers.zeros, (8,))


class Layer(nn.Module):
    fault: str = ""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        untransposed = self.fault.split()[1:] if self.fault.startswith("untransposed") else []
        dense = {name: nn.Dense(8, use_bias=name != "down", name=name) for name in DENSE if name not in untransposed}
        dense |= {name: Untransposed(name=name) for name in untransposed}
        if self.fault in ("gate and up", "key and value", "query and value and key"):
            names = self.fault.split(" and ")
            dense |= {name: dense[other] for name, other in zip(names, (*names[1:], names[0]), strict=True)}
        y = nn.LayerNorm(epsilon=1e-3 if self.fault == "epsilon" else 1e-5, name="norm")(x)
        value = dense["value"](jax.lax.stop_gradient(y) if self.fault == "stopped" else y)
        x = x + nn.softmax(dense["query"](y) @ dense["key"](y).swapaxes(1, 2)) @ value
        activation = nn.gelu if self.fault == "activation" else nn.silu
        y = activation(dense["gate"](x)) * dense["up"](x)
        return x + dense["down"](y)


class Model(nn.Module):
    fault: str = ""
    order: tuple[int, ...] = (0, 1)

    @nn.compact
    def __call__(self, x: Any) -> Any:
        layers = [Layer(self.fault if index == 1 else "", name=f"layers_{index}") for index in range(2)]
        for index in self.order:
            x = layers[index](x)
        return x


def case(**options: Any) -> dict[str, Any]:
    return {"torch_module": model_torch(), "inputs": X, "rules": "auto", **QUICK, **options}


@pytest.mark.parametrize(
    ("flax", "crossed", "module"),
    [
        (Model("query and value and key"), "layers.1.key and layers.1.query and layers.1.value", "layers_1"),
        (Model(order=(1, 0)), "layers.0 and layers.1", ""),
    ],
)
def test_exchanged_names_are_said_first(flax: nn.Module, crossed: str, module: str) -> None:
    report = run(case(flax_module=flax))
    assert report.crossed == (crossed,) and not report.passed and report.proves
    assert report.verdict().startswith(f"NOT PASSED: the models agree only if equal names are exchanged ({crossed}); under")
    first = report.checks[0]
    text = "probably a fault of the port: under the map of equal names, output .* dif"
    assert first.name == "weight map" and re.search(text, first.found)
    # The tensors and the module are those under the map of equal names.
    assert "{name}.weight -> params/layers_{i}/{name}/kernel | linear" in report.rules
    assert {row.name for row in report.failed_rows} > {"output"}
    assert report.divergences["forward"]["flax_path"].startswith(module)
    lines = [line.strip() for line in first.found.splitlines() if "->" in line]
    if module:
        assert run(case(flax_module=flax, rules=[*lines, "auto"])).passed


ABSORBED = "layers.1.{name}.weight by 'identity' instead of 'linear'"


def test_kernels_that_are_not_transposed_are_said_first() -> None:
    names = ["query", "gate"]
    flax = Model(f"untransposed {' '.join(names)}")
    report = run(case(flax_module=flax))
    assert set(report.unlike) == {ABSORBED.format(name=name) for name in names} and not report.passed
    assert report.weight_map == "unlike siblings"
    assert report.verdict().startswith(
        f"NOT PASSED: the models agree only if weights are transformed unlike their siblings ({report.unlike[0]}"
    )
    assert report.divergences["forward"]["flax_path"] == f"layers_1/{names[0]}"
    lines = [line.strip() for line in report.checks[0].found.splitlines() if "->" in line]
    assert set(lines) == {f"layers.1.{name}.weight -> params/layers_1/{name}/kernel" for name in names}
    assert run(case(flax_module=flax, rules=[*lines, "auto"])).passed


def test_kernels_of_which_none_is_transposed_are_a_convention() -> None:
    theirs = Torch(lambda m, x: m.left(x).tanh() + m.norm(x).tanh(), norm=torch.nn.LayerNorm(8), **linears(8, "left"))
    ours = Flax(lambda m, x: nn.tanh(Untransposed(name="left")(x)) + nn.tanh(nn.LayerNorm(epsilon=1e-5, name="norm")(x)))
    report = run(case(torch_module=theirs, flax_module=ours))
    assert report.passed and report.weight_map == "proven"


def test_propose_warns_of_exchanged_names() -> None:
    with pytest.warns(RematWarning, match=r"only if equal names are exchanged \(layers.1.gate and layers.1.up\)"):
        rules = porting.propose(model_torch(), Model("gate and up"), X)
    assert "layers.1.gate.weight -> params/layers_1/up/kernel | linear" in str(rules)


@pytest.mark.parametrize(
    ("fault", "pass_", "module"),
    [("epsilon", "forward", "layers_1/norm"), ("activation", "forward", "layers_1"), ("stopped", "backward", "layers_1")],
)
def test_a_module_is_named_without_a_proven_map(fault: str, pass_: str, module: str) -> None:
    report = run(case(flax_module=Model(fault)))
    assert report.verdict().startswith("NOT PASSED: the weight map is not proven; under the map that names suggest: ")
    assert [way for way, first in report.divergences.items() if first] == [pass_]
    assert report.divergences[pass_]["flax_path"] == module
    assert bool(report.differences) is (fault == "epsilon")


def test_the_right_model_passes_and_the_map_is_said_to_be_proved() -> None:
    report = run(case(flax_module=Model()))
    assert report.passed and report.weight_map == "proven"
    assert report.checks[0].found == "found from names and shapes, and proved by running both models"


def branches() -> Torch:
    """Two branches that may be exchanged."""
    return Torch(lambda m, x: m.left(x).tanh() + m.right(x).tanh(), **linears(8, "left", "right"))


def test_equal_names_decide_a_symmetry() -> None:
    ours = Flax(lambda m, x: jnp.tanh(nn.Dense(8, name="right")(x)) + jnp.tanh(nn.Dense(8, name="left")(x)))
    report = run(case(torch_module=branches(), flax_module=ours))
    assert report.passed and report.rules.startswith("{name}.weight -> params/{name}/kernel | linear")


def biased() -> Torch:
    """A head whose bias is a buffer, as `final_logits_bias` in transformers."""
    model = Torch(lambda m, x: m.head(x) + m.logits_bias, head=torch.nn.Linear(8, 7, bias=False))
    model.register_buffer("logits_bias", torch.zeros(1, 7))
    return model


def biased_flax(adds: bool) -> Flax:
    def run(module: nn.Module, x: Any) -> Any:
        bias = module.param("logits_bias", nn.initializers.zeros, (1, 7))
        return nn.Dense(7, use_bias=False, name="head")(x) + (bias if adds else 0.0)

    return Flax(run)


RULES = "logits_bias -> params/logits_bias\nhead.weight -> params/head/kernel | linear"


@pytest.mark.parametrize("rules", ["auto", ["logits_bias -> params/logits_bias", "auto"], RULES])
def test_a_buffer_that_fills_a_parameter_is_compared(rules: Any) -> None:
    report = run(case(torch_module=biased(), flax_module=biased_flax(adds=True), rules=rules))
    assert report.passed and "logits_bias -> params/logits_bias" in report.rules
    wrong = run(case(torch_module=biased(), flax_module=biased_flax(adds=False), rules=rules))
    assert not wrong.passed and "output" in {row.name for row in wrong.failed_rows}


def test_a_bias_of_one_framework_is_named() -> None:
    def pair(torch_bias: bool, flax_bias: bool) -> dict[str, Any]:
        parts = {"first": torch.nn.Linear(8, 6, bias=torch_bias), "second": torch.nn.Linear(6, 2)}
        ours = Flax(lambda m, x: nn.Dense(2, name="second")(nn.tanh(nn.Dense(6, name="first", use_bias=flax_bias)(x))))
        return case(torch_module=Torch(lambda m, x: m.second(m.first(x).tanh()), **parts), flax_module=ours)

    dropped, added = run(pair(True, False)), run(pair(False, True))
    assert "only PyTorch has first.bias (in rules: 'extra: …')" in dropped.checks[0].found
    assert "only Flax has params/first/bias (in rules: 'missing: …')" in added.checks[0].found
    for report in (dropped, added):
        assert named(report, "forward", "torch_path") == ("first",) and not report.passed


def test_modules_of_equal_names_and_different_shapes_are_named() -> None:
    ours = Flax(lambda m, x: nn.Dense(8, name="right")(nn.Dense(4, name="left")(x)))
    with pytest.raises(PortingError, match="left and left have equal names") as error:
        run(case(torch_module=branches(), flax_module=ours, torch_call=lambda model, x: model.right(model.left(x))))
    assert "left (Linear): weight (8, 8), bias (8,)" in str(error.value)


def test_without_a_report_a_module_that_differs_is_an_error() -> None:
    with pytest.raises(PortingError, match=r"no map (makes the models|was found under which the models) agree"):
        porting.propose(model_torch(), Model("epsilon"), X)
