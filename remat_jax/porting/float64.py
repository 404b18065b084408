"""Run PyTorch models and trace Flax models in float64 throughout, even if they cast to float32 inside."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import Scope
from jax.extend.core import Primitive

from remat_jax import compat
from remat_jax.errors import RematError

_MAKERS = ("arange", "array", "empty", "eye", "full", "geomspace", "linspace", "logspace", "ones", "tile", "zeros")
# NumPy calls from these packages keep their dtype, because the packages compute no tables of a model.
_LIBRARIES = {"flax", "jax", "jaxlib", "ml_dtypes", "numpy", "optax", "orbax", "torch"}
_NARROW = (np.dtype("float32"), np.dtype("float16"))


class WideArray(np.ndarray):
    """An array that stays float64 when float32 is requested; NumPy functions of a `WideArray` return a `WideArray`."""

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """NumPy's `astype`, with float64 in place of a narrower floating-point dtype."""
        return super().astype(_widened(dtype), *args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        kwargs = {name: _widened(value) if name == "dtype" else _plain(value) for name, value in kwargs.items()}
        return _wide(getattr(ufunc, method)(*map(_plain, inputs), **kwargs))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {name: _widened(value) if name == "dtype" else value for name, value in kwargs.items()}
        return _wide(super().__array_function__(function, [*types, WideArray], args, kwargs))


@contextmanager
def keep_numpy_float64() -> Iterator[None]:
    """Make NumPy return float64 wherever a model's own code, but not JAX or Flax, requests float32 or float16.

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
    """`value`, or float64 if `value` is a narrower floating-point dtype."""
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


FLOAT32_REMEDY = (
    "if the model intends this, give keep_float64=True, which runs it in float64; to compare without float64, give "
    "dtypes=('float32',) and rules"
)
"""The remedy for a Flax model with a hard-coded float32."""

# Part of the key of JAX's trace caches, so that a trace with widened casts is not reused outside the context.
_widening = compat.trace_context(False)

_FLOAT64 = jnp.dtype("float64")
_DTYPE_PARAMETERS = {"new_dtype", "preferred_element_type"}
# The bodies of these calls and loops are already widened, because they were traced in the context.
# `bitcast_convert_type` is listed because it depends on its operand's width.
_CALLS = {"jit", "pjit", "scan", "while", "cond", "custom_jvp_call", "custom_vjp_call", "checkpoint", "bitcast_convert_type"}


@contextmanager
def keep_float64() -> Iterator[list[Any]]:
    """Make PyTorch use float64 wherever float32, float16 or bfloat16 is requested, by dtype or by default.

    Many models cast to float32 for a norm, a softmax or a rotation: after `.double()` they are exact only to 1e-7, which hides
    real faults of a port. Run both passes in the context. Build the model in it too, and load its weights afterwards: tables
    that a constructor computes in float32, such as rotary frequencies, keep their rounding through `.double()`. Existing
    float32 tensors stay float32, and casts inside a C++ operator are not changed. The default dtype is float64 in all threads.
    The value of the context is a list of the functions whose narrow dtype was replaced for a float64 tensor.

    >>> import torch
    >>> x = torch.tensor(1 / 3, dtype=torch.float64)
    >>> with keep_float64():
    ...     x.float().dtype, x.to(torch.bfloat16).dtype, torch.softmax(x, 0, dtype=torch.float32).dtype, torch.ones(2).dtype
    (torch.float64, torch.float64, torch.float64, torch.float64)
    >>> x.float().dtype
    torch.float32
    """
    import torch

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        # Old code creates its tables with this float32 constructor.
        with _mode()() as mode, mock.patch.object(torch, "FloatTensor", torch.DoubleTensor):
            yield mode.narrowed
    finally:
        torch.set_default_dtype(default)


@contextmanager
def keep_jax_float64() -> Iterator[None]:
    """Make traced JAX code use float64 wherever a cast or a matmul requests float32, float16 or bfloat16.

    Flax modules cast to float32 for a norm, a softmax or a position encoding, which hides a port's faults below 1e-7. Trace
    both passes in the context, with 64-bit types enabled. Tables that a model's own code makes with NumPy stay float64 too. An
    array created in float32 keeps its rounding; its first operation gives float64.

    >>> with jax.enable_x64(True):
    ...     x = jnp.ones(2, "float64")
    ...     with keep_jax_float64():
    ...         x.astype("float32").dtype.name, jnp.sum(x, dtype="float32").dtype.name
    ...     x.astype("float32").dtype.name
    ('float64', 'float64')
    'float32'
    """
    bind = Primitive.bind

    def wide(primitive: Any, *args: Any, **params: Any) -> Any:
        is_widening = primitive.name == "convert_element_type" and params["new_dtype"] == _FLOAT64
        if primitive.name not in _CALLS and not is_widening and jax.config.jax_enable_x64:
            params |= {name: _FLOAT64 for name in _DTYPE_PARAMETERS & params.keys() if _is_narrow(params[name])}
            widen = functools.partial(jax.lax.convert_element_type, new_dtype=_FLOAT64)
            args = tuple(widen(x) if _is_narrow(getattr(x, "dtype", None)) else x for x in args)
        return bind(primitive, *args, **params)

    with _widening(True), keep_numpy_float64():
        Primitive.bind = wide
        try:
            yield
        finally:
            Primitive.bind = bind


def with_wider_retry(run: Callable[[], Any]) -> tuple[Any, bool]:
    """The result of `run()`, and whether it only runs in `keep_jax_float64`; raises the error of the plain run otherwise.

    A scan whose carry starts in a hard-coded float32, for example, does not run on float64 inputs.
    """
    try:
        return run(), False
    except RematError as error:
        if not jax.config.jax_enable_x64:
            raise
        try:
            with keep_jax_float64():
                return run(), True
        except RematError:
            raise error from error.__cause__


def in_any_width(init: Callable[[], Any]) -> Any:
    """The result of `init()`, run with 64-bit types if possible, else in `keep_jax_float64`, else without 64-bit types."""
    try:
        return with_wider_retry(init)[0]
    except RematError as error:
        try:
            with jax.enable_x64(False):
                return init()
        except RematError:
            raise error from error.__cause__


@contextmanager
def initialisers_in_any_width() -> Iterator[None]:
    """Run an initialiser of a Linen module without 64-bit types if it fails with them.

    Flax runs the initialiser at every use of a parameter, to compare shapes.
    """
    param = Scope.param

    def widened(scope: Scope, name: str, init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def in_any_types(*inner_args: Any, **inner_kwargs: Any) -> Any:
            try:
                return init(*inner_args, **inner_kwargs)
            except Exception as error:  # an initialiser is a user's code, and raises what it likes
                try:
                    with jax.enable_x64(False):
                        return init(*inner_args, **inner_kwargs)
                except Exception:  # the types are not the cause
                    raise error from None

        return param(scope, name, in_any_types, *args, **kwargs)

    with mock.patch.object(Scope, "param", widened):
        yield


def _is_narrow(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype) != _FLOAT64


@functools.cache
def _mode() -> type:
    import torch
    from torch.overrides import TorchFunctionMode

    tensor = torch.Tensor
    casts = {tensor.float, tensor.half, tensor.bfloat16}
    passes = {tensor.backward, torch.autograd.backward, torch.autograd.grad}

    class KeepFloat64(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.narrowed: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in passes:
                with self:
                    return _backward(func, args, kwargs)
            if func in casts:
                self.narrowed += [func] if args[0].dtype == torch.float64 else []
                return args[0].double()
            if func is tensor.view:  # view(dtype) reinterprets the bits
                return func(*args, **kwargs)
            # `to(other)` and `type_as(other)` cast to the dtype and the device of `other`.
            is_wide = bool(args) and isinstance(args[0], tensor) and args[0].dtype == torch.float64
            like = func in (tensor.to, tensor.type_as) and is_wide
            self.narrowed += [func] if is_wide and any(map(_is_narrow_torch, (*args[1:], *kwargs.values()))) else []
            return func(*(_wide_like(x, like) for x in args), **{name: _wide_like(x, like) for name, x in kwargs.items()})

    return KeepFloat64


def _is_narrow_torch(value: Any) -> bool:
    import torch

    return isinstance(value, torch.dtype) and value in (torch.float32, torch.float16, torch.bfloat16)


def _wide_like(value: Any, like: bool) -> Any:
    """`value`, or float64 if `value` is a narrower dtype, or a float64 copy if `like` is true and `value` a narrower tensor."""
    import torch

    narrow = (torch.float32, torch.float16, torch.bfloat16)
    if _is_narrow_torch(value):
        return torch.float64
    return value.double() if like and isinstance(value, torch.Tensor) and value.dtype in narrow else value


def _backward(func: Any, args: Any, kwargs: Any) -> Any:
    # PyTorch disables the mode while it handles a call. The caller enables it again, so that recomputation is widened too.
    # Graph edges replace tensors, because a call with tensors would invoke the mode again.
    import torch
    from torch.autograd.graph import get_gradient_edge

    def edges(values: Any) -> Any:
        return tuple(get_gradient_edge(value) if isinstance(value, torch.Tensor) else value for value in values)

    if func is torch.Tensor.backward:
        kwargs = kwargs | {"grad_tensors": kwargs.get("gradient")}
        return torch.autograd.backward(*args, **{name: value for name, value in kwargs.items() if name != "gradient"})
    if kwargs.get("inputs") is not None:
        kwargs = kwargs | {"inputs": edges(kwargs["inputs"])}
    return func(*map(edges, args), **kwargs)
