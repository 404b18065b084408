"""Weights that neither model uses are listed with a note; a gradient that is 0 by chance proves nothing, and fails."""

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

from parity_tests.compare.cases import QUICK
from parity_tests.small_pairs import DENSE, Torch, finding
from parity_tests.small_pairs import Flax as FlaxOf
from remat_jax import porting
from remat_jax.errors import PortingError
from remat_jax.parity import ParityReport, compare
from remat_jax.warning import RematWarning

RULES = f"mask_token -> params/mask_token\n{DENSE.replace('{name}', 'linear')}"
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def masking(times_zero: bool = False) -> Torch:
    """A token for masked patches, as in DINOv2, without a mask that uses it."""
    parts = {"mask_token": torch.nn.Parameter(torch.randn(1, 3)), "linear": torch.nn.Linear(3, 2)}
    return Torch(lambda m, x: m.linear(x + 0 * m.mask_token if times_zero else x), **parts)


class Flax(nn.Module):
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


def run(flax: Any, torch_module: Any = None, **options: Any) -> ParityReport:
    torch.manual_seed(0)
    pair = {"torch_module": torch_module or masking(), "flax_module": flax, "inputs": X, "rules": RULES}
    return compare(**{**pair, **QUICK, **options})


@pytest.mark.parametrize("flax", [Flax(), FlaxNnx()], ids=["linen", "nnx"])
def test_what_neither_model_uses_is_a_note(flax: Any) -> None:
    blocks = {"torch_blocks": torch.nn.Linear, "flax_blocks": nn.Dense if isinstance(flax, Flax) else nnx.Linear}
    report = run(flax, modes=("off", "checkpoint"), dtypes=("float64", "float32"), optimizer="adamw", **blocks)
    assert report.passed, str(report)
    assert finding(report, "gradients") == "2 parameters, none with a gradient of 0; unused by both, not compared: mask_token"
    assert {row.name for row in report.rows if row.kind == "gradient"} == {"linear.weight", "linear.bias", "input:0"}
    assert not any("mask_token" in row.name for row in report.rows)


@pytest.mark.parametrize(
    ("flax", "times_zero"), [(Flax(), True), (Flax(0.0), False), (Flax(0.0), True)], ids=["torch", "flax", "both"]
)
def test_a_gradient_that_happens_to_be_zero_still_fails(flax: Any, times_zero: bool) -> None:
    report = run(flax, masking(times_zero))
    assert not report.passed and "prove nothing about mask_token" in finding(report, "gradients")


def test_a_weight_that_only_flax_uses_differs() -> None:
    report = run(Flax(1.0))
    assert not report.passed and {"output", "mask_token"} <= {row.name for row in report.failed_rows}


def test_where_all_weights_are_unused_nothing_is_proved() -> None:
    def idle(module: nn.Module, x: Any) -> Any:
        Flax(name="inner")(x)
        return x**2

    rules = RULES.replace("params/", "params/inner/")
    report = run(FlaxOf(idle), rules=rules, torch_call=lambda model, x: x**2)
    assert not report.passed and not report.proves and "every gradient is 0" in finding(report, "gradients")


def test_a_map_is_proposed_for_it_where_only_one_is_possible() -> None:
    with pytest.warns(RematWarning, match="mask_token: the outputs do not depend on it, so its place follows from name, shape"):
        assert "mask_token -> params/mask_token" in str(porting.propose(masking(), Flax(), X))
    report = run(Flax(), rules="auto")  # the report says that the token is not compared
    assert report.passed and "not compared: mask_token" in finding(report, "gradients")


def test_no_map_is_proposed_where_the_name_is_another() -> None:
    with pytest.raises(PortingError, match="the outputs do not depend on mask_token.*\n  mask_token -> params/bottleneck"):
        porting.propose(masking(), Flax(name_of_token="bottleneck"), X)


@pytest.mark.parametrize("names", [("mask_token", "class_token"), ("masking_token", "classing_token")])
def test_no_map_is_proposed_where_shapes_and_names_leave_two_places(names: tuple[str, str]) -> None:
    def two(module: nn.Module, x: Any) -> Any:
        for name in names:
            module.param(name, nn.initializers.normal(), (1, 3))
        return nn.Dense(2, name="linear")(x)

    module = masking()
    module.class_token = torch.nn.Parameter(torch.zeros(1, 3))
    if names[0] == "mask_token":
        assert porting.propose(module, FlaxOf(two), X)
    else:
        with pytest.raises(PortingError, match="do not depend on mask_token, class_token"):
            porting.propose(module, FlaxOf(two), X)


def test_what_only_flax_has_is_named_by_a_rule() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2))
    with pytest.warns(RematWarning, match="only Flax has params/mask_token; the outputs do not depend on it"):
        rules = porting.propose(module, Flax(), X)
    assert str(rules).splitlines()[-1] == "missing: params/mask_token"
    with pytest.raises(PortingError, match="no map makes the models agree"):
        porting.propose(module, Flax(1.0), X, rules="missing: params/mask_token")
    used = run(Flax(1.0), module, rules="auto")
    assert not used.passed and "only Flax has params/mask_token (in rules: 'missing: …')" in used.checks[0].found
    assert run(Flax(), module, rules="auto").passed
    with pytest.raises(PortingError, match=r"mask_token: .* has no value for it; give variables with values, such as those of"):
        run(Flax(), module, rules=rules)
    assert run(Flax(), module, rules=rules, variables=Flax().init(jax.random.key(0), X)).passed


# A ReLU that no input reaches.


def gated_flax(factor: float) -> FlaxOf:
    def run(module: nn.Module, x: Any) -> Any:
        gate = nn.relu(nn.Dense(2, name="down")(x)) * factor
        return nn.Dense(2, name="linear")(x) * nn.sigmoid(nn.Dense(2, name="up")(gate))

    return FlaxOf(run)


def test_a_gradient_that_is_zero_by_chance_is_compared_with_random_weights() -> None:
    """A gate as in small convolutional models: with these weights its ReLU is 0 for every input."""
    parts = {"linear": torch.nn.Linear(3, 2), "down": torch.nn.Linear(3, 2), "up": torch.nn.Linear(2, 2)}
    gated = Torch(lambda m, x: m.linear(x) * m.up(m.down(x).relu()).sigmoid(), **parts)
    gated.down.bias.data.fill_(-9)
    gated.linear.weight.data *= 4  # the largest weights are planted, and the others do not matter
    report = run(gated_flax(1.0), gated, rules=DENSE)
    assert report.passed, str(report)
    dead = "down.weight, down.bias, up.weight"
    expected = f"6 parameters, 0 with these weights, and equal with random ones: {dead}"
    assert finding(report, "gradients") == expected
    wrong = run(gated_flax(2.0), gated, rules=DENSE)
    assert not wrong.passed and all(row.passed for row in wrong.rows)
    assert re.search(f"prove nothing about {dead}; with random weights, .* is .* off", finding(wrong, "gradients"))
