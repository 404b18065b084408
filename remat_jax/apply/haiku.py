"""Blocks in Haiku transforms. Parameters, state and random keys lie in Haiku's frame, not in a module.

`apply/region.py` makes them inputs and outputs of the block, so dropout draws the same numbers as without a policy, and state
is written back. Haiku is used only if the user has imported it.
"""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from remat_jax.apply.calls import Call, entered, run_module
from remat_jax.apply.methods import block_path, first_name
from remat_jax.apply.region import run_block


def is_haiku(cls: type) -> bool:
    """Whether `cls` is a Haiku module class."""
    module = getattr(sys.modules.get("haiku"), "Module", None)
    return module is not None and issubclass(cls, module)


def intercepting() -> AbstractContextManager[None]:
    """Inside this context every Haiku module that is a block of the active policies runs as a checkpointed block."""
    haiku = sys.modules.get("haiku")
    intercept = getattr(haiku, "intercept_methods", None)
    context: AbstractContextManager[None] = nullcontext() if intercept is None else intercept(_interceptor)
    return context


def _interceptor(next_fun: Call, args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
    module, method = context.module, first_name(type(context.module), context.method_name)
    path = getattr(module, "module_name", None)
    if path is None:  # the module is being made
        return next_fun(*args, **kwargs)

    def run(_: None, /, *args: Any, **kwargs: Any) -> Any:
        with entered(module, method):
            return next_fun(*args, **kwargs)

    as_block = functools.partial(run_block, run, block_path(path, method), None, args, kwargs)
    return run_module(module, path, lambda: next_fun(*args, **kwargs), as_block, method)
