"""Targets: the hardware that memory and time are asked about, read from ``targets.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

from remat_jax.errors import TargetError, nearest

TABLE = "targets.toml"
FACTS = ("memory_bytes", "hbm_bytes_per_s", "host_link_bytes_per_s", "peak_flops", "compiler_description")


@dataclass(frozen=True)
class Target:
    """What a device is, in figures that do not depend on a program; None where a figure is not known.

    All rates are nominal; what a program reaches is lower.

    Attributes:
        name: what the target is asked by, in lower case.
        kind: ``"cpu"`` or ``"gpu"``.
        description: one line for people.
        memory_bytes: memory of one device, in bytes.
        hbm_bytes_per_s: rate of that memory, in bytes per second.
        host_link_bytes_per_s: rate of the link to host memory, each way, in bytes per second.
        peak_flops: FLOPs per second by dtype name, dense; ``tensorfloat32`` is float32 at reduced matmul precision.
        compiler_description: what XLA needs in order to compile for the target where it is absent, a
            ``GpuTargetConfigProto`` as text; None where it compiles for the machine it runs on.
        devices: how many of them.
        source: where each of these figures comes from, by attribute name.
    """

    name: str
    kind: Literal["cpu", "gpu"]
    description: str
    memory_bytes: int | None = None
    hbm_bytes_per_s: float | None = None
    host_link_bytes_per_s: float | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    compiler_description: str | None = None
    devices: int = 1
    source: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops", MappingProxyType(dict(self.peak_flops)))
        object.__setattr__(self, "source", MappingProxyType(dict(self.source)))

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping cannot be pickled or copied, and targets go to the process that compiles.
        return _rebuild, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """The attributes as plain data for JSON.

        >>> target("h200").to_dict()["devices"]
        1
        """
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def target(name: str) -> Target:
    """The target called ``name``; case does not count.

    Raises:
        TargetError: there is none of that name; the message lists the names and the nearest.

    >>> round(target("H200").memory_bytes / 2**30, 1)
    140.4
    """
    known = targets()
    if not isinstance(name, str) or name.strip().lower() not in known:
        hint = nearest(name, known) if isinstance(name, str) else ""
        raise TargetError(f"target={name!r} is not a known target; the names are {', '.join(known)}.{hint}")
    return _table()[name.strip().lower()]


def targets() -> tuple[str, ...]:
    """The names of all targets, in the order of the table.

    >>> targets()
    ('cpu', 'h200')
    """
    return tuple(_table())


@cache
def _table() -> dict[str, Target]:
    return read_table(resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8"))


def read_table(text: str) -> dict[str, Target]:
    """The targets that a TOML text describes, by name.

    Raises:
        TargetError: a key or kind is unknown, one is missing, or a figure has no source or a source no figure.
    """
    return {name: _read_target(name, entry) for name, entry in tomllib.loads(text).items()}


def _read_target(name: str, entry: dict[str, Any]) -> Target:
    required = ("kind", "description", "source")
    unknown = sorted(set(entry) - {*required, *FACTS})
    missing = sorted(set(required) - set(entry))
    if unknown or missing or name != name.lower():
        raise TargetError(
            f"target table [{name}]: unknown keys {unknown}, missing keys {missing}; the keys are "
            f"{', '.join((*required, *FACTS))}, and names are in lower case."
        )
    if entry["kind"] not in ("cpu", "gpu"):
        raise TargetError(f'target table [{name}]: kind={entry["kind"]!r}; write "cpu" or "gpu".')
    stated, sourced = set(entry) & set(FACTS), set(entry["source"])
    if stated != sourced:
        raise TargetError(
            f"target table [{name}]: without a source: {sorted(stated - sourced)}; a source without a "
            f"figure: {sorted(sourced - stated)}. Say under [{name}.source] where each figure is from."
        )
    return Target(name=name, **entry)


def _rebuild(values: dict[str, Any]) -> Target:
    return Target(**values)
