"""The rates that programs reach on a target and on the links between devices, for estimates of time."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from remat_jax.errors import TargetError
from remat_jax.hardware.entries import LINKS, SECONDS, is_figure
from remat_jax.hardware.products import Product, reached_share
from remat_jax.hardware.target import Target
from remat_jax.hardware.target import target as target_named

MATMUL_SHARE, MEMORY_SHARE, LINK_SHARE, HIDDEN_SHARE = 0.8, 0.9, 0.8, 0.9
"""Assumed if nothing was measured: three shares of nominal rates, and the share of compute that copies can overlap.

Large matmuls, PCIe copies and collectives commonly reach four fifths of a data sheet's figure, streaming reads nine tenths.
"""
LAUNCH_SECONDS, COPY_SECONDS, DEVICE_LINK_SECONDS, NETWORK_SECONDS = 2e-6, 5e-6, 4e-6, 10e-6
"""The assumed latencies of a kernel launch, a copy to or from the host, a message inside a host, and one between hosts."""
# Maps a dtype to the dtype whose rate is used if it has no rate itself. The map is followed until a dtype has a rate.
_FALLBACK = {
    **dict.fromkeys(("tensorfloat32", "complex64", "float64", "int32", "uint32", "int64", "uint64"), "float32"),
    **dict.fromkeys(("int16", "uint16", "bool"), "float32"),
    **dict.fromkeys(("uint8", "int4", "uint4"), "int8"),
    "complex128": "float64",
    "float16": "bfloat16",
    "bfloat16": "float16",
    "int8": "bfloat16",
}
_CPU_FLOPS, _CPU_BYTES = {"float32": 5e10, "float64": 2.5e10}, 1e10

_TWICE = frozenset({"all-reduce"})
"""Collectives that send everything twice: an all-reduce is a reduce-scatter, then an all-gather."""
_WHOLE = frozenset({"collective-permute", "collective-broadcast"})
"""Collectives that send the whole array once, whatever the number of devices."""


@dataclass(frozen=True)
class Links:
    """The links between devices. Rates are for one device and one direction.

    Attributes:
        device_bytes_per_s: the rate between the devices of a host.
        network_bytes_per_s: the rate of one device's part of the network between hosts; None if unknown.
        device_seconds, network_seconds: the latency of one message between devices of a host, and between hosts.

    >>> links = Links(100.0, 10.0)
    >>> links.seconds("all-gather", 800.0, 8)  # seven eighths come from others
    7.0
    >>> links.seconds("all-gather", 800.0, 8, hosts=2)  # four devices of a host share what comes over the network
    17.5
    """

    device_bytes_per_s: float
    network_bytes_per_s: float | None = None
    device_seconds: float = 0.0
    network_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("device_bytes_per_s", "network_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise TargetError(f"Links: {name}={rate!r}; expected a positive number of bytes per second")

    def seconds(self, kind: str, size: float, devices: int, *, hosts: int = 1, axes: float = 1.0) -> float | None:
        """The seconds of one collective among `devices` on `hosts`; None if the network rate is needed but unknown.

        `size` is the bytes on one device of the operand or of the result, whichever are more. The slowest link sets the rate.
        `axes` multiplies the rate inside a host: on a slice of TPUs the rate is that of one axis (`slices.axes_between`), and
        `hosts` is the number of slices. The network between hosts has the combined rate of a host's participating devices. The
        latency is that of log₂ (devices of a host) messages inside the host, one after another, and then log₂ (hosts) messages
        between hosts.
        """
        if devices < 2:
            return 0.0
        inside = max(1, devices // hosts)
        rate, latency = axes * self.device_bytes_per_s, math.ceil(math.log2(inside)) * self.device_seconds
        if hosts > 1:
            if self.network_bytes_per_s is None:
                return None
            between = inside * self.network_bytes_per_s
            rate = between if inside == 1 else min(rate, between)
            latency += math.ceil(math.log2(hosts)) * self.network_seconds
        sent = size if kind in _WHOLE else size * (devices - 1) / devices
        return (2 if kind in _TWICE else 1) * (latency + sent / rate)


@dataclass(frozen=True)
class Rates:
    """The rates that programs reach on a device.

    Attributes:
        flops: floating-point operations per second by dtype name.
        hbm_bytes_per_s: the rate of device memory, reading and writing together.
        out_bytes_per_s, in_bytes_per_s: the rates of copies from the device to host memory, and back; None if there is no link,
            as on a CPU, which has one memory.
        hidden_share: the share of compute that a copy can overlap, from 0 to 1.
        launch_seconds: the latency of a kernel launch.
        copy_seconds: the latency of a copy to or from the host.
        clock_hz: the clock rate at which the compiler's own estimates of cycles count; None if the compiler writes none.
        cores: the number of multiprocessors that share a matmul's tiles; None if every matmul reaches the full rate.
        products: measured operations per second, by dtype and by the side of a square matmul. Rates between the measured sizes
            are interpolated; `cores` is not used for the measured dtypes.
        links: the links between devices; None if there are none or they are unknown.
        source: the origin of each figure, by attribute name.
        assumed_dtypes: the dtypes whose rate in `flops` is assumed, neither measured nor published.

    Raises:
        TargetError: a rate is not a positive number, only one of the two host link rates is given, a latency is negative or at
            least one second, `flops` is empty, or `hidden_share` is not between 0 and 1.

    >>> Rates({"float32": 10.0}, 4.0).seconds({"float32": 30.0}, 4.0)
    3.0
    """

    flops: Mapping[str, float] = field(hash=False)
    hbm_bytes_per_s: float
    out_bytes_per_s: float | None = None
    in_bytes_per_s: float | None = None
    hidden_share: float = 1.0
    launch_seconds: float = 0.0
    copy_seconds: float = 0.0
    clock_hz: float | None = None
    cores: int | None = None
    products: Mapping[str, Mapping[int, float]] = field(default_factory=dict, hash=False)
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
        if not is_figure(self.hidden_share) or not 0 <= self.hidden_share <= 1:
            raise TargetError(f"Rates: hidden_share={self.hidden_share!r}; expected a share from 0 to 1.")
        for name in ("launch_seconds", "copy_seconds"):
            if not is_figure(getattr(self, name)) or not 0 <= getattr(self, name) < 1:
                raise TargetError(f"Rates: {name}={getattr(self, name)!r}; expected seconds, at least 0 and less than 1.")
        curves = {dtype: dict(sorted(curve.items())) for dtype, curve in self.products.items()}
        for name, values in (("flops", self.flops), ("products", curves), ("source", self.source)):
            object.__setattr__(self, name, MappingProxyType(dict(values)))

    @classmethod
    def of(cls, target: Target | str) -> Rates:
        """The rates of a target: measured by `remat-jax calibrate`, else published, else an assumed share of a nominal rate.

        The rates of the CPU are assumed until `remat-jax calibrate` measures them.

        Raises:
            TargetError: the target has no rate for its operations or its memory.

        >>> rates = Rates.of("l40s")
        >>> rates.flops["bfloat16"] / 1e12, rates.source["hbm_bytes_per_s"]
        (269.15, 'nominal × 0.9, assumed')
        """
        described = target_named(target) if isinstance(target, str) else target
        if described.kind == "cpu" and not described.measured:
            assumed = "assumed, as no figure is known; run remat-jax calibrate"
            source = {"flops": assumed, "hbm_bytes_per_s": assumed}
            return cls(_CPU_FLOPS, _CPU_BYTES, source=source, assumed_dtypes=frozenset(_CPU_FLOPS))
        return cls(**_figures(described))

    def slower(self, times: int) -> Rates:
        """The rates at which every operation and copy takes `times` as long."""
        per_s = {name: getattr(self, name) for name in ("hbm_bytes_per_s", "out_bytes_per_s", "in_bytes_per_s", "clock_hz")}
        return replace(
            self,
            flops={dtype: rate / times for dtype, rate in self.flops.items()},
            products={dtype: {side: rate / times for side, rate in curve.items()} for dtype, curve in self.products.items()},
            **{name: rate and rate / times for name, rate in per_s.items()},
        )

    def flops_per_s(self, dtype: str) -> float:
        """The rate of `dtype`, or of its `fallback`, in operations per second; `TargetError` if neither has a rate."""
        return self.flops[self.fallback(dtype)]

    def fallback(self, dtype: str) -> str:
        """The dtype whose rate is used for `dtype`: `dtype` or its first fallback with a rate; `TargetError` if none has one.

        >>> Rates({"float32": 1.0}, 1.0).fallback("tensorfloat32")
        'float32'
        """
        tried = [dtype]
        while tried[-1] not in self.flops:
            following = "bfloat16" if tried[-1].startswith("float8") else _FALLBACK.get(tried[-1], "")
            # bfloat16 and float16 fall back on each other, then on float32.
            untried = [each for each in (following, "float32") if each not in tried]
            if not following or not untried:
                raise TargetError(
                    f"dtype {dtype!r} has no rate, and neither have its fallbacks ({', '.join(tried[1:]) or 'none'}); the "
                    f"dtypes with a rate are {', '.join(sorted(self.flops))}. Add a rate to flops."
                )
            tried += untried[:1]
        return tried[-1]

    def seconds(self, flops: Mapping[str, float], size: float) -> float:
        """The seconds that the operations `flops` (by dtype) or `size` bytes of memory traffic take, whichever is longer."""
        compute = sum(count / self.flops_per_s(dtype) for dtype, count in flops.items() if count)
        return max(compute, size / self.hbm_bytes_per_s)

    def product_seconds(self, product: Product) -> float:
        """The compute time of a matrix product of this shape, in seconds.

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
        """The names of the rates and latencies that are assumed, neither measured nor published.

        `flops` is among them if the rate used for one of `dtypes` is assumed.

        >>> Rates.of("h200").assumed(["bfloat16"])
        ('hidden_share', 'launch_seconds', 'copy_seconds', 'network_seconds')
        >>> Rates.of("l4").assumed(["int8"])[:2]
        ('flops', 'hbm_bytes_per_s')
        """
        used = {self.fallback(dtype) for dtype in dtypes}
        names = ("hbm_bytes_per_s", "out_bytes_per_s", "in_bytes_per_s", "hidden_share", *LINKS, *SECONDS)
        assumed = [name for name in names if "assumed" in self.source.get(name, "")]
        return ("flops", *assumed) if used & self.assumed_dtypes else tuple(assumed)


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
    """The arguments of `Rates` for a target other than an unmeasured CPU."""
    source: dict[str, str] = {}

    def reached(name: str, otherwise: float | None, origin: str = "") -> float | None:
        if otherwise is not None:
            _check_rate(name, otherwise)
        for figures in (target.measured, target.reached):
            if name in figures:
                stated = figures["source"]
                source[name] = str(stated[name] if isinstance(stated, Mapping) else stated)
                return float(figures[name])
        if otherwise is not None:
            source[name] = f"{origin}assumed"
        return otherwise

    def of_nominal(name: str, nominal: float | None, share: float) -> float | None:
        return reached(name, None if nominal is None else nominal * share, f"nominal × {share}, ")

    link = target.host_link_bytes_per_s
    rates: dict[str, Any] = {
        "hbm_bytes_per_s": of_nominal("hbm_bytes_per_s", target.hbm_bytes_per_s, MEMORY_SHARE),
        "out_bytes_per_s": of_nominal("out_bytes_per_s", link, LINK_SHARE),
        "in_bytes_per_s": of_nominal("in_bytes_per_s", link, LINK_SHARE),
        "hidden_share": of_nominal("hidden_share", 1.0, HIDDEN_SHARE),
        "flops": _flops(target, source),
        "launch_seconds": reached("launch_seconds", LAUNCH_SECONDS if target.launches_kernels else None) or 0.0,
        "copy_seconds": reached("copy_seconds", COPY_SECONDS if link is not None else None) or 0.0,
        "clock_hz": target.clock_hz,
        "cores": target.core_count,
        "products": {
            dtype: {int(size): float(rate) for size, rate in curve.items()}
            for dtype, curve in target.measured.get("products", {}).items()
        },
    }
    between = of_nominal("device_link_bytes_per_s", target.device_link_bytes_per_s, LINK_SHARE)
    if between is not None:
        network = of_nominal("network_bytes_per_s", target.network_bytes_per_s, LINK_SHARE)
        device_seconds = reached("device_link_seconds", DEVICE_LINK_SECONDS) or 0.0
        rates["links"] = Links(between, network, device_seconds, reached("network_seconds", NETWORK_SECONDS) or 0.0)
    if rates["hbm_bytes_per_s"] is None or not rates["flops"]:
        lacks = "hbm_bytes_per_s" if rates["hbm_bytes_per_s"] is None else "peak_flops"
        raise TargetError(
            f"target={target.name!r} has no {lacks}, so times cannot be estimated; state it in the file that describes the "
            "target, measure it with remat-jax calibrate, or pass rates=Rates(...)."
        )
    stated_dtypes = {*target.reached.get("flops", {}), *target.measured.get("flops", {})}
    return {**rates, "source": source, "assumed_dtypes": frozenset(rates["flops"]) - stated_dtypes}


def _flops(target: Target, source: dict[str, str]) -> dict[str, float]:
    """The best available rate for each dtype. `source["flops"]` is set to the origin of the rates."""
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


def _check_rate(name: str, value: object) -> None:
    # An integer may be larger than any float.
    if not is_figure(value) or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise TargetError(f"Rates: {name}={value!r}; expected a positive number per second.")
