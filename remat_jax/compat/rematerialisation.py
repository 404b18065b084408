"""Checkpoint regions and names of JAX's established rematerialisation and of the new one, `jax_remat3`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import config as _config

from remat_jax.compat.jaxprs import closed, eqn_context, hoist_consts, jaxpr_function
from remat_jax.compat.tracing import setting


def is_checkpoint(eqn: Any) -> bool:
    """Whether `eqn` is a `jax.checkpoint` region, established or of `jax_remat3`."""
    return kind(eqn) in ("checkpoint", "remat", "remat2")


def checkpoint_parts(eqn: Any) -> tuple[Any, dict[str, Any]]:
    """The body of a checkpoint region as a closed jaxpr, and its parameters."""
    params = eqn.params
    if hidden_body(eqn) is not None:
        # A `jax_remat3` region has no parameter `differentiated`; its name stack shows whether it is a recomputation.
        differentiated = "rematted_computation" in str(eqn.source_info.name_stack)
        params = {**params["_prim"].params, "differentiated": differentiated}
    return closed(params["jaxpr"]), params


def given_name(eqn: Any) -> str | None:
    """The name that `jax.ad_checkpoint.checkpoint_name` gave to the output of `eqn`, or None."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    if _hi_primitive(eqn) in ("CheckpointName", "CheckpointNameFwd"):
        return eqn.params["_prim"].params["name"]
    return None


def _hi_primitive(eqn: Any) -> str | None:
    return type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else None


def kind(eqn: Any) -> str:
    """The name of the primitive of `eqn`; `"checkpoint"` for a region of `jax_remat3`."""
    return "checkpoint" if _hi_primitive(eqn) == "RematTraced" else eqn.primitive.name


def hidden_body(eqn: Any) -> Any | None:
    """The body of a `jax_remat3` region, a jaxpr; None for other equations.

    `compat.bind(eqn, …, _prim=body)` evaluates the region with another body.
    """
    return eqn.params["_prim"].params["jaxpr"] if _hi_primitive(eqn) == "RematTraced" else None


def remat3() -> bool:
    """Whether `jax_remat3`, JAX's new rematerialisation, is on."""
    return bool(_config.remat3.value)


def classic_rematerialisation() -> contextlib.AbstractContextManager[None]:
    """Inside this context `jax.checkpoint` and `checkpoint_name` use the established rematerialisation, despite `jax_remat3`.

    `jax_remat3` saves only arrays that were named before differentiation: it recomputes arrays that derivative rules compute,
    and outputs that derivative rules read (exp, tanh, softmax). Before JAX 0.12 it also ignores policies that are functions,
    except that JAX 0.11.2 calls them for names (and for nothing else).
    """
    context: contextlib.AbstractContextManager[None] = _config.remat3(False)
    return context


def named(value: Any, name: str) -> Any:
    """`value`, named by `checkpoint_name` of the established rematerialisation."""
    with classic_rematerialisation():
        return _ad_checkpoint.checkpoint_name(value, name)


