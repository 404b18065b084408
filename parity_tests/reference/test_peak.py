from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_ref
from examples import pytorch
from parity_tests.reference.blocks import call, live_copies

B, T, D, H, L = 16, 64, 64, 4, 4
ACTIVATION = B * T * D * 4


def step_in(mode: str, optimizer: bool = False, batch: int = B):
    def build() -> torch_ref.TrainingStep:
        model = pytorch.DecoderStack(L, D, H)
        flags = torch_ref.mode_flags(mode)
        x = torch.zeros(batch, T, D)
        adam = torch.optim.Adam(model.parameters(), fused=True) if optimizer else None
        return torch_ref.TrainingStep(model, lambda x: model(x + 0, **flags).square().mean(), (x,), adam)

    return build


@pytest.fixture(scope="module")
def peaks() -> dict[str, torch_ref.PeakBytes]:
    return {mode: torch_ref.peak_bytes(step_in(mode)) for mode in torch_ref.MODES}


PARAMETERS = sum(p.nbytes for p in pytorch.DecoderStack(L, D, H).parameters())


def test_the_parts_make_the_whole(peaks):
    for peak in peaks.values():
        assert sum(peak.breakdown.values()) == peak.device_bytes
        assert peak.breakdown["parameters"] == PARAMETERS
        assert peak.breakdown["batch"] == ACTIVATION
        assert peak.breakdown["optimizer_state"] == peak.breakdown["buffers"] == 0


def test_every_mode_lowers_the_device_peak(peaks):
    assert peaks["off"].device_bytes > peaks["checkpoint"].device_bytes > peaks["offload"].device_bytes
    assert peaks["off"].host_bytes == peaks["checkpoint"].host_bytes == 0
    assert peaks["offload"].host_bytes == L * ACTIVATION
    for mode in ("off", "checkpoint"):
        assert peaks[mode].tracked_bytes == peaks[mode].device_bytes


def test_offload_moves_the_peak_to_the_other_end(peaks):
    # With checkpoints the peak is in the backward pass of the last block: the inputs of all blocks and the output are alive,
    # and no gradient of an earlier block. With offload the peak is in that of the first block: one input was fetched,
    # and the gradients of all later blocks are alive.
    later_gradients = (L - 1) * PARAMETERS // L
    assert peaks["checkpoint"].device_bytes - peaks["offload"].device_bytes == L * ACTIVATION - later_gradients
    assert peaks["offload"].breakdown["gradients"] - peaks["checkpoint"].breakdown["gradients"] == later_gradients


def test_more_layers_cost_what_they_keep():
    def layers(count: int, mode: str) -> int:
        def build():
            model = pytorch.DecoderStack(count, D, H)
            x, flags = torch.zeros(B, T, D), torch_ref.mode_flags(mode)
            return torch_ref.TrainingStep(model, lambda x: model(x + 0, **flags).square().mean(), (x,))

        peak = torch_ref.peak_bytes(build)
        return peak.device_bytes - peak.breakdown["parameters"]

    layer = (12 * B * T * D + B * H * T * T + 4 * B * T) * 4
    assert layers(3, "off") - layers(2, "off") == layer
    assert layers(3, "checkpoint") - layers(2, "checkpoint") == ACTIVATION
    assert layers(3, "offload") - layers(2, "offload") == PARAMETERS // L  # gradients; they are smaller than an input


def test_optimizer_state_is_there_from_the_start_of_the_step():
    peak = torch_ref.peak_bytes(step_in("off", optimizer=True))
    tensors = len(list(pytorch.DecoderStack(L, D, H).parameters()))
    assert peak.breakdown["optimizer_state"] == 2 * PARAMETERS + 4 * tensors  # both moments, and a step count each


def test_a_linear_model_by_hand():
    def build():
        model = nn.Linear(100, 50, bias=False)
        return torch_ref.TrainingStep(model, lambda x: model(x).sum(), (torch.zeros(10, 100),), optimizer())

    def optimizer():
        return None

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
    torch_ref.peak_bytes(step_in("offload", batch=2))
    assert live_copies() == before
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_tensors_that_existed_before_are_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(torch_ref.InvalidArgumentError, match="model of the TrainingStep has tensors that existed before"):
        torch_ref.peak_bytes(lambda: torch_ref.TrainingStep(model, model, (torch.ones(2),)))
    batch = (torch.ones(2),)
    with pytest.raises(torch_ref.InvalidArgumentError, match="batch of the TrainingStep has tensors.*into build"):
        torch_ref.peak_bytes(lambda: torch_ref.TrainingStep(nn.Linear(2, 2), model, batch))
    with pytest.raises(torch_ref.InvalidArgumentError, match="build returned a Linear, expected a TrainingStep"):
        torch_ref.peak_bytes(lambda: nn.Linear(2, 2))


def test_a_step_that_asks_for_a_value_is_refused():
    def build():
        model = nn.Linear(2, 1)
        return torch_ref.TrainingStep(model, lambda x: model(x).sum() / model(x).sum().item(), (torch.ones(2),))

    with pytest.raises(torch_ref.FakeTensorStepError, match=r"value of a fake tensor.*remove `.item\(\)`"):
        torch_ref.peak_bytes(build)


def test_the_allocators_peak_needs_a_gpu_and_says_so() -> None:
    def build() -> torch_ref.TrainingStep:
        raise AssertionError("built")

    with pytest.raises(torch_ref.InvalidArgumentError, match=r"device='cpu': expected a CUDA device.*torch_ref\.peak_bytes"):
        torch_ref.allocated_bytes(build, "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(
            torch_ref.InvalidArgumentError, match=r"device='cuda': expected a CUDA device of this machine, which has 0"
        ):
            torch_ref.allocated_bytes(build)


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
