"""Bugs found on pairs of others' models (docs/notes/pairs.md), each in a few lines: false alarms, and wrong names."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.compare.cases import run
from remat_jax.errors import ArgumentError
from remat_jax.parity.localise import first_divergences
from remat_jax.parity.match import MatchedModule, match
from remat_jax.parity.semantics import differences
from remat_jax.parity.trees import default_loss

FLOAT64: dict[str, Any] = {"modes": "off", "dtypes": "float64", "memory": False}
X = np.random.default_rng(0).normal(size=(6, 5, 4)).astype(np.float32)


def test_the_sum_of_a_loss_rounds_no_more_than_pytorch_s() -> None:
    """Summed term by term, as XLA adds 31 × 31 terms, it is up to 5.9 ε off; PyTorch's sum is within 1."""
    worst = 0.0
    random = np.random.default_rng(0)
    for _ in range(10):
        x, target = ({"x": random.normal(size=(31, 31)).astype(np.float32)} for _ in range(2))
        exact = default_loss(*({"x": tree["x"].astype(np.float64)} for tree in (x, target)))
        worst = max(worst, abs(float(jax.jit(default_loss)(x, target)) / exact - 1) / np.finfo(np.float32).eps)
    assert worst < 2


# A list of one block that is called several times.


class Shared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.groups = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.groups[0](self.groups[0](x))


