"""Measures this machine's device: rates of matmuls, memory and host link, and the share of compute that can overlap copies."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax.errors import TargetError
from remat_jax.hardware import target as target_named
from remat_jax.hardware import targets
from remat_jax.hardware.target import entry, target_text
from remat_jax.report.document import write_whole

DTYPES = ("bfloat16", "float16", "float32", "tensorfloat32", "float64")
_ENOUGH = 0.05
"""The minimum seconds of a timed run: shorter runs mostly measure Python."""
_SMALLEST, _LARGEST, _MANY_NUMBERS, _MOST_CALLS = 128, 16384, 2**26, 100
_KERNELS = 64
_CHAIN, _LONG_CHAIN, _LONG_BELOW = 4, 64, 2048
"""Matmuls per call: `_CHAIN`; on a GPU `_LONG_CHAIN` for sizes below `_LONG_BELOW`, because starting a call takes longer than a
few small matmuls."""
_REPEATS = 3
_COMPUTE_SIZE = 1024
"""The rows and columns of the matmul that copies overlap."""


@dataclass(frozen=True)
class Calibration:
    """The measured rates of the device that JAX calls `device_kind`; `name` is the target's name in the file.

    Attributes:
      flops: operations per second of the fastest matmul in `products`, by dtype name; `tensorfloat32` is float32 at JAX's
        default precision, on a GPU only.
      hbm_bytes_per_s: bytes per second read and written when two large arrays are added.
      out_bytes_per_s, in_bytes_per_s: the rates of copies to and from pinned host memory; None on a CPU.
      hidden_share: the share of compute time that a copy can overlap, from 0 to 1; None on a CPU.
      source: the device, the JAX version and the date of the measurement.
      products: for each dtype name, a dict from matrix size (as text) to operations per second of a square matmul.
      launch_seconds: the time of a kernel that does almost no work.
    """

    name: str
    device_kind: str
    flops: dict[str, float] = field(default_factory=dict)
    hbm_bytes_per_s: float = 0.0
    out_bytes_per_s: float | None = None
    in_bytes_per_s: float | None = None
    hidden_share: float | None = None
    source: str = ""
    products: dict[str, dict[str, float]] = field(default_factory=dict)
    launch_seconds: float | None = None

    def measured(self) -> dict[str, Any]:
        """The table `measured` of a target file; figures that were not measured are left out."""
        figures = {key: value for key, value in asdict(self).items() if key not in ("name", "device_kind")}
        return {key: value for key, value in figures.items() if value not in (None, {})}

    def save(self, path: str | Path, *, overwrite: bool = False) -> str:
        """Write a target file (TOML), and return the name by which to use the target, `FILE:NAME`.

        If the table of targets lists the device, the file contains the device's entry in addition to the measured rates.

        Raises:
          TargetError: the file exists and `overwrite` is False, or it cannot be written.
        """
        text = target_text(self.name, {**_known(self.device_kind), "measured": self.measured()})
        try:
            write_whole(path, text, replace=overwrite)
        except FileExistsError:
            raise TargetError(f"output={str(path)!r} exists already; give another name, or overwrite it") from None
        except OSError as error:
            raise TargetError(f"output={str(path)!r} cannot be written ({error}); give another file") from None
        return f"{path}:{self.name}"

    def to_dict(self) -> dict[str, Any]:
        """The attributes as plain data for JSON."""
        return asdict(self)


def calibrate(
    name: str = "measured", *, seconds: float = 20.0, on_done: Callable[[str, int, int], None] | None = None
) -> Calibration:
    """Measure JAX's first device, a GPU or this machine's CPU.

    Every figure is the best of a few runs, each so long that its start-up time is negligible. Run nothing else meanwhile.

    Args:
      name: the target's name: lower-case letters, digits, `-` and `_`.
      seconds: the approximate total time without compilation.
      on_done: called with the part being measured, the number of finished parts, and the number of parts.

    Raises:
      TargetError: the name has other characters, or `seconds` is not a positive number.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9_-]+", name):
        raise TargetError(f"name={name!r}: expected lower-case letters, digits, - and _, such as 'my-h100'")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise TargetError(f"seconds={seconds!r}: expected a positive number")
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    dtypes = [dtype for dtype in DTYPES if on_gpu or dtype != "tensorfloat32"]
    parts: dict[str, Callable[[float], Any]] = {
        **{f"products in {dtype}": partial(product_rates, device, dtype) for dtype in dtypes},
        "memory": partial(memory_rate, device),
        **({"link to the host": partial(link_rates, device)} if on_gpu else {}),
    }
    on_done = on_done or (lambda part, done, of: None)
    rates = []
    for done, (part, measure) in enumerate(parts.items()):
        on_done(part, done, len(parts))
        rates.append(measure(seconds / len(parts)))
    on_done("done", len(parts), len(parts))
    out, back, hidden = rates.pop() if on_gpu else (None, None, None)
    *products, memory = rates
    return Calibration(
        name,
        device.device_kind,
        {dtype: max(curve.values()) for dtype, curve in zip(dtypes, products, strict=True)},
        memory,
        out,
        back,
        hidden,
        f"measured by remat-jax calibrate on {device.device_kind}, JAX {jax.__version__}, {time.strftime('%Y-%m-%d')}",
        {dtype: {str(size): rate for size, rate in curve.items()} for dtype, curve in zip(dtypes, products, strict=True)},
        launch_seconds(device),
    )


def launch_seconds(device: Any) -> float:
    """Seconds of one tiny kernel, measured on a chain of additions that the compiler cannot fuse."""

    def chain(x: Any) -> Any:
        for _ in range(_KERNELS):
            x = jax.lax.optimization_barrier(x + 1)
        return x

    x = jax.device_put(jnp.ones(128, jnp.float32), device)
    return fastest(partial(jax.jit(chain), x)) / _KERNELS


