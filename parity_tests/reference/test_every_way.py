"""Every way to run a block computes what a plain call computes, bit for bit: gradients, buffers and the random state."""

from __future__ import annotations

import functools
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ref
from examples import pytorch
from parity_tests.reference.blocks import Gate, all_equal, call
from torch_ref import selective_checkpoint

POLICIES = ("full", "everything", "offload: *", "offload: @inputs; save: *")


def under(policy: str) -> Any:
    def run(block: Any, /, *args: Any, **kwargs: Any) -> Any:
        return selective_checkpoint(block, policy, *args, **kwargs)

    return run


def inside(outer: Any, inner: Any) -> Any:
    def run(block: Any, /, *args: Any, **kwargs: Any) -> Any:
        return outer(lambda *args, **kwargs: inner(block, *args, **kwargs), *args, **kwargs)

    return run


def function(block: Any, /, *args: Any, **kwargs: Any) -> Any:
    return torch_ref.OffloadFunction(block)(*args, **kwargs)


CHECKPOINT, OFFLOAD = (functools.partial(call, mode) for mode in ("checkpoint", "offload"))
WAYS = {
    "checkpoint": CHECKPOINT,
    "offload": OFFLOAD,
    "OffloadFunction": function,
    "captured": inside(CHECKPOINT, lambda block, /, *args, **kwargs: block(*args, **kwargs)),
    **{policy: under(policy) for policy in POLICIES},
    "checkpoint in full": inside(under("full"), CHECKPOINT),
    "offload in offload": inside(under("offload: *"), OFFLOAD),
}

Pair = namedtuple("Pair", "left right")


def contained(x: Any, extra: Any, *, options: Any) -> Any:
    pair, scale = options["pair"], options["scale"]
    return x * pair.left + extra[0] * pair.right * scale + extra[1]["deep"][0].sin()


def noisy(x: torch.Tensor) -> torch.Tensor:
    """Two random operators and arithmetic on either side of each."""
    y = torch.native_dropout(x.sin(), 0.5, True)[0].cos()
    return (torch.bernoulli(y.sigmoid()) * y).exp() * torch.native_dropout(y, 0.5, True)[0]


def with_a_mask(x: torch.Tensor) -> torch.Tensor:
    """Writes on a constant."""
    mask = torch.zeros(3)
    mask[1:] = 5
    return (x * mask.clone()).exp()


def largest(x: torch.Tensor) -> torch.Tensor:
    value, index = x.sin().topk(2)
    return value.exp().sum() + index.sum()


class RandomSlope(nn.Module):
    """Its last operator that saves draws its noise after it saved it; `end` may follow without saving."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(3, 3), end or nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.end(F.rrelu(self.linear(x), 0.1, 0.9, training=True))


class Codebook(nn.Module):
    """Reads a buffer, then writes to it: in place, and by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(3, 9))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        x = (x * self.mean.clone()).sin() * self.steps
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        return x


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def attention() -> tuple[Any, ...]:
    module, x = nn.MultiheadAttention(8, 2), leaf(3, 2, 8)
    return lambda q, k, v: module(q, k, v)[0], (x,), {"k": x, "v": x}, module


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(3),
    "cumulative average": lambda: nn.BatchNorm1d(3, momentum=None),
    "instance norm": lambda: nn.InstanceNorm1d(3, track_running_stats=True),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv1d(3, 3, 1)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Conv1d(3, 3, 1)),
    "lazy batch norm": lambda: nn.LazyBatchNorm1d(),
    "codebook": Codebook,
}


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(norm, nn.ReLU(), nn.Conv1d(3, 3, 3))


