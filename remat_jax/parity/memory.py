"""The residuals and the peak memory of both frameworks; PyTorch's peak is tracked on fake tensors."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax

from remat_jax.identity import ByIdentity
from remat_jax.parity.flax_side import FlaxSide
from remat_jax.parity.report_data import KeptAlone, MemoryRow
from remat_jax.parity.torch_side import TorchSide


def memory_of(
    torch: TorchSide, flax: FlaxSide, dtype: str, mode: str, target: str | None
) -> tuple[list[MemoryRow], list[KeptAlone]]:
    """A row for each framework, and the residuals that only one framework saves."""
    saved, residuals = torch.saved(dtype, mode), flax.kept(dtype, mode)
    source = f"compiled for {target or jax.default_backend()}, without an optimizer"
    rows = [
        MemoryRow(mode, "PyTorch", saved.device_bytes, saved.host_bytes, *torch_peak(torch, dtype, mode)),
        MemoryRow(mode, "JAX", residuals.device_bytes, residuals.host_bytes, flax.peak(dtype, mode, target), source),
    ]
    return rows, kept_alone(mode, saved, residuals)


def kept_alone(mode: str, saved: Any, residuals: Any) -> list[KeptAlone]:
    """The residuals without a counterpart in the other framework, largest first.

    `saved` is torch_ref's `SavedBytes`, `residuals` a `ResidualTable`. Residuals of equal size in the same memory (device
    or host) are paired, residuals of blocks first. A residual stacked by a scan counts once per layer.
    """
    theirs, ours = defaultdict[Any, list[KeptAlone]](list), defaultdict[Any, list[KeptAlone]](list)
    for side, arrays in ((theirs, _of_torch(mode, saved)), (ours, _of_jax(mode, residuals))):
        for array in arrays:
            side[array.place, array.bytes].append(array)
    unpaired: list[KeptAlone] = []
    for side, other in ((theirs, ours), (ours, theirs)):
        alone = Counter(array for key, arrays in side.items() for array in arrays[len(other.get(key, ())) :])
        unpaired += [replace(array, count=count, bytes=count * array.bytes) for array, count in alone.items()]
    return sorted(unpaired, key=lambda arrays: (-arrays.bytes, arrays.framework, arrays.name))


def _of_torch(mode: str, saved: Any) -> Iterator[KeptAlone]:
    for entry in saved.entries:
        if entry.place in ("device", "host"):
            # Of aten.native_layer_norm.default, only native_layer_norm is informative.
            operator = entry.operator.split(".")[1] if entry.operator.count(".") > 1 else entry.operator
            yield KeptAlone(mode, "PyTorch", entry.place, f"{entry.module}:{operator}", entry.shape, 1, entry.nbytes)


def _of_jax(mode: str, residuals: Any) -> Iterator[KeptAlone]:
    """JAX's residuals, one per layer; residuals of blocks and scans, whose names have a `#`, come first."""
    for row in sorted(residuals, key=lambda row: "#" not in row.name):
        if row.action == "recompute" or not math.prod(row.shape):
            continue
        layers, shape = (row.shape[0], row.shape[1:]) if row.scanned and row.shape else (1, row.shape)
        count = row.count * layers
        place = "host" if row.action == "offload" else "device"
        yield from [KeptAlone(mode, "JAX", place, row.name, tuple(shape), 1, row.bytes // count)] * count


def torch_peak(side: TorchSide, dtype: str, mode: str) -> tuple[int | None, str]:
    """PyTorch's peak memory in bytes over both passes in a mode, and the source of the figure.

    Returns (None, reason) if the step cannot run on fake tensors: it needs tensor values, or tensors other than parameters,
    buffers and inputs.
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
    # The step has run on real tensors, so every error here, such as a bare assertion in PyTorch, comes from fake tensors.
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        return None, f"the step does not run on fake tensors: {text}"


def _empty_model(model: Any) -> None:
    """Replace parameters and buffers by uninitialised tensors; a shared tensor stays shared."""
    import torch

    made: ByIdentity[Any] = ByIdentity()
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in made:
                    empty, is_parameter = _empty(tensor, False), isinstance(tensor, torch.nn.Parameter)
                    made[tensor] = torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                tensors[name] = made.get(tensor)


def _empty(tensor: Any, with_gradient: bool) -> Any:
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, requires_grad=with_gradient)
