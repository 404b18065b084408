"""Finds the blocks of a model: the repeated parts of a loss whose checkpoints would save the most memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat_jax.apply import calls
from remat_jax.apply.effect import run_under, with_blocks
from remat_jax.apply.gradients import Gradient, noting_gradients
from remat_jax.apply.inner_loss import gradients_of
from remat_jax.apply.loss_parts import Calls, Found, TracedLoss
from remat_jax.apply.region import traced
from remat_jax.apply.scope import BlockPolicies, applying
from remat_jax.core.marks import CHECKPOINTS, SCANS, Block
from remat_jax.errors import BlockError
from remat_jax.policy import Policy
from remat_jax.report.activity import activity
from remat_jax.report.tables import format_bytes, render, table

_WORTH, _EQUAL, _LEAST = 0.03, 0.005, 0.1
"""Shares of residuals. Of all: what one more class of blocks must save, and below which a difference does not count. Of those
in the module around the blocks: the least that blocks must save."""


@dataclass(frozen=True)
class FoundBlocks:
    """The blocks that were found in a loss.

    Attributes:
      taken: the blocks, those that save the most first.
      others: what else could be blocks.
      residual_bytes: the bytes of all residuals without checkpoints.

    >>> import jax, jax.numpy as jnp
    >>> from remat_jax import Workload
    >>> loss = lambda ws, x: jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, ws)[0].sum()
    >>> found = Workload(loss, jnp.ones((3, 8, 8)), (jnp.ones((4, 8)),)).find_blocks()
    >>> found.blocks, found.taken[0].calls, found.taken[0].bytes, found.residual_bytes
    (('scans',), 3, 384, 768)
    """

    taken: tuple[Found, ...]
    others: tuple[Found, ...]
    residual_bytes: int

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, as `Workload` takes them."""
        return tuple(each.block for each in self.taken)

    @property
    def text(self) -> str:
        """What was taken and why, in one sentence, and what else could be blocks.

        >>> FoundBlocks(tuple(Found(name, "", 2, 8, 4) for name in ("up", "norm", "down")), (), 30).text.partition(".")[0]
        'Blocks found: up (2 calls), norm (2 calls) and down (2 calls)'
        """
        *first, last = [f"{each.name} ({each.calls} calls)" for each in self.taken]
        taken = f"{', '.join(first)} and {last}" if first else last
        dropped, again = sum(each.bytes for each in self.taken), max(each.largest for each in self.taken)
        others = [each.name for each in self.others if each.calls > 1 and each.saved > self.residual_bytes / 100][:4]
        return (
            f"Blocks found: {taken}. Checkpoints around these calls drop {format_bytes(dropped)} of "
            f"{format_bytes(self.residual_bytes)} of residuals; the backward pass recomputes them call by call, at most "
            f"{format_bytes(again)} at a time" + (f". Other choices: {', '.join(others)}" if others else "")
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""

        def plain(found: Sequence[Found]) -> list[dict[str, Any]]:
            keys = ("name", "path", "calls", "bytes", "largest", "saved")
            return [{key: getattr(each, key) for key in keys} for each in found]

        return {"taken": plain(self.taken), "others": plain(self.others), "residual_bytes": self.residual_bytes}

    def __rich__(self) -> Any:
        columns = ("block", "first call", "calls", "dropped", "needed again", "freed")
        rows = [
            (f"{each.name} (taken)" if each in self.taken else each.name, each.path or "(root)", each.calls)
            + (each.bytes, each.largest, each.saved)
            for each in (*self.taken, *self.others)
        ]
        caption = (
            "dropped: the residuals that a checkpoint around each call drops, less the inputs that it keeps; needed again: "
            "those of the largest call, in the backward pass; freed: the difference"
        )
        formats = dict.fromkeys(columns[3:], format_bytes)
        title = f"what could be blocks: {format_bytes(self.residual_bytes)} of residuals without checkpoints"
        return table(title, columns, rows, formats=formats, caption=caption)

    def __str__(self) -> str:
        return render(self)


_ANYWHERE = BlockPolicies((("\0", Policy.parse("full")),), waits=True)
"""Policies that select nothing, under which all calls of modules are intercepted."""


@activity("tracing the loss to find its blocks")
def find_blocks(loss: Callable[..., Any], trained: Any, others: tuple[Any, ...], name: str) -> FoundBlocks:
    """The blocks of `loss(trained, *others)`, a scalar; the arguments are pytrees of arrays or of their types.

    Raises:
      BlockError: nothing in the loss is repeated, or two choices are equally good.
    """
    seen = Calls()
    policies = _ANYWHERE.anew()
    with applying(policies), calls.listening(seen.scope):
        jaxpr = jax.make_jaxpr(lambda *args: with_blocks(policies, loss, args, {}))(trained, *others)
    return _chosen([TracedLoss(seen, jaxpr, range(len(jax.tree.leaves(trained))), 1)], name)


@activity("tracing the loss to find its blocks")
def find_blocks_of_step(step: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> FoundBlocks:
    """The blocks of the losses that a training step differentiates.

    Raises:
      BlockError: the step differentiates nothing, nothing in the losses is repeated, or two choices are equally good.
    """
    seen = Calls()
    with calls.listening(seen.scope):
        gradients, *_ = gradients_of(step, arguments, _ANYWHERE.anew())
    if not gradients:
        raise BlockError(f"step={name!r}: it takes no gradient (jax.grad, value_and_grad, vjp), so it has no blocks to find")
    return _chosen(_losses(seen, gradients), name)


def find_blocks_of_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> FoundBlocks:
    """The blocks of a call of any function: of the functions that it differentiates, or else of its own gradient.

    Raises:
      BlockError: nothing is repeated, or two choices are equally good.
    """
    seen, name = Calls(), getattr(fn, "__name__", "fn")
    with calls.listening(seen.scope), noting_gradients() as gradients:
        jaxpr, *_ = traced(lambda *args, **kwargs: run_under(_ANYWHERE.anew(), fn, args, kwargs)[0], args, kwargs)
    if gradients:
        return _chosen(_losses(seen, gradients), name)
    return _chosen([TracedLoss(seen, jaxpr, range(len(jaxpr.in_avals)), len(jaxpr.out_avals))], name)


def _losses(seen: Calls, gradients: Sequence[Gradient]) -> list[TracedLoss]:
    different = {str(each.jaxpr): each for each in gradients}.values()
    return [TracedLoss(seen, each.jaxpr, range(len(each.frozen), len(each.jaxpr.in_avals)), each.outputs) for each in different]


def trained_shapes(step: Callable[..., Any], arguments: tuple[Any, ...]) -> set[tuple[int, ...]]:
    """The shapes of the arrays along which a training step takes gradients, without that of a scalar."""
    gradients, *_ = gradients_of(step, arguments, _ANYWHERE.anew())
    return {leaf.shape for gradient in gradients for leaf in gradient.trained if leaf.shape}


def _chosen(losses: Sequence[TracedLoss], name: str) -> FoundBlocks:
    total = sum(loss.total for loss in losses)
    found: dict[Block, Found] = {}
    for each in (each for loss in losses for each in loss.found.values()):
        before = found.setdefault(each.block, each)
        if before is not each:
            before.calls, before.bytes = before.calls + each.calls, before.bytes + each.bytes
            before.largest = max(before.largest, each.largest)
            before.inside, before.meets = before.inside & each.inside, before.meets | each.meets
    ranked = sorted(found.values(), key=lambda each: (-each.saved, -each.bytes))
    repeated = [each for each in ranked if each.saved > 0 and each.block not in each.meets]
    candidates = [each for each in repeated if not any(_instead(other, each) for other in repeated)]
    around = max((each.bytes for each in ranked if candidates and candidates[0].block in each.inside), default=0)
    if not candidates or candidates[0].saved < _LEAST * around:
        raise BlockError(_nothing(ranked, total, name))
    close = [each for each in candidates if candidates[0].saved - each.saved <= _EQUAL * total]
    best = min(close, key=_kind)
    rivals = [each for each in close if each is not best and _kind(each) == _kind(best) and best.block in each.meets]
    choices = sorted((_with_others(each, candidates, total) for each in (best, *rivals)), key=_saved, reverse=True)
    if rivals and _saved(choices[0]) - _saved(choices[1]) <= _EQUAL * total:
        shown = " or ".join(f"blocks={_shown(choice[0])}" for choice in choices[:2])
        raise BlockError(f"blocks=None: two choices save equally much in {name!r}; name one of them: {shown}")
    taken = choices[0]
    return FoundBlocks(tuple(taken), tuple(each for each in ranked if each not in taken and each.bytes), total)


def _with_others(first: Found, candidates: Sequence[Found], total: int) -> list[Found]:
    """`first`, and the candidates that neither contain nor are in what is taken, and drop enough beside it."""
    taken = [first]
    for each in candidates:
        if not each.meets & {other.block for other in taken} and each not in taken:
            gain = each.bytes - max(0, each.largest - max(other.largest for other in taken))
            taken += [each] if gain > _WORTH * total else []
    return taken


def _saved(taken: Sequence[Found]) -> int:
    return sum(each.bytes for each in taken) - max(each.largest for each in taken)


def _kind(found: Found) -> int:
    """The order of preference: classes, then the model's own checkpoints, then scans."""
    return (CHECKPOINTS, SCANS).index(found.block) + 1 if isinstance(found.block, str) else 0


def _instead(better: Found, found: Found) -> bool:
    """Whether `better` stands for the same calls as `found`: one contains the other, equally often.

    The outer one does, unless it only wraps the inner one, or is no class.
    """
    if better.calls != found.calls:
        return False
    if better.block in found.inside:
        share = 1.0 if _kind(better) == _kind(found) else 0.9
        return _kind(better) <= _kind(found) and better.bytes >= share * found.bytes
    return found.block in better.inside and not _instead(found, better)


def _times(calls: int) -> str:
    return "one call" if calls == 1 else f"{calls} calls"


def _shown(found: Found) -> str:
    return f"{found.name!r}" if isinstance(found.block, str) else found.name


def _nothing(found: Sequence[Found], total: int, name: str) -> str:
    most = [each for each in sorted(found, key=lambda each: -each.bytes) if each.bytes > 0]
    listed = "; ".join(f"{_shown(each)} ({_times(each.calls)}, {format_bytes(each.bytes)})" for each in most[:8])
    seen = f" The parts with the most of its {format_bytes(total)} of residuals: {listed}." if listed else ""
    return (
        f"blocks=None: no module, marked function, checkpoint or scan in {name!r} with much of its residuals is "
        f"repeated.{seen} Name the blocks: a class, or a method that runs a layer (Layer.encode). To make a plain function a "
        "block, mark it with @remat_jax.block."
    )
