"""Cuts into segments: closed forms against measurements, and every fault of the tutorial's experiment in numbers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_ref
from examples import pytorch
from examples.pytorch.faithful import deep_mlp as faithful

Segments = int | Sequence[int] | None
SIZES = {"hidden_size": 64, "in_features": 48, "out_features": 10}
BATCH = 96
ACTIVATION = BATCH * 64 * 4


@functools.cache
def measured(num_layers: int, segments: Segments, batch: int = BATCH, **sizes: int) -> pytorch.SegmentCost:
    """All figures of a closed form, measured on fake tensors."""
    sizes = sizes or SIZES

    def build() -> torch_ref.TrainingStep:
        model = pytorch.DeepMLP(num_layers, **sizes)
        x = torch.zeros(batch, sizes["in_features"])
        return torch_ref.TrainingStep(model, lambda x: model(x, segments=segments).sum(), (x,))

    with FakeTensorMode():
        step = build()
        saved = torch_ref.saved_for_backward(lambda x: step.model(x, segments=segments), *step.batch)
        with torch_ref.count_calls(nn.Linear) as calls, torch_ref.count_matmuls() as matmuls:
            step.run()
    peak = torch_ref.peak_bytes(build)
    activations = peak.device_bytes - sum(peak.breakdown[kind] for kind in ("parameters", "gradients", "batch"))
    return pytorch.SegmentCost(saved.device_bytes, activations - 8, peak.device_bytes, calls.total, matmuls.total)


def cuts(num_layers: int) -> dict[str, tuple[Segments, tuple[int, ...]]]:
    """The model's argument, and the same as boundaries."""
    sqrt, best = pytorch.sqrt_segments(num_layers), pytorch.optimal_segments(num_layers)
    by_hand = pytorch.decreasing_boundaries(num_layers)
    return {
        "plain": (None, ()),
        "three": (3, pytorch.uniform_boundaries(num_layers, 3)),
        "sqrt": (sqrt, pytorch.uniform_boundaries(num_layers, sqrt)),
        "optimal": (best, pytorch.uniform_boundaries(num_layers, best)),
        "by hand": (by_hand, by_hand),
    }


# The closed forms.


@pytest.mark.parametrize(
    ("num_layers", "cut"),
    [
        *((16, cut) for cut in ("plain", "three", "sqrt", "by hand")),
        *((62, cut) for cut in ("optimal", "by hand")),
        (64, "sqrt"),
    ],
)
def test_what_a_cut_costs_is_its_closed_form(num_layers: int, cut: str) -> None:
    segments, boundaries = cuts(num_layers)[cut]
    cost, expected = measured(num_layers, segments), pytorch.deep_mlp_cost(num_layers, boundaries, batch=BATCH, **SIZES)
    assert cost.saved_bytes == expected.saved_bytes
    assert cost.peak_bytes == expected.peak_bytes
    assert (cost.executions, cost.matmuls) == (expected.executions, expected.matmuls)


@pytest.mark.parametrize(
    ("num_layers", "segments", "activations", "runs"), [(16, 4, 6, 28), (64, 8, 14, 120), (256, 16, 30, 496)]
)
def test_the_square_roots_by_hand(num_layers: int, segments: int, activations: int, runs: int) -> None:
    assert pytorch.sqrt_segments(num_layers) == pytorch.optimal_segments(num_layers) == segments
    cost = pytorch.deep_mlp_cost(num_layers, pytorch.uniform_boundaries(num_layers, segments), batch=BATCH, **SIZES)
    assert cost.saved_bytes == activations * ACTIVATION == (2 * segments - 2) * ACTIVATION
    assert cost.peak_activation_bytes == (activations + 2) * ACTIVATION
    assert (cost.executions, cost.matmuls) == (runs, runs + 2 * num_layers - 1)
    assert runs == 2 * num_layers - segments


@pytest.mark.parametrize(
    ("segments", "batch", "hidden_size", "in_features"),
    [
        (None, 512, 64, 48),
        (3, 32, 64, 48),
        (5, 32, 64, 200),
        (9, 65, 64, 64),
        ((4, 7), 200, 16, 300),
        ((1, 2), 512, 64, 48),
        ((8,), 32, 64, 200),
        (None, 65, 64, 64),
        (3, 200, 16, 300),
    ],
)
def test_the_peak_holds_for_any_cut_and_shape(segments: Segments, batch: int, hidden_size: int, in_features: int) -> None:
    sizes = {"hidden_size": hidden_size, "in_features": in_features, "out_features": 10}
    boundaries = segments if isinstance(segments, tuple) else pytorch.uniform_boundaries(9, segments or 1)
    expected = pytorch.deep_mlp_cost(9, boundaries, batch=batch, **sizes)
    assert measured(9, segments, batch, **sizes).peak_bytes == expected.peak_bytes


@pytest.mark.parametrize("num_layers", [1, 2, 5, 10, 12])
def test_decreasing_segments_are_the_best_of_all_cuts(num_layers: int) -> None:
    def cost(boundaries: tuple[int, ...]) -> tuple[int, int]:
        return pytorch.most_activations(num_layers, boundaries), pytorch.recomputed_layers(num_layers, boundaries)

    every = (cut for count in range(num_layers) for cut in itertools.combinations(range(1, num_layers), count))
    assert cost(pytorch.decreasing_boundaries(num_layers)) == min(map(cost, every))


