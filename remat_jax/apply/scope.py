"""The policies that are active while a function runs.

They are in JAX's trace context, so JAX reuses a cached trace only under equal policies.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from flax import linen, nnx

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.methods import CALL, checked_method, defines, first_name, method_of
from remat_jax.core.marks import CHECKPOINTS, PARTS, Block, Marked, name_of
from remat_jax.errors import ArgumentError, BlockError, NoEffectError, RematError, nearest
from remat_jax.policy import JaxPolicy, LayerPolicies, Policy, as_block_policy


@dataclass(frozen=True)
class BlockPolicies:
    """Blocks and their policies, in the order in which they are matched.

    Attributes:
      entries: pairs of a block and its policy. A class includes its subclasses.
      keeps: whether the model's own checkpoints around the blocks stay.
      waits: whether all blocks become marks, even if none has policies by layer.
      trial: 0, or a new number that makes JAX trace everything again under the same policies.
    """

    entries: tuple[tuple[Block, Policy | JaxPolicy | LayerPolicies], ...]
    keeps: bool = False
    waits: bool = False
    trial: int = 0

    @property
    def by_layer(self) -> bool:
        """Whether all blocks become marks and get their policies after tracing.

        So it is if a block has policies by layer, is a part of a traced function, or `waits`.
        """
        return self.waits or any(block in PARTS or isinstance(policy, LayerPolicies) for block, policy in self.entries)

    @classmethod
    def of(cls, policies: Mapping[Block, Any], *, keeps: bool = False) -> BlockPolicies:
        """Checked `policies`.

        Raises:
          ArgumentError: `policies` is no mapping or is empty, or a key is no block.
          PolicyError: a value is no policy.
        """
        if not isinstance(policies, Mapping) or not policies:
            raise ArgumentError(
                f"policies={policies!r}: expected a mapping from block to policy with at least one entry, "
                'for example {DecoderLayer: "full"}'
            )
        return cls(tuple((checked_block(block), as_block_policy(value)) for block, value in policies.items()), keeps)

    def find(
        self, module: type, path: str, entered: Sequence[str], method: str = CALL
    ) -> tuple[Block, Policy | JaxPolicy | Marked] | None:
        """The first entry, except the globs in `entered`, that selects a method of a module of this class at this path."""
        for block, policy in self.entries:
            if block not in entered and _selects(block, module, path, method):
                return block, self._marked(block, policy)
        return None

    def find_function(self, function: Block) -> Policy | JaxPolicy | Marked | None:
        """The policy of a marked function, or of one of `PARTS`."""
        return next((self._marked(block, policy) for block, policy in self.entries if block == function), None)

    def _marked(self, block: Block, policy: Policy | JaxPolicy | LayerPolicies) -> Policy | JaxPolicy | Marked:
        return Marked(block, policy, self.keeps) if isinstance(policy, LayerPolicies) or self.by_layer else policy

    def over(self, outer: BlockPolicies | None) -> BlockPolicies:
        """These entries, followed by an enclosing call's entries for other blocks."""
        mine = {block for block, _ in self.entries}
        inherited = tuple(entry for entry in outer.entries if entry[0] not in mine) if outer else ()
        trial = self.trial or (outer.trial if outer else 0)
        return BlockPolicies(self.entries + inherited, self.keeps, self.waits, trial)

    def anew(self) -> BlockPolicies:
        """The same policies, but with no cached traces."""
        return replace(self, trial=next(_trials))


def _selects(block: Block, module: type, path: str, method: str) -> bool:
    if isinstance(block, type):
        return method == CALL and issubclass(module, block)
    if isinstance(block, str):
        return method == CALL and block not in PARTS and fnmatchcase(path, block)
    named = method_of(block)
    return named is not None and issubclass(module, named.classes) and method == first_name(module, named.name)


def checked_block(block: Any, argument: str = "block") -> Block:
    """`block`, checked.

    Raises:
      ArgumentError: `block` is no class whose instances are called, no method, no marked function and no text.
    """
    if isinstance(block, str) and block:
        return block
    if isinstance(block, type):
        below: list[type] = type.__subclasses__(block) if block.__module__ != "builtins" else []
        if issubclass(block, linen.Module | nnx.Module) or any(defines(cls, CALL) for cls in (block, *below)):
            return block
        raise ArgumentError(
            f"{argument}={block!r}: this class has no __call__, so its instances are never called. Name a class that has one, "
            "the method that runs a layer (Layer.encode), or a function marked with @remat_jax.block."
        )
    if (inspect.isfunction(block) and block in marked) or checked_method(block, argument):
        return block
    name = getattr(block, "__name__", "layer").replace("<lambda>", "layer")
    remedy = (
        f" To make a plain function a block, mark it, {name} = remat_jax.block({name}), call the marked function in the loss, "
        f"and name it here; remat_jax.remat({name}, policy) gives one function one policy without naming it."
        if callable(block)
        else ""
    )
    raise ArgumentError(
        f"{argument}={block!r}: expected a class whose instances are called (a Flax or Equinox module), a method of a class "
        "(Layer.encode), a function marked with @remat_jax.block, a glob on module paths such as 'layers_*', "
        f"'checkpoints' or 'scans'.{remedy}"
    )


