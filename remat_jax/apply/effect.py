"""Runs functions under policies, and checks that these reached their blocks and had an effect, even if JAX reused traces."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import jax
from flax.errors import TraceContextError
from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.apply import gradients, haiku, linen, nnx, pytrees, scope
from remat_jax.apply.calls import is_listening
from remat_jax.apply.nnx_state import Objects, is_node
from remat_jax.apply.per_layer import kept_programs
from remat_jax.apply.region import traced
from remat_jax.apply.replan import with_marked_parts
from remat_jax.apply.scope import BlockPolicies, Record
from remat_jax.core.marks import PARTS, Block
from remat_jax.core.walk import bodies, equations
from remat_jax.errors import ArgumentError, BlockError, RematError, UnsupportedError

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any]

# (policies, code, signature) of each function whose policies had an effect in a trial trace. A function that is created again
# in every step has the same key, so it needs no new trial.
_proven: set[Hashable] = set()
_MOST_PROVEN = 4096
# For a function, by policies and signature: the blocks that it differentiates itself, if one trace did not show it.
_differentiated_before: weakref.WeakKeyDictionary[Function, dict[Hashable, frozenset[Block]]] = weakref.WeakKeyDictionary()
# For each set of policies: the blocks that its calls have reached. Used for functions that cannot be traced.
_ever_reached: dict[BlockPolicies, set[Block]] = {}


def under_policies(fn: Callable[P, R], policies: BlockPolicies, tell: Callable[[Record], None] | None = None) -> Callable[P, R]:
    """`checkpoint_blocks` with checked policies; `tell` is called with the record of each call."""
    effect = Effect(checked_function(fn), policies)

    @functools.wraps(fn)
    def with_policies(*args: P.args, **kwargs: P.kwargs) -> R:
        outputs, record = run_under(policies, fn, args, kwargs)
        if not is_listening():  # blocks are being looked for, and every call is let through
            effect.check(record, args, kwargs)
        if tell is not None:
            tell(record)
        return outputs

    return with_policies


def checked_function(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn`; raises `ArgumentError` if it is not callable."""
    if not callable(fn):
        raise ArgumentError(f"fn={fn!r}: expected a function that runs the model")
    return fn


def run_under(policies: BlockPolicies, fn: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Record]:
    """`fn(*args, **kwargs)` with `policies` on its blocks, and the record of the call."""
    outer = scope.active()
    with scope.applying(policies) as record:
        together = policies.over(outer)
        if not together.by_layer:
            return with_blocks(policies, fn, args, kwargs), record
        # If an enclosing call has policies by layer, that call counts the blocks of its own policies.
        counted = policies if outer is not None and outer.by_layer else together
        return _by_layer(policies, frozenset(block for block, _ in counted.entries), fn, args, kwargs, record), record


_CLOSED_OVER = (
    "fn writes to an NNX object (a model, an nnx.Rngs, a statistic) that it closes over, or that a jax.jit, jax.grad or scan "
    "inside it closes over: values that are written while tracing cannot leave the trace. Make the object an argument of fn "
    "and pass it in the call, as in checkpoint_blocks(lambda model, x: model(x), policies)(model, x); inside fn use nnx.jit, "
    "nnx.grad, nnx.scan."
)


def _by_layer(
    policies: BlockPolicies,
    blocks: frozenset[Block],
    fn: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    record: Record,
) -> Any:
    """`fn(*args, **kwargs)`, traced with marks in place of its blocks, then evaluated with a policy for each layer of `blocks`.

    NNX objects among the arguments are split into arrays, and the function's writes to them are written back. If `fn` takes
    gradients, each function that it differentiates is traced and evaluated so by itself, with the layers counted anew: a mark
    cannot be differentiated. Blocks outside of these functions then have no policy.
    """
    found: set[Block] = set()
    before, key = _remembered(fn), (policies, call_signature(args, kwargs))
    inside = set(before.get(key, ()))

    def evaluated(
        marked: Function, args: tuple[Any, ...], kwargs: dict[str, Any], scope_name: str | None = None
    ) -> tuple[Any, set[Block], Any]:
        jaxpr, values, outputs_of = traced(marked, args, kwargs)
        # The trace of a `jit` that JAX reused has the checkpoints and scans of an earlier call under these policies, which look
        # like parts of `fn`. Module classes show a reused trace by a BlockError.
        may_be_reused = marked is with_marks and not found and not policies.trial and key not in before
        if may_be_reused and blocks & PARTS and _has_jitted_parts(jaxpr):
            inside.update(_differentiated_in_reused(fn, policies, args, kwargs, before))
        within = blocks - inside if marked is with_marks else blocks
        named = contextlib.nullcontext() if scope_name is None else jax.named_scope(scope_name)
        with compat.changing_differentiated(None), named:
            jaxpr = with_marked_parts(jaxpr, within, record)
            outputs, counts = kept_programs.evaluate(jaxpr, values, within, record.audit)
        return outputs_of(outputs), set(counts), jaxpr

    def differentiated(function: Function, has_aux: bool) -> Function:
        @functools.wraps(function)
        def with_layers(*args: Any, **kwargs: Any) -> Any:
            scope_name = gradients.new_scope()
            with gradients.inside_gradient():
                outputs, reached, jaxpr = evaluated(function, args, kwargs, scope_name)
            found.update(reached)
            gradients.note(jaxpr, outputs[0] if has_aux else outputs, scope_name)
            return outputs

        return with_layers

    def with_marks(*args: Any, **kwargs: Any) -> Any:
        with compat.changing_differentiated(differentiated):
            outputs = with_blocks(policies, fn, args, kwargs)
        inside.update(found)
        return outputs

    try:
        try:
            outputs, reached, _ = evaluated(with_marks, args, kwargs)
        except BlockError:
            if found or policies.trial:
                raise
            # JAX may have reused the trace of a `jit` that takes the gradient. Then nothing was differentiated here, and the
            # blocks outside of the gradient were counted as its layers.
            inside.update(_differentiated_in_reused(fn, policies, args, kwargs, before))
            outputs, reached, _ = evaluated(with_marks, args, kwargs)
    except TraceContextError as error:
        raise UnsupportedError(_CLOSED_OVER) from error
    record.differentiated |= inside
    record.reached = (record.reached - blocks) | reached | inside
    # JAX may have reused the trace of a `jit` that takes the gradient.
    record.is_whole = blocks <= record.reached
    return outputs


