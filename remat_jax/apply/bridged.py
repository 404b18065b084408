"""Linen modules inside an NNX model, behind `nnx.bridge.ToNNX`: their blocks under a policy from now on, as the switch has it.

Which Linen blocks a part has shows only when it is called. So its class changes to a subclass that runs every call, of any
method, under the policies; and that a block was called by no part is an error once every part was called.
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
"""The path of a part in its model, and the class of the Linen module in it."""


def parts_of(model: nnx.Module, others: Sequence[nnx.Module] = ()) -> dict[Part, nnx.Module]:
    """The parts of `model` that are Linen modules behind `nnx.bridge.ToNNX`, but for `others`."""
    apart = set(map(id, others))
    return {
        ("/".join(map(str, path)), type(node.to_nnx__module)): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.bridge.ToNNX) and id(node) not in apart
    }


def linen_blocks(blocks: Any) -> tuple[Block, ...]:
    """Those of `blocks` that a Linen module can have: Linen classes and globs; by default the part's own checkpoints."""
    wanted = (CHECKPOINTS,) if blocks is None else blocks if isinstance(blocks, tuple) else (blocks,)
    return tuple(one for one in wanted if isinstance(one, str) or (isinstance(one, type) and issubclass(one, linen.Module)))


class Calls:
    """What the calls of the parts of a model have reached so far.

    Attributes:
      parts: those that were not called yet. A call of another method than `__call__` may have no block, and does not count.
      found: what was traced in all calls until the policies were seen to have an effect, then None.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = set(parts)
        self.found: Record | None = Record()

    def add(self, part: Part | None, found: Record, policies: BlockPolicies) -> None:
        """Note a call of `part`, or of another of its methods where that is None; all parts were called: check.

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
    """A subclass of `ToNNX`, or of a subclass of that, of the same name, whose calls run under `policies`."""

    @functools.wraps(cls.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._pytree__state.initializing:
            return cls.__call__(self, *args, **kwargs)
        pure, state, arguments, write = as_pure_function(self, cls.__call__, args, kwargs)
        returned, found = run_under(policies, pure, (state, *arguments), {})
        is_whole = kwargs.get("method") is None
        if is_whole and part in calls.parts and not found.reached:
            # A `jit` inside may have been traced before, under the same policies.
            found = traced_under(policies.anew(), pure, (state, *arguments), {})
        calls.add(part if is_whole else None, found, policies)
        return write(returned)

    names = {"__call__": __call__, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    subclass: Any = type(cls)(cls.__name__, (cls,), names)
    subclass._plain_class = cls
    return subclass
