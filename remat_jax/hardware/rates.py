"""Rates that programs reach on a target, for estimates of time. Plain numbers, without JAX."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from remat_jax.errors import TargetError
from remat_jax.hardware.checks import LINKS
from remat_jax.hardware.links import Links
from remat_jax.hardware.products import Product, reached_share
from remat_jax.hardware.target import Target
from remat_jax.hardware.target import target as target_named

MATMUL_SHARE, MEMORY_SHARE, LINK_SHARE, HIDDEN_SHARE = 0.8, 0.9, 0.8, 0.9
"""The assumed shares of nominal rates that programs reach, and of compute that copies can overlap, without a measurement.

Large matrix products, PCIe copies and collectives commonly reach about four fifths of a data sheet's figure, and streaming
reads nine tenths. `remat-jax calibrate` measures all of them.
"""
LAUNCH_SECONDS, COPY_SECONDS, DEVICE_LINK_SECONDS, NETWORK_SECONDS = 2e-6, 5e-6, 4e-6, 10e-6
"""The assumed latencies of a kernel launch, a copy to or from the host, a message between devices of a host, and a message
between hosts, without a measurement."""
LATENCIES = ("launch_seconds", "copy_seconds", "device_link_seconds", "network_seconds")

# The dtype whose units a dtype without its own figure can run on; followed repeatedly.
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
    """The rates that programs reach on a device.

    Attributes:
        flops: floating-point operations per second by dtype name.
        hbm_bytes_per_s: the rate of device memory, reading and writing together.
        out_bytes_per_s, in_bytes_per_s: the rates of the link to host memory, from the device and to it; None if there is no
            link, as on a CPU, which has one memory.
        hidden_share: the share of compute that a copy can overlap, from 0 to 1.
        launch_seconds: the latency of a kernel launch.
        copy_seconds: the latency of a copy to or from the host.
        cores: multiprocessors, among which the tiles of a product are divided; None if every product reaches the full rate.
        products: the measured rates of square products by dtype and size, used instead of the tile model.
        links: the links between devices; None if there are none or they are unknown.
        source: the origin of each figure, by attribute name.
        assumed_dtypes: the dtypes whose rate was not measured.

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
    launch_seconds: float = 0.0
    copy_seconds: float = 0.0
    cores: int | None = None
    products: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    links: Links | None = None
    source: Mapping[str, str] = field(default_factory=dict, hash=False)
    assumed_dtypes: frozenset[str] = frozenset()

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
        for name in ("launch_seconds", "copy_seconds"):
            if not _is_number(getattr(self, name)) or not 0 <= getattr(self, name) < 1:
                raise TargetError(f"Rates: {name}={getattr(self, name)!r}; expected seconds, 0 or some millionths.")
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))
        curves = {dtype: dict(sorted(curve.items())) for dtype, curve in self.products.items()}
        object.__setattr__(self, "products", MappingProxyType(curves))
        object.__setattr__(self, "source", MappingProxyType(dict(self.source)))

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.flops.items())), self.hbm_bytes_per_s, self.out_bytes_per_s, self.in_bytes_per_s))

    @classmethod
    def of(cls, target: Target | str) -> Rates:
        """The rates of a target: measured on it, else from published measurements, else a share of the nominal rates.

        `source` gives the origin of each figure. The rates of the CPU are assumed until `remat-jax calibrate` measures them,
        and the CPU has no link.

        Raises:
            TargetError: the target has no rate for its operations or its memory.

        >>> rates = Rates.of("l40s")
        >>> rates.flops["bfloat16"] / 1e12, rates.source["hbm_bytes_per_s"]
        (269.15, 'nominal × 0.9, assumed')
        """
        described = target_named(target) if isinstance(target, str) else target
        if described.kind == "cpu" and not described.measured:
            flops = {name: rate for name, rate in _CPU.items() if name != "hbm_bytes_per_s"}
            assumed = "assumed, as no figure is known; run remat-jax calibrate"
            source = {"flops": assumed, "hbm_bytes_per_s": assumed}
            return cls(flops, _CPU["hbm_bytes_per_s"], source=source, assumed_dtypes=frozenset(flops))
        return cls(**_figures(described))

    def flops_per_s(self, dtype: str) -> float:
        """The rate for a dtype: its own, or the rate of its `fallback`.

        Raises:
            TargetError: neither dtype has a rate.
        """
        return self.flops[self.fallback(dtype)]

    def fallback(self, dtype: str) -> str:
        """The dtype whose rate counts for `dtype`: itself if it has a rate, else the nearest whose units it can run on.

        >>> Rates({"float32": 1.0}, 1.0).fallback("tensorfloat32")
        'float32'
        """
        tried = [dtype]
        while tried[-1] not in self.flops:
            following = _FALLBACK.get(tried[-1], "bfloat16" if tried[-1].startswith("float8") else None)
            if following is None or following in tried:
                # Two narrow types fall back on each other; float32 is the last resort.
                following = "float32" if following is not None and "float32" not in tried else None
            if following is None:
                raise TargetError(
                    f"dtype {dtype!r} has no rate, and neither have its fallbacks ({', '.join(tried[1:]) or 'none'}); the "
                    f"dtypes with a rate are {', '.join(sorted(self.flops))}. Add a rate to flops."
                )
            tried.append(following)
        return tried[-1]

    def seconds(self, flops: Mapping[str, float], size: float) -> float:
        """The time of operations by dtype and of `size` bytes of memory traffic beside them: the longer of the two."""
        compute = sum(count / self.flops_per_s(dtype) for dtype, count in flops.items() if count)
        return max(compute, size / self.hbm_bytes_per_s)

    def product_seconds(self, product: Product) -> float:
        """The time of the operations of a matrix product of this shape.

        >>> rates = Rates({"float32": 16.0}, 1.0, products={"float32": {2: 4.0, 8: 16.0}})
        >>> round(rates.product_seconds(Product("float32", 1, 4, 4, 4)), 9)  # 128 operations at a rate of 8
        16.0
        """
        dtype = self.fallback(product.dtype)
        if dtype in self.products:
            return product.flops / _between(self.products[dtype], product.size)
        share = 1.0 if self.cores is None else reached_share(product.batch, product.m, product.n, product.k, self.cores)
        return product.flops / (self.flops[dtype] * share)

    def assumed(self, dtypes: Iterable[str]) -> tuple[str, ...]:
        """The unmeasured rates and latencies that matter to products of these dtypes.

        >>> Rates.of("h200").assumed(["bfloat16"])
        ('hidden_share', 'launch_seconds', 'copy_seconds', 'network_seconds')
        >>> Rates.of("l4").assumed(["int8"])[:2]
        ('flops', 'hbm_bytes_per_s')
        """
        used = {self.fallback(dtype) for dtype in dtypes}
        names = ("hbm_bytes_per_s", "out_bytes_per_s", "in_bytes_per_s", "hidden_share", *LINKS, *LATENCIES)
        found = [name for name in names if "assumed" in self.source.get(name, "")]
        return ("flops", *found) if used & self.assumed_dtypes else tuple(found)


