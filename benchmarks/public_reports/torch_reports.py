"""Reports about PyTorch's `torch.utils.checkpoint`, with the reference `torch_ref`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_ref
from benchmarks.public_reports.report import NOT_RUN, Outcome, compared, message, report, shown


def ours(block: Any, *args: Any, offload: bool = False, **keywords: Any) -> Any:
    """The block under `torch_ref`'s checkpoint."""
    return torch_ref.gradient_checkpoint_forward(block, True, offload, *args, **keywords)


def reentrant(block: Any, *args: Any) -> Any:
    """The block under the older checkpoint, still the default of many projects."""
    return checkpoint(block, *args, use_reentrant=True)


def gradients(build: Callable[[], Any], call: Callable[..., Any], *, frozen_input: bool = False) -> Any:
    """The gradients of the input and of the parameters of a module, from the same seed."""
    torch.manual_seed(0)
    module = build()
    x = torch.linspace(-1, 1, 24).reshape(2, 3, 4).requires_grad_(not frozen_input)
    torch.manual_seed(1)
    result = call(module, x)
    (result * torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape)).sum().backward()
    found = [x.grad, *(parameter.grad for parameter in module.parameters())]
    return [grad.double().numpy() for grad in found if grad is not None]


def three(build: Callable[[], Any], call: Callable[..., Any], **options: Any) -> Outcome:
    """The plain module, PyTorch's call, and ours."""
    return compared(
        gradients(build, lambda module, x: module(x), **options),
        lambda: gradients(build, call, **options),
        lambda: gradients(build, ours, **options),
    )


@report("pytorch/pytorch#26546", "the gradient stops where the checkpointed module ends with an in-place operation on a view")
def in_place_at_the_end() -> Outcome:
    return three(lambda: nn.Sequential(nn.InstanceNorm1d(3), nn.ReLU(inplace=True)), reentrant)


@report("pytorch/pytorch#36383", "an in-place modified view as the result of a checkpoint gets no gradient")
def an_in_place_view() -> Outcome:
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            return (x + self.shift)[:].relu_()

    return three(View, reentrant)


@report("pytorch/pytorch#7617", "the first block gets no gradient if its input needs none")
def an_input_without_gradient() -> Outcome:
    return three(lambda: nn.Linear(4, 4), reentrant, frozen_input=True)


@report(
    "pytorch/pytorch#193671",
    "`nn.RReLU` at the end of a checkpoint: the early stop saves noise that was never drawn, silently wrong",
)
def noise_that_is_saved_late() -> Outcome:
    return three(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU(0.1, 0.9)), lambda block, x: checkpoint(block, x, use_reentrant=False)
    )


class Counting(nn.Module):
    """A block that behaves otherwise when it runs again, as one with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cache = nn.Linear(4, 4), []

    def forward(self, x: Any) -> Any:
        self.cache.append(self.linear(x))
        return torch.tanh(torch.cat(self.cache, 1)).sum()


@report(
    "pytorch/pytorch#155171", "a cache grows when the block runs again: `CheckpointError`, recomputed tensors have other shapes"
)
def a_cache() -> Outcome:
    plain = message(lambda: gradients(Counting, lambda block, x: checkpoint(block, x, use_reentrant=False)))
    found = message(lambda: gradients(Counting, ours), most=200)
    return shown(plain, found, found.startswith("ChangedRecomputationError"))


@report("pytorch/pytorch#14253", "dropout draws another mask when the block runs again")
def dropout() -> Outcome:
    return three(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)),
        lambda block, x: checkpoint(block, x, use_reentrant=True, preserve_rng_state=False),
    )


class WithOptions(nn.Module):
    """A block with arguments that are None, keywords or in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any, mask: Any = None, *, extra: Any = None, debug: float = 1.0) -> Any:
        x = torch.tanh(self.linear(x)) * debug
        x = x if mask is None else x * mask
        return x if extra is None else x + extra["bias"]


@report("pytorch/pytorch#17969", "None as an argument of a checkpointed function is an AttributeError")
def none_as_an_argument() -> Outcome:
    return compared(
        gradients(WithOptions, lambda block, x: block(x, None)),
        lambda: gradients(WithOptions, lambda block, x: reentrant(block, x, None)),
        lambda: gradients(WithOptions, lambda block, x: ours(block, x, None)),
    )


