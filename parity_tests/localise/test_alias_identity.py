"""An output that a module computes is not taken for an alias of its input that is gone."""

from __future__ import annotations

import torch

from remat_jax.parity.capture_torch import _Recorder


def test_a_computed_output_is_copied_although_an_input_is_gone() -> None:
    recorder = _Recorder({})
    call = recorder._begin(torch.nn.ReLU(), "relu")
    for _ in range(20):
        x = 1 * torch.ones(2, requires_grad=True)
        recorder._tap([x], call, "input")
        [output] = recorder._tap([2 * x], call, "output")
        assert output._base is None  # a copy, and no view
