"""`rules="auto"` on wrong ports: exchanged names are said first, and a module is named without a proven map.

Weights that a model does not use: what can be proposed for them, and what the report says.
"""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity_tests.mutants.models import QUICK, run
from parity_tests.small_pairs import DENSE as LINEARS
from parity_tests.small_pairs import Flax, Kernel, Torch, finding, linears, named
from remat_jax import porting
from remat_jax.errors import PortingError
from remat_jax.parity import ParityReport, compare
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


class Layer(nn.Module):
    fault: str = ""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        untransposed = self.fault.split()[1:] if self.fault.startswith("untransposed") else []
        dense = {name: nn.Dense(8, use_bias=name != "down", name=name) for name in DENSE if name not in untransposed}
        dense |= {name: Kernel(width=8, name=name) for name in untransposed}
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
    ours = Flax(lambda m, x: nn.tanh(Kernel(width=8, name="left")(x)) + nn.tanh(nn.LayerNorm(epsilon=1e-5, name="norm")(x)))
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


def branches() -> Torch:
    """Two branches that may be exchanged."""
    return Torch(lambda m, x: m.left(x).tanh() + m.right(x).tanh(), **linears(8, "left", "right"))


def test_equal_names_decide_a_symmetry() -> None:
    ours = Flax(lambda m, x: jnp.tanh(nn.Dense(8, name="right")(x)) + jnp.tanh(nn.Dense(8, name="left")(x)))
    report = run(case(torch_module=branches(), flax_module=ours))
    assert report.passed and report.rules.startswith("{name}.weight -> params/{name}/kernel | linear")
    assert report.weight_map == "proven"
    assert report.checks[0].found == "found from names and shapes, and proved by running both models"


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


# Weights that neither model uses are listed with a note; a gradient that is 0 by chance proves nothing, and fails.

TOKEN_RULES = f"mask_token -> params/mask_token\n{LINEARS.replace('{name}', 'linear')}"
ROWS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def masking(times_zero: bool = False) -> Torch:
    """A token for masked patches, as in DINOv2, without a mask that uses it."""
    parts = {"mask_token": torch.nn.Parameter(torch.randn(1, 3)), "linear": torch.nn.Linear(3, 2)}
    return Torch(lambda m, x: m.linear(x + 0 * m.mask_token if times_zero else x), **parts)


class Masking(nn.Module):
    """As `masking`; its mask token, if any, is multiplied by `share` and added."""

    share: float | None = None
    name_of_token: str = "mask_token"

    @nn.compact
    def __call__(self, x: Any) -> Any:
        token = self.param(self.name_of_token, nn.initializers.normal(), (1, 3))
        return nn.Dense(2, name="linear")(x if self.share is None else x + self.share * token)


class FlaxNnx(nnx.Module):
    def __init__(self) -> None:
        self.mask_token, self.linear = nnx.Param(jnp.ones((1, 3))), nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


def compared(flax: Any, torch_module: Any = None, **options: Any) -> ParityReport:
    torch.manual_seed(0)
    pair = {"torch_module": torch_module or masking(), "flax_module": flax, "inputs": ROWS, "rules": TOKEN_RULES}
    return compare(**{**pair, **QUICK, **options})


@pytest.mark.parametrize("flax", [Masking(), FlaxNnx()], ids=["linen", "nnx"])
def test_what_neither_model_uses_is_a_note(flax: Any) -> None:
    blocks = {"torch_blocks": torch.nn.Linear, "flax_blocks": nn.Dense if isinstance(flax, Masking) else nnx.Linear}
    report = compared(flax, modes=("off", "checkpoint"), dtypes=("float64", "float32"), optimizer="adamw", **blocks)
    assert report.passed, str(report)
    assert finding(report, "gradients") == "2 parameters, none with a gradient of 0; unused by both, not compared: mask_token"
    assert {row.name for row in report.rows if row.kind == "gradient"} == {"linear.weight", "linear.bias", "input:0"}
    assert not any("mask_token" in row.name for row in report.rows)


@pytest.mark.parametrize(
    ("flax", "times_zero"), [(Masking(), True), (Masking(0.0), False), (Masking(0.0), True)], ids=["torch", "flax", "both"]
)
def test_a_gradient_that_happens_to_be_zero_still_fails(flax: Any, times_zero: bool) -> None:
    report = compared(flax, masking(times_zero))
    assert not report.passed and "prove nothing about mask_token" in finding(report, "gradients")


