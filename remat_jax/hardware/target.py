"""Targets, the hardware for which memory and time are computed, and the TOML tables that describe them."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from importlib import resources
from types import MappingProxyType
from typing import Any

from remat_jax.errors import TargetError, nearest
from remat_jax.hardware.entries import TABLE, Kind, checked_entry, compiler_description
from remat_jax.hardware.slices import CHIPS_PER_HOST, checked_chip, checked_shape, listed, shape_of, slice_name, split_path
from remat_jax.reading import read_limited

ATTACHED = "attached"
ALIASES = {
    **dict.fromkeys(("v5litepod", "v5lite"), "v5e"),
    **{"trillium": "v6e", "ironwood": "tpu7x", "v7x": "tpu7x"},
    **{"h100-sxm": "h100", "h200-sxm": "h200", "a100-80": "a100", "a100-sxm": "a100", "4090": "rtx4090"},
}
# "8xh100" is eight GPUs in one host, and "8x8xh200" is eight hosts with eight GPUs each.
_SEVERAL = re.compile(r"(?:(?P<hosts>\d{1,6})x)?(?P<each>\d{1,6})x(?P<one>(?!\d+x).+)", re.DOTALL)
MOST_BYTES = 2**16
"""The largest size of a target file in bytes; a larger file is refused."""
MOST_LETTERS = 2_000
"""A file with a longer line is refused: parsing time is quadratic in the number of parts of a dotted key."""


@dataclass(frozen=True)
class Target:
    """The figures of a device, independent of any program. Rates are nominal; an unknown figure is None.

    Attributes:
        name: the target's name, in lower case.
        kind: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
        description: one line for people.
        memory_bytes: memory of one device, in bytes; of a TPU, what the compiler lets a program have.
        hbm_bytes_per_s: rate of the device's memory, in bytes per second.
        host_memory_bytes: one device's share of the host's memory, in bytes: an eighth for a host with eight devices.
        host_link_bytes_per_s: rate of the link to host memory, each way, in bytes per second.
        device_link_bytes_per_s: rate of the links to the other devices of the host, each way; of a TPU, along one axis of the
            slice.
        network_bytes_per_s: rate of one device's share of the network between hosts (of TPUs, between slices), each way.
        peak_flops: FLOPs per second by dtype name, dense; ``tensorfloat32`` is float32 at reduced matmul precision.
        compiler_description: XLA's description of the GPU, a ``GpuTargetConfigProto`` as text. None for the CPU, and for
            a GPU whose table has no ``compiler``: XLA cannot compile for such a GPU.
        devices: the number of devices on all hosts together.
        hosts: the number of hosts, each with the same number of devices.
        chip: of a TPU, what its compiler and the names of its slices need, by the keys of `slices.CHIP`.
        topology: of TPUs, the chips of a slice along each axis.
        slices: of TPUs, the number of slices.
        device_kinds: JAX's names for the device (``device_kind``), the usual name first.
        attached: whether the device is the GPU of this machine, so that programs can run on it.
        source: the origin of each figure, by attribute name.
        core_count: the number of multiprocessors of a GPU.
        reached: published measurements of rates and latencies, with a ``source`` for each figure.
        measured: the rates that ``remat-jax calibrate`` measured, with one ``source``; preferred to ``reached``.

    Raises:
        TargetError: there is no device or host, or the devices do not divide evenly among the hosts.
    """

    name: str
    kind: Kind
    description: str
    memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    hbm_bytes_per_s: float | None = None
    host_link_bytes_per_s: float | None = None
    device_link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    core_count: int | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    compiler_description: str | None = None
    devices: int = 1
    hosts: int = 1
    chip: Mapping[str, Any] = field(default_factory=dict, hash=False)
    topology: tuple[int, ...] = ()
    slices: int = 1
    device_kinds: tuple[str, ...] = ()
    attached: bool = False
    source: Mapping[str, str] = field(default_factory=dict, hash=False)
    reached: Mapping[str, Any] = field(default_factory=dict, hash=False)
    measured: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= self.devices or self.devices % self.hosts:
            raise TargetError(
                f"target {self.name[:200]!r}: {self.devices} devices in {self.hosts} hosts; expected the same number in each "
                "host"
            )
        for name in ("chip", "peak_flops", "source", "reached", "measured"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        for name in ("device_kinds", "topology"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def clock_hz(self) -> float | None:
        """The clock rate of a TPU, at which its compiler's estimates of cycles count."""
        return self.chip["clock_rate_ghz"] * 1e9 if "clock_rate_ghz" in self.chip else None

    @property
    def launches_kernels(self) -> bool:
        """Whether each kernel is launched by the host: the host of a GPU launches them, a TPU runs a whole program."""
        return self.kind == "gpu"

    @property
    def linked_groups(self) -> int:
        """The groups of devices that are joined by links faster than the network: hosts of GPUs, slices of TPUs."""
        return self.slices if self.kind == "tpu" else self.hosts

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping cannot be pickled or copied, but targets are sent to the compile process.
        return partial(Target, **self.to_dict()), ()

    def to_dict(self) -> dict[str, Any]:
        """The attributes as plain data for JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        return plain | {"device_kinds": list(self.device_kinds), "topology": list(self.topology)}


def target(name: str) -> Target:
    """The target called ``name``; upper and lower case are equivalent.

    ``8xh100`` is eight H100s in one host, ``8x8xh200`` is eight hosts with eight H200s each. ``v5p-128`` is a slice of TPUs, by
    the name of its accelerator type in Google Cloud, ``v5p:4x4x4`` the same slice by its shape in chips, ``2xv5p-128`` two such
    slices, and ``4xv5e`` a slice with four devices. ``path/to/file.toml:name`` (or ``:8xname``) is a target from a user's file
    in the form of this package's ``targets.toml``. ``attached`` is the GPU of this machine. JAX's or the driver's name for a
    device, such as ``NVIDIA H200``, works too.

    Raises:
        TargetError: no target has the name, the file is missing or invalid, or no GPU is attached.

    >>> round(target("H200").memory_bytes / 2**30, 1), target("2x8xh100").devices
    (140.4, 16)
    """
    wanted = name.strip() if isinstance(name, str) else ""
    path, inside = split_path(wanted)
    table = _read_file(path) if path is not None else _table()
    lower = inside.lower()
    named = slice_name(lower)
    chip = None if named is None else _entry(named.chip, table, path)
    if named is not None and chip is not None and chip.kind == "tpu" and lower not in table:
        return _sliced(chip, checked_shape(named, chip.chip, wanted), named.slices, lower)
    several = _SEVERAL.fullmatch(lower)
    if several is not None and int(several["each"]) and int(several["hosts"] or 1):
        hosts, each = int(several["hosts"] or 1), int(several["each"])
        single = target(several["one"] if path is None else f"{path}:{several['one']}")
        if single.kind == "tpu":
            return _slice_of(single, several["hosts"], each, lower)
        return replace(single, name=lower, devices=hosts * each, hosts=hosts)
    if wanted.lower() == ATTACHED:
        return _attached()
    described = _entry(lower, table, path) or _of_kind(inside, table)
    if described is None:
        where = "" if path is None else f" of {path}"
        hint = nearest(inside, table) if inside else ""
        raise TargetError(f"target={name!r} is not a known target{where}; the names are {', '.join(table):.2000}.{hint}")
    return described


def _entry(name: str, table: Mapping[str, Target], path: str | None) -> Target | None:
    """The entry of a table called `name`; the package's own table (no `path`) has aliases too."""
    return table.get(name if path is not None else ALIASES.get(name, name))


