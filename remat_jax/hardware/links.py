"""The time to exchange arrays between devices: rings over the links of a host and the network between hosts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from remat_jax.errors import TargetError

_TWICE = frozenset({"all-reduce"})
"""Collectives that send everything twice: an all-reduce is a reduce-scatter, then an all-gather."""
_WHOLE = frozenset({"collective-permute", "collective-broadcast"})
"""Collectives that send the whole array once, whatever the number of devices."""


@dataclass(frozen=True)
class Links:
    """The links between devices, each way, as one device sees them.

    Attributes:
        device_bytes_per_s: between the devices of a host.
        network_bytes_per_s: between hosts, for each device; None if unknown.
        device_seconds, network_seconds: the latency of one message over either link.

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

    def seconds(self, kind: str, size: float, devices: int, *, hosts: int = 1) -> float | None:
        """The time of one exchange among `devices` on `hosts`; `size` is the larger of the bytes a device sends and receives.

        The slowest link decides: within a host the device link, between hosts the combined network of the host's participating
        devices. Messages go along a tree. None if the network is needed but unknown.
        """
        if devices < 2:
            return 0.0
        inside = max(1, devices // hosts)
        rate, latency = self.device_bytes_per_s, math.ceil(math.log2(inside)) * self.device_seconds
        if hosts > 1:
            if self.network_bytes_per_s is None:
                return None
            between = inside * self.network_bytes_per_s
            rate = between if inside == 1 else min(rate, between)
            latency += math.ceil(math.log2(hosts)) * self.network_seconds
        sent = size if kind in _WHOLE else size * (devices - 1) / devices
        return (2 if kind in _TWICE else 1) * (latency + sent / rate)