def product_rates(device: Any, dtype: str, seconds: float) -> dict[int, float]:
    """A dict from matrix size to operations per second of a square matmul.

    Sizes double until a run takes longer than `_ENOUGH`, or until the next size would exceed `seconds` (without compilation).
    """
    precision = "highest" if dtype in ("float32", "float64") else None
    kind = "float32" if dtype == "tensorfloat32" else dtype

    def chain(x: Any, y: Any) -> Any:
        for _ in range(length(y.shape[0])):
            # Scale the result so that no number overflows its dtype.
            x = jnp.dot(x, y, precision=precision) * jnp.asarray(1 / y.shape[0], y.dtype)
        return x

    def length(size: int) -> int:
        return _LONG_CHAIN if device.platform == "gpu" and size < _LONG_BELOW else _CHAIN

    rates: dict[int, float] = {}
    spent, size = 0.0, _SMALLEST
    with jax.enable_x64(dtype == "float64"):
        run = jax.jit(chain)
        while size <= _LARGEST:
            x = jax.device_put(jnp.ones((size, size), kind), device)
            jax.block_until_ready(run(x, x))  # compiles
            started = time.perf_counter()
            took = fastest(partial(run, x, x))
            spent += time.perf_counter() - started
            rates[size] = 2.0 * length(size) * size**3 / took
            # The next size takes eight times as long.
            if took > _ENOUGH or spent + 8 * took * (_REPEATS + 1) > seconds:
                return rates
            size *= 2
    return rates


def memory_rate(device: Any, seconds: float) -> float:
    """Bytes per second read and written when two arrays larger than any cache are added.

    A loop writes to the same memory each time: the first write to new memory is slower, and rare in real programs.
    """
    rounds = max(2, min(16, round(4 * seconds)))
    x, y = (jax.device_put(jnp.full(_MANY_NUMBERS, value, jnp.float32), device) for value in (1, 2))
    run = jax.jit(lambda x, y: jax.lax.fori_loop(0, rounds, lambda _, x: x + y, x))
    return 3.0 * rounds * x.nbytes / fastest(partial(run, x, y))


def link_rates(device: Any, seconds: float) -> tuple[float, float, float]:
    """Bytes per second of copies to and from pinned host memory, and the share of compute that the copies can overlap.

    The share is the time saved by overlapping a copy with compute, divided by the shorter of the two times. Of the
    shares of the two directions, the smaller is returned.
    """
    here, there = (jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host"))
    deadline, size = time.perf_counter() + seconds, 2**22
    while True:
        x = jax.device_put(jnp.ones(size, jnp.float32), here)
        y = jax.device_put(x, there)
        copies = {there: x, here: y}
        took = {to: fastest(partial(jax.device_put, array, to)) for to, array in copies.items()}
        longest = max(took.values())
        if longest > _ENOUGH / 2 or size >= _MANY_NUMBERS or time.perf_counter() + 8 * longest * (_REPEATS + 1) > deadline:
            break
        size *= 2
    compute, alone = _compute_of(device, min(took.values()) / 2)
    shares = []
    for to, array in copies.items():
        copy = partial(jax.device_put, array, to)
        both = fastest(partial(_each, compute, copy))
        shares.append((alone + took[to] - both) / min(alone, took[to]))
    return x.nbytes / took[there], x.nbytes / took[here], min(1.0, max(0.0, min(shares)))


def _compute_of(device: Any, seconds: float) -> tuple[Callable[[], Any], float]:
    """A function that computes for about `seconds`, and its measured time."""
    x = jax.device_put(jnp.ones((_COMPUTE_SIZE, _COMPUTE_SIZE), jnp.float32), device)

    def chain(x: Any, rounds: int) -> Any:
        return jax.lax.fori_loop(0, rounds, lambda _, x: jnp.dot(x, x) * (1 / x.shape[0]), x)

    # On a GPU, a loop whose number of rounds the compiler does not know blocks the thread that would start the copy.
    run = jax.jit(chain, static_argnums=1)
    # Many rounds, because starting a call may take longer than a matmul.
    time_of_8, time_of_72 = (fastest(partial(run, x, n)) for n in (8, 72))
    rounds = max(1, round(seconds / max((time_of_72 - time_of_8) / 64, 1e-6)))
    return lambda: run(x, rounds), fastest(lambda: run(x, rounds))


def _each(*runs: Callable[[], Any]) -> list[Any]:
    return [run() for run in runs]


def fastest(run: Callable[[], Any]) -> float:
    """Seconds per call of `run`: the best of a few series of calls, each timed until all its work has ended."""
    jax.block_until_ready(run())
    took = _timed(run, 1)
    calls = min(_MOST_CALLS, max(1, round(_ENOUGH / max(took, 1e-9))))
    return min(_timed(run, calls) for _ in range(_REPEATS))


def _timed(run: Callable[[], Any], calls: int) -> float:
    before = time.perf_counter()
    # Wait for every call: copies to the host run on several streams, so the last one may end first.
    jax.block_until_ready([run() for _ in range(calls)])
    return (time.perf_counter() - before) / calls


def _known(device_kind: str) -> dict[str, Any]:
    """The device's entry in the table of targets, without a name; for an unknown device, only its kind and description."""
    for name in targets():
        if device_kind.lower() in (kind.lower() for kind in target_named(name).device_kinds):
            return entry(name)
    if jax.devices()[0].platform == "gpu":
        return {"kind": "gpu", "description": f"{device_kind}; only its rates are known", "source": {}}
    return {"kind": "cpu", "description": f"the CPU of this machine, {platform.machine()}", "source": {}}
