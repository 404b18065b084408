"""A parameter that is updated in host memory: its master copy, its CPU optimizer, and the copies in both directions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from torch_ref.errors import InvalidArgumentError


def master_of(parameter: torch.Tensor, device: torch.device | str) -> nn.Parameter:
    """A master copy of `parameter`, at least float32; pinned if the parameter is on CUDA and the copy on the CPU."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    copy = parameter.detach().to(device, dtype, copy=True)
    pin = parameter.device.type == "cuda" and copy.device.type == "cpu"
    return nn.Parameter(copy.pin_memory() if pin else copy)


class Offloaded:
    """A parameter, with its master copy and optimizer on the host.

    Attributes:
        parameter: the parameter, on its device.
        master: its values in host memory, which the CPU optimizer updates.
        optimizer: the CPU optimizer.
    """

    def __init__(self, parameter: nn.Parameter, optimizer_class: type[torch.optim.Optimizer], settings: dict[str, Any]) -> None:
        self.parameter = parameter
        self.master = master_of(parameter, "cpu")
        self.optimizer = optimizer_class([{**settings, "params": [self.master]}])
        pin = parameter.device.type == "cuda"
        # Copies cross the link in the parameter's own dtype; the host converts them.
        self._gradient = torch.empty_like(parameter, device="cpu", pin_memory=pin)
        self._narrowed = None if self.master.dtype == parameter.dtype else torch.empty_like(self._gradient, pin_memory=pin)
        self._version = parameter._version
        self._arrived: torch.cuda.Event | None = None
        self._returned: torch.cuda.Event | None = None

    @property
    def state(self) -> dict[str, Any]:
        """The CPU optimizer's state of the parameter."""
        return self.optimizer.state.get(self.master, {})

    @property
    def nbytes(self) -> int:
        """Bytes of the state, and of the master if the parameter is narrower."""
        tensors = [value for value in self.state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors) + (0 if self._narrowed is None else self.master.nbytes)

    def fetch_gradient(self, stream: torch.cuda.Stream | None) -> None:
        """Start copying the gradient to the host; asynchronously on CUDA."""
        gradient = self.parameter.grad
        if gradient.layout != torch.strided:
            raise InvalidArgumentError(
                f"a gradient of shape {tuple(gradient.shape)} has layout {gradient.layout}: expected a dense one;"
                " leave such parameters to an optimizer of their own."
            )
        if self.parameter._version != self._version:
            self._wait(self._returned)
            self.master.copy_(self.parameter)  # the parameter was changed from outside
        cuda = gradient.device.type == "cuda"
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(gradient.device))
            gradient.record_stream(stream)
        with _on(stream):
            self._gradient.copy_(gradient, non_blocking=cuda)
            self._arrived = _recorded(gradient.device) if cuda else None

    def update(self, stream: torch.cuda.Stream | None) -> None:
        """Update the master once the gradient has arrived, and start copying it to the parameter."""
        self._wait(self._arrived)
        self._wait(self._returned)  # the last step's copy may still read the memory that is written now
        self.master.grad = self._gradient.to(self.master.dtype)
        self.optimizer.step()
        self.master.grad = None
        source = self.master
        if self._narrowed is not None:
            source = self._narrowed.copy_(self.master)
        device = self.parameter.device
        cuda = device.type == "cuda"
        # The gradient has arrived, so the backward pass, which reads the parameter, is over.
        with _on(stream):
            self.parameter.copy_(source, non_blocking=cuda)
            self._returned = _recorded(device) if cuda else None
        self._version = self.parameter._version

    def load(self, state: dict[str, Any]) -> None:
        """Load `state` into the CPU optimizer, and treat the parameter's current values as those of the master."""
        plain = self.optimizer.state_dict()
        plain["state"] = {0: state} if state else {}
        self.optimizer.load_state_dict(plain)
        self._version = self.parameter._version

    @staticmethod
    def _wait(event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _recorded(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
