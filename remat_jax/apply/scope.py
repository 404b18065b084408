"""Which policy holds for which block, while a function runs: part of JAX's trace context, so that caches cannot leak it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from flax import linen, nnx

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.errors import ArgumentError, BlockError, nearest
from remat_jax.policy import JaxPolicy, Policy, as_policy

Block = type | str
"""A Linen or NNX module class, or a glob on module paths."""


@dataclass(frozen=True)
class BlockPolicies:
    """Blocks and their policies, in the order in which they are tried.

    Attributes:
      entries: pairs of a module class (subclasses count) or a glob on module paths, and its policy.
    """

    entries: tuple[tuple[Block, Policy | JaxPolicy], ...]

    @classmethod
    def of(cls, policies: Mapping[Block, Any]) -> BlockPolicies:
        """Checked `policies`.

        Raises:
          ArgumentError: `policies` is no mapping, is empty, or has a key that is neither a module class nor a glob.
          PolicyError: a value is no policy.
        """
        if not isinstance(policies, Mapping) or not policies:
            raise ArgumentError(
                f"policies={policies!r}: expected a mapping from block to policy with at least one entry, "
                'for example {DecoderLayer: "full"}'
            )
        return cls(tuple((_checked(block), as_policy(value)) for block, value in policies.items()))

    def find(self, module: type, path: str) -> tuple[Block, Policy | JaxPolicy] | None:
        """The first entry that means a module of this class at this path."""
        for block, policy in self.entries:
            if issubclass(module, block) if isinstance(block, type) else fnmatchcase(path, block):
                return block, policy
        return None

    def over(self, outer: BlockPolicies | None) -> BlockPolicies:
        """These entries first, then those of an enclosing call for other blocks."""
        mine = {block for block, _ in self.entries}
        inherited = tuple(entry for entry in outer.entries if entry[0] not in mine) if outer else ()
        return BlockPolicies(self.entries + inherited)


def _checked(block: Any) -> Block:
    if isinstance(block, str) and block:
        return block
    if isinstance(block, type) and issubclass(block, linen.Module | nnx.Module):
        return block
    raise ArgumentError(
        f"block={block!r}: expected a flax.linen or flax.nnx module class, or a glob on module paths such as 'layers_*'; "
        "for a plain function use remat_jax.remat(function, policy)"
    )


@dataclass
class Record:
    """What was traced under one set of policies: kept as long as a trace made under it can be reused."""

    audit: Audit = field(default_factory=Audit)
    reached: set[Block] = field(default_factory=set)
    modules: dict[str, str] = field(default_factory=dict)


_active = compat.trace_context(None)
_records: dict[BlockPolicies, Record] = {}


def active() -> BlockPolicies | None:
    """The policies that hold now."""
    value: BlockPolicies | None = compat.trace_context_value(_active)
    return value


def record() -> Record:
    """The record of the policies that hold now."""
    current = active()
    assert current is not None
    return _records.setdefault(current, Record())


@contextlib.contextmanager
def applying(policies: BlockPolicies) -> Iterator[Record]:
    """Make `policies` hold, over those that hold already."""
    with _active(policies.over(active())):
        yield record()


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Make no policies hold: a later trace under the same policies must not see this one's."""
    with _active(None):
        yield


def check_reached(policies: BlockPolicies, found: Record) -> None:
    """Raise if a block of `policies` was never called, or a policy was without effect.

    Raises:
      BlockError, NoEffectError: what was missed, and what there is instead.
    """
    for block, _ in policies.entries:
        if block not in found.reached:
            raise BlockError(_never_called(block, found))
    found.audit.check()


def _never_called(block: Block, found: Record) -> str:
    called = sorted({f"{path or '(root)'}: {name}" for path, name in found.modules.items()})
    listing = "; ".join(called[:12]) + (f"; and {len(called) - 12} more" if len(called) > 12 else "")
    seen = f"The modules that were called: {listing}." if called else "No module of this kind was called at all."
    if isinstance(block, str):
        hint = nearest(block.strip("*"), list(found.modules))
        return f"block={block!r}: the glob matches the path of no module that was called.{hint} {seen}"
    hint = nearest(block.__name__, set(found.modules.values()))
    return (
        f"block={block.__name__}: this class was never called, so its policy has no effect.{hint} {seen} "
        "Name the class whose __call__ runs once per layer."
    )