@report("pytorch/pytorch#80987", "keyword arguments cannot be passed through the reentrant checkpoint")
def keywords() -> Outcome:
    bias = {"bias": torch.ones(4)}
    return compared(
        gradients(WithOptions, lambda block, x: block(x, extra=bias)),
        lambda: gradients(WithOptions, lambda block, x: checkpoint(block, x, use_reentrant=True, extra=bias)),
        lambda: gradients(WithOptions, lambda block, x: ours(block, x, extra=bias)),
    )


@report("hpcaitech/ColossalAI#1761", "a checkpoint swallows keywords that the module also has")
def a_swallowed_keyword() -> Outcome:
    return compared(
        gradients(WithOptions, lambda block, x: block(x, debug=3.0)),
        lambda: gradients(WithOptions, lambda block, x: checkpoint(block, x, use_reentrant=False, debug=3.0)),
        lambda: gradients(WithOptions, lambda block, x: ours(block, x, debug=3.0)),
    )


@report(
    "pytorch/pytorch#178568", "tensors in dictionaries are not seen by the checkpoint, so an offload leaves them on the device"
)
def tensors_in_containers() -> Outcome:
    block, x = WithOptions(), torch.ones(2, 3, 4, requires_grad=True)
    extra = {"bias": torch.ones(2, 3, 4, requires_grad=True) * 2}
    with torch_ref.receipt() as moved:
        ours(block, x * 1.0, offload=True, extra=extra).sum().backward()
    (call,) = moved.calls
    return shown(
        NOT_RUN + "only positional tensors are offloaded",
        f"{call.tensors_packed} tensors, {call.bytes_on_host} B on the host",
        call.tensors_packed == 2 and call.bytes_on_host == 2 * 4 * x.numel(),
    )


@report("pytorch/pytorch#42212", "BatchNorm's running statistics are updated twice, once when the block runs again")
def statistics() -> Outcome:
    def after(call: Any) -> Any:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(3))
        call(block, torch.linspace(-1, 1, 24).reshape(2, 3, 4).requires_grad_()).sum().backward()
        return [buffer.double().numpy() for buffer in block.buffers()]

    return compared(after(lambda block, x: block(x)), lambda: after(reentrant), lambda: after(ours))


@report("pytorch/torchtitan#4688", "an in-place write to a recomputed buffer is not repeated: silently wrong gradients")
def a_write_in_the_block() -> Outcome:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            buffer = self.linear(x).clone()
            buffer += 1
            return buffer**2

    return compared(
        gradients(Written, lambda block, x: block(x)),
        lambda: gradients(Written, lambda block, x: checkpoint(block, x, use_reentrant=False)),
        lambda: gradients(Written, lambda block, x: torch_ref.selective_checkpoint(block, "dots", x)),
    )


@report(
    "huggingface/transformers#48444", "a checkpoint still keeps one activation for each layer: how much would an offload free?"
)
def what_an_offload_frees() -> Outcome:
    layers = [nn.Linear(64, 64) for _ in range(4)]

    def loss(offload: bool) -> Any:
        x = torch.ones(128, 64, requires_grad=True)
        for layer in layers:
            x = ours(lambda x, layer=layer: torch.tanh(layer(x)), x * 1.0, offload=offload)
        return x.sum()

    with torch_ref.receipt() as moved:
        loss(True).backward()
    on_host = sum(call.bytes_on_host for call in moved.calls)
    return shown(NOT_RUN + "not shown", f"the receipt: {on_host} B on the host for 4 layers", on_host == 4 * 128 * 64 * 4)


@report("pytorch/xla#3455", "gradient checkpoints free nothing: the compiler removes the recomputation")
def what_is_saved() -> Outcome:
    block = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.ones(8, 4, requires_grad=True)
    saved = [torch_ref.saved_for_backward(call, x).device_bytes for call in (block, lambda x: ours(block, x))]
    with torch_ref.count_matmuls() as run:
        ours(block, x).sum().backward()
    return shown(f"{saved[0]} B saved without a checkpoint", f"{saved[1]} B; {run.total} products run", saved[1] < saved[0])
