"""Checkpoint regions as they are bound: one that a caller takes the place of is evaluated plainly, and no region is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax._src import ad_checkpoint as _ad_checkpoint

from remat_jax.compat.jaxprs import closed, jaxpr_function
from remat_jax.compat.rematerialisation import is_binding_ours, is_chunk_policy


def let_checkpoints_give_way(gives_way: Callable[[Any], bool]) -> None:
    """From now on evaluate the body of a checkpoint region in its place where `gives_way(body)`, a closed jaxpr.

    Whatever made the region (`jax.checkpoint`, `nn.remat` under a scan, `nnx.remat`) ends here, with its function traced. Only
    regions that are not differentiated yet are asked about, and none of those that `remat_jax` makes. JAX has no hook for
    this, and a region that is bound cannot be taken away before the whole function has been traced.
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
