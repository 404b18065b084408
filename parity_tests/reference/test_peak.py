"""`peak_bytes`: the peak of a training step on fake tensors, against closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_ref
from examples import pytorch
from parity_tests.reference.blocks import call, live_copies

B, T, D, H, L = 16, 64, 64, 4, 4
ACTIVATION = B * T * D * 4


def step_in(mode: str, optimizer: bool = False, layers: int = L):
    def build() -> torch_ref.TrainingStep:
        model = pytorch.DecoderStack(layers, D, H)
        flags = torch_ref.mode_flags(mode)
        adam = torch.optim.Adam(model.parameters(), fused=True) if optimizer else None
        return torch_ref.TrainingStep(model, lambda x: model(x + 0, **flags).square().mean(), (torch.zeros(B, T, D),), adam)

    return build


@pytest.fixture(scope="module")
def peaks() -> dict[str, torch_ref.PeakBytes]:
    return {mode: torch_ref.peak_bytes(step_in(mode)) for mode in torch_ref.MODES}


PARAMETERS = sum(p.nbytes for p in pytorch.DecoderStack(L, D, H).parameters())


def test_the_parts_make_the_whole_and_every_mode_lowers_it(peaks):
    for mode, peak in peaks.items():
        assert sum(peak.breakdown.values()) == peak.device_bytes
        assert peak.breakdown["parameters"] == PARAMETERS
        assert peak.breakdown["batch"] == ACTIVATION
        assert peak.breakdown["optimizer_state"] == peak.breakdown["buffers"] == 0
        assert peak.host_bytes == (L * ACTIVATION if mode == "offload" else 0)
        assert mode == "offload" or peak.tracked_bytes == peak.device_bytes
    assert peaks["off"].device_bytes > peaks["checkpoint"].device_bytes > peaks["offload"].device_bytes


def test_offload_moves_the_peak_to_the_other_end(peaks):
    # With checkpoints the peak is in the backward pass of the last block: the inputs of all blocks and the output are alive,
    # and no gradient of an earlier block. With offload the peak is in that of the first block: one input was fetched,
    # and the gradients of all later blocks are alive.
    later_gradients = (L - 1) * PARAMETERS // L
    assert peaks["checkpoint"].device_bytes - peaks["offload"].device_bytes == L * ACTIVATION - later_gradients
    assert peaks["offload"].breakdown["gradients"] - peaks["checkpoint"].breakdown["gradients"] == later_gradients


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("off", (12 * B * T * D + B * H * T * T + 4 * B * T) * 4),
        ("checkpoint", ACTIVATION),
        ("offload", PARAMETERS // L),  # gradients; they are smaller than an input
    ],
)
def test_one_more_layer_costs_what_it_keeps(peaks, mode, expected):
    fewer = torch_ref.peak_bytes(step_in(mode, layers=L - 1))
    less, more = (peak.device_bytes - peak.breakdown["parameters"] for peak in (fewer, peaks[mode]))
    assert more - less == expected


def test_optimizer_state_is_there_from_the_start_of_the_step():
    peak = torch_ref.peak_bytes(step_in("off", optimizer=True, layers=1))
    tensors = len(list(pytorch.DecoderStack(1, D, H).parameters()))
    assert peak.breakdown["optimizer_state"] == 2 * PARAMETERS // L + 4 * tensors  # both moments, and a step count each


def test_a_linear_model_by_hand():
    def build():
        model = nn.Linear(100, 50, bias=False)
        return torch_ref.TrainingStep(model, lambda x: model(x).sum(), (torch.zeros(10, 100),))

    peak = torch_ref.peak_bytes(build)
    # Parameter, its gradient, the batch; only the caller holds the output until it is summed.
    assert peak.breakdown["parameters"] == 20000
    assert peak.breakdown["batch"] == 4000
    assert peak.device_bytes == 20000 + 4000 + 20000 + 4 + 4  # the loss and the seed of its gradient


class FirstRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x[:1].sum() * self.weight


def test_a_host_copy_in_the_making_is_not_on_the_device():
    def build():
        model = FirstRow()
        x = torch.zeros(1000, 250)
        return torch_ref.TrainingStep(model, lambda x: call("offload", model, x=x + 0), (x,))

    peak = torch_ref.peak_bytes(build)
    assert peak.host_bytes == 1_000_000
    assert peak.tracked_bytes >= 3_000_000
    assert 2_000_000 < peak.device_bytes < 2_002_000  # the batch, the block's input; then the batch, the one fetched


def test_nothing_is_left_behind():
    before = live_copies()
    torch_ref.peak_bytes(step_in("offload", layers=1))
    assert live_copies() == before
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


LINEAR = nn.Linear(2, 1)
X = torch.ones(2)


def asks_for_a_value() -> torch_ref.TrainingStep:
    model = nn.Linear(2, 1)
    return torch_ref.TrainingStep(model, lambda x: model(x).sum() / model(x).sum().item(), (torch.ones(2),))


REFUSED = {
    "model of the TrainingStep has tensors that existed": lambda: torch_ref.TrainingStep(LINEAR, LINEAR, (torch.ones(2),)),
    "batch of the TrainingStep has tensors.*into build": lambda: torch_ref.TrainingStep(nn.Linear(2, 1), LINEAR, (X,)),
    "build returned a Linear, expected a TrainingStep": lambda: LINEAR,
    r"value of a fake tensor.*remove `.item\(\)`": asks_for_a_value,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_measured_is_refused(message):
    with pytest.raises(torch_ref.TorchRefError, match=message):
        torch_ref.peak_bytes(REFUSED[message])
    with pytest.raises(torch_ref.InvalidArgumentError, match=r"device='cpu': expected a CUDA device.*torch_ref\.peak_bytes"):
        torch_ref.allocated_bytes(REFUSED[message], "cpu")


@pytest.mark.gpu
def test_the_allocators_peak_is_the_tracked_one_but_for_rounding_and_workspaces() -> None:
    def build(device: str | None = "cuda") -> torch_ref.TrainingStep:
        with torch.device(device or "cpu"):
            model = pytorch.DeepMLP(num_layers=8, hidden_size=1024)
            x = torch.zeros(4096, 1024)
        return torch_ref.TrainingStep(model, lambda x: model(x).square().mean(), (x,), torch.optim.Adam(model.parameters()))

    tracked, allocated = torch_ref.peak_bytes(lambda: build(None)), torch_ref.allocated_bytes(build)
    # cuBLAS has a workspace of up to 32 MiB.
    assert tracked.device_bytes <= allocated.peak_bytes <= 1.03 * tracked.device_bytes + 32 * 2**20
    assert allocated.peak_bytes <= allocated.reserved_bytes
