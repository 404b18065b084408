"""Gradient accumulation in PyTorch against the whole batch, and a tutorial's loop with its faults in numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from examples.pytorch import accumulate_gradients, accumulated_step
from examples.pytorch.faithful.accumulate import train

COUNTS = (5, 1, 4, 2, 1, 5)
"""Targets in each of six micro-batches."""


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def data(dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=generator).to(dtype), torch.randint(0, 3, (n,), generator=generator)) for n in COUNTS]


def summed(model: nn.Module) -> Any:
    def loss(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return nn.functional.cross_entropy(model(x), target, reduction="sum"), len(target)

    return loss


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]


def whole_batch(dtype: torch.dtype = torch.float64) -> tuple[float, torch.Tensor]:
    whole = model(dtype)
    loss = nn.functional.cross_entropy(whole(torch.cat([x for x, _ in data(dtype)])), torch.cat([y for _, y in data(dtype)]))
    loss.backward()
    return loss.item(), gradients(whole)


def flat(network: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def error(gradient: torch.Tensor, expected: torch.Tensor) -> float:
    return float((gradient.double() - expected.double()).norm() / expected.double().norm())


def test_it_is_the_whole_batchs_gradient() -> None:
    accumulating = model()
    list(accumulating.parameters())[0].grad = torch.ones(8, 4, dtype=torch.float64)  # an older gradient is dropped
    empty = [(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, dtype=torch.long))]
    accumulated = accumulate_gradients(summed(accumulating), empty + data(), accumulating.parameters())
    loss, expected = whole_batch()
    assert accumulated.targets == sum(COUNTS) and abs(accumulated.loss - loss) <= 1e-12
    assert error(gradients(accumulating), expected) <= 1e-12
    accumulated = accumulate_gradients(summed(accumulating), empty * 2, accumulating.parameters())
    assert (accumulated.loss, accumulated.targets) == (0.0, 0.0) and float(gradients(accumulating).abs().max()) == 0.0


def test_the_tutorials_mean_of_means_is_another_gradient() -> None:
    faithful, start = model(), flat(model())
    log = train(faithful, torch.optim.SGD(faithful.parameters(), lr=1.0), nn.CrossEntropyLoss(), data(), len(COUNTS), epochs=1)
    before = model()
    sum(nn.functional.cross_entropy(before(x), y) / len(COUNTS) for x, y in data()).backward()
    assert error(start - flat(faithful), gradients(before)) <= 1e-12, "it does what its text says"
    assert error(start - flat(faithful), whole_batch()[1]) > 0.1, "which is off by more than a tenth of the gradient"
    # The printed loss is that of the last five targets of eighteen.
    last = nn.functional.cross_entropy(before(data()[-1][0]), data()[-1][1]).item()
    assert [(line.epoch, line.step) for line in log] == [(0, 5)] and abs(log[0].loss - last) <= 1e-12
    assert abs(log[0].loss - whole_batch()[0]) > 0.01


@pytest.mark.parametrize(("batches", "steps"), [(6, [(0, 3), (1, 3)]), (4, [(0, 3), (1, 3)]), (3, [])])
def test_the_tutorial_never_steps_an_incomplete_last_group_of_four(batches: int, steps: list[tuple[int, int]]) -> None:
    network, four = model(), model()
    for trained, count in ((network, batches), (four, 4 if steps else 0)):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        log = train(trained, optimizer, nn.CrossEntropyLoss(), data()[:count], 4, epochs=2)
        assert [(line.epoch, line.step) for line in log] == steps
    assert torch.equal(flat(network), flat(four))


@pytest.mark.parametrize(("autocast", "bound"), [(None, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_autocast_runs_narrow_and_keeps_the_gradient(autocast: torch.dtype | None, bound: float) -> None:
    accumulating, seen = model(torch.float32), []
    accumulating[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))  # type: ignore[index]
    scaler = torch.amp.GradScaler("cpu") if autocast is torch.float16 else None
    optimizer = torch.optim.SGD(accumulating.parameters(), lr=1.0)
    outcome = accumulated_step(summed(accumulating), data(torch.float32), optimizer, autocast=autocast, scaler=scaler)
    assert outcome.stepped and outcome.gradient_norm is None and abs(outcome.loss - whole_batch()[0]) < 0.01
    assert set(seen) == {autocast or torch.float32} and len(seen) == len(COUNTS)
    distance = error(flat(model(torch.float32)) - flat(accumulating), whole_batch()[1])
    assert distance <= bound and (autocast is None or distance > 1e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_clipping_sees_the_unscaled_gradient(scaled: bool) -> None:
    accumulating = model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    optimizer = torch.optim.SGD(accumulating.parameters(), lr=1.0)
    outcome = accumulated_step(summed(accumulating), data(torch.float32), optimizer, scaler=scaler, clip_norm=0.01)
    expected = float(whole_batch()[1].norm())
    assert outcome.gradient_norm == pytest.approx(expected, rel=1e-5) and expected > 0.1
    moved = flat(accumulating) - flat(model(torch.float32))
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-4)


def test_an_infinite_gradient_skips_the_step_and_lowers_the_scale() -> None:
    accumulating = model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(accumulating.parameters(), lr=1.0)
    spoiled = data(torch.float32)
    spoiled[2][0][0, 0] = float("inf")
    assert not accumulated_step(summed(accumulating), spoiled, optimizer, scaler=scaler).stepped
    assert scaler.get_scale() == 2.0**9 and torch.equal(flat(accumulating), flat(model(torch.float32)))
    assert accumulated_step(summed(accumulating), data(torch.float32), optimizer, scaler=scaler).stepped
    assert scaler.get_scale() == 2.0**9
