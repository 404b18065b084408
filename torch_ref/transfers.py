"""Copies between a device and host memory; on CUDA they run on streams of their own, beside the computation.

A copy to the host waits for what the current stream has been given so far, not the other way round. The memory that it
reads is not reused before it is over (`record_stream`); whoever writes on it meanwhile must be kept from it. A copy back
can be started before it is needed; whoever uses it makes the stream that it computes on wait for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Arrival:
    """A tensor on its way to the device; `event` is None if it is there."""

    tensor: torch.Tensor
    event: torch.cuda.Event | None = None

    def wait(self) -> torch.Tensor:
        """Make the current stream wait for the tensor, and give it."""
        if self.event is not None:
            current = torch.cuda.current_stream(self.tensor.device)
            current.wait_event(self.event)
            # It was allocated on the copying stream, which knows nothing of what the current one does with it.
            self.tensor.record_stream(current)
        return self.tensor


def copy_out(tensor: torch.Tensor, pin: bool) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Copy a tensor to host memory: pinned and asynchronous if `pin` and it is on CUDA, with the event that ends it."""
    if not pin or tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True), None
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    stream, copied = _streams(tensor.device)[0], torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        host.copy_(tensor, non_blocking=True)
        copied.record(stream)
    tensor.record_stream(stream)
    return host, copied


def fetch(host: torch.Tensor, device: torch.device, copied: torch.cuda.Event | None) -> Arrival:
    """Start copying `host` to `device`; asynchronous if `copied`, the event of `copy_out`, is given.

    The tensor requires a gradient, where its data type allows one, without being a leaf.
    """
    differentiable = host.is_floating_point() or host.is_complex()
    with torch.set_grad_enabled(differentiable):
        source = host.detach().requires_grad_(differentiable)
        if copied is None:
            return Arrival(source.to(device, copy=True))
        stream, arrived = _streams(device)[1], torch.cuda.Event()
        stream.wait_event(copied)
        with torch.cuda.stream(stream):
            back = source.to(device, non_blocking=True, copy=True)
            arrived.record(stream)
        return Arrival(back, arrived)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """One stream for each direction: the link carries both at once."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