ENDS = {
    "alone": lambda x: x,
    "sum": lambda x: (x + 1).sum(0),
    "dict": lambda x: {"x": x},
    "object": lambda x: SimpleNamespace(x=x),
    "product": None,
}
# Makes a block, its arguments, and the module of its parameters if that is not the block.
BLOCKS = {
    "positional": lambda: (Gate(), (leaf(2, 3), leaf(2, 3)), {}),
    "mixed": lambda: (Gate(), (leaf(2, 3),), {"y": leaf(2, 3)}),
    "keywords": lambda: (Gate(), (), {"y": leaf(2, 3), "x": leaf(2, 3)}),
    "no gradient": lambda: (Gate(), (), {"y": torch.randn(2, 3), "x": torch.randn(2, 3)}),
    "containers": lambda: (
        contained,
        (leaf(4), [leaf(4), {"deep": (leaf(4), None)}]),
        {"options": {"pair": Pair(leaf(4), leaf(4)), "scale": 3}},
    ),
    "one tensor three times": attention,
    "dropout": lambda: (pytorch.DecoderLayer(8, 2, dropout=0.4), (leaf(2, 5, 8),), {}),
    "fused dropout": lambda: (pytorch.DecoderLayer(8, 2, dropout=0.4, explicit_attention=False), (leaf(2, 5, 8),), {}),
    "fused attention": lambda: (lambda q: F.scaled_dot_product_attention(q, q, q).sin(), (leaf(1, 2, 8, 4),), {}),
    "noise": lambda: (noisy, (leaf(50),), {}),
    "a constant": lambda: (with_a_mask, (leaf(3),), {}),
    "several results": lambda: (largest, (leaf(4, 6),), {}),
    **{f"noise, {name}": lambda end=end: (RandomSlope(end), (leaf(4, 3),), {}) for name, end in ENDS.items()},
    **{name: lambda make=make: (normed(make()), (leaf(4, 3, 9),), {}) for name, make in NORMS.items()},
}


def outcome(way: Any, block_name: str) -> list[torch.Tensor]:
    """Gradients, buffers and random numbers after two calls, whose backward passes run after both forward passes."""
    # Memory that was never written often holds what the last run left there: fill it.
    torch.full((4, 3), 7.0)
    torch.manual_seed(0)
    block, args, kwargs, *module = BLOCKS[block_name]()
    module = module[0] if module else block if isinstance(block, nn.Module) else nn.Module()
    results = [way(block, *args, **kwargs) for _ in range(2)]
    results = [result["x"] if isinstance(result, dict) else getattr(result, "x", result) for result in results]
    drawn, leaves = torch.rand(3), [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    sum(result.square().sum() for result in results).backward()
    gradients = [x.grad for x in (*leaves, *module.parameters()) if x.grad is not None]
    assert gradients
    return [*gradients, *(buffer.clone() for buffer in module.buffers()), drawn]


@functools.cache
def plain(block: str) -> list[torch.Tensor]:
    return outcome(lambda block, *args, **kwargs: block(*args, **kwargs), block)


SAVING = ("everything", "offload: @inputs; save: *")
# A spectral norm changes arrays in place, which may then not be saved (`test_selective_hazards.py`).
CASES = [(block, way) for block in BLOCKS for way in WAYS if "spectral" not in block or way not in SAVING]


@pytest.mark.parametrize(("block", "way"), CASES)
def test_every_way_to_run_a_block_is_a_plain_call(block: str, way: str) -> None:
    assert all_equal(outcome(WAYS[way], block), plain(block))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_runs_under_autocast_and_passes_every_keyword_on(way: str) -> None:
    words = ["self", "block", "policy", "mode", "function", "use_reentrant", "context_fn", "debug", "early_stop", "args"]
    words += ["preserve_rng_state", "determinism_check"]
    seen: list[Any] = []

    def block(x: torch.Tensor, **options: Any) -> torch.Tensor:
        y = x @ x
        seen.append((y.dtype, options))
        return y.sin()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = WAYS[way](block, leaf(3, 3), **dict.fromkeys(words, 1))
    output.sum().backward()
    assert seen == [(torch.bfloat16, dict.fromkeys(words, 1))] * len(seen) and len(seen) >= 2


@pytest.mark.parametrize("way", [way for way in WAYS if way not in SAVING])
def test_every_way_that_saves_nothing_has_second_derivatives_and_several_backward_passes(way: str) -> None:
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x.exp() * x

    def slopes(fn: Any) -> torch.Tensor:
        x = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
        y = fn(x).sum()
        once = torch.autograd.grad(y, x, retain_graph=True)[0]
        first = torch.autograd.grad(y, x, create_graph=True)[0]
        return torch.stack([once, first.detach(), torch.autograd.grad(first.square().sum(), x)[0]])

    torch.testing.assert_close(slopes(functools.partial(WAYS[way], cube)), slopes(cube), rtol=1e-14, atol=0)
