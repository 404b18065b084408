"""Checkpoint regions, names and policies of JAX's established rematerialisation and of the new one, `jax_remat3`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import config as _config
from jax._src.interpreters import partial_eval as _pe

from remat_jax.compat.jaxprs import closed, eqn_context, hoist_consts, is_jaxpr, jaxpr_function
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


def names_in(policy: Any) -> frozenset[str]:
    """The names that a JAX policy such as `save_only_these_names(…)` was made with.

    The names are the strings in sets, lists and tuples among the policy's attributes and closure variables. JAX's
    callables among these are searched in the same way.

    >>> sorted(names_in(jax.checkpoint_policies.save_only_these_names("scores", "hidden")))
    ['hidden', 'scores']
    """
    if not (getattr(policy, "__module__", "") or type(policy).__module__ or "").startswith("jax"):
        return frozenset()  # strings in a user's own function may mean anything
    held = list(getattr(policy, "__dict__", {}).values())
    if inspect.isfunction(policy):
        held += inspect.getclosurevars(policy).nonlocals.values()
    names: set[str] = set()
    for value in held:
        if isinstance(value, set | frozenset | list | tuple):
            names.update(element for element in value if isinstance(element, str))
        elif callable(value) and not inspect.isclass(value):
            names |= names_in(value)
    return frozenset(names)


def kept_names_in(policy: Any) -> frozenset[str]:
    """The names of the arrays that a JAX policy saves or offloads, if it keeps only named arrays; else empty.

    >>> names = jax.checkpoint_policies
    >>> kept_names_in(names.save_only_these_names("hidden")), kept_names_in(names.save_any_names_but_these("hidden"))
    (frozenset({'hidden'}), frozenset())
    """
    maker = getattr(policy, "__qualname__", type(policy).__qualname__).partition(".")[0]
    return names_in(policy) if maker in _MAKERS_OF_KEPT_NAMES else frozenset()


# JAX 0.11.2 makes both policies by classes and JAX 0.12 by functions; JAX 0.10.2 has a class for the first only.
_MAKERS_OF_KEPT_NAMES = frozenset(
    {"SaveOnlyTheseNames", "SaveAndOffloadOnlyTheseNames", "save_only_these_names", "save_and_offload_only_these_names"}
)


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


_replacement: ContextVar[Callable[..., list[Any]] | None] = ContextVar("replacement", default=None)


def region_replaced_by(evaluate: Callable[[Any, Sequence[Any]], list[Any]] | None) -> contextlib.AbstractContextManager[None]:
    """In this context a checkpoint region is evaluated by `evaluate(closed body, operands)` instead of being bound."""
    return setting(_replacement, evaluate)


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
        instead = _replacement.get()
        if instead is not None and not differentiated:
            with setting(_replacement, None):
                return instead(closed(jaxpr), args)
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


OFFLOAD = _pe.Offloadable(src="device", dst="pinned_host")
"""The value that a JAX policy returns to offload an array."""


def offloaded_by(policy: Callable[..., Any], jaxpr: Any) -> list[str]:
    """For each array in `jaxpr`, at any depth, that the JAX policy would offload: its name, else the name of its primitive."""
    names = []
    for eqn in jaxpr.jaxpr.eqns:
        verdict = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
        if type(verdict).__name__ == "Offloadable":
            names.append(given_name(eqn) or eqn.primitive.name)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if is_jaxpr(inner):
                    names += offloaded_by(policy, closed(inner))
    return names


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


def checkpoints_stay() -> bool:
    """Whether new blocks in this context keep the model's own checkpoints."""
    return _block_name.get() == _KEEPING


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
