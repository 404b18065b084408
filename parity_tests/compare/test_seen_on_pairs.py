"""Bugs found on pairs of others' models (docs/notes/pairs.md), each in a few lines: false alarms, and wrong names."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.mutants.models import QUICK, run
from parity_tests.mutants.planting import at, detached
from parity_tests.small_pairs import DENSE, Flax, Torch, linears, named
from parity_tests.small_pairs import SERIES as X
from remat_jax.errors import ArgumentError
from remat_jax.parity.localise import first_divergences
from remat_jax.parity.match import MatchedModule, match
from remat_jax.parity.semantics import differences
from remat_jax.parity.trees import default_loss


def test_the_sum_of_a_loss_rounds_no_more_than_pytorch_s() -> None:
    """Summed term by term, as XLA adds 31 × 31 terms, it is up to 5.9 ε off; PyTorch's sum is within 1."""
    worst = 0.0
    random = np.random.default_rng(0)
    for _ in range(10):
        x, target = ({"x": random.normal(size=(31, 31)).astype(np.float32)} for _ in range(2))
        exact = default_loss(*({"x": tree["x"].astype(np.float64)} for tree in (x, target)))
        worst = max(worst, abs(float(jax.jit(default_loss)(x, target)) / exact - 1) / np.finfo(np.float32).eps)
    assert worst < 2


class Group(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return jnp.tanh(nn.Dense(4, name="linear")(x))


def grouped(module: nn.Module, x: Any) -> Any:
    group = Group(name="group")
    return group(group(x))


def test_a_list_of_one_block_that_is_called_twice_is_checkpointed() -> None:
    groups = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())])
    theirs = Torch(lambda m, x: m.groups[0](m.groups[0](x)), groups=groups)
    rules = "groups.0.0.weight -> params/group/linear/kernel | linear\ngroups.0.0.bias -> params/group/linear/bias"
    case = {"torch_module": theirs, "flax_module": Flax(grouped), "inputs": X, "rules": rules}
    report = run(case, modes="checkpoint", dtypes="float64", memory=False)
    assert report.passed, str(report)


def faint(module: nn.Module, x: Any) -> Any:
    small, faint, large = (nn.Dense(4, name=name) for name in ("small", "faint", "large"))
    return small(x) + large(x) + 1e-8 * faint(x)


def test_a_planted_weight_that_hardly_matters_gives_way_to_another() -> None:
    """The layer whose weight is neither the smallest nor the largest hardly matters."""
    layers = linears(4, "small", "faint", "large")
    for size, layer in enumerate(layers.values(), 1):
        layer.weight.data *= size / layer.weight.norm().item()
    theirs = Torch(lambda m, x: m.small(x) + m.large(x) + 1e-8 * m.faint(x), **layers)
    report = run({"torch_module": theirs, "flax_module": Flax(faint), "inputs": X, "rules": DENSE}, modes="off", memory=False)
    planted = next(check for check in report.checks if check.name == "planted weight in float32")
    assert planted.passed and "params/large/kernel transposed" in planted.found, planted
    assert "too small to tell: params/faint/kernel transposed" in planted.found


def in_place_torch(module: Torch, x: torch.Tensor) -> torch.Tensor:
    """The addition in place removes a view's cotangent."""
    y = module.second(module.first(x))
    y += x
    return module.head(y.tanh())


def in_place_flax(scale: float) -> Flax:
    def run(module: nn.Module, x: Any) -> Any:
        first, second, head = (nn.Dense(4, name=name) for name in ("first", "second", "head"))
        return scale * head(jnp.tanh(second(first(x)) + x))

    return Flax(run)


def test_a_sum_in_place_accuses_nobody() -> None:
    theirs = Torch(in_place_torch, **linears(4, "first", "second", "head"))
    report = run({"torch_module": theirs, "flax_module": in_place_flax(1.5), "inputs": X, "rules": DENSE}, **QUICK)
    assert named(report, "forward", "torch_path") == ("",) and report.divergences["backward"] is None
    params = {
        name: {"kernel": layer.weight.detach().numpy().T, "bias": layer.bias.detach().numpy()}
        for name, layer in theirs.named_children()
    }
    # Without a loss.
    assert first_divergences(theirs, in_place_flax(1.0), {"params": params}, (X,)).none


@pytest.mark.parametrize("detaches", [False, True])
def test_a_shared_table_is_not_blamed_for_a_gradient_that_another_call_lost(detaches: bool) -> None:
    theirs = Torch(
        lambda m, tokens: m.after(m.before(m.table(tokens)).tanh() + m.table(tokens.flip(1))),
        table=torch.nn.Embedding(9, 4),
        **linears(4, "before", "after"),
    )

    def twice(module: nn.Module, tokens: Any) -> Any:
        table = nn.Embed(9, 4, name="table")
        x = jnp.tanh(nn.Dense(4, name="before")(table(tokens)))
        return nn.Dense(4, name="after")(x + table(tokens[:, ::-1]))

    tokens = np.random.default_rng(1).integers(0, 9, (2, 5))
    rules = f"table.weight -> params/table/embedding\n{DENSE}"
    case = {"torch_module": theirs, "flax_module": Flax(twice), "inputs": (tokens,), "rules": rules}
    report = run(at("before", detached)(case) if detaches else case, **QUICK)
    assert report.passed == (not detaches)
    assert not detaches or named(report, "backward", "torch_path", "what") == ("before", "gradient of input 0")


