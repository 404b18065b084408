"""PyTorch in float64 throughout, for models that cast to float32 inside."""

from __future__ import annotations

from typing import Any


def keep_float64() -> Any:
    """Return a context in which no float64 tensor of PyTorch's becomes a smaller float: such casts are left out.

    Many models compute norms, softmax and rotary angles in float32 whatever they are given. In float64 that hides, behind
    1e-7, whether two models are the same function.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    small = {torch.float32, torch.float16, torch.bfloat16}
    casts = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}

    class KeepFloat64(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
                if function in casts:
                    return args[0]
                args = (args[0], *(wider(argument) for argument in args[1:]))
                kwargs = {name: wider(argument) for name, argument in kwargs.items()}
            return function(*args, **kwargs)

    def wider(argument: Any) -> Any:
        return torch.float64 if isinstance(argument, torch.dtype) and argument in small else argument

    return KeepFloat64()
