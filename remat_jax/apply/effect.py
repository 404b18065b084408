"""Whether the policies of a call reached their blocks and had an effect, whatever JAX's trace caches answered."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply import linen, nnx, pytrees, regions, scope
from remat_jax.apply.per_layer import call as by_layer
from remat_jax.apply.scope import BlockPolicies, Record
from remat_jax.core.marks import Block
from remat_jax.core.walk import of_arrays
from remat_jax.errors import BlockError, RematError

Function = Callable[..., Any]

# What a trial has shown to have an effect, so that a function that is made anew for every step is not traced for every step.
_proven: set[Hashable] = set()
_MOST_PROVEN = 4096
# For functions that cannot be traced: the blocks that were ever reached under some policies.
_ever_reached: dict[BlockPolicies, set[Block]] = {}


def run_under(policies: BlockPolicies, fn: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Record]:
    """`fn(*args, **kwargs)` with `policies` on its blocks, and what was traced meanwhile."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_blocks(policies, fn, args, kwargs)

    outer = scope.active()
    with scope.applying(policies) as found:
        together = policies.over(outer)
        if not together.by_layer:
            return run(args, kwargs), found
        # What an enclosing call by layers has policies for is counted there.
        own = policies if outer is not None and outer.by_layer else together
        return by_layer.run(run, frozenset(block for block, _ in own.entries), args, kwargs, found), found


def with_blocks(policies: BlockPolicies, fn: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fn(*args, **kwargs)` with the calls of the blocks intercepted, of any library, and its checkpoint regions if asked."""
    offloads = any(getattr(policy, "offloads", False) for _, policy in policies.entries)
    explained = compat.eager_offload_explained() if offloads else contextlib.nullcontext()
    with explained, linen.intercepting(), nnx.intercepting(policies, (args, kwargs)):
        with pytrees.intercepting(policies, (*args, *kwargs.values())):
            return regions.run(fn, args, kwargs)


class Effect:
    """Whether the calls of one function reach its blocks, and the policies have an effect there.

    A call may trace nothing, because a `jit` inside was traced before under the same policies: in an earlier call of this
    function, or of another one, whose blocks say nothing about this one's. So where a call seems to have missed something, the
    function is traced once more, under policies for which nothing is cached, and that trace decides; once for each signature.
    """

    def __init__(self, fn: Function, policies: BlockPolicies) -> None:
        self._fn, self._policies = fn, policies
        self._passed: set[Hashable] = set()
        self._code = getattr(inspect.unwrap(fn), "__code__", None)

    def check(self, found: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the call with these arguments, during which `found` was traced.

        Raises:
          BlockError: a block was never called.
          NoEffectError: a selector matched nothing, or there was nothing to offload.
        """
        missed = scope.missed(self._policies, found)
        if found.is_whole:
            if missed is not None:
                raise missed
            return
        _ever_reached.setdefault(self._policies, set()).update(found.reached)
        signature = call_signature(args, kwargs)
        if missed is not None and signature not in self._passed:
            self._try_anew(missed, (self._policies, self._code, signature), args, kwargs)
        if signature is not None:
            self._passed.add(signature)

    def _try_anew(self, missed: RematError, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = None not in key
        if known and key in _proven:
            return
        try:
            found = traced_under(self._policies.anew(), self._fn, args, kwargs)
        except RematError:
            raise
        except Exception:  # a function that looks at values (`float(loss)`) cannot be traced: what other calls showed has to do
            unreached = {block for block, _ in self._policies.entries} - _ever_reached[self._policies]
            if unreached or not isinstance(missed, BlockError):
                raise missed from None
            return
        missed_again = scope.missed(self._policies, found)
        if missed_again is not None:
            raise missed_again
        if known:
            if len(_proven) >= _MOST_PROVEN:
                _proven.clear()
            _proven.add(key)


def traced_under(policies: BlockPolicies, fn: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
    """What is traced when `fn` is run on the types of its arguments; other values in them reach it as they are."""
    records: list[Record] = []

    def run(*args: Any, **kwargs: Any) -> None:
        records.append(run_under(policies, fn, args, kwargs)[1])

    flat, arrays = of_arrays(run, args, kwargs)
    jax.eval_shape(flat, *arrays)
    return records[0]


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What the trace of a call depends on: structure, types of arrays and numbers, other values; None if it has no hash."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    kinds: list[Any] = []
    for leaf in leaves:
        if compat.is_array(leaf):
            kinds.append((tuple(leaf.shape), leaf.dtype))
        else:
            # A number that counts steps must not make every step another call.
            kinds.append(type(leaf) if type(leaf) in (int, float, complex) else leaf)
    signature = (treedef, tuple(kinds))
    try:
        hash(signature)
    except TypeError:
        return None
    return signature
