"""Backends: what compiling for one kind of hardware needs, one module for each kind.

The other modules ask the backend of a target, and never which kind of hardware the target is.
"""

from __future__ import annotations

from typing import Any

from remat_jax.errors import ArgumentError
from remat_jax.hardware import Target
from remat_jax.hardware.amounts import device_amount
from remat_jax.memory.compile.backends.backend import Backend
from remat_jax.memory.compile.backends.cpu import CpuBackend
from remat_jax.memory.compile.backends.gpu import GpuBackend
from remat_jax.memory.compile.backends.tpu import TpuBackend

__all__ = ["BACKENDS", "LIMIT_OPTIONS", "Backend", "backend_of", "limit_bytes"]

BACKENDS: dict[str, Backend] = {"cpu": CpuBackend(), "gpu": GpuBackend(), "tpu": TpuBackend()}
"""The backend for each `Target.kind`."""

LIMIT_OPTIONS = dict(backend.limit_option for backend in BACKENDS.values() if backend.limit_option is not None)
"""The compiler options for a memory limit, with the largest value of each."""


def backend_of(target: Target) -> Backend:
    """The backend of a target's kind of hardware.

    >>> from remat_jax.hardware import target
    >>> backend_of(target("h200")).platform
    'cuda'
    """
    return BACKENDS[target.kind]


def limit_bytes(memory_limit: Any, target: Target) -> int | None:
    """`memory_limit`, written like a budget, in bytes; None for no limit. Raises ArgumentError if it is invalid."""
    if memory_limit is None:
        return None
    if backend_of(target).limit_option is None or target.memory_bytes is None:
        raise ArgumentError(
            f"memory_limit={memory_limit!r} with target={target.name!r}: XLA takes a memory limit only for GPUs and TPUs whose "
            "memory is known; give such a target, for example 'h200', or leave memory_limit out"
        )
    return device_amount(memory_limit, target, "memory_limit", ArgumentError)
