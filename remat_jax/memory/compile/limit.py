"""XLA's memory limit for a compiled step, as a compiler option.

XLA:GPU schedules and rematerialises so that a step's temporary memory fits

    (device memory · 80 % − held) · factor / 100,

where *held* are the arguments and the results that reuse no argument's buffer. The option is the integer factor; its default is
95. On an attached GPU the first term is not 80 % of the device's memory but the pool of JAX's allocator, 75 % unless
XLA_PYTHON_CLIENT_MEM_FRACTION changes it. XLA works towards the limit but does not guarantee it: a step may need more.
"""

from __future__ import annotations

from typing import Any

from remat_jax.errors import ArgumentError
from remat_jax.hardware import Target
from remat_jax.hardware.amounts import device_amount

OPTION = "xla_gpu_memory_limit_slop_factor"

LARGEST_FACTOR = 95
"""XLA's default factor: a larger factor is not set."""

_AVAILABLE_PERCENT = 80
"""The share of a described device's memory that XLA takes as available."""


def limit_bytes(memory_limit: Any, target: Target) -> int | None:
    """A user's `memory_limit`, written like a budget, in bytes on `target`; None for no limit.

    Raises:
      ArgumentError: the limit is not an amount of memory, not positive, or above the target's memory; or the target has no
        such limit.

    >>> from remat_jax.hardware import target
    >>> limit_bytes("40GiB", target("h200")) == 40 * 2**30, limit_bytes(None, target("cpu"))
    (True, None)
    """
    if memory_limit is None:
        return None
    if target.kind != "gpu" or target.memory_bytes is None:
        raise ArgumentError(
            f"memory_limit={memory_limit!r} with target={target.name!r}: XLA takes a memory limit only for GPUs whose memory "
            "is known; give such a GPU, for example 'h200', or leave memory_limit out"
        )
    return device_amount(memory_limit, target, "memory_limit", ArgumentError)


def limit_options(limit: int | None, target: Target, held_bytes: int) -> dict[str, int]:
    """The compiler options that set XLA's limit to the largest within `limit` bytes; empty if the default limit is lower.

    Also empty if `limit` is None, or the target is a CPU or a GPU of unknown memory.

    Args:
      held_bytes: device memory of the step's arguments and of results that reuse no argument's buffer.

    >>> from remat_jax.hardware import target
    >>> limit_options(40 * 2**30, target("h200"), 10 * 2**30)
    {'xla_gpu_memory_limit_slop_factor': 29}
    >>> limit_options(40 * 2**30, target("cpu"), 0)
    {}
    """
    if limit is None or target.kind != "gpu" or target.memory_bytes is None:
        return {}
    available = target.memory_bytes * _AVAILABLE_PERCENT // 100 - held_bytes
    if available <= 0:
        return {}  # XLA's limit is 0 for every factor
    factor = max(1, 100 * (limit - held_bytes) // available)
    return {OPTION: factor} if factor < LARGEST_FACTOR else {}