def test_the_number_of_segments_where_the_rest_spoils_the_root() -> None:
    kept = [pytorch.kept_activations(62, pytorch.uniform_boundaries(62, segments)) for segments in range(1, 63)]
    assert pytorch.sqrt_segments(62) == 7 and pytorch.optimal_segments(62) == 6
    assert (kept[6], kept[5], min(kept)) == (19, 16, 16)
    assert pytorch.most_activations(62, pytorch.decreasing_boundaries(62)) == 11


# The same numbers.


@pytest.mark.parametrize("cut", ["three", "sqrt", "optimal", "by hand"])
def test_gradients_are_those_of_the_plain_model(cut: str) -> None:
    torch.manual_seed(0)
    model, x = pytorch.DeepMLP(20, 12, 7, 5).double(), torch.randn(9, 7, dtype=torch.float64)
    (y := model(x)).square().sum().backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    (output := model(x, segments=cuts(20)[cut][0])).square().sum().backward()
    assert torch.equal(output, y)
    norm = torch.stack([gradient.norm() for gradient in plain.values()]).norm()
    for name, parameter in model.named_parameters():
        assert (parameter.grad - plain[name]).norm() <= 1e-12 * norm, name


# The tutorial's experiment: one fault per test.


def relative(output: torch.Tensor, expected: torch.Tensor) -> float:
    return ((output - expected).norm() / expected.norm()).item()


@pytest.fixture
def tutorial() -> faithful.DeepMLP:
    torch.manual_seed(42)
    return faithful.DeepMLP(num_layers=9, hidden_size=32, in_features=24).double()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_fault_1_checkpoint_sequential_over_bare_linears_loses_every_relu(tutorial, x) -> None:
    x.requires_grad_()
    output, plain = tutorial(x, use_checkpoint=True), tutorial(x)
    affine = x
    for layer in tutorial.layers:
        affine = layer(affine)
    assert torch.equal(output, affine)
    assert relative(output, plain) > 0.1
    # An affine function maps the midpoint of two inputs to the midpoint of their outputs.
    middle = tutorial(((x[:8] + x[8:]) / 2).detach().requires_grad_(), use_checkpoint=True)
    assert relative((output[:8] + output[8:]) / 2, middle) < 1e-14


def test_fault_2_the_reentrant_form_trains_the_last_segment_only(tutorial, x) -> None:
    with torch_ref.count_calls(nn.Linear) as calls, pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        tutorial(x, use_checkpoint=True).sum().backward()
    assert [layer.weight.grad is None for layer in tutorial.layers] == [True] * 6 + [False] * 3
    assert calls.total == 9  # whatever time it took, it was not the time of checkpointing: with recomputation 15


def test_fault_3_segments_by_hand_lose_the_relu_at_their_ends(tutorial, x) -> None:
    output, ends = faithful.manual_checkpoint_forward(tutorial, x)
    expected = x
    for index, layer in enumerate(tutorial.layers):
        expected = layer(expected)
        if index not in (2, 5, 8):
            expected = torch.relu(expected)
    assert torch.equal(output, expected)
    assert relative(output, tutorial(x)) > 0.05
    assert [bool((end < 0).any()) for end in ends] == [True, True]


def test_fault_4_detached_segments_cut_the_gradient(tutorial, x) -> None:
    output, _ = faithful.manual_checkpoint_forward(tutorial, x)
    with torch_ref.count_calls(nn.Linear) as calls:
        output.sum().backward()
    assert [layer.weight.grad is None for layer in tutorial.layers] == [True] * 6 + [False] * 3
    assert calls.total == 0  # nothing is recomputed, so nothing was checkpointed


@pytest.mark.parametrize(("segments", "missed"), [(None, 77_450_028), (3, 78_760_748)])
def test_fault_5_what_is_held_after_forward_is_not_the_peak(segments: int | None, missed: int) -> None:
    """At the tutorial's sizes: its reading of a single step, and that step's peak, without the optimizer and with it."""

    def build(optimizer: bool = False) -> torch_ref.TrainingStep:
        model = pytorch.DeepMLP(20, 1024)
        batch = (torch.zeros(32, 1024), torch.zeros(32, dtype=torch.long))
        adam = torch.optim.Adam(model.parameters()) if optimizer else None
        return torch_ref.TrainingStep(model, lambda x, t: F.cross_entropy(model(x, segments=segments), t), batch, adam)

    with FakeTensorMode():
        step = build()
        parameters = sum(parameter.nbytes for parameter in step.model.parameters())
        held = torch_ref.saved_for_backward(step.loss, *step.batch)
    after_forward = parameters + sum(tensor.nbytes for tensor in step.batch) + held.device_bytes
    peak = torch_ref.peak_bytes(build)
    assert peak.device_bytes - after_forward == missed
    # Most of the missed memory is gradients; checkpointing changes the reading, not the peak.
    assert peak.breakdown["gradients"] == parameters - 4 * 1024 * 1025
    assert peak.device_bytes == 159_883_608
    assert torch_ref.peak_bytes(lambda: build(optimizer=True)).device_bytes == 327_766_592


def test_fault_6_the_second_reading_has_gradients_and_moments_in_it() -> None:
    with pytest.warns(UserWarning, match="None of the inputs"):
        readings = faithful.memory_readings()
    parameters = sum(parameter.nbytes for parameter in faithful.DeepMLP(20, 1024).parameters())
    assert (readings.standard, readings.checkpoint) == (82_433_584, 320_423_752)
    # Three times the parameters, minus what the first forward pass kept more than the second.
    assert 2.9 * parameters < -readings.reduction < 3 * parameters