def test_a_weight_that_only_flax_uses_differs() -> None:
    report = compared(Masking(1.0))
    assert not report.passed and {"output", "mask_token"} <= {row.name for row in report.failed_rows}


def test_where_all_weights_are_unused_nothing_is_proved() -> None:
    def idle(module: nn.Module, x: Any) -> Any:
        Masking(name="inner")(x)
        return x**2

    rules = TOKEN_RULES.replace("params/", "params/inner/")
    report = compared(Flax(idle), rules=rules, torch_call=lambda model, x: x**2)
    assert not report.passed and not report.proves and "every gradient is 0" in finding(report, "gradients")


def test_a_map_is_proposed_for_it_where_only_one_is_possible() -> None:
    with pytest.warns(RematWarning, match="mask_token: the outputs do not depend on it, so its place follows from name, shape"):
        assert "mask_token -> params/mask_token" in str(porting.propose(masking(), Masking(), ROWS))
    report = compared(Masking(), rules="auto")  # the report says that the token is not compared
    assert report.passed and "not compared: mask_token" in finding(report, "gradients")


def test_no_map_is_proposed_where_the_name_is_another() -> None:
    with pytest.raises(PortingError, match="the outputs do not depend on mask_token.*\n  mask_token -> params/bottleneck"):
        porting.propose(masking(), Masking(name_of_token="bottleneck"), ROWS)


@pytest.mark.parametrize("names", [("mask_token", "class_token"), ("masking_token", "classing_token")])
def test_no_map_is_proposed_where_shapes_and_names_leave_two_places(names: tuple[str, str]) -> None:
    def two(module: nn.Module, x: Any) -> Any:
        for name in names:
            module.param(name, nn.initializers.normal(), (1, 3))
        return nn.Dense(2, name="linear")(x)

    module = masking()
    module.class_token = torch.nn.Parameter(torch.zeros(1, 3))
    if names[0] == "mask_token":
        assert porting.propose(module, Flax(two), ROWS)
    else:
        with pytest.raises(PortingError, match="do not depend on mask_token, class_token"):
            porting.propose(module, Flax(two), ROWS)


def test_what_only_flax_has_is_named_by_a_rule() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2))
    with pytest.warns(RematWarning, match="only Flax has params/mask_token; the outputs do not depend on it"):
        rules = porting.propose(module, Masking(), ROWS)
    assert str(rules).splitlines()[-1] == "missing: params/mask_token"
    with pytest.raises(PortingError, match="no map makes the models agree"):
        porting.propose(module, Masking(1.0), ROWS, rules="missing: params/mask_token")
    used = compared(Masking(1.0), module, rules="auto")
    assert not used.passed and "only Flax has params/mask_token (in rules: 'missing: …')" in used.checks[0].found
    assert compared(Masking(), module, rules="auto").passed
    with pytest.raises(PortingError, match=r"mask_token: .* has no value for it; give variables with values, such as those of"):
        compared(Masking(), module, rules=rules)
    assert compared(Masking(), module, rules=rules, variables=Masking().init(jax.random.key(0), ROWS)).passed


# A ReLU that no input reaches.


def gated_flax(factor: float) -> Flax:
    def run(module: nn.Module, x: Any) -> Any:
        gate = nn.relu(nn.Dense(2, name="down")(x)) * factor
        return nn.Dense(2, name="linear")(x) * nn.sigmoid(nn.Dense(2, name="up")(gate))

    return Flax(run)


def test_a_gradient_that_is_zero_by_chance_is_compared_with_random_weights() -> None:
    """A gate as in small convolutional models: with these weights its ReLU is 0 for every input."""
    parts = {"linear": torch.nn.Linear(3, 2), "down": torch.nn.Linear(3, 2), "up": torch.nn.Linear(2, 2)}
    gated = Torch(lambda m, x: m.linear(x) * m.up(m.down(x).relu()).sigmoid(), **parts)
    gated.down.bias.data.fill_(-9)
    gated.linear.weight.data *= 4  # the largest weights are planted, and the others do not matter
    report = compared(gated_flax(1.0), gated, rules=LINEARS)
    assert report.passed, str(report)
    dead = "down.weight, down.bias, up.weight"
    expected = f"6 parameters, 0 with these weights, and equal with random ones: {dead}"
    assert finding(report, "gradients") == expected
    wrong = compared(gated_flax(2.0), gated, rules=LINEARS)
    assert not wrong.passed and all(row.passed for row in wrong.rows)
    assert re.search(f"prove nothing about {dead}; with random weights, .* is .* off", finding(wrong, "gradients"))
