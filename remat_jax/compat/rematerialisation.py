"""Checkpoint regions and names of JAX's established rematerialisation and of the new one, `jax_remat3`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import config as _config
from jax._src.interpreters import partial_eval as _pe
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax.compat.equations import body_of_call, given_name, kind, parameters
from remat_jax.compat.jaxprs import closed, jaxpr_function, linear_parts_are_batched
from remat_jax.compat.patches import Patch
from remat_jax.compat.tracing import established_forms, setting, traced_for, traces
from remat_jax.errors import UnsupportedError


def checkpoint_parts(eqn: JaxprEqn) -> tuple[Any, Mapping[str, Any]]:
    """The body of a checkpoint region as a closed jaxpr, and its parameters."""
    params = parameters(eqn)
    if "differentiated" not in params:
        # A `jax_remat3` region has no such parameter; its name stack shows whether it is a recomputation.
        params = {**params, "differentiated": "rematted_computation" in str(eqn.source_info.name_stack)}
    return closed(params["jaxpr"]), params


# Operations whose results a block computes again from a parameter instead of keeping them.
_VIEWS = frozenset({"reshape", "transpose", "squeeze", "broadcast_in_dim", "convert_element_type"})
# What JAX traces the body of a `jax.checkpoint` region for.
_REGIONS = frozenset({"checkpoint / remat", "remat3"})


def unnamed(leaf: Any) -> Any:
    """The array that `checkpoint_name` made the tracer `leaf` from; `leaf` if it is not named.

    Outside every region a name has no effect, but JAX would keep a named copy beside the array.
    """
    while (eqn := _made_from_one(leaf)) is not None and given_name(eqn) is not None:
        leaf = eqn.in_tracers[0]
    return leaf


def view(leaf: Any) -> tuple[Any, list[Any]]:
    """The array of which the tracer `leaf` is a view, and the equations from this array to `leaf`, without names.

    Equations other than names count only inside a `jax.checkpoint` region, which would have recomputed them.
    """
    in_region = _traces_a_region()
    eqns: list[Any] = []
    while (eqn := _made_from_one(leaf)) is not None:
        if given_name(eqn) is None:
            if not in_region or eqn.primitive.name not in _VIEWS:
                break
            eqns.append(eqn)
        leaf = eqn.in_tracers[0]
    return leaf, eqns[::-1]


def _made_from_one(leaf: Any) -> Any:
    """The equation that computes the tracer `leaf` from one array; None if there is none."""
    eqn = leaf.parent if isinstance(leaf, _pe.DynamicJaxprTracer) else None
    return eqn if eqn is not None and len(eqn.in_tracers) == len(eqn.outvars) == 1 else None


def _traces_a_region() -> bool:
    return any(traced_for(trace) in _REGIONS for trace in traces())


def remat3() -> bool:
    """Whether `jax_remat3`, JAX's new rematerialisation, is on."""
    return bool(_config.remat3.value)


def named(value: Any, name: str) -> Any:
    """`value`, named by `checkpoint_name` of the established rematerialisation."""
    with established_forms():
        return _ad_checkpoint.checkpoint_name(value, name)


def _keeps_nothing(*_: Any, **__: Any) -> bool:
    """The policy of `chunk_checkpoint`; `is_chunk_policy` recognises the function object."""
    return False


def chunk_checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, the body of a loop over chunks, in a checkpoint that saves nothing and does not count as the model's."""

    def checkpointed(*args: Any) -> Any:
        install_hooks()
        with established_forms():
            return jax.checkpoint(function, prevent_cse=False, policy=_keeps_nothing)(*args)

    return checkpointed


def is_chunk_policy(policy: Any) -> bool:
    """Whether `policy` is the policy of `chunk_checkpoint`."""
    return policy is _keeps_nothing


_replacement: ContextVar[Callable[..., list[Any]] | None] = ContextVar("replacement", default=None)


def region_replaced_by(evaluate: Callable[[Any, Sequence[Any]], list[Any]] | None) -> contextlib.AbstractContextManager[None]:
    """In this context a checkpoint region is evaluated by `evaluate(closed body, operands)` instead of being bound."""
    install_hooks()
    return setting(_replacement, evaluate)


_gives_way: list[Callable[[Any], bool]] = []


def let_checkpoints_give_way(gives_way: Callable[[Any], bool]) -> None:
    """Once the hooks are installed, a checkpoint region loses its checkpoint if `gives_way` is true for its body."""
    _gives_way.append(gives_way)


def _give_way(body: ClosedJaxpr) -> bool:
    return any(gives_way(body) for gives_way in _gives_way)


