"""`checkpoint_blocks` sets a policy on every block of a finished model, without editing the model.

`OwnCheckpoints` counts the model's own checkpoints that the policies replace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax

from remat_jax import compat
from remat_jax.apply.effect import call_signature, checked_function, under_policies
from remat_jax.apply.find_blocks import find_blocks_of_call
from remat_jax.apply.own_checkpoints import check_choice
from remat_jax.apply.scope import BlockPolicies, Record, checked_block
from remat_jax.core.marks import Block
from remat_jax.core.walk import checkpoints_around_blocks
from remat_jax.errors import ArgumentError, BlockError, RematError
from remat_jax.policy import JaxPolicy, LayerPolicies, Policy, as_block_policy
from remat_jax.warning import silenced

P = ParamSpec("P")
R = TypeVar("R")
AS_WRITTEN = "as written"
"""The name of the table row for the step under the model's own checkpoints around the blocks."""


def checkpoint_blocks(
    fn: Callable[P, R], policies: Mapping[Block, Any] | Any, *, own_checkpoints: str = "replace"
) -> Callable[P, R]:
    """`fn` with a policy on every call of the given blocks, or of those that are found; the model is not edited.

    Parameter names and values, outputs and gradients do not change. A `jit` inside `fn` is traced again under each set of
    policies, and later calls of the plain `fn` do not reuse these traces.

    The policy of a block replaces the model's own checkpoints around that block (`nn.remat`, `nnx.remat`, `jax.checkpoint`).
    Under `"off"` the model keeps its own checkpoints.

    Under `LayerPolicies` the i-th call of the block, in forward order, runs under the i-th policy. A scan over the blocks
    becomes several scans, one for each run of equal policies; parameters and results do not change. `fn` must then be
    traceable. If `fn` takes gradients of the blocks, as a train step does, each function that it differentiates counts its
    blocks by itself, and blocks outside of these functions have no policy. Eager calls retrace `fn` every time; an identical
    trace reuses the compiled program, unless the trace contains a `custom_vjp`, a callback or a `jax.checkpoint` with a policy.

    Args:
      fn: any function that runs the model, under `jit` or not, differentiated or not.
      policies: maps a block to its policy. A block is a class whose instances are called (subclasses count), a method of a
        class (`Model.encode`), a function marked with `block`, a glob on module paths, `"checkpoints"` or `"scans"`. A policy
        is a `Policy`, its name or text, a JAX policy object, or `LayerPolicies` or their text. One policy without a block is
        the policy of the blocks that are found in `fn`, as `Workload` finds them. They are looked for in the first call of each
        new set of argument types, in which `fn` must be traceable.
      own_checkpoints: `"keep"` keeps the model's own checkpoints around the blocks, with a `RematWarning`: these checkpoints
        discard the residuals that a policy keeps.

    Raises:
      ArgumentError, PolicyError: at once, if `fn` is no function, or a key or value of `policies` is wrong.
      BlockError: when called, if a block is never called, or if it is called more or less often than it has policies by layer;
        without blocks, if nothing in `fn` is repeated.
      NoEffectError: when called, if a selector matches no residual, or if there is nothing to offload. With policies by layer,
        each run of layers is checked.
      UnsupportedError: when called, only with policies by layer: if the block is in a `while` loop or a `custom_root`, or if
        `fn` writes to an NNX object that is not among its arguments.

    >>> import flax.linen as nn, jax, jax.numpy as jnp
    >>> from remat_jax.cost.count import matmuls
    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return x + nn.Dense(8)(nn.gelu(nn.Dense(32)(x)))
    >>> model, x = nn.Sequential([Block(), Block()]), jnp.ones((2, 8))
    >>> params = model.init(jax.random.key(0), x)
    >>> loss = lambda params, x: jnp.sum(model.apply(params, x) ** 2)
    >>> full = checkpoint_blocks(loss, {Block: "full"})
    >>> [matmuls(jax.value_and_grad(f), params, x) for f in (loss, full)]  # full runs the first layer of each block again
    [11, 13]
    >>> mixed = checkpoint_blocks(loss, {Block: "1 x full | 1 x dots"})  # the second block keeps its products
    >>> matmuls(jax.value_and_grad(mixed), params, x)
    12
    >>> matmuls(jax.value_and_grad(checkpoint_blocks(loss, "full")), params, x)  # `Block` is found
    13
    """
    keeps = check_choice(own_checkpoints)
    if isinstance(policies, Mapping) or not _may_be_policy(policies):
        return under_policies(fn, BlockPolicies.of(policies, keeps=keeps))
    return _under_policy(fn, as_block_policy(policies), keeps)


