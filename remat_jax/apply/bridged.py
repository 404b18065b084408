"""The model switch for Linen modules inside an NNX model (`nnx.bridge.ToNNX`): a policy on their blocks.

The Linen blocks of such a part are known only when it is called. So the part's class changes to a subclass that runs every
call, of any method, under the policies. Once every part was called, a block that no part called is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from flax import linen, nnx

from remat_jax.apply import scope
from remat_jax.apply.effect import run_under, traced_under
from remat_jax.apply.nnx import as_pure_function
from remat_jax.apply.scope import BlockPolicies, Record
from remat_jax.core.marks import CHECKPOINTS, Block

Part = tuple[str, type]
"""The path of a part in its model, and the class of its Linen module."""


def parts_of(model: nnx.Module, others: Sequence[nnx.Module] = ()) -> dict[Part, nnx.Module]:
    """The parts of `model` that are Linen modules behind `nnx.bridge.ToNNX`, without `others`."""
    apart = set(map(id, others))
    return {
        ("/".join(map(str, path)), type(node.to_nnx__module)): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.bridge.ToNNX) and id(node) not in apart
    }


def linen_blocks(blocks: Any) -> tuple[Block, ...]:
    """The `blocks` that a Linen module can have: Linen classes and globs. The default is the part's own checkpoints."""
    wanted = (CHECKPOINTS,) if blocks is None else blocks if isinstance(blocks, tuple) else (blocks,)
    return tuple(one for one in wanted if isinstance(one, str) or (isinstance(one, type) and issubclass(one, linen.Module)))


class Calls:
    """Collects the blocks that calls of a model's parts have reached so far.

    Attributes:
      parts: the parts not called yet. Calls of other methods than `__call__` do not count: they may have no block.
      found: the record of all calls, until the policies are known to have an effect; then None.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = set(parts)
        self.found: Record | None = Record()

    def add(self, part: Part | None, found: Record, policies: BlockPolicies) -> None:
        """Record a call of `part` (None: of a method other than `__call__`), and check the policies once all parts were called.

        Raises:
          BlockError: a block was never called.
          NoEffectError: a selector matched nothing, or there was nothing to offload.
        """
        if self.found is None:
            return
        self.parts -= {part}
        self.found.reached |= found.reached
        self.found.modules |= found.modules
        self.found.audit.add(found.audit)
        if self.parts:
            return
        error = scope.missed(policies, self.found)
        self.found = None if error is None else Record(reached=self.found.reached, modules=self.found.modules)
        if error is not None:
            raise error


def checkpointed_class(cls: Any, policies: BlockPolicies, part: Part, calls: Calls) -> type:
    """A subclass of `cls` (`ToNNX` or a subclass) with the same name, whose calls run under `policies`."""

    @functools.wraps(cls.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._pytree__state.initializing:
            return cls.__call__(self, *args, **kwargs)
        pure, state, arguments, write = as_pure_function(self, cls.__call__, args, kwargs)
        returned, record = run_under(policies, pure, (state, *arguments), {})
        is_whole = kwargs.get("method") is None
        if is_whole and part in calls.parts and not record.reached:
            # A `jit` inside may have been traced before, under the same policies.
            record = traced_under(policies.anew(), pure, (state, *arguments), {})
        calls.add(part if is_whole else None, record, policies)
        return write(returned)

    names = {"__call__": __call__, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    subclass: Any = type(cls)(cls.__name__, (cls,), names)
    subclass._plain_class = cls
    return subclass
