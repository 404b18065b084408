"""Detects a captured variable that is rebound before the function runs again.

`for layer in layers: x = checkpoint(lambda x: layer(x), x)` recomputes every call with the *last* layer; if the shapes
agree, the gradients are wrong without any error (https://docs.python.org/3/faq/programming.html, "lambdas defined in a
loop"). Variables that the function assigns itself, such as a counter, are ignored.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from torch_ref.errors import ReboundVariableError

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MISSING = object()


class Captures:
    """The variables that a function captures, with their current values."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = _plain_function(function)
        self._before = {name: _remember(value) for name, value in captured(self._function).items()}

    def check_unchanged(self) -> None:
        """Raise an error if a captured variable has a different value now.

        Raises:
            ReboundVariableError: the message names the variable.
        """
        if not self._before:
            return
        now = captured(self._function)
        for name, recalled in self._before.items():
            if not recalled(now.get(name, _MISSING)):
                raise ReboundVariableError(
                    f"the checkpointed function {getattr(self._function, '__qualname__', '?')!r} captures the variable "
                    f"{name!r}, which was rebound after the forward pass, so the recomputation would read another value. Bind "
                    f"the variable when the function is made (`lambda x, {name}={name}: ...`), or checkpoint the module "
                    "itself."
                )


def _plain_function(function: Any) -> types.FunctionType | None:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType):
        function = function.__func__
    return function if isinstance(function, types.FunctionType) else None


def captured(function: types.FunctionType | None) -> dict[str, Any]:
    """The values, by name, of the closure variables and globals that a function reads and does not assign."""
    if function is None:
        return {}
    global_reads, assigned = _names(function.__code__)
    values = {name: function.__globals__[name] for name in global_reads if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return {name: value for name, value in values.items() if name not in assigned}


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    reads, writes = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            reads.add(instruction.argval)
        elif instruction.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            writes.add(instruction.argval)
    return frozenset(reads), frozenset(writes)


def _remember(value: Any) -> Callable[[Any], bool]:
    # Use a weak reference if possible, so that a captured tensor lives no longer than without checkpointing.
    if isinstance(value, _PLAIN):
        return lambda now: now is value or (type(now) is type(value) and now == value)
    try:
        reference = weakref.ref(value)
    except TypeError:
        return lambda now: now is value
    return lambda now: now is not None and reference() is now


def reached_modules(function: Any, arguments: Iterable[Any] = ()) -> list[nn.Module]:
    """The modules, with their submodules, that a call can run: the function itself, what it captures, modules in arguments."""
    waiting: list[Any] = [function, *(leaf for leaf in arguments if isinstance(leaf, nn.Module))]
    seen: set[int] = set()
    found: dict[nn.Module, None] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.update(dict.fromkeys(value.modules()))
        elif isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            waiting += [value.__self__, value.__func__]
        elif isinstance(value, types.FunctionType):
            waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *captured(value).values()]
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif callable(value) and not isinstance(value, type | types.ModuleType):
            waiting += vars(value).values() if hasattr(value, "__dict__") else ()
    return list(found)