def _bind_or_evaluate(bind: Callable[..., Any]) -> Callable[..., list[Any]]:
    @functools.wraps(bind)
    def bind_or_evaluate(*args: Any, jaxpr: Any, differentiated: bool, **params: Any) -> list[Any]:
        instead = _replacement.get()
        if instead is not None and not differentiated:
            with setting(_replacement, None):
                return instead(closed(jaxpr), args)
        if not differentiated and not is_chunk_policy(params.get("policy")) and _give_way(closed(jaxpr)):
            return list(jaxpr_function(closed(jaxpr))(*args))
        with effects_explained(jaxpr):
            return list(bind(*args, jaxpr=jaxpr, differentiated=differentiated, **params))

    return bind_or_evaluate


def _call_or_evaluate(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def call_or_evaluate(self: Any, *args: Any) -> Any:
        if not _give_way(self.jaxpr):
            return call(self, *args)
        return jax.tree.unflatten(self.out_tree, jaxpr_function(self.jaxpr)(*jax.tree.leaves(args)))

    return call_or_evaluate


_REGIONS_BOUND = Patch(
    (_ad_checkpoint.remat_p, "bind", _bind_or_evaluate),
    *((region, "__call__", _call_or_evaluate) for region in [getattr(_ad_checkpoint, "RematTraced", None)] if region),
)
"""Checkpoint regions may be evaluated without their checkpoint, or in another way (`region_replaced_by`).

The functions are replaced that JAX calls after tracing a region (of `jax.checkpoint`, `nnx.remat`, or `nn.remat` under a scan).
Regions that are already differentiated are unaffected.
"""


def install_hooks() -> None:
    """Replace some functions of JAX, which has no hooks there, from now on. The first policy does this, and no import.

    The replacements stay: a function that was traced under a policy may be put into a checkpoint, differentiated or batched
    at any later time. Without blocks of this package, checkpoint regions are unaffected.
    """
    for patch in (_REGIONS_BOUND, linear_parts_are_batched):
        patch.keep()


@contextlib.contextmanager
def effects_explained(jaxpr: Any) -> Iterator[None]:
    """Inside this context JAX's error about an effect in a checkpoint region with the body `jaxpr` says the remedy."""
    try:
        yield
    except NotImplementedError as error:
        effects = sorted(map(str, closed(jaxpr).jaxpr.effects))
        if isinstance(error, UnsupportedError) or not effects or "Effects not supported" not in str(error):
            raise
        raise UnsupportedError(
            f"a checkpointed block has an effect that JAX cannot differentiate in a checkpoint ({effects[0]}), such as "
            "io_callback. Use jax.debug.callback (it runs once in each pass) or jax.pure_callback, or return the "
            "array from the block and call io_callback outside"
        ) from error


# In a jaxpr, the name of a checkpointed block's function marks the block. The name also says whether the block replaces the
# model's own checkpoints around it.
_BLOCK_NAME = "remat_jax_block"
_REPLACING, _KEEPING = f"{_BLOCK_NAME}_in_place", f"{_BLOCK_NAME}_inside"
_block_name: ContextVar[str] = ContextVar("block_name", default=_BLOCK_NAME)


def block_function(run: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """A new block that computes `run` and has this derivative rule, as for `jax.custom_jvp` with `symbolic_zeros`.

    The call is a `custom_jvp_call` of JAX, despite `jax_custom_jvp3` (`established_forms`).
    """
    run.__name__ = run.__qualname__ = _block_name.get()
    block = jax.custom_jvp(run)
    block.defjvp(rule, symbolic_zeros=True)

    def bind_block(*args: Any) -> Any:
        with established_forms():
            return block(*args)

    return bind_block


def blocks_around_which(*, checkpoints_stay: bool) -> contextlib.AbstractContextManager[None]:
    """In this context, names of new blocks say whether the model's own checkpoints around the block are kept or replaced."""
    return setting(_block_name, _KEEPING if checkpoints_stay else _REPLACING)


def checkpoints_stay() -> bool:
    """Whether new blocks in this context keep the model's own checkpoints."""
    return _block_name.get() == _KEEPING


def replaces_checkpoints(eqn: JaxprEqn) -> bool | None:
    """Whether `eqn` is a block that replaces the model's own checkpoints around it; None if its name does not say."""
    return {_REPLACING: True, _KEEPING: False}.get(_name_of_block(eqn))


def is_block(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a checkpointed block of `remat_jax`, tied to its place in the schedule or not."""
    return _name_of_block(eqn).startswith(_BLOCK_NAME)


def _name_of_block(eqn: JaxprEqn) -> str:
    if kind(eqn) != "custom_jvp_call":
        return ""
    debug = getattr(body_of_call(eqn), "debug_info", None)
    return str(getattr(debug, "func_src_info", "")).partition(" ")[0]