def bind_established(eqn: Any, body: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate the `jax_remat3` region `eqn`, with the closed jaxpr `body`, under the established rematerialisation."""
    params = eqn.params["_prim"].params
    prevent = params.get("prevent_cse", True)
    with eqn_context(eqn), classic_rematerialisation():
        prevents = prevent if isinstance(prevent, bool) else any(prevent)
        return list(jax.checkpoint(jaxpr_function(body), policy=params["policy"], prevent_cse=prevents)(*inputs))


def bind_checkpoint(jaxpr: Any, args: Sequence[Any], *, policy: Any, prevent_cse: bool) -> list[Any]:
    """`jax.checkpoint` of a traced program: evaluate the closed `jaxpr` on `args` as one region."""
    body, consts = hoist_consts(jaxpr)
    params = {"jaxpr": body.jaxpr, "prevent_cse": prevent_cse, "differentiated": False, "policy": policy}
    with binding_ours():
        return list(_ad_checkpoint.remat_p.bind(*consts, *args, **params))


def _keeps_nothing(*_: Any, **__: Any) -> bool:
    """The policy of `chunk_checkpoint`; `is_chunk_policy` recognises the function object."""
    return False


def chunk_checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, the body of a loop over chunks, in a checkpoint that saves nothing and does not count as the model's."""

    def checkpointed(*args: Any) -> Any:
        with classic_rematerialisation():
            return jax.checkpoint(function, prevent_cse=False, policy=_keeps_nothing)(*args)

    return checkpointed


def is_chunk_policy(policy: Any) -> bool:
    """Whether `policy` is the policy of `chunk_checkpoint`."""
    return policy is _keeps_nothing


_binding_ours: ContextVar[bool] = ContextVar("binding_ours", default=False)


def binding_ours() -> contextlib.AbstractContextManager[None]:
    """Checkpoint regions that are bound inside this context count as regions of `remat_jax`."""
    return setting(_binding_ours, True)


def let_checkpoints_give_way(gives_way: Callable[[Any], bool]) -> None:
    """From now on, evaluate a checkpoint region without its checkpoint if `gives_way` is true for its body (a closed jaxpr).

    JAX has no hook, so this function replaces `bind`, which JAX calls after tracing a region (of `jax.checkpoint`, `nnx.remat`,
    or `nn.remat` under a scan). Regions that are already differentiated, and regions that `remat_jax` binds, are unaffected.
    """
    bind = _ad_checkpoint.remat_p.bind

    @functools.wraps(bind)
    def bind_or_evaluate(*args: Any, jaxpr: Any, differentiated: bool, **params: Any) -> list[Any]:
        ours = _binding_ours.get() or is_chunk_policy(params.get("policy"))
        if not differentiated and not ours and gives_way(closed(jaxpr)):
            return list(jaxpr_function(closed(jaxpr))(*args))
        return list(bind(*args, jaxpr=jaxpr, differentiated=differentiated, **params))

    _ad_checkpoint.remat_p.bind = bind_or_evaluate
    region = getattr(_ad_checkpoint, "RematTraced", None)
    if region is None:
        return
    call = region.__call__

    @functools.wraps(call)
    def call_or_evaluate(self: Any, *args: Any) -> Any:
        return self.expand(*args) if not _binding_ours.get() and gives_way(self.jaxpr) else call(self, *args)

    region.__call__ = call_or_evaluate


# In a jaxpr, the name of a checkpointed block's function marks the block. The name also says whether the block replaces the
# model's own checkpoints around it.
_BLOCK_NAME = "remat_jax_block"
_REPLACING, _KEEPING = f"{_BLOCK_NAME}_in_place", f"{_BLOCK_NAME}_inside"
_block_name: ContextVar[str] = ContextVar("block_name", default=_BLOCK_NAME)


def block_name() -> str:
    """The name to give to the function of a new block in this context."""
    return _block_name.get()


def blocks_around_which(*, checkpoints_stay: bool) -> contextlib.AbstractContextManager[None]:
    """In this context, names of new blocks say whether the model's own checkpoints around the block are kept or replaced."""
    return setting(_block_name, _KEEPING if checkpoints_stay else _REPLACING)


def replaces_checkpoints(eqn: Any) -> bool | None:
    """Whether `eqn` is a block that replaces the model's own checkpoints around it; None if its name does not say."""
    return {_REPLACING: True, _KEEPING: False}.get(_name_of_block(eqn))


def is_block(eqn: Any) -> bool:
    """Whether `eqn` is a checkpointed block of `remat_jax`, tied to its place in the schedule or not."""
    return _name_of_block(eqn).startswith(_BLOCK_NAME)


def _name_of_block(eqn: Any) -> str:
    if eqn.primitive.name != "custom_jvp_call":
        return ""
    debug = getattr(eqn.params["call_jaxpr"].jaxpr, "debug_info", None)
    return str(getattr(debug, "func_src_info", "")).partition(" ")[0]
