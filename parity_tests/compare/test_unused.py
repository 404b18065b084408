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

from parity_tests.compare import cases as c
from remat_jax import porting
from remat_jax.errors import PortingError
from remat_jax.parity import Check, ParityReport, compare
from remat_jax.warning import RematWarning

RULES = "mask_token -> params/mask_token\nlinear.weight -> params/linear/kernel | linear\nlinear.bias -> params/linear/bias"
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Torch(torch.nn.Module):
    """A token for masked patches, as in DINOv2, without a mask that uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token, self.linear = torch.nn.Parameter(torch.randn(1, 3)), torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class TorchTimesZero(Torch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + 0 * self.mask_token)


class Flax(nn.Module):
    """As `Torch`; its mask token, if any, is multiplied by `share` and added."""

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
    return compare(
        **{"torch_module": torch_module or Torch(), "flax_module": flax, "inputs": X, "rules": RULES, **c.QUICK, **options}
    )


def gradients(report: ParityReport) -> Check:
    return next(check for check in report.checks if check.name == "gradients")


@pytest.mark.parametrize("flax", [Flax(), FlaxNnx()], ids=["linen", "nnx"])
def test_what_neither_model_uses_is_a_note(flax: Any) -> None:
    blocks = {"torch_blocks": torch.nn.Linear, "flax_blocks": nn.Dense if isinstance(flax, Flax) else nnx.Linear}
    report = run(flax, modes=("off", "checkpoint"), dtypes=("float64", "float32"), optimizer="adamw", **blocks)
    assert report.passed, str(report)
    assert gradients(report).found == "2 parameters, none with a gradient of 0; unused by both, not compared: mask_token"
    assert {row.name for row in report.rows if row.kind == "gradient"} == {"linear.weight", "linear.bias", "input:0"}
    assert not any("mask_token" in row.name for row in report.rows)


@pytest.mark.parametrize(
    ("flax", "module"),
    [(Flax(), TorchTimesZero), (Flax(0.0), Torch), (Flax(0.0), TorchTimesZero)],
    ids=["torch", "flax", "both"],
)
def test_a_gradient_that_happens_to_be_zero_still_fails(flax: Any, module: Any) -> None:
    report = run(flax, module())
    assert not report.passed and "prove nothing about mask_token" in gradients(report).found


def test_a_weight_that_only_flax_uses_differs() -> None:
    report = run(Flax(1.0))
    assert not report.passed and {"output", "mask_token"} <= {row.name for row in report.failed_rows}


def test_where_all_weights_are_unused_nothing_is_proved() -> None:
    class Idle(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            Flax(name="inner")(x)
            return x**2

    rules = RULES.replace("params/", "params/inner/")
    report = run(Idle(), rules=rules, torch_call=lambda model, x: x**2)
    assert not report.passed and not report.proves and "every gradient is 0" in gradients(report).found


def test_a_map_is_proposed_for_it_where_only_one_is_possible() -> None:
    with pytest.warns(RematWarning, match="mask_token: the outputs do not depend on it, so its place follows from name, shape"):
        assert "mask_token -> params/mask_token" in str(porting.propose(Torch(), Flax(), X))
    report = run(Flax(), rules="auto")  # the report says that the token is not compared
    assert report.passed and "not compared: mask_token" in gradients(report).found


def test_no_map_is_proposed_where_the_name_is_another() -> None:
    with pytest.raises(PortingError, match="the outputs do not depend on mask_token.*\n  mask_token -> params/bottleneck"):
        porting.propose(Torch(), Flax(name_of_token="bottleneck"), X)


@pytest.mark.parametrize("names", [("mask_token", "class_token"), ("masking_token", "classing_token")])
def test_no_map_is_proposed_where_shapes_and_names_leave_two_places(names: tuple[str, str]) -> None:
    class Two(Flax):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for name in names:
                self.param(name, nn.initializers.normal(), (1, 3))
            return nn.Dense(2, name="linear")(x)

    module = Torch()
    module.class_token = torch.nn.Parameter(torch.zeros(1, 3))
    if names[0] == "mask_token":
        assert porting.propose(module, Two(), X)
    else:
        with pytest.raises(PortingError, match="do not depend on mask_token, class_token"):
            porting.propose(module, Two(), X)


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


class Gated(torch.nn.Module):
    """A gate as in small convolutional models: with these weights its ReLU is 0 for every input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.down, self.up = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
        self.down.bias.data.fill_(-9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.up(self.down(x).relu()).sigmoid()


class GatedFlax(nn.Module):
    factor: float = 1.0

    @nn.compact
    def __call__(self, x: Any) -> Any:
        gate = nn.relu(nn.Dense(2, name="down")(x)) * self.factor
        return nn.Dense(2, name="linear")(x) * nn.sigmoid(nn.Dense(2, name="up")(gate))


GATED = "{name}.weight -> params/{name}/kernel | linear\n{name}.bias -> params/{name}/bias"


def test_a_gradient_that_is_zero_by_chance_is_compared_with_random_weights() -> None:
    report = run(GatedFlax(), Gated(), rules=GATED)
    assert report.passed, str(report)
    dead = "down.weight, down.bias, up.weight"
    assert gradients(report).found == f"6 parameters, 0 with these weights, and equal with random ones: {dead}"
    wrong = run(GatedFlax(2.0), Gated(), rules=GATED)
    assert not wrong.passed and all(row.passed for row in wrong.rows)
    assert re.search(f"prove nothing about {dead}; with random weights, .* is .* off", gradients(wrong).found)