def _under_policy(fn: Callable[P, R], policy: Policy | JaxPolicy | LayerPolicies, keeps: bool) -> Callable[P, R]:
    """`checkpoint_blocks` with a checked policy of the blocks that are found in each call of a new signature."""
    known: dict[Hashable, Callable[P, R]] = {}

    @functools.wraps(checked_function(fn))
    def with_policy(*args: P.args, **kwargs: P.kwargs) -> R:
        # An integer may choose between models.
        integers = tuple(leaf for leaf in jax.tree.leaves((args, kwargs)) if type(leaf) is int)
        signature = call_signature(args, kwargs), integers
        if None in signature or signature not in known:
            if compat.in_linen_module():
                raise BlockError(
                    "checkpoint_blocks without blocks, inside a Linen module: the search would call the submodules once more. "
                    "Name the blocks, as in checkpoint_blocks(fn, {Layer: policy}), or put the policy on the loss."
                )
            blocks = find_blocks_of_call(fn, args, kwargs).blocks
            known[signature] = under_policies(fn, BlockPolicies.of(dict.fromkeys(blocks, policy), keeps=keeps))
        return known[signature](*args, **kwargs)

    return with_policy


def _may_be_policy(value: object) -> bool:
    """Whether `value` may be one policy; False for collections and blocks, for which a mapping is expected."""
    if isinstance(value, str):
        return True
    try:
        return not isinstance(value, type | Collection) and checked_block(value) is None
    except ArgumentError:
        return True


def replaced_text(replaced: int) -> str:
    """The sentence of a report about the model's own checkpoints that were replaced.

    >>> replaced_text(1)
    "The policy replaces 1 of the model's own checkpoints around the blocks (a scanned checkpoint counts once)"
    """
    return f"The policy replaces {replaced} of the model's own checkpoints around the blocks (a scanned checkpoint counts once)"


class OwnCheckpoints:
    """Counts a model's own checkpoints around its blocks. `choice` is the argument `own_checkpoints` of `checkpoint_blocks`."""

    def __init__(self, choice: str) -> None:
        self.keeps, self.choice = check_choice(choice), choice
        # None: not counted yet.
        self._count: int | None = 0 if self.keeps else None

    def policies(self, policies: dict[Any, Any]) -> BlockPolicies:
        """`policies` (block → policy), checked, with the choice about the model's own checkpoints."""
        return BlockPolicies.of(policies, keeps=self.keeps)

    def note(self, record: Record) -> None:
        """Remember whether checkpoints were replaced in a call."""
        if record.replaced == 0 and self._count is None:
            self._count = 0
        elif record.replaced and not self._count:
            # `record.replaced` counts a body twice if it is traced twice. So `count` has to count the regions.
            self._count = None

    def count(self, function: Callable[..., Any], blocks: Callable[[], Iterable[Block]], arguments: tuple[Any, ...]) -> int:
        """How many checkpoints a policy on the `blocks()` of `function` replaces. `function` is traced at most once."""
        if self._count is None:
            records: list[Record] = []
            try:
                policies = BlockPolicies.of(dict.fromkeys(blocks(), "full"), keeps=True)
                kept = under_policies(function, policies, records.append)
                with silenced():
                    around = checkpoints_around_blocks(jax.make_jaxpr(kept)(*arguments))
                # Regions that are blocks themselves are replaced even under "keep".
                self._count = around + records[-1].replaced + records[-1].kept
            except RematError:
                # No block is found, or one is never called. Applying a policy raises this error later.
                self._count = 0
        return self._count
