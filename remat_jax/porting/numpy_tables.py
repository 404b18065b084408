"""Tables that a model computes with NumPy, such as the angles of a rotation, in float64 where it casts them to float32."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

_MAKERS = ("arange", "array", "empty", "eye", "full", "geomspace", "linspace", "logspace", "ones", "tile", "zeros")
_LIBRARIES = {"flax", "jax", "jaxlib", "ml_dtypes", "numpy", "optax", "orbax", "torch"}
"""What these ask NumPy for is no table of a model's."""
_NARROW = (np.dtype("float32"), np.dtype("float16"))


class WideArray(np.ndarray):
    """An array that stays in float64 where float32 is asked for; so does all that NumPy makes of it."""

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """As NumPy's, to float64 in place of a narrower floating-point dtype."""
        return super().astype(_widened(dtype), *args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        kwargs = {name: _widened(value) if name == "dtype" else _plain(value) for name, value in kwargs.items()}
        return _wide(getattr(ufunc, method)(*map(_plain, inputs), **kwargs))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {name: _widened(value) if name == "dtype" else value for name, value in kwargs.items()}
        return _wide(super().__array_function__(function, [*types, WideArray], args, kwargs))


@contextmanager
def keep_numpy_float64() -> Iterator[None]:
    """Make NumPy give float64 wherever a model's own code asks for a table in float32 or float16.

    What a model makes by NumPy's functions, such as `arange`, is a `WideArray` meanwhile; JAX and Flax get what they always do.

    >>> with keep_numpy_float64():
    ...     angles = np.einsum("i,j->ij", np.arange(3), 1 / (10 ** (np.arange(0, 4, 2) / 4))).astype("float32")
    ...     np.sin(np.concatenate((angles, angles), axis=-1)).dtype.name, np.zeros(2, dtype=np.float32).dtype.name
    ('float64', 'float64')
    >>> np.arange(3).astype("float32").dtype.name
    'float32'
    """
    with ExitStack() as patches:
        for name in _MAKERS:
            patches.enter_context(mock.patch.object(np, name, _maker(getattr(np, name))))
        yield


def _maker(right: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(right)
    def make(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
            return right(*args, **kwargs)
        return _wide(right(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()}))

    return make


def _widened(value: Any) -> Any:
    """Float64 for a narrower floating-point dtype; all else as it is."""
    if isinstance(value, (str, type, np.dtype)):
        try:
            return np.dtype("float64") if np.dtype(value) in _NARROW else value
        except TypeError:
            return value
    return value


def _wide(made: Any) -> Any:
    if isinstance(made, tuple):
        return type(made)(map(_wide, made)) if type(made) is tuple else made
    return made.view(WideArray) if isinstance(made, np.ndarray) and made.dtype.kind in "fiu" else made


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.view(np.ndarray) if isinstance(value, WideArray) else value
