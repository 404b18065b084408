"""Copy arrays between PyTorch, NumPy and JAX without changing their dtypes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from remat_jax.errors import PortingError


def is_torch(value: Any) -> bool:
    """Whether `value` is a PyTorch tensor, tested without importing PyTorch."""
    return any(kind.__module__.partition(".")[0] == "torch" and kind.__name__ == "Tensor" for kind in type(value).__mro__)


def as_numpy(value: Any) -> np.ndarray:
    """A NumPy copy of a tensor or array with the same dtype, also for bfloat16 and float8.

    The copy shares no memory with `value`: a view would change with the next optimizer step.

    Raises:
        PortingError: the tensor has no data, or is not dense.

    >>> import jax.numpy as jnp
    >>> as_numpy(jnp.ones(2, jnp.bfloat16)).dtype
    dtype(bfloat16)
    """
    if not is_torch(value):
        return np.array(value)
    if value.is_meta or value.layout != _torch().strided or value.is_quantized:
        raise PortingError(
            f"is a {value.dtype} tensor on {value.device} with layout {value.layout}; give a dense tensor with data"
        )
    value = value.detach().cpu().resolve_conj().resolve_neg()
    name = str(value.dtype).removeprefix("torch.")
    if name.startswith(("bfloat16", "float8")):
        # PyTorch cannot convert these dtypes to NumPy, so their bits are converted as integers.
        torch = _torch()
        integers = value.contiguous().view({1: torch.uint8, 2: torch.int16}[value.element_size()])
        return integers.numpy().view(getattr(ml_dtypes, name)).copy()
    return value.numpy().copy()


def as_torch(array: Any) -> Any:
    """A PyTorch copy of an array with the same dtype, also for bfloat16 and float8."""
    torch = _torch()
    array = np.ascontiguousarray(np.array(array)).reshape(np.shape(array))
    if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat16", "float8")):
        integers = torch.from_numpy(array.view({1: np.uint8, 2: np.int16}[array.dtype.itemsize]))
        return integers.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def as_jax(array: np.ndarray, like: Any = None) -> jax.Array:
    """A JAX copy of `array` with the same dtype, and with the sharding of `like` if that is a NamedSharding."""
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if kept != array.dtype:
        raise PortingError(
            f"is {array.dtype.name}, but JAX would convert it to {kept.name}; turn on 64-bit types (jax.enable_x64), or give "
            f"dtype='{kept.name}'"
        )
    sharding = getattr(like, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.device_put(np.array(array), sharding)
    if not jax.sharding.get_abstract_mesh().empty:
        return jnp.array(array)  # replicated on the mesh of `jax.set_mesh`
    # `jnp.array` and `jnp.asarray` would compile a program for each shape. JAX may keep NumPy's memory, so copy the array.
    return jax.device_put(np.array(array))


def memory_of(value: Any) -> Hashable:
    """A key that is equal for two tensors or arrays, both alive, only if they share all their memory."""
    if is_torch(value) and value.numel() and not value.is_meta:
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    if isinstance(value, np.ndarray) and value.size:
        return value.__array_interface__["data"], value.shape, value.strides
    return id(value)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise PortingError("PyTorch tensors need PyTorch, which is not installed; pip install 'remat_jax[torch]'.") from None
    return torch
