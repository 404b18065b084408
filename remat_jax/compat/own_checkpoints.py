"""Intercepting checkpoint regions when JAX binds them: a region that is replaced is evaluated without a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax._src import ad_checkpoint as _ad_checkpoint

from remat_jax.compat.jaxprs import closed, jaxpr_function
from remat_jax.compat.rematerialisation import is_binding_ours, is_chunk_policy


def let_checkpoints_give_way(gives_way: Callable[[Any], bool]) -> None:
    """From now on, evaluate a checkpoint region as its plain body, a closed jaxpr, if `gives_way(body)`.

    Every region (`jax.checkpoint`, `nn.remat` under a scan, `nnx.remat`) is bound here, after its function was traced. Regions
    that are differentiated already are not affected, nor are the regions of `remat_jax`. JAX has no hook for this, and a bound
    region could only be removed after the whole function was traced.
    """
    bind = _ad_checkpoint.remat_p.bind

    @functools.wraps(bind)
    def bind_or_evaluate(*args: Any, jaxpr: Any, differentiated: bool, **params: Any) -> list[Any]:
        ours = is_binding_ours() or is_chunk_policy(params.get("policy"))
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
        if not is_binding_ours() and gives_way(self.jaxpr):
            return self.expand(*args)
        return call(self, *args)

    region.__call__ = call_or_evaluate
