"""The hybrid optimizer in PyTorch: the plain optimizer's results to the bit, the placement of its state, and its life between
steps.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from examples.pytorch import HybridOptimizer
from torch_ref.errors import NothingToOffloadError

LEARNING_RATE = 0.1
"""Ten steps move every parameter far more than rounding: an optimizer that does nothing would be seen."""

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], int]] = {
    "sgd": (torch.optim.SGD, {"lr": LEARNING_RATE, "momentum": 0.9}, 1),
    "adam": (torch.optim.Adam, {"lr": LEARNING_RATE}, 2),
    "adamw": (torch.optim.AdamW, {"lr": LEARNING_RATE, "weight_decay": 0.1}, 2),
}
MATRIX = 8 * 8
"""Four equal matrices: a share of one half is two of them."""


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))).to(dtype)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 8, generator=generator).to(next(model.parameters()).dtype)
    return ((model(x) - x) ** 2).sum() / 4


def groups_of(model: nn.Module, groups: int) -> list[Any]:
    parameters = list(model.parameters())
    return parameters if groups == 1 else [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:]}]


def make(name: str, fraction: float | None, groups: int, model: nn.Module) -> torch.optim.Optimizer:
    """The plain optimizer for a fraction of None."""
    kind, options, _ = OPTIMIZERS[name]
    if fraction is None:
        return kind(groups_of(model, groups), **options)
    return HybridOptimizer(groups_of(model, groups), kind, offload_fraction=fraction, **options)


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@functools.cache
def plain(name: str, groups: int) -> nn.Module:
    trained = model()
    train(make(name, None, groups, trained), trained, range(10))
    return trained


def assert_same_bits(module: nn.Module, expected: nn.Module) -> None:
    for got, want in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "fraction", "groups"),
    [*((name, 0.5, 2) for name in OPTIMIZERS), *(("adamw", fraction, 1) for fraction in (0, 0.5, 1.0))],
)
def test_ten_steps_are_the_plain_optimizers_to_the_bit(name: str, fraction: float, groups: int) -> None:
    trained, start = model(), model()
    optimizer = make(name, fraction, groups, trained)
    train(optimizer, trained, range(10))
    assert_same_bits(trained, plain(name, groups))
    for new, old in zip(trained.parameters(), start.parameters(), strict=True):
        assert float((new - old).detach().abs().max()) > 0.02
    assert isinstance(optimizer, HybridOptimizer)
    placement, state = optimizer.placement(), 4 * MATRIX * OPTIMIZERS[name][2]
    counts = 4 if name != "sgd" else 0
    assert placement.host_bytes == fraction * 4 * (state + counts)
    assert placement.device_bytes == (1 - fraction) * 4 * (state + counts)
    assert len(optimizer.offloaded_parameters) == 4 * fraction


def test_a_parameter_without_gradient_is_left_alone_and_a_closure_is_run() -> None:
    trained, expected = model(), model()
    for module, by in ((trained, make("adam", 0.5, 1, trained)), (expected, make("adam", None, 1, expected))):
        next(module.parameters()).requires_grad_(False)

        def closure(module: nn.Module = module) -> torch.Tensor:
            (loss := loss_of(module, 0)).backward()
            return loss

        assert by.step(closure).item() == loss_of(model(), 0).item()
    assert_same_bits(trained, expected)
    assert torch.equal(next(trained.parameters()), next(model().parameters()))


def test_schedulers_and_hyperparameters_reach_the_optimizers_inside() -> None:
    trained, expected = model(), model()
    for module, optimizer in ((trained, make("adamw", 0.5, 2, trained)), (expected, make("adamw", None, 2, expected))):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        for step in range(4):
            train(optimizer, module, range(step, step + 1))
            scheduler.step()
        optimizer.param_groups[0]["weight_decay"] = 0.5
        train(optimizer, module, range(4, 6))
        assert optimizer.param_groups[0]["lr"] == 0.05 * 0.5**4
    assert_same_bits(trained, expected)


@pytest.mark.parametrize("fraction", [0, 0.5])
def test_bfloat16_parameters_follow_a_float32_run(fraction: float) -> None:
    """The masters keep small steps that bfloat16 would round away."""
    kind, rate, steps = torch.optim.SGD, 2.0**-12, 64
    trained = model(torch.bfloat16)
    start = [parameter.detach().float().clone() for parameter in trained.parameters()]
    hybrid = HybridOptimizer(trained.parameters(), kind, offload_fraction=fraction, lr=rate, momentum=0.5)
    masters = [nn.Parameter(tensor.clone()) for tensor in start]
    wide = kind(masters, lr=rate, momentum=0.5)
    for _ in range(steps):
        for group in (trained.parameters(), masters):
            for parameter in group:
                parameter.grad = torch.ones_like(parameter)
        for optimizer in (hybrid, wide):
            optimizer.step()
    for got, want in zip(trained.parameters(), masters, strict=True):
        assert torch.equal(got, want.detach().bfloat16())
    saved = hybrid.state_dict()["state"]
    assert all(torch.equal(saved[index]["master"], master.detach()) for index, master in enumerate(masters))
    assert hybrid.placement().host_bytes == fraction * 4 * (4 * MATRIX + 4 * MATRIX), "momentum and master"


@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [(None, 0.5, torch.float32), (0.5, 1.0, torch.float32), (1.0, 0, torch.float32), (1.0, 0.5, torch.bfloat16)],
)
def test_a_state_dict_goes_on_with_another_fraction(before: float | None, after: float, dtype: torch.dtype) -> None:
    """In 16 bits it has the masters too."""
    trained = model(dtype)
    first = make("adamw", before, 2, trained)
    train(first, trained, range(4))
    copied, saved = copy.deepcopy(trained), copy.deepcopy(first.state_dict())
    second = make("adamw", after, 2, copied)
    second.load_state_dict(saved)
    for optimizer, module in ((first, trained), (second, copied)):
        train(optimizer, module, range(4, 10))
    assert_same_bits(copied, trained)
    assert set(second.state_dict()["state"][0]) - {"master"} == {"step", "exp_avg", "exp_avg_sq"}
    back = make("adamw", None, 2, copied)
    back.load_state_dict(second.state_dict())
    assert back.state_dict()["state"][3]["step"] == 10


@pytest.mark.parametrize(("fraction", "dtype"), [(0.5, torch.bfloat16), (1.0, torch.float32)])
def test_weights_that_are_loaded_later_are_not_overwritten_by_old_masters(fraction: float, dtype: torch.dtype) -> None:
    trained = model(dtype)
    optimizer = HybridOptimizer(trained.parameters(), torch.optim.SGD, offload_fraction=fraction, lr=1.0, momentum=0.5)
    train(optimizer, trained, range(1))
    trained.load_state_dict({name: value + 1 for name, value in model(dtype).state_dict().items()})
    for parameter in trained.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.state.clear()
    before = [parameter.detach().clone() for parameter in trained.parameters()]
    momentum = [state["momentum_buffer"].clone() for state in optimizer.state_dict()["state"].values()]
    optimizer.step()
    for parameter, old, buffer in zip(trained.parameters(), before, momentum, strict=True):
        assert torch.equal(parameter, (old.float() - 0.5 * buffer.float()).to(dtype))


def test_nothing_to_move_is_an_error_and_not_a_silent_no_op() -> None:
    with pytest.raises(NothingToOffloadError, match="optimizer_class=SGD keeps no state.*give SGD a momentum"):
        HybridOptimizer(model().parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(NothingToOffloadError, match="offload_fraction=0.1 moves nothing: the smallest parameter has 64 of 256"):
        HybridOptimizer(model().parameters(), torch.optim.Adam, offload_fraction=0.1)
    HybridOptimizer(model().parameters(), torch.optim.SGD, offload_fraction=0, lr=0.1)
    HybridOptimizer(model(torch.bfloat16).parameters(), torch.optim.SGD, lr=0.1)  # its masters move


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_on_a_gpu_state_is_host_memory_and_results_are_within_rounding(overlap: bool) -> None:
    trained, expected = model().cuda(), model().cuda()
    kind, options, _ = OPTIMIZERS["adamw"]
    optimizer = HybridOptimizer(trained.parameters(), kind, offload_fraction=0.5, overlap=overlap, **options)
    train_on_gpu = ((trained, optimizer), (expected, kind(expected.parameters(), **options)))
    for step in range(10):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).cuda()
        for module, by in train_on_gpu:
            by.zero_grad()
            (module(x) ** 2).mean().backward()
            by.step()
    for got, want, old in zip(trained.parameters(), expected.parameters(), model().parameters(), strict=True):
        assert float((got - want).detach().abs().max()) < 1e-3 * float((want.detach().cpu() - old).abs().max())
    moved = {id(parameter) for parameter in optimizer.offloaded_parameters}
    assert len(moved) == 2 and all(optimizer._offloaded[p].master.is_pinned() for p in optimizer.offloaded_parameters)
    for parameter in trained.parameters():
        assert optimizer.state[parameter]["exp_avg"].device.type == ("cpu" if id(parameter) in moved else "cuda")
