"""`checkpoint_blocks`: a policy on every block of a finished model, from outside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from remat_jax.apply.effect import Effect, run_under
from remat_jax.apply.own_checkpoints import check_choice
from remat_jax.apply.scope import BlockPolicies, Record
from remat_jax.core.marks import Block
from remat_jax.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint_blocks(fn: Callable[P, R], policies: Mapping[Block, Any], *, own_checkpoints: str = "replace") -> Callable[P, R]:
    """`fn` with a policy on every call of the named blocks; the model is not edited.

    Parameter names and values, outputs and gradients are those of `fn`. A `jit` inside `fn` is traced anew under each set of
    policies, whether or not it was traced before, and what is traced here is not seen by later calls of the plain function.

    The model's own checkpoints around a block (`nn.remat`, `nnx.remat`, `jax.checkpoint`) give way to the block's policy: their
    bodies run in their place. Under `"off"` the model stays as its author wrote it.

    Args:
      fn: any function that runs the model, under `jit` or not, differentiated or not.
      policies: a Linen or NNX module class (subclasses count), or a glob on module paths, → a policy, its name or text, or
        `LayerPolicies` (or their text): the i-th call of the block, in forward order, then runs under the i-th policy. A scan
        over the blocks is cut into one for each run of equal policies; parameters and results stay what they are. `fn` must
        then be a function that can be traced, and that takes no gradient of the blocks itself. A call that is not under `jit`
        traces it every time, and compiles what no earlier call did; all of it where a `custom_vjp`, a callback or a policy of
        `jax.checkpoint` is inside.
      own_checkpoints: `"keep"` leaves the model's own checkpoints around the blocks, where they throw away what a policy
        keeps; a `RematWarning` says so.

    Raises:
      ArgumentError, PolicyError: at once, for what is no function, a wrong key or value.
      BlockError: when called, if a block is never called, or not as often as there are policies by layer.
      NoEffectError: when called, if a selector matches no residual, or there is nothing to offload; of policies by layer, in
        any run.
      UnsupportedError: when called, if policies by layer meet blocks in a `while` loop or under a gradient that `fn` takes, or
        `fn` writes to an NNX object that is no argument of its.

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
    """
    return under_policies(fn, BlockPolicies.of(policies, keeps=check_choice(own_checkpoints)))


def under_policies(fn: Callable[P, R], checked: BlockPolicies, tell: Callable[[Record], None] | None = None) -> Callable[P, R]:
    """`checkpoint_blocks` of checked policies; `tell` gets the record of each call."""
    if not callable(fn):
        raise ArgumentError(f"fn={fn!r}: expected a function that runs the model")
    effect = Effect(fn, checked)

    @functools.wraps(fn)
    def with_policies(*args: P.args, **kwargs: P.kwargs) -> R:
        outputs, found = run_under(checked, fn, args, kwargs)
        effect.check(found, args, kwargs)
        if tell is not None:
            tell(found)
        return outputs

    return with_policies
