"""Copies between a device and host memory; on CUDA they are asynchronous, on separate streams.

A copy to the host waits for all work already queued on the current stream; the current stream does not wait for the copy.
The allocator reuses the source memory only after the copy (`record_stream`); the caller must prevent writes to it until
then. A copy back can be started early; `Arrival.wait` makes the current stream wait for this copy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Arrival:
    """A tensor that is being copied to the device; `event` is None if the copy is complete."""

    tensor: torch.Tensor
    event: torch.cuda.Event | None = None

    def wait(self) -> torch.Tensor:
        """Make the current stream wait for the tensor, and return it."""
        if self.event is not None:
            current = torch.cuda.current_stream(self.tensor.device)
            current.wait_event(self.event)
            # The tensor was allocated on the copying stream, which does not know of its use on the current stream.
            self.tensor.record_stream(current)
        return self.tensor


def copy_out(tensor: torch.Tensor, pin: bool) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Copy a tensor to host memory. With `pin` on CUDA, the copy is pinned and asynchronous, and an event marks its end."""
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

    The tensor requires a gradient if its dtype allows one, and is not a leaf.
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
    """A stream for each direction, because the link carries both directions at once."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
