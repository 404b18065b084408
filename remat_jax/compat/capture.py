"""Flax's own capture of intermediates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from flax.linen import module as _linen_module


@contextlib.contextmanager
def not_captured(module: Any, method: str) -> Iterator[None]:
    """Inside this context `capture_intermediates` skips `method` of this module. Modules inside it are still captured."""
    stack = _linen_module._context.capture_stack
    wanted = stack[-1] if stack else None
    if not wanted:
        yield
        return
    stack.append(lambda called, name: not (called is module and name == method) and wanted(called, name))
    try:
        yield
    finally:
        stack.pop()
