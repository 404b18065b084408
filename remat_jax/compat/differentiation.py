"""Functions that JAX differentiates while another function is traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from jax._src.interpreters import ad as _ad

from remat_jax.compat.patches import Patch
from remat_jax.compat.tracing import setting

Change = Callable[[Callable[..., Any], bool], Callable[..., Any]]
"""Takes a function f and whether f returns aux beside its differentiated outputs, and returns the function to differentiate."""

_change: ContextVar[Change | None] = ContextVar("change", default=None)


@contextlib.contextmanager
def changing_differentiated(change: Change | None) -> Iterator[None]:
    """Inside this context JAX differentiates `change(f, has_aux)` instead of f, whatever asks for a derivative of f.

    An enclosing context changes the result once more. None changes nothing, whatever the enclosing contexts do.

    JAX has no hook, so its entries are replaced while any thread is in such a context. Other threads are not affected.
    """
    with _ENTRIES, setting(_change, _together(_change.get(), change)):
        yield


def _together(outer: Change | None, inner: Change | None) -> Change | None:
    if outer is None or inner is None:
        return inner
    return lambda function, has_aux: outer(inner(function, has_aux), has_aux)


def _looking_up(entry: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(entry)
    def changed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        change = _change.get()
        return entry(function if change is None else change(function, bool(kwargs.get("has_aux"))), *args, **kwargs)

    return changed


# `grad`, `value_and_grad`, `vjp` and `linearize` give the user's function to the first one, `jvp` gives it to the second one.
_ENTRIES = Patch((_ad, "linearize", _looking_up), (_ad, "jvp", _looking_up))