# Matching modules by path and class; a path that ends in / has modules inside, and classes in brackets have no weights.

ELSEWHERE = [
    (
        "rotary:(Rotary) layers/0/attn/q:Linear layers/0/attn/:Attention layers/0/:Layer",
        "layers/0/attn/rotary:(Rotary) layers/0/attn/q:Dense layers/0/attn/:Attention layers/0/:Layer",
        {"layers/0/attn", "layers/0"},
    ),
    (
        "encoder/tokens:Embedding encoder/positions:Embedding encoder/fc:Conv1D encoder/:Encoder",
        "shared:Embed encoder/positions:Embed encoder/fc:MyConv1D encoder/:Encoder",
        {"encoder", "encoder/fc"},
    ),
]


@pytest.mark.parametrize(("theirs", "ours", "equal"), ELSEWHERE)
def test_a_module_that_is_elsewhere_hides_no_layer(theirs: str, ours: str, equal: set[str]) -> None:
    def modules(text: str) -> list[MatchedModule]:
        pairs = (entry.split(":") for entry in text.split())
        leaves = ((path.rstrip("/"), kind, not path.endswith("/")) for path, kind in pairs)
        return [MatchedModule(path, kind.strip("()"), 4, leaf, leaf and kind[0] != "(") for path, kind, leaf in leaves]

    matched = match(modules(theirs), modules(ours))
    assert {path for path in equal if matched[path] == path} == equal


class SomeGELU(torch.nn.Module):
    """GELU by the tanh formula, under another name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


@pytest.mark.parametrize("approximate", [True, False])
def test_a_gelu_is_told_by_its_values(approximate: bool) -> None:
    theirs = torch.nn.Sequential(torch.nn.Linear(4, 4), SomeGELU())
    ours = Flax(lambda m, x: nn.gelu(nn.Dense(4, name="0")(x), approximate=approximate))
    settings_that_differ = differences(theirs, ours, ours.init(jax.random.key(0), X), (X,))
    assert [setting.torch for setting in settings_that_differ if setting.what == "GELU"] == ([] if approximate else ["by tanh"])


def rotated_torch(module: Torch, x: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(5)[:, None] / 10 ** (torch.arange(4)[None] / 4)
    return module.linear(x) * angles.float().sin()


def rotated(module: nn.Module, x: Any) -> Any:
    """Angles as ports compute them: by NumPy, in float32."""
    angles = np.einsum("i,j->ij", np.arange(5), 1 / 10 ** (np.arange(0, 4) / 4)).astype("float32")
    return nn.Dense(4, name="linear")(x) * jnp.array(np.sin(angles))


def test_a_table_of_numpy_s_widens_where_float32_is_meant() -> None:
    theirs = Torch(rotated_torch, **linears(4, "linear"))
    case = {"torch_module": theirs, "flax_module": Flax(rotated), "inputs": X, "rules": DENSE, **QUICK}
    assert not run(case, keep_float64=False).passed
    assert run(case).passed and run(case, keep_float64=True).passed


# Random numbers that are drawn and not used; a table that is a frozen parameter, and a constant in Flax.


def tabled_torch() -> Torch:
    """Positions by a float32 table that is a parameter; a random number that only training would use."""
    positions = torch.nn.Embedding(5, 4)
    angles = np.arange(5)[:, None] / 10 ** (np.arange(4)[None] / 4)
    positions.weight = torch.nn.Parameter(torch.FloatTensor(np.sin(angles)), requires_grad=False)

    def run(module: Torch, x: torch.Tensor) -> torch.Tensor:
        skipped = module.training and bool(torch.rand([]) < 0.1)
        torch.rand([])
        return x if skipped else module.linear(x + module.positions(torch.arange(5)))

    return Torch(run, positions=positions, **linears(4, "linear")).eval()


def tabled(slower: float) -> Flax:
    def run(module: nn.Module, x: Any) -> Any:
        angles = np.arange(5)[:, None] / (10 * slower) ** (np.arange(4)[None] / 4)
        return nn.Dense(4, name="linear")(x + jnp.array(np.sin(angles)))

    return Flax(run)


def test_a_frozen_table_is_a_constant_in_flax_and_an_unused_draw_is_none() -> None:
    case = {"torch_module": tabled_torch, "flax_module": tabled(1.0), "inputs": X, **QUICK}
    report = run(case)
    assert report.passed, str(report)
    assert report.rules.splitlines()[-1] == "extra: positions.weight"
    wrong = run({**case, "flax_module": tabled(1.001)}, rules=report.rules)
    assert named(wrong, "forward", "what") == ("input 0 of 'linear'",)


def test_a_draw_that_changes_outputs_is_refused() -> None:
    case = {"torch_module": tabled_torch(), "flax_module": tabled(1.0), "inputs": X, "rules": "extra: *"}
    with pytest.raises(ArgumentError, match="draws random numbers in its forward pass"):
        run(case, torch_call=lambda model, x: model(x) + torch.rand([]), **QUICK)
