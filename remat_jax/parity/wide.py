"""PyTorch models in float64 from end to end, those too that fall to float32 inside."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def keep_float64() -> Iterator[None]:
    """Make PyTorch give float64 wherever float32, float16 or bfloat16 is asked for, by dtype or by default.

    Many models cast to float32 for a norm, a softmax or a rotation, whatever their parameters are: after `.double()`
    they are exact to 1e-7, which hides real faults of a port. Run the forward and the backward pass inside (a
    checkpoint runs forward code in its backward pass). Build the model inside as well, and load its weights after:
    tables that a constructor computes in float32, such as the frequencies of a rotation, keep its rounding through
    `.double()`. What is no float64 to begin with, such as a float32 parameter of a model built outside, stays as it is.

    A `torch.overrides.TorchFunctionMode`: what C++ casts by itself, inside one operator, it does not see. The default
    dtype is float64 meanwhile, in all threads.

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
        with _mode()():
            yield
    finally:
        torch.set_default_dtype(default)


@functools.cache
def _mode() -> type:
    import torch
    from torch.overrides import TorchFunctionMode

    tensor = torch.Tensor
    casts = {tensor.float, tensor.half, tensor.bfloat16}
    passes = {tensor.backward, torch.autograd.backward, torch.autograd.grad}

    class KeepFloat64(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in passes:
                with self:
                    return _backward(func, args, kwargs)
            if func in casts:
                return args[0].double()
            if (
                func in (tensor.to, tensor.type_as)
                and args[0].dtype == torch.float64
                and _like_a_narrow_tensor(args[1:], kwargs)
            ):
                return args[0]
            if func is tensor.view:  # as another dtype it reads the same bits
                return func(*args, **kwargs)
            return func(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})

    return KeepFloat64


def _widened(value: Any) -> Any:
    import torch

    narrow = isinstance(value, torch.dtype) and value in (torch.float32, torch.float16, torch.bfloat16)
    return torch.float64 if narrow else value


def _like_a_narrow_tensor(args: Any, kwargs: Any) -> bool:
    """Whether a cast is to the dtype of a tensor of a narrow one, as in `x.to(other)`."""
    import torch

    return any(isinstance(value, torch.Tensor) and _widened(value.dtype) != value.dtype for value in (*args, *kwargs.values()))


def _backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func`, one of PyTorch's ways to run a backward pass, so that the mode is on in what it recomputes.

    While a mode handles a call it is off, and these functions call it whenever one of their tensors is a tensor: edges
    of the graph mean the same and do not.
    """
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