def _between(curve: Mapping[int, float], size: float) -> float:
    """The rate at `size` on a curve, by log-log interpolation; constant beyond both ends."""
    sizes = list(curve)
    place = bisect_left(sizes, size)
    if place in (0, len(sizes)):
        return curve[sizes[min(place, len(sizes) - 1)]]
    low, high = sizes[place - 1], sizes[place]
    part = math.log(size / low) / math.log(high / low)
    return float(curve[low] ** (1 - part) * curve[high] ** part)


def _figures(target: Target) -> dict[str, Any]:
    """The arguments of `Rates` for a target with figures."""
    source: dict[str, str] = {}

    def reached(name: str, otherwise: float | None, told: str) -> float | None:
        if otherwise is not None:
            _check_rate(name, otherwise)
        for figures in (target.measured, target.reached):
            if name in figures:
                said = figures["source"]
                source[name] = str(said[name] if isinstance(said, Mapping) else said)
                return float(figures[name])
        if otherwise is not None:
            source[name] = f"{told}assumed"
        return otherwise

    def of_nominal(name: str, nominal: float | None, share: float) -> float | None:
        return reached(name, None if nominal is None else nominal * share, f"nominal × {share}, ")

    link = target.host_link_bytes_per_s
    figures_of_rates: dict[str, Any] = {
        "hbm_bytes_per_s": of_nominal("hbm_bytes_per_s", target.hbm_bytes_per_s, MEMORY_SHARE),
        "out_bytes_per_s": of_nominal("out_bytes_per_s", link, LINK_SHARE),
        "in_bytes_per_s": of_nominal("in_bytes_per_s", link, LINK_SHARE),
        "hidden_share": of_nominal("hidden_share", 1.0, HIDDEN_SHARE),
        "flops": _flops(target, source),
        "launch_seconds": reached("launch_seconds", LAUNCH_SECONDS if target.kind == "gpu" else None, "") or 0.0,
        "copy_seconds": reached("copy_seconds", COPY_SECONDS if link is not None else None, "") or 0.0,
        "cores": target.core_count,
        "products": {dtype: _curve(curve) for dtype, curve in target.measured.get("products", {}).items()},
    }
    between = of_nominal("device_link_bytes_per_s", target.device_link_bytes_per_s, LINK_SHARE)
    if between is not None:
        network = of_nominal("network_bytes_per_s", target.network_bytes_per_s, LINK_SHARE)
        times = reached("device_link_seconds", DEVICE_LINK_SECONDS, ""), reached("network_seconds", NETWORK_SECONDS, "")
        figures_of_rates["links"] = Links(between, network, *(one or 0.0 for one in times))
    if figures_of_rates["hbm_bytes_per_s"] is None or not figures_of_rates["flops"]:
        lacks = "hbm_bytes_per_s" if figures_of_rates["hbm_bytes_per_s"] is None else "peak_flops"
        raise TargetError(
            f"target={target.name!r} has no {lacks}, so times cannot be estimated; state it in the file that describes the "
            "target, measure it with remat-jax calibrate, or pass rates=Rates(...)."
        )
    stated = {*target.reached.get("flops", {}), *target.measured.get("flops", {})}
    return {**figures_of_rates, "source": source, "assumed_dtypes": frozenset(figures_of_rates["flops"]) - stated}


def _curve(rates: Mapping[str, float]) -> dict[int, float]:
    return {int(size): float(rate) for size, rate in rates.items()}


def _flops(target: Target, source: dict[str, str]) -> dict[str, float]:
    """The best available figure for each dtype; `source` receives the origin."""
    nominal = {dtype: MATMUL_SHARE * rate for dtype, rate in target.peak_flops.items()}
    published, measured = target.reached.get("flops", {}), target.measured.get("flops", {})
    sources = [str(target.measured.get("source", ""))] if measured else []
    sources += [str(target.reached["source"]["flops"])] if set(published) - set(measured) else []
    rest = sorted(set(nominal) - set(published) - set(measured))
    if rest:
        which = f"{', '.join(rest)}: " if sources else ""
        sources.append(f"{which}nominal × {MATMUL_SHARE}, assumed")
    source["flops"] = "; ".join(sources)
    return {**nominal, **published, **measured}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_rate(name: str, value: object) -> None:
    # An integer may be larger than any float.
    if not _is_number(value) or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise TargetError(f"Rates: {name}={value!r}; expected a positive number per second.")