class Group(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return jnp.tanh(nn.Dense(4, name="linear")(x))


class SharedFlax(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        group = Group(name="group")
        return group(group(x))


def test_a_list_of_one_block_is_checkpointed() -> None:
    rules = "groups.0.0.weight -> params/group/linear/kernel | linear\ngroups.0.0.bias -> params/group/linear/bias"
    case = {"torch_module": Shared(), "flax_module": SharedFlax(), "inputs": X, "rules": rules}
    report = run(case, modes="checkpoint", dtypes="float64", memory=False)
    assert report.passed, str(report)


# A query with negligible scores.


class Faint(torch.nn.Module):
    """Three linear layers; the layer whose weight is neither the smallest nor the largest hardly matters."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.faint, self.large = (torch.nn.Linear(4, 4) for _ in range(3))
        with torch.no_grad():
            for size, layer in enumerate((self.small, self.faint, self.large), 1):
                layer.weight.mul_(size / layer.weight.norm())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(x) + self.large(x) + 1e-8 * self.faint(x)


class FaintFlax(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        small, faint, large = (nn.Dense(4, name=name) for name in ("small", "faint", "large"))
        return small(x) + large(x) + 1e-8 * faint(x)


FAINT = """
    {name}.weight -> params/{name}/kernel | linear
    {name}.bias -> params/{name}/bias
"""


def test_a_planted_weight_that_hardly_matters_gives_way_to_another() -> None:
    case = {"torch_module": Faint(), "flax_module": FaintFlax(), "inputs": X, "rules": FAINT}
    report = run(case, modes="off", memory=False)
    planted = next(check for check in report.checks if check.name == "planted weight in float32")
    assert planted.passed and "params/large/kernel transposed" in planted.found, planted
    assert "too small to tell: params/faint/kernel transposed" in planted.found


# An in-place addition removes a view's cotangent.


class InPlace(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x))
        y += x
        return self.head(y.tanh())


class InPlaceFlax(nn.Module):
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: Any) -> Any:
        first, second, head = (nn.Dense(4, name=name) for name in ("first", "second", "head"))
        return self.scale * head(jnp.tanh(second(first(x)) + x))


LINEARS = """
    {name}.weight -> params/{name}/kernel | linear
    {name}.bias -> params/{name}/bias
"""


def test_a_sum_in_place_accuses_nobody() -> None:
    case = {"torch_module": InPlace(), "flax_module": InPlaceFlax(1.5), "inputs": X, "rules": LINEARS}
    report = run(case, **FLOAT64)
    assert report.divergences["forward"]["torch_path"] == "" and report.divergences["backward"] is None


# A table that is read twice.


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.before, self.after = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.before(self.table(tokens)).tanh()
        return self.after(x + self.table(tokens.flip(1)))


class TwiceFlax(nn.Module):
    detaches: bool = False

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        table = nn.Embed(9, 4, name="table")
        x = table(tokens)
        x = jnp.tanh(BeforeLinear(self.detaches, name="before")(x))
        return nn.Dense(4, name="after")(x + table(tokens[:, ::-1]))


class BeforeLinear(nn.Module):
    detaches: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.normal(), (4, 4))
        bias = self.param("bias", nn.initializers.zeros, (4,))
        return (jax.lax.stop_gradient(x) if self.detaches else x) @ kernel + bias


TWICE = """
    table.weight -> params/table/embedding
    {name}.weight -> params/{name}/kernel | linear
    {name}.bias -> params/{name}/bias
"""


@pytest.mark.parametrize("detaches", [False, True])
def test_a_shared_table_is_not_blamed_for_a_gradient_that_another_call_lost(detaches: bool) -> None:
    tokens = np.random.default_rng(1).integers(0, 9, (2, 5))
    case = {"torch_module": Twice(), "flax_module": TwiceFlax(detaches), "inputs": (tokens,), "rules": TWICE}
    report = run(case, **FLOAT64)
    assert report.passed == (not detaches)
    if detaches:
        divergence = report.divergences["backward"]
        assert (divergence["torch_path"], divergence["what"]) == ("before", "gradient of input 0")


# Matching modules.


def modules(*entries: tuple[str, str, bool, bool]) -> list[MatchedModule]:
    return [MatchedModule(path, kind, 4, is_leaf, has_weights) for path, kind, is_leaf, has_weights in entries]


def test_a_rotation_elsewhere_hides_no_layer() -> None:
    theirs = modules(
        ("rotary", "Rotary", True, False),
        ("layers/0/attn/q", "Linear", True, True),
        ("layers/0/attn", "Attention", False, False),
        ("layers/0", "Layer", False, False),
    )
    ours = modules(
        ("layers/0/attn/rotary", "Rotary", True, False),
        ("layers/0/attn/q", "Dense", True, True),
        ("layers/0/attn", "Attention", False, False),
        ("layers/0", "Layer", False, False),
    )
    matched = match(theirs, ours)
    assert matched["layers/0/attn"] == "layers/0/attn" and matched["layers/0"] == "layers/0"


def test_a_table_inside_one_of_two_and_a_convolution_of_one_are_matched() -> None:
    theirs = modules(
        ("encoder/tokens", "Embedding", True, True),
        ("encoder/positions", "Embedding", True, True),
        ("encoder/fc", "Conv1D", True, True),
        ("encoder", "Encoder", False, False),
    )
    ours = modules(
        ("shared", "Embed", True, True),
        ("encoder/positions", "Embed", True, True),
        ("encoder/fc", "MyConv1D", True, True),
        ("encoder", "Encoder", False, False),
    )
    matched = match(theirs, ours)
    assert matched["encoder"] == "encoder" and matched["encoder/fc"] == "encoder/fc"


# GELU by its values.


class SomeGELU(torch.nn.Module):
    """GELU by the tanh formula, under another name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class Activated(nn.Module):
    approximate: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.gelu(nn.Dense(4, name="0")(x), approximate=self.approximate)


@pytest.mark.parametrize("approximate", [True, False])
def test_a_gelu_is_told_by_its_values(approximate: bool) -> None:
    theirs = torch.nn.Sequential(torch.nn.Linear(4, 4), SomeGELU())
    ours = Activated(approximate)
    settings_that_differ = differences(theirs, ours, ours.init(jax.random.key(0), X), (X,))
    assert [setting.torch for setting in settings_that_differ if setting.what == "GELU"] == ([] if approximate else ["by tanh"])


# A NumPy table.


class Rotated(nn.Module):
    """Angles as ports compute them: by NumPy, in float32."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        angles = np.einsum("i,j->ij", np.arange(5), 1 / 10 ** (np.arange(0, 4) / 4)).astype("float32")
        return nn.Dense(4, name="linear")(x) * jnp.array(np.sin(angles))


class RotatedTorch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(5)[:, None] / 10 ** (torch.arange(4)[None] / 4)
        return self.linear(x) * angles.float().sin()


def test_a_table_of_numpy_s_widens_where_float32_is_meant() -> None:
    rules = "linear.weight -> params/linear/kernel | linear\nlinear.bias -> params/linear/bias"
    case = {"torch_module": RotatedTorch(), "flax_module": Rotated(), "inputs": X, "rules": rules}
    assert not run(case, keep_float64=False, **FLOAT64).passed and run(case, **FLOAT64).passed
    report = run(case, keep_float64=True, **FLOAT64)
    assert report.passed, str(report)


def test_without_a_loss_nothing_is_accused_where_all_agrees() -> None:
    module = InPlace()
    weights = {name: np.asarray(x.detach()) for name, x in module.state_dict().items()}
    names = ("first", "second", "head")
    params = {name: {"kernel": weights[f"{name}.weight"].T, "bias": weights[f"{name}.bias"]} for name in names}
    assert first_divergences(module, InPlaceFlax(), {"params": params}, (X,)).none


# Random numbers that are drawn and not used; a table that is a frozen parameter, and a constant in Flax.


class Tabled(torch.nn.Module):
    """Positions by a float32 table that is a parameter; a random number that only training would use."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.linear = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4)
        angles = np.arange(5)[:, None] / 10 ** (np.arange(4)[None] / 4)
        self.positions.weight = torch.nn.Parameter(torch.FloatTensor(np.sin(angles)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = self.training and bool(torch.rand([]) < 0.1)
        torch.rand([])
        return x if skipped else self.linear(x + self.positions(torch.arange(5)))


class TabledFlax(nn.Module):
    slower: float = 1.0

    @nn.compact
    def __call__(self, x: Any) -> Any:
        angles = np.arange(5)[:, None] / (10 * self.slower) ** (np.arange(4)[None] / 4)
        return nn.Dense(4, name="linear")(x + jnp.array(np.sin(angles)))


def test_a_frozen_table_is_a_constant_in_flax_and_an_unused_draw_is_none() -> None:
    case = {"torch_module": lambda: Tabled().eval(), "flax_module": TabledFlax(), "inputs": X}
    report = run(case, **FLOAT64)
    assert report.passed, str(report)
    assert report.rules.splitlines()[-1] == "extra: positions.weight"
    wrong = run({**case, "flax_module": TabledFlax(1.001)}, rules=report.rules, **FLOAT64)
    assert wrong.divergences["forward"]["what"] == "input 0 of 'linear'"


def test_a_draw_that_changes_outputs_is_refused() -> None:
    module = Tabled().eval()
    case = {"torch_module": module, "flax_module": TabledFlax(), "inputs": X, "rules": "extra: *"}
    with pytest.raises(ArgumentError, match="draws random numbers in its forward pass"):
        run(case, torch_call=lambda model, x: model(x) + torch.rand([]), **FLOAT64)
