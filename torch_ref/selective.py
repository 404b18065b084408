"""Selective checkpointing: a policy decides which arrays of a block are saved, offloaded or recomputed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_ref.errors import InvalidArgumentError, NoEffectError, NothingToOffloadError
from torch_ref.policy import OFFLOAD, RECOMPUTE, Candidate, Policy, is_catch_all, matches
from torch_ref.receipts import is_offloadable, record_call
from torch_ref.region import Region
from torch_ref.replay import Replay


def selective_checkpoint(block: Callable[..., Any], policy: Policy | str, /, *args: Any, **kwargs: Any) -> Any:
    """Call `block(*args, **kwargs)` under a policy; outputs and gradients are those of a plain call.

    Policies are those of `remat_jax`: `full`, `dots`, `"offload: *ffn*:dot_general*; save: @dots"`, … An array that the
    block computes is named `path/of/the/module:primitive#k`. The path, with slashes, is that of the running module inside
    the block; k counts from 0 in the order of execution. The primitive is JAX's name if the ATen operator equals a single
    primitive (`mm`, `addmm`, `bmm`, `baddbmm` are `dot_general`, `convolution` is `conv_general_dilated`, `sigmoid` is
    `logistic`, …), else ATen's (`native_layer_norm`). `@dots` selects these matmuls and convolutions; `@convs` selects the
    convolutions; `@dots_with_no_batch_dims` selects `mm`, `addmm` and matrix-vector products; `@inputs` selects the tensor
    arguments, named `path:input#k`, with keywords in alphabetical order. Arguments are always kept, and only `offload`
    moves them; parameters stay on the device.

    PyTorch differs from JAX in these points:

    - A policy saves or offloads a selected array even if backward does not read the array, such as the result of a block's
      last matmul; JAX drops such an array. An operator with several results has a single name.
    - The recomputation runs all operators whose results are not saved or offloaded, in order, until backward has the tensors
      it needs; JAX leaves out operators whose results are not read.
    - A view, an in-place change and a constant are no arrays of their own: they have no names and cannot be offloaded.
    - Operators that draw from the random state (`native_dropout`) are always recomputed: if one of them were skipped, the
      next of them would get its random state. A `save` or `offload` selector that matches only such operators raises an error.
    - `everything` saves the arrays that the block computes. In JAX it saves the arrays that backward reads, which include
      arrays that only derivative rules compute.
    - `torch.einsum` and 3-D matmuls that PyTorch turns into `bmm` have batch dimensions even where JAX's have none.

    An offloaded array is copied (pinned on CUDA), recorded in the receipt, and fetched by the recomputation. PyTorch allows
    only one backward pass to use the saved arrays: a second pass (`retain_graph=True`) or a second derivative raises a
    `RuntimeError`. With gradients disabled the block is called plainly. Every keyword reaches the block. Buffers, such as
    running statistics, are updated once.

    Every operator of the block goes through Python in both passes, which slows down small operators. Policies that do not
    look inside the block (`full`, `offload_inputs`) avoid this. Do not use this function under `torch.compile`.

    Raises:
        InvalidArgumentError: if `block` cannot be called.
        PolicyError: if `policy` is malformed.
        NoEffectError: if a selector matches nothing in this call.
        NothingToOffloadError: if the policy offloads, but no array or argument of this call can be moved.
        MutatedTensorError: if an array that the policy saves is changed in place inside the block; in the backward pass,
            if an offloaded argument was changed in place after the call.
        ChangedRecomputationError: in the backward pass, if the block runs different operators than in the forward pass, saves
            other tensors, or raises an error that the forward pass did not raise.

    This function builds on `torch.utils.checkpoint.create_selective_checkpoint_contexts`, which saves but does not offload.

    >>> import torch, torch_ref
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> x = torch.ones(3, 5, 8, requires_grad=True)
    >>> def products(policy):
    ...     with torch_ref.count_matmuls() as count:
    ...         torch_ref.selective_checkpoint(layer, policy, x).sum().backward()
    ...     return count.total
    >>> [products(policy) for policy in ("off", "full", "dots", "save: *self_attn*:dot_general*")]
    [18, 24, 18, 20]
    """
    if not callable(block):
        raise InvalidArgumentError(f"block is a {type(block).__name__}, expected a module or a function, not its output.")
    chosen = Policy.parse(policy)
    output, seen = run_under(block, block, chosen, "", args, kwargs)
    if seen is not None:
        check_effect(chosen, [seen])
    return output


@dataclass
class Seen:
    """The arrays that a policy could select in a call of a block.

    Attributes:
        block: the block's name, or its path in a model.
        candidates: the block's arrays and arguments.
        random: names of the arrays that are always recomputed.
        moved: whether an array was copied to the host, or would have been copied if it had any elements.
    """

    block: str
    candidates: list[Candidate]
    random: set[str] = field(default_factory=set)
    moved: bool = False


def run_under(
    block: Callable[..., Any],
    run: Callable[..., Any],
    policy: Policy,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Seen | None]:
    """Call `run`, the block or its original forward, under a policy; also return the arrays that the policy could select.

    If the call is plain (policy `off`, or gradients disabled), None is returned in place of the arrays.
    """
    entry = record_call(block, policy.name or str(policy), "selective")
    if policy.is_off or not torch.is_grad_enabled():
        return run(*args, **kwargs), None
    region = Region(block, run, policy, path, entry) if policy.looks_inside else None
    inputs, chosen, is_empty = _inputs(policy, path, args, kwargs)
    seen = Seen(path or entry.block, inputs, moved=is_empty)
    replay = Replay(block, args, kwargs, run=region or run)
    del args, kwargs
    if chosen:
        replay.offload(entry, chosen=lambda tensor: id(tensor) in chosen)
    output = replay.checkpointed()
    if region is not None:
        seen.candidates += region.candidates
        seen.random |= region.random
        seen.moved |= region.is_empty
    seen.moved |= entry.tensors_packed > 0
    return output, seen


def _inputs(policy: Policy, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Candidate], set[int], bool]:
    """The arguments that a policy can select, the `id`s of offloaded arguments, and whether an empty argument is offloaded."""
    leaves = pytree.tree_leaves((args, [kwargs[name] for name in sorted(kwargs)]))
    empty = {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.numel()}
    tensors = [leaf for leaf in leaves if is_offloadable(leaf) or id(leaf) in empty]
    candidates = [Candidate(f"{path}:input#{index}", "input", is_input=True) for index in range(len(tensors))]
    offered = [tensor for tensor, candidate in zip(tensors, candidates, strict=True) if policy.action(candidate) == OFFLOAD]
    # A scalar is not worth a copy. The caller holds the tensors as long as it uses their ids.
    chosen = {id(tensor) for tensor in offered if tensor.dim()}
    return candidates, chosen - empty, bool(chosen & empty)


def check_effect(policy: Policy, calls: list[Seen]) -> None:
    """Raise an error if the policy, or one of its selectors, has no effect in any of these calls.

    Raises:
        NoEffectError: if a selector matched nothing; the message names the selector and the available arrays.
        NothingToOffloadError: if the policy offloads and no array was copied to the host.
    """
    where = _some(dict.fromkeys(seen.block for seen in calls), 3)
    for rule in policy.rules:
        for selector in rule.selectors:
            if not is_catch_all(selector) and not any(_has(seen, selector, rule.action) for seen in calls):
                raise NoEffectError(_unmatched(policy, selector, rule.action, calls, where))
    if policy.offloads and not any(seen.moved for seen in calls):
        raise NothingToOffloadError(
            f"policy {str(policy)!r} offloads nothing in {where}: an offload rule must select an array that no earlier rule "
            f"matches; scalars and random numbers are not offloaded. The arrays are: {_some(_names(calls), 8)}. Select one of "
            "these, or use 'full' to offload nothing."
        )


def _has(seen: Seen, selector: str, action: str) -> bool:
    hits = (candidate for candidate in seen.candidates if matches(selector, candidate))
    return any(action == RECOMPUTE or candidate.name not in seen.random for candidate in hits)


def _unmatched(policy: Policy, selector: str, action: str, calls: list[Seen], where: str) -> str:
    if any(_has(seen, selector, RECOMPUTE) for seen in calls):
        return (
            f"policy {str(policy)!r}: the selector {selector!r} matches only operators that draw random numbers in {where}. "
            f"These are always recomputed, so there is nothing to {action}. Leave the selector out."
        )
    names = _names(calls)
    tails = {name.rpartition(":")[2].partition("#")[0]: name for name in names} | {name: name for name in names}
    close = difflib.get_close_matches(selector.strip("*"), tails, n=1, cutoff=0.5)
    hint = f" Did you mean {tails[close[0]]!r}?" if close else ""
    return (
        f"policy {str(policy)!r}: the selector {selector!r} matches no array of {where}.{hint}"
        f" There are: {_some(names, 8)}. Views, changes in place and constants have no names."
        " Correct the selector or leave it out."
    )


def _names(calls: list[Seen]) -> list[str]:
    return list(dict.fromkeys(candidate.name for seen in calls for candidate in seen.candidates))


def _some(names: Iterable[str], limit: int) -> str:
    shown = list(names)
    more = f", and {len(shown) - limit} more" if len(shown) > limit else ""
    return (", ".join(shown[:limit]) or "none") + more
