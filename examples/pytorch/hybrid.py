"""An optimizer that keeps the state of a share of the parameters in host memory, and updates them on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_ref.errors import InvalidArgumentError, NothingToOffloadError

from .offloaded import Offloaded, master_of

MASTER = "master"
"""The key of a float32 master copy in `HybridOptimizer.state_dict`."""


@dataclass(frozen=True)
class StatePlacement:
    """The bytes of an optimizer's state tensors and float32 master copies, by place.

    Attributes:
        host_bytes: the bytes for parameters that are updated on the host.
        device_bytes: the bytes for parameters that are updated on the device.
    """

    host_bytes: int
    device_bytes: int


class HybridOptimizer(torch.optim.Optimizer):
    """`optimizer_class` with the state of a share of the parameters in host memory, like Megatron-LM's hybrid optimizer.

    An offloaded parameter has a master copy in host memory (pinned if the parameter is on a CUDA device) and its own CPU
    optimizer. A step copies the gradient to the host, updates the master there, and copies the master to the parameter. On
    CUDA the copies run on separate streams, while the device updates its parameters and the CPU updates others. The largest
    parameters are offloaded first, while their share of all elements is at most `offload_fraction`.

    16-bit parameters have float32 masters on the host and on the device, so the result does not depend on the fraction.
    Other parameters are updated bit for bit like in the plain optimizer. Learning rate schedulers, closures, `GradScaler` and
    `state_dict` work as usual; a state dict may come from a different fraction or from the plain optimizer.

    Args:
        params: parameters, or groups of them, as for any optimizer.
        optimizer_class: an optimizer that treats each parameter by itself, such as `torch.optim.AdamW`.
        offload_fraction: from 0 (nothing moves) to 1.
        overlap: on CUDA, copy on separate streams; if False, copy on the current stream.
        options: the options of `optimizer_class`.

    Raises:
        InvalidArgumentError: if an argument is invalid.
        NothingToOffloadError: if a fraction above 0 moves nothing, as for plain SGD, which has no state.

    >>> w = nn.Parameter(torch.ones(4))
    >>> optimizer = HybridOptimizer([w], torch.optim.SGD, lr=0.5, momentum=0.9)
    >>> w.grad = torch.ones(4)
    >>> optimizer.step()
    >>> w.tolist(), optimizer.placement()
    ([0.5, 0.5, 0.5, 0.5], StatePlacement(host_bytes=16, device_bytes=0))
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        offload_fraction: float = 1.0,
        overlap: bool = True,
        **options: Any,
    ) -> None:
        _check(optimizer_class, offload_fraction)
        whole = optimizer_class(list(params), **options)
        self._finished = False
        super().__init__(whole.param_groups, whole.defaults)
        self._finished = True
        self._class, self._options, self._overlap = optimizer_class, options, overlap
        chosen = self._chosen(offload_fraction)
        self._offloaded = {
            parameter: Offloaded(parameter, optimizer_class, _settings(group))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter in chosen
        }
        self._masters = {
            parameter: master_of(parameter, parameter.device)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter not in chosen and _is_narrow(parameter)
        }
        self._versions = {parameter: parameter._version for parameter in self._masters}
        self._device = self._device_optimizer()
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    # --- what is where ------------------------------------------------------------------------------------------------

    @property
    def offloaded_parameters(self) -> list[nn.Parameter]:
        """The parameters that are updated on the host."""
        return list(self._offloaded)

    def placement(self) -> StatePlacement:
        """The current placement of state and masters; before the first step there is no state."""
        host = sum(one.nbytes for one in self._offloaded.values())
        device = sum(_nbytes(state) for state in self._device.state.values()) if self._device is not None else 0
        return StatePlacement(host, device + sum(master.nbytes for master in self._masters.values()))

    # --- a step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; with a `closure`, run it first and return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share_settings()
        ready = [one for parameter, one in self._offloaded.items() if parameter.grad is not None]
        for one in ready:
            one.fetch_gradient(self._stream(one.parameter.device, 0))
        self._step_on_device()
        for one in ready:
            one.update(self._stream(one.parameter.device, 1))
        for device, (_, back) in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(back)
        self._share_state()
        return loss

    def _step_on_device(self) -> None:
        if self._device is None:
            return
        for parameter, master in self._masters.items():
            if parameter._version != self._versions[parameter]:
                master.copy_(parameter)  # the parameter was changed from outside
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        self._device.step()
        for parameter, master in self._masters.items():
            if master.grad is not None:
                parameter.copy_(master)
                master.grad = None
            self._versions[parameter] = parameter._version

    def _stream(self, device: torch.device, which: int) -> torch.cuda.Stream | None:
        """The stream that copies to the host (0) or back (1); None for the current one."""
        if device.type != "cuda" or not self._overlap:
            return None
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams[device][which]

    # --- groups and state ---------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible after construction: the choice of offloaded parameters depends on all parameters."""
        if self._finished:
            raise InvalidArgumentError(
                "add_param_group: give all groups at once, and load the state into the new HybridOptimizer."
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state dict, with the float32 master of a 16-bit parameter under `"master"`."""
        self._share_state()
        found: dict[str, Any] = super().state_dict()
        for index, parameter in enumerate(self._parameters()):
            if _is_narrow(parameter):
                found["state"][index] = {**found["state"].get(index, {}), MASTER: self._master(parameter).detach().clone()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, with any fraction, or of the plain optimizer; tensors are copied.

        If the state dict has no master copies, masters are copied from the parameters: load the model first.

        Raises:
            InvalidArgumentError: if its groups differ from this optimizer's groups.
        """
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        expected = [len(group["params"]) for group in self.param_groups]
        if sizes != expected:
            raise InvalidArgumentError(
                f"state_dict has groups of {sizes} parameters: expected {expected}, those of this optimizer."
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(_settings(saved))
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        entries = dict(zip(self._parameters(), (state_dict["state"].get(number, {}) for number in numbers), strict=True))
        with torch.no_grad():
            for parameter, entry in entries.items():
                if parameter in self._offloaded or parameter in self._masters:
                    self._master(parameter).copy_(entry.get(MASTER, parameter))
                if parameter in self._offloaded:
                    self._offloaded[parameter].load(_without_master(entry))
                elif parameter in self._masters:
                    self._versions[parameter] = parameter._version
        if self._device is not None:
            kept = [parameter for parameter in entries if parameter not in self._offloaded]
            plain = self._device.state_dict()
            plain["state"] = {
                index: _without_master(entries[parameter]) for index, parameter in enumerate(kept) if entries[parameter]
            }
            self._device.load_state_dict(plain)
        self._share_settings()
        self._share_state()

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _master(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._offloaded[parameter].master if parameter in self._offloaded else self._masters[parameter]

    def _device_optimizer(self) -> torch.optim.Optimizer | None:
        groups = []
        for group in self.param_groups:
            kept = [self._masters.get(one, one) for one in group["params"] if one not in self._offloaded]
            groups.append({**_settings(group), "params": kept})
        return self._class(groups, **self._options) if any(group["params"] for group in groups) else None

    def _share_settings(self) -> None:
        """Pass the settings of the groups, which a scheduler may have changed, to the inner optimizers."""
        for index, group in enumerate(self.param_groups):
            settings = _settings(group)
            if self._device is not None:
                self._device.param_groups[index].update(settings)
            for parameter in group["params"]:
                if parameter in self._offloaded:
                    self._offloaded[parameter].optimizer.param_groups[0].update(settings)

    def _share_state(self) -> None:
        """Make the inner optimizers' state objects this optimizer's state."""
        for parameter in self._parameters():
            if parameter in self._offloaded:
                state = self._offloaded[parameter].state
            else:
                state = self._device.state.get(self._masters.get(parameter, parameter), {}) if self._device is not None else {}
            if state:
                self.state[parameter] = state

    def _chosen(self, fraction: float) -> set[nn.Parameter]:
        """The parameters to offload: the largest first, while their share of all elements is at most `fraction`."""
        parameters = self._parameters()
        quota = fraction * sum(parameter.numel() for parameter in parameters)
        chosen: set[nn.Parameter] = set()
        for parameter in sorted(parameters, key=lambda one: -one.numel()):
            if 0 < parameter.numel() <= quota:
                chosen.add(parameter)
                quota -= parameter.numel()
        if fraction > 0 and not chosen:
            least = min((one.numel() for one in parameters if one.numel()), default=0)
            raise NothingToOffloadError(
                f"offload_fraction={fraction!r} moves nothing: the smallest parameter has {least} of"
                f" {sum(one.numel() for one in parameters)} elements; give at least its share."
            )
        for group in self.param_groups:
            here = [parameter for parameter in group["params"] if parameter in chosen]
            if here and not any(map(_is_narrow, here)) and not _has_state(self._class, group):
                raise NothingToOffloadError(
                    f"optimizer_class={self._class.__name__} keeps no state with these options, so there is nothing to move to"
                    " the host; use it as it is, or give SGD a momentum."
                )
        return chosen


def _check(optimizer_class: Any, fraction: Any) -> None:
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise InvalidArgumentError(f"optimizer_class={optimizer_class!r}: expected a class such as torch.optim.AdamW.")
    if issubclass(optimizer_class, torch.optim.LBFGS | HybridOptimizer):
        raise InvalidArgumentError(
            f"optimizer_class={optimizer_class.__name__}: expected one that treats each parameter by itself, such as AdamW."
        )
    number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if not number or not 0 <= fraction <= 1:
        raise InvalidArgumentError(f"offload_fraction={fraction!r}: expected a number from 0 (nothing moves) to 1 (all do).")


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _is_narrow(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and parameter.element_size() < 4


def _has_state(optimizer_class: type[torch.optim.Optimizer], group: dict[str, Any]) -> bool:
    """Whether a step creates a state tensor that is more than a scalar count."""
    probe = nn.Parameter(torch.zeros(2, 2))
    probe.grad = torch.zeros(2, 2)
    optimizer = optimizer_class([{**_settings(group), "params": [probe]}])
    optimizer.step()
    return any(isinstance(value, torch.Tensor) and value.dim() > 0 for value in optimizer.state[probe].values())


def _nbytes(state: dict[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


def _without_master(entry: dict[str, Any]) -> dict[str, Any]:
    copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
    return {key: value for key, value in copies.items() if key != MASTER}