def _differentiated_in_reused(
    fn: Function,
    policies: BlockPolicies,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    before: dict[Hashable, frozenset[Block]],
) -> frozenset[Block]:
    """The blocks that `fn` differentiates inside a `jit` whose trace JAX reused; `before` remembers them."""
    key = policies, call_signature(args, kwargs)
    differentiated = frozenset(traced_under(policies.anew(), fn, args, kwargs).differentiated)
    before[key] = before.get(key, frozenset()) | differentiated
    return before[key]


def _has_jitted_parts(jaxpr: ClosedJaxpr) -> bool:
    """Whether a `jit` in the closed `jaxpr` has checkpoints or scans."""
    jitted = (body for eqn in equations(jaxpr) if compat.kind(eqn) == "jit" for body in bodies(eqn))
    return any(compat.is_checkpoint(eqn) or eqn.primitive.name == "scan" for body in jitted for eqn in equations(body))


def _remembered(fn: Function) -> dict[Hashable, frozenset[Block]]:
    try:
        return _differentiated_before.setdefault(fn, {})
    except TypeError:  # a callable without weak references is traced twice every time
        return {}


def with_blocks(policies: BlockPolicies, fn: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fn(*args, **kwargs)` with calls of blocks intercepted."""
    offloads = any(getattr(policy, "offloads", False) for _, policy in policies.entries)
    explained = compat.eager_offload_explained() if offloads else contextlib.nullcontext()
    with explained, linen.intercepting(), haiku.intercepting(), nnx.intercepting(policies, (args, kwargs)):
        with pytrees.intercepting(policies, (*args, *kwargs.values())):
            return fn(*args, **kwargs)


class Effect:
    """Checks that the calls of one function reach its blocks, and that the policies have an effect there.

    A call may trace nothing, because JAX reuses the trace of an inner `jit` under the same policies. So if a call seems to miss
    a block or an effect, the function is traced again under policies that have no cached traces, once for each signature. This
    trial trace decides whether an error is raised.
    """

    def __init__(self, fn: Function, policies: BlockPolicies) -> None:
        self._fn, self._policies = fn, policies
        self._passed: set[Hashable] = set()
        self._code = getattr(inspect.unwrap(fn), "__code__", None)

    def check(self, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the call with these arguments and this record.

        Raises:
          BlockError: a block was never called.
          NoEffectError: a selector matched nothing, or there was nothing to offload.
        """
        missed = scope.missed(self._policies, record)
        if record.is_whole:
            if missed is not None:
                raise missed
            return
        _ever_reached.setdefault(self._policies, set()).update(record.reached)
        signature = call_signature(args, kwargs)
        if missed is not None and signature not in self._passed:
            self._try_anew(missed, (self._policies, self._code, signature), args, kwargs)
        if signature is not None:
            self._passed.add(signature)

    def _try_anew(self, missed: RematError, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_key = None not in key
        if has_key and key in _proven:
            return
        try:
            record = traced_under(self._policies.anew(), self._fn, args, kwargs)
        except RematError:
            raise
        except Exception:  # a function that reads values (`float(loss)`) cannot be traced: earlier calls decide
            unreached = {block for block, _ in self._policies.entries} - _ever_reached[self._policies]
            if unreached or not isinstance(missed, BlockError):
                raise missed from None
            return
        missed_again = scope.missed(self._policies, record)
        if missed_again is not None:
            raise missed_again
        if has_key:
            if len(_proven) >= _MOST_PROVEN:
                _proven.clear()
            _proven.add(key)


def traced_under(policies: BlockPolicies, fn: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
    """The record of tracing `fn` on the types of its arrays; other values in the arguments reach it unchanged."""
    records: list[Record] = []

    def run(*args: Any, **kwargs: Any) -> None:
        records.append(run_under(policies, fn, args, kwargs)[1])

    traced(run, args, kwargs)
    return records[0]


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """A key for the trace of a call: the pytree structure, the types of arrays and numbers, and all other values.

    None if a value is not hashable.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    objects = Objects([leaf for leaf in leaves if is_node(leaf)])
    kinds: list[Any] = [objects.graphdef]
    for leaf in (*(leaf for leaf in leaves if not is_node(leaf)), *jax.tree.leaves(objects.leaves)):
        leaf = leaf.item() if compat.is_numpy_scalar(leaf) else leaf
        if compat.is_array(leaf):
            kinds.append((tuple(leaf.shape), leaf.dtype))
        else:
            # Python numbers count by type, so that a step counter does not give every step a new signature.
            kinds.append(type(leaf) if type(leaf) in (int, float, complex) else leaf)
    signature = (treedef, tuple(kinds))
    try:
        hash(signature)
    except TypeError:
        return None
    return signature
