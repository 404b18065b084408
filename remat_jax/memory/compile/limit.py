"""XLA's memory limit: the bytes that a compiled step should stay within, as the compiler option that says so.

XLA:GPU schedules, and recomputes by itself, so that what a step computes with fits

    (device memory · 80 % − held) · factor / 100,

where *held* are the arguments, and the results that reuse no argument's buffer. The option is the factor, an integer; 95 unless
given. On an attached GPU the first term is not 80 % of the device's memory but the pool of JAX's allocator, 75 % unless
XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise. It is a limit that XLA works towards, and no promise: a step may need more.
"""

from __future__ import annotations

from typing import Any

from remat_jax.errors import ArgumentError
from remat_jax.hardware import Target
from remat_jax.hardware.amounts import device_amount

OPTION = "xla_gpu_memory_limit_slop_factor"

LARGEST_FACTOR = 95
"""XLA's own: a limit that would be larger is left to it."""

_AVAILABLE_PERCENT = 80
"""What XLA takes for available of a described device's memory."""


def limit_bytes(memory_limit: Any, target: Target) -> int | None:
    """The bytes that a user's `memory_limit` stands for on `target`, written as a budget is; None for none.

    Raises:
      ArgumentError: it is no amount of memory, not positive, more than the target has, or the target has no such limit.

    >>> from remat_jax.hardware import target
    >>> limit_bytes("40GiB", target("h200")) == 40 * 2**30, limit_bytes(None, target("cpu"))
    (True, None)
    """
    if memory_limit is None:
        return None
    if target.kind != "gpu" or target.memory_bytes is None:
        raise ArgumentError(
            f"memory_limit={memory_limit!r} with target={target.name!r}: XLA has a memory limit for GPUs only, and of those "
            "whose memory is known; give a GPU, such as 'h200', or no memory_limit"
        )
    return device_amount(memory_limit, target, "memory_limit", ArgumentError)


def limit_options(limit: int | None, target: Target, held_bytes: int) -> dict[str, int]:
    """The compiler options under which XLA's limit is the largest within `limit` bytes; empty where it is so without any.

    Also empty where there is no such limit: `limit` is None, or the target is a CPU or a GPU of unknown memory.

    Args:
      held_bytes: device memory of the step's arguments, and of its results that reuse no argument's buffer.

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
        return {}  # XLA's limit is 0 whatever the factor
    factor = max(1, 100 * (limit - held_bytes) // available)
    return {OPTION: factor} if factor < LARGEST_FACTOR else {}