def checked_blocks(blocks: object) -> tuple[Block, ...]:
    """`blocks`, one or a tuple, each checked (`checked_block`)."""
    listed = blocks if isinstance(blocks, tuple) else (blocks,)
    if not listed:
        raise ArgumentError("blocks=(): expected at least one class, marked function or glob on module paths")
    return tuple(checked_block(block, "blocks") for block in listed)


marked: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""The functions that `block` has marked."""


@dataclass
class Record:
    """What was traced during one call.

    Attributes:
      reached: the blocks that were called.
      modules: the modules that were called: path → class name.
      overruled: the blocks that an inner `checkpoint_blocks` ran under its own policies.
      replaced: how many of the model's own checkpoints the policies replaced; a scanned checkpoint counts once.
      kept: how many of the model's own checkpoints were kept, each of which is a whole block.
      differentiated: the blocks that the function differentiates itself; only under policies by layer.
      is_whole: whether the record is complete even if a `jit` inside was traced before the call.
    """

    audit: Audit = field(default_factory=Audit)
    reached: set[Block] = field(default_factory=set)
    modules: dict[str, str] = field(default_factory=dict)
    overruled: set[Block] = field(default_factory=set)
    replaced: int = 0
    kept: int = 0
    differentiated: set[Block] = field(default_factory=set)
    is_whole: bool = False

    def add(self, inner: Record, policies: BlockPolicies) -> None:
        """Add the record of an inner call under `policies`. The blocks of `policies` do not count as reached by this call."""
        self.audit.add(inner.audit)
        blocks = {block for block, _ in policies.entries}
        self.reached |= inner.reached - blocks
        self.overruled |= (inner.reached & blocks) | inner.overruled
        self.modules = inner.modules | self.modules
        self.replaced += inner.replaced
        self.kept += inner.kept


_active = compat.trace_context(None, reaches_blocks=False)
_trials = itertools.count(1)
# The records of the calls that are running, the innermost last.
_calls: ContextVar[tuple[Record, ...]] = ContextVar("calls", default=())


def active() -> BlockPolicies | None:
    """The policies that are active now."""
    policies: BlockPolicies | None = _active.value
    return policies


def record() -> Record:
    """The record of the innermost call that is running; an empty record if no call is running."""
    return (_calls.get() or (Record(),))[-1]


@contextlib.contextmanager
def applying(policies: BlockPolicies) -> Iterator[Record]:
    """Activate `policies` inside this context; they take precedence over the active policies."""
    compat.install_hooks()
    outer, inner = _calls.get(), Record()
    try:
        with compat.setting(_calls, (*outer, inner)), _active(policies.over(active())):
            yield inner
    finally:
        if outer:
            outer[-1].add(inner, policies)


def tracing_anew() -> contextlib.AbstractContextManager[Record]:
    """Inside this context everything is traced again, so that the record and the traces are complete."""
    return applying(BlockPolicies(()).anew())


def missed(policies: BlockPolicies, record: Record) -> RematError | None:
    """The error for a block of `policies` that was not called, or for a policy without effect; None if there is no error."""
    for block, _ in policies.entries:
        if block not in record.reached and block in record.overruled:
            return BlockError(
                f"block={name_of(block)}: an inner checkpoint_blocks has a policy for this block too. The inner policy wins, "
                "so the outer one has no effect. Remove one of the two."
            )
        if block not in record.reached:
            return BlockError(_never_called(block, record))
    try:
        record.audit.check()
    except NoEffectError as error:
        return error
    return None


def _never_called(block: Block, record: Record) -> str:
    called = sorted({f"{path or '(root)'}: {name}" for path, name in record.modules.items()})
    listing = "; ".join(called[:12]) + (f"; and {len(called) - 12} more" if len(called) > 12 else "")
    seen = f"The modules that were called: {listing}." if called else "No module of this kind was called at all."
    if block in PARTS:
        wanted = "jax.checkpoint region" if block == CHECKPOINTS else "scan of two or more iterations"
        return (
            f"block={block!r}: the function has no {wanted}, or only around or inside other blocks. Name the class or function "
            "that runs a layer. Under jax.disable_jit scans are Python loops."
        )
    if isinstance(block, str):
        hint = nearest(block.strip("*"), list(record.modules))
        remedy = (
            " A glob selects modules. To select a function, mark it with @remat_jax.block and pass the function, not its name."
        )
        functions = "" if called else remedy
        return f"block={block!r}: the glob matches no path of a called module.{hint} {seen}{functions}"
    hint = nearest(block.__name__, set(record.modules.values()))
    if not isinstance(block, type):
        kind = "function" if method_of(block) is None else "method"
        return f"block={name_of(block)}: this {kind} was never called, so its policy has no effect.{hint} {seen}"
    if block.__name__ in record.modules.values():
        hint = (
            f" Another class {block.__name__} was called: a notebook's cell that is run again, or a file that is imported "
            "under two names, defines its classes again. Make the model again, or give the class that it uses."
        )
    return (
        f"block={block.__name__}: this class was never called, so its policy has no effect.{hint} {seen} "
        "Name the class whose __call__ runs once per layer."
    )