def _slice_of(chip: Target, hosts: str | None, devices: int, name: str) -> Target:
    """The slice with this number of devices. Raises TargetError if there is none, or if the name has several readings."""
    each = chip.chip["devices_per_chip"]
    if hosts is not None or chip.slices > 1 or chip.devices > 1:
        raise TargetError(
            f"target={name[:200]!r} has several readings: for several slices write their number before the name of one, "
            "such as '2xv5p-128' or '2xv5p:4x4x4', and for the shape of one slice 'v5e:2x4'"
        )
    shape = None if devices % each else shape_of(devices // each, chip.chip)
    if shape is None:
        slices = listed(chip.chip, lambda shape: f"{math.prod(shape) * each}x{chip.name}")
        raise TargetError(f"target={name[:200]!r}: there is no slice of {devices} devices; slices are {slices}")
    return _sliced(chip, shape, 1, name)


def _sliced(chip: Target, shape: tuple[int, ...], slices: int, name: str) -> Target:
    chips = slices * math.prod(shape)
    hosts = max(slices, chips // CHIPS_PER_HOST)
    return replace(chip, name=name, devices=chips * chip.chip["devices_per_chip"], hosts=hosts, topology=shape, slices=slices)


def targets() -> tuple[str, ...]:
    """The names of all targets, in the order of the table.

    >>> targets()[:3]
    ('cpu', 'h200', 'h100')
    """
    return tuple(_table())


def _of_kind(device_kind: str, table: Mapping[str, Target]) -> Target | None:
    """The target whose device has the name ``device_kind`` in JAX or in the driver; None if there is none."""
    wanted = device_kind.lower()
    return next((each for each in table.values() if wanted in map(str.lower, each.device_kinds)), None)


# --- the attached GPU -------------------------------------------------------------------------------------------------


_find_attached: list[Callable[[], str]] = []


def find_attached_with(device_kind: Callable[[], str]) -> None:
    """Register the function that asks JAX for the attached GPU's name, because `remat_jax.hardware` does not import JAX."""
    _find_attached[:] = [device_kind]


def _attached() -> Target:
    if not _find_attached:
        raise TargetError(
            f"target={ATTACHED!r} needs remat_jax.memory, which asks JAX for the attached device; import remat_jax"
        )
    kind = _find_attached[0]()
    described = _of_kind(kind, _table())
    if described is None:
        raise TargetError(
            f"target={ATTACHED!r}: the attached GPU is {kind!r}, but no table describes it; the names are "
            f"{', '.join(_table())}. Describe it in a file of your own, in the form of {TABLE}, and ask for "
            "path/to/file.toml:name."
        )
    return replace(described, name=ATTACHED, attached=True)


# --- tables of targets ------------------------------------------------------------------------------------------------


def _read_file(path: str) -> dict[str, Target]:
    try:
        return read_table(read_limited(path, MOST_BYTES).decode("utf-8"))
    except TargetError as error:
        raise TargetError(f"target file {path!r}: {error}") from error
    except (OSError, ValueError) as error:  # a null byte in the path is a ValueError
        raise TargetError(f"target file {path!r} cannot be read: {error}. Give a TOML file in the form of {TABLE}.") from error


@cache
def _table() -> dict[str, Target]:
    return read_table(_text_of_table())


def _text_of_table() -> str:
    return resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8")


def read_table(text: str) -> dict[str, Target]:
    """A dict from name to target, for the targets that a TOML text describes. Raises TargetError if the text is invalid."""
    longest = max(map(len, text.splitlines()), default=0)
    if longest > MOST_LETTERS:
        raise TargetError(
            f"a line has {longest} characters, but at most {MOST_LETTERS} are allowed; give a TOML file in the form of {TABLE}."
        )
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # an integer with thousands of digits is a ValueError
        raise TargetError(f"the TOML cannot be read: {error}. Give a file in the form of {TABLE}.") from error
    return {name: _read_target(name, table) for name, table in tables.items()}


def _read_target(name: str, table: object) -> Target:
    facts = dict(checked_entry(name, table))
    compiler = facts.pop("compiler", None)
    if facts["kind"] == "tpu":
        if compiler is None:
            raise TargetError(f"target table [{name}]: a TPU needs the table [{name}.compiler], as in {TABLE}")
        return Target(name=name, chip=checked_chip(compiler, name), topology=(1,) * compiler["axes"], **facts)
    described = compiler_description(facts, compiler, name) if compiler is not None else None
    return Target(name=name, compiler_description=described, core_count=(compiler or {}).get("core_count"), **facts)


def entry(name: str) -> dict[str, Any]:
    """The entry of a target in this package's table, as plain data."""
    entries: dict[str, dict[str, Any]] = tomllib.loads(_text_of_table())
    if name not in entries:
        raise TargetError(f"target={name!r} is not in the table; the names are {', '.join(entries)}")
    return entries[name]


def target_text(name: str, facts: Mapping[str, Any]) -> str:
    """A target's entry as TOML, tables last. The text is parsed again as a check, so an invalid entry raises `TargetError`.

    >>> print(target_text("mine", {"kind": "cpu", "description": "a CPU", "source": {}}))
    [mine]
    kind = "cpu"
    description = "a CPU"
    <BLANKLINE>
    [mine.source]
    <BLANKLINE>
    """
    text = "\n".join(_toml((name,), facts)) + "\n"
    read_table(text)
    return text


def _toml(path: tuple[str, ...], values: Mapping[str, Any]) -> list[str]:
    """The lines of a table and its subtables. TOML writes strings, numbers, booleans and lists as JSON does."""
    lines = [f"[{'.'.join(map(_key, path))}]"]
    lines += [
        f"{_key(key)} = {json.dumps(value, ensure_ascii=False)}"
        for key, value in values.items()
        if not isinstance(value, Mapping)
    ]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += ["", *_toml((*path, key), value)]
    return lines


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)
