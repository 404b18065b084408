"""The memory of both frameworks in a comparison; that of PyTorch's training step is tracked on fake tensors."""

from __future__ import annotations

from typing import Any

import jax

from remat_jax.parity.flax_side import FlaxSide
from remat_jax.parity.kept import KeptAlone, kept_alone
from remat_jax.parity.report_data import MemoryRow
from remat_jax.parity.torch_side import TorchSide


def memory_of(
    torch: TorchSide, flax: FlaxSide, dtype: str, mode: str, target: str | None
) -> tuple[list[MemoryRow], list[KeptAlone]]:
    """A row for each framework, and the arrays that only one of them keeps.

    JAX's peak is that of its step as it is compiled for the target; without one, as it was compiled to run here.
    """
    saved, residuals = torch.saved(dtype, mode), flax.kept(dtype, mode)
    peak = flax.peak(dtype, mode, target) if target else flax.peak_here(dtype, mode)
    known = f"compiled for {target or jax.default_backend()}, without an optimizer"
    rows = [
        MemoryRow(mode, "PyTorch", saved.device_bytes, saved.host_bytes, *torch_peak(torch, dtype, mode)),
        MemoryRow(mode, "JAX", residuals.device_bytes, residuals.host_bytes, peak, known),
    ]
    return rows, kept_alone(mode, saved, residuals)


def torch_peak(side: TorchSide, dtype: str, mode: str) -> tuple[int | None, str]:
    """Bytes that PyTorch's forward and backward pass hold at their highest in a mode, and how that is known.

    None, and why, where the step cannot be run on fake tensors: it asks for a value, or reads tensors that are neither
    parameters nor buffers nor inputs.
    """
    import torch_ref

    model, arrays = side.make(dtype), side.inputs(dtype)

    def build() -> Any:
        _empty_model(model)
        batch = {name: _empty(tensor, name in side.case.inputs.floating) for name, tensor in arrays.items()}

        def loss(*tensors: Any) -> Any:
            return side.loss(model, dict(zip(batch, tensors, strict=True)), dtype)

        return torch_ref.TrainingStep(model, loss, tuple(batch.values()))

    try:
        with side.in_mode(model, mode):
            return torch_ref.peak_bytes(build).device_bytes, "tracked on fake tensors, without an optimizer"
    # The same step has run on real tensors: whatever is raised here, bare assertions of PyTorch's too, is for their being fake.
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        return None, f"the step does not run on fake tensors: {text}"


def _empty_model(model: Any) -> None:
    """Put unwritten tensors in the place of parameters and buffers, one for all that share one."""
    import torch

    made: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    empty = _empty(tensor, False)
                    parameter = isinstance(tensor, torch.nn.Parameter)
                    made[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if parameter else empty
                tensors[name] = made[id(tensor)]


def _empty(tensor: Any, with_gradient: bool) -> Any:
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, requires_grad=with_gradient)
