"""Rates: how fast a target really is, for estimates of time. Plain numbers; knows nothing of JAX."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from remat_jax.errors import TargetError
from remat_jax.hardware.target import Target
from remat_jax.hardware.target import target as target_named

MATMUL_SHARE, MEMORY_SHARE, LINK_SHARE, HIDDEN_SHARE = 0.8, 0.9, 0.8, 0.9
"""What programs reach of nominal figures, and the share of compute beside which copies run, where nothing was measured.

Assumed, not measured: large matrix products and PCIe copies are commonly seen at about four fifths of what a data sheet says,
and streaming reads at nine tenths. `remat-jax calibrate` measures all of them.
"""

# Where a dtype has no figure of its own: the next one whose units it can run on, then the next.
_FALLBACK = {
    "tensorfloat32": "float32",
    "complex64": "float32",
    "complex128": "float64",
    "float16": "bfloat16",
    "bfloat16": "float16",
    "float64": "float32",
    "int32": "float32",
    "uint32": "float32",
    "int64": "float32",
    "uint64": "float32",
    "int16": "float32",
    "uint16": "float32",
    "bool": "float32",
    "uint8": "int8",
    "int4": "int8",
    "uint4": "int8",
    "int8": "bfloat16",
}
_CPU = {"float32": 5e10, "float64": 2.5e10, "hbm_bytes_per_s": 1e10}


@dataclass(frozen=True)
class Rates:
    """What a device reaches.

    Attributes:
        flops: floating-point operations per second by dtype name.
        hbm_bytes_per_s: of device memory, reading and writing together.
        out_bytes_per_s, in_bytes_per_s: of the link to host memory, from the device and to it; None where there is none, as on
            a CPU, whose memory is one.
        hidden_share: the share of compute beside which a copy can run, from 0 to 1.
        source: where each figure is from, by attribute name.

    Raises:
        TargetError: a rate is not a positive number, there is no rate at all, or the share is not between 0 and 1.

    >>> Rates({"float32": 10.0}, 4.0).seconds({"float32": 30.0}, 4.0)
    3.0
    """

    flops: Mapping[str, float]
    hbm_bytes_per_s: float
    out_bytes_per_s: float | None = None
    in_bytes_per_s: float | None = None
    hidden_share: float = 1.0
    source: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.flops, Mapping) or not self.flops:
            raise TargetError(
                f"Rates: flops={self.flops!r}; give operations per second by dtype, such as {{'bfloat16': 8e14}}."
            )
        for dtype, rate in self.flops.items():
            _check_rate(f"flops[{dtype!r}]", rate)
        _check_rate("hbm_bytes_per_s", self.hbm_bytes_per_s)
        for name in ("out_bytes_per_s", "in_bytes_per_s"):
            if getattr(self, name) is not None:
                _check_rate(name, getattr(self, name))
        if (self.out_bytes_per_s is None) != (self.in_bytes_per_s is None):
            raise TargetError("Rates: out_bytes_per_s and in_bytes_per_s belong together; give both, or neither.")
        if not _is_number(self.hidden_share) or not 0 <= self.hidden_share <= 1:
            raise TargetError(f"Rates: hidden_share={self.hidden_share!r}; expected a share from 0 to 1.")
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))
        object.__setattr__(self, "source", MappingProxyType(dict(self.source)))

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.flops.items())), self.hbm_bytes_per_s, self.out_bytes_per_s, self.in_bytes_per_s))

    @classmethod
    def of(cls, target: Target | str) -> Rates:
        """The rates of a target: measured ones as they are, nominal ones times the share that programs reach.

        `source` says of each figure which of the two it is. For the CPU, of which nothing is known, they are assumed until
        `remat-jax calibrate` has measured them; there is no link then.

        Raises:
            TargetError: the target has neither nominal nor measured rates of its operations or its memory.

        >>> rates = Rates.of("h200")
        >>> rates.flops["bfloat16"] / 1e12, rates.source["flops"]
        (791.6, 'nominal × 0.8, assumed')
        """
        described = target_named(target) if isinstance(target, str) else target
        if described.kind == "cpu" and not described.measured:
            flops = {name: rate for name, rate in _CPU.items() if name != "hbm_bytes_per_s"}
            said = "assumed for want of any figure; run remat-jax calibrate"
            return cls(flops, _CPU["hbm_bytes_per_s"], source={"flops": said, "hbm_bytes_per_s": said})
        return cls(**_figures(described))

    def flops_per_s(self, dtype: str) -> float:
        """The rate for a dtype: its own, or that of the units it falls back on (`fallback`).

        Raises:
            TargetError: neither has a rate.
        """
        return self.flops[self.fallback(dtype)]

    def fallback(self, dtype: str) -> str:
        """The dtype whose rate counts for `dtype`: itself where it has one, else the nearest whose units it can run on.

        >>> Rates({"float32": 1.0}, 1.0).fallback("tensorfloat32")
        'float32'
        """
        tried = [dtype]
        while tried[-1] not in self.flops:
            following = _FALLBACK.get(tried[-1], "bfloat16" if tried[-1].startswith("float8") else None)
            if following is None or following in tried:
                # Two narrow types fall back on each other; what is left is float32.
                following = "float32" if following is not None and "float32" not in tried else None
            if following is None:
                raise TargetError(
                    f"dtype {dtype!r} has no rate, nor has any that it falls back on ({', '.join(tried[1:]) or 'none'}); the "
                    f"rates are those of {', '.join(sorted(self.flops))}. Give one more in flops."
                )
            tried.append(following)
        return tried[-1]

    def seconds(self, flops: Mapping[str, float], size: float) -> float:
        """The time of operations by dtype and of `size` bytes of memory traffic beside them: the longer of the two."""
        compute = sum(count / self.flops_per_s(dtype) for dtype, count in flops.items() if count)
        return max(compute, size / self.hbm_bytes_per_s)


def _figures(target: Target) -> dict[str, Any]:
    """The arguments of `Rates` for a target that has figures."""
    measured, source = target.measured, {}
    said = str(measured.get("source", ""))

    def reached(name: str, nominal: float | None, share: float) -> float | None:
        if name in measured:
            source[name] = said
            return float(measured[name])
        if nominal is not None:
            _check_rate(name, nominal)
            source[name] = f"nominal × {share}, assumed"
        return None if nominal is None else nominal * share

    link = target.host_link_bytes_per_s
    found = {
        "hbm_bytes_per_s": reached("hbm_bytes_per_s", target.hbm_bytes_per_s, MEMORY_SHARE),
        "out_bytes_per_s": reached("out_bytes_per_s", link, LINK_SHARE),
        "in_bytes_per_s": reached("in_bytes_per_s", link, LINK_SHARE),
        "hidden_share": reached("hidden_share", 1.0, HIDDEN_SHARE),
        "flops": {dtype: MATMUL_SHARE * rate for dtype, rate in target.peak_flops.items()} | dict(measured.get("flops", {})),
    }
    source["flops"] = f"nominal × {MATMUL_SHARE}, assumed" if "flops" not in measured else said
    if found["hbm_bytes_per_s"] is None or not found["flops"]:
        lacks = "hbm_bytes_per_s" if found["hbm_bytes_per_s"] is None else "peak_flops"
        raise TargetError(
            f"target={target.name!r} has no {lacks}, so that times cannot be estimated; state it in the file that describes "
            "the target, measure it with remat-jax calibrate, or pass rates=Rates(...)."
        )
    return {**found, "source": source}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_rate(name: str, value: object) -> None:
    # An integer may be larger than any float.
    if not _is_number(value) or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise TargetError(f"Rates: {name}={value!r}; expected a positive number per second.")
