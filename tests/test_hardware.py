"""Targets: the table, its strictness, and its consistency."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path

import pytest

from remat_jax.errors import TargetError
from remat_jax.hardware import Target, target, targets
from remat_jax.hardware.entries import FACTS, LINKS
from remat_jax.hardware.target import read_table

NAMES = ", ".join(targets())

ENTRY = """
[toy]
kind = "gpu"
description = "a toy"
memory_bytes = 8
[toy.source]
memory_bytes = "made up"
"""

GPU = """
[toy]
kind = "gpu"
description = "a toy"
memory_bytes = 1_000_000_000
hbm_bytes_per_s = 2e9
[toy.compiler]
compute_capability = "9.1"
core_count = 7
fpus_per_core = 1
clock_rate_ghz = 1.5
threads_per_core_limit = 2048
shared_memory_per_core = 1000
shared_memory_per_block_optin = 1000
l2_cache_size = 1000
[toy.source]
memory_bytes = "made up"
hbm_bytes_per_s = "made up"
compiler = "made up"
"""


def stated(description: str, key: str) -> float:
    """The number after ``key:`` in a compiler description."""
    matches = re.findall(rf"\b{key}:\s*([\d.]+)", description)
    assert len(matches) == 1, (key, matches)
    return float(matches[0])


def test_the_h200_is_what_its_data_sheet_says() -> None:
    h200 = target("h200")
    assert (h200.name, h200.kind, h200.devices) == ("h200", "gpu", 1)
    assert h200.memory_bytes == 143771 * 2**20
    assert h200.hbm_bytes_per_s == 4.8e12
    assert h200.host_link_bytes_per_s == pytest.approx(16 * 32e9 * 128 / 130 / 8, rel=1e-3)
    with_sparsity = {"tensorfloat32": 989e12, **dict.fromkeys(("bfloat16", "float16"), 1979e12)}
    with_sparsity |= dict.fromkeys(("int8", "float8_e4m3fn", "float8_e5m2"), 3958e12)
    without = {"float32": 67e12, "float64": 67e12}
    assert h200.peak_flops == {**{dtype: rate / 2 for dtype, rate in with_sparsity.items()}, **without}
    # Four tensor cores per multiprocessor, with 512 bfloat16 multiply-adds per clock each, at 1.83 GHz.
    cores, lanes, clock = (stated(h200.compiler_description, key) for key in ("core_count", "fpus_per_core", "clock_rate_ghz"))
    assert h200.peak_flops["bfloat16"] == pytest.approx(cores * 4 * 512 * 2 * 1.83e9, rel=1e-3)
    assert h200.peak_flops["float32"] == pytest.approx(cores * lanes * 2 * clock * 1e9, rel=2e-3)
    cpu = target("cpu")
    assert (cpu.kind, cpu.compiler_description, cpu.memory_bytes, dict(cpu.peak_flops)) == ("cpu", None, None, {})


@pytest.mark.parametrize("name", [name for name in targets() if target(name).kind == "gpu"])
def test_what_the_compiler_is_told_agrees_with_the_table(name: str) -> None:
    gpu = target(name)
    assert stated(gpu.compiler_description, "device_memory_size") == gpu.memory_bytes
    assert stated(gpu.compiler_description, "memory_bandwidth") == gpu.hbm_bytes_per_s
    assert 'platform_name: "CUDA"' in gpu.compiler_description
    assert gpu.compiler_description.count("{") == gpu.compiler_description.count("}")
    assert set(gpu.source) - {"host_memory_bytes", *LINKS} == set(FACTS)


def test_names_are_found_in_any_case() -> None:
    assert target("H200") is target(" h200") is target("h200-sxm") is target("h200")


@pytest.mark.parametrize(("name", "devices", "hosts"), [("8xH100", 8, 1), ("8x8xh200", 64, 8), ("1xa100-80", 1, 1)])
def test_several_of_one(name: str, devices: int, hosts: int) -> None:
    several, single = target(name), target(name.rpartition("x")[2])
    assert (several.name, several.devices, several.hosts) == (name.lower(), devices, hosts)
    assert dataclasses.replace(several, name=single.name, devices=1, hosts=1) == single


def test_a_target_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(GPU, encoding="utf-8")
    toy = target(f"{path}:Toy")
    assert (toy.name, toy.memory_bytes) == ("toy", 10**9)
    for line in ("core_count: 7", "device_memory_size: 1000000000", "memory_bandwidth: 2000000000", "{ major: 9 minor: 1 }"):
        assert line in str(toy.compiler_description)
    several = target(f"{path}:2x8xToy")
    assert (several.name, several.devices, several.hosts) == ("2x8xtoy", 16, 2)
    assert dataclasses.replace(several, name="toy", devices=1, hosts=1) == toy
    with pytest.raises(TargetError, match=r"target=.*gpus.toml:tory' is not a known target of .*the names are toy. Did you"):
        target(f"{path}:tory")
    with pytest.raises(TargetError, match=r"target file 'none.toml' cannot be read.*Give a TOML file in the form of targets"):
        target("none.toml:toy")
    path.write_text(GPU + "[", encoding="utf-8")
    with pytest.raises(TargetError, match="cannot be read"):
        target(f"{path}:toy")
    path.write_text("x = 3", encoding="utf-8")
    with pytest.raises(TargetError, match=r"target file '.*gpus.toml': target table \[x\]: 3 is not a table"):
        target(f"{path}:x")


@pytest.mark.parametrize(("devices", "hosts"), [(0, 1), (-8, 1), (8, 0), (12, 5), (2, 4), (8, -2)])
def test_every_host_has_as_many_devices(devices: int, hosts: int) -> None:
    with pytest.raises(TargetError, match=f"'h200': {devices} devices in {hosts} hosts; expected the same number"):
        dataclasses.replace(target("h200"), devices=devices, hosts=hosts)
    assert dataclasses.replace(target("h200"), devices=12, hosts=4).devices == 12


def test_a_file_that_takes_long_to_read_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    for content, message in (
        ("a." * 20_000 + "a = 1", "a line has 40005 characters, but at most 2000 are allowed; give a TOML file"),
        ("#\n" * 2**15 + "#", "it has more than 65536 bytes. Give a TOML file"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(TargetError, match=message):
            target(f"{path}:toy")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h20", f"target='h20' is not a known target; the names are {NAMES}. Did you mean 'h200'?"),
        ("tpu", f"target='tpu' is not a known target; the names are {NAMES}. Did you mean 'tpu7x'?"),
        ("", f"target='' is not a known target; the names are {NAMES}."),
        ("0xh100", "target='0xh100' is not a known target"),
        (200, "target=200 is not a known target"),
    ],
)
def test_unknown_targets_list_the_names(name: str, message: str) -> None:
    with pytest.raises(TargetError, match=re.escape(message)):
        target(name)


def test_targets_are_frozen_hashable_and_survive_a_pickle() -> None:
    h200 = target("h200")
    for twin in (pickle.loads(pickle.dumps(h200)), copy.deepcopy(h200), Target(**h200.to_dict())):
        assert twin == h200 and hash(twin) == hash(h200)
    assert dataclasses.replace(h200, devices=8) != h200
    with pytest.raises(TypeError):
        h200.peak_flops["bfloat16"] = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        h200.memory_bytes = 1


WRONG_ENTRY = [
    ("memory_bytes = 8", "memory_bytes = 8\nmemory = 8", "unknown keys ['memory']"),
    ('description = "a toy"', "", "missing keys ['description']"),
    ('memory_bytes = "made up"', "", "without a source: ['memory_bytes']"),
    ("memory_bytes = 8", "", "a source without a figure: ['memory_bytes']"),
    ('kind = "gpu"', 'kind = "npu"', "kind='npu'; expected one of cpu, gpu, tpu"),
    ('kind = "gpu"', 'kind = "tpu"', "a TPU needs the table [toy.compiler]"),
    ("[toy]", "[TOY]\n[toy]", "names are in lower case"),
    ("memory_bytes = 8", "memory_bytes = 8\npeak_flops = 7", "target table [toy.peak_flops]: 7 is not a table"),
    ("memory_bytes = 8", 'memory_bytes = 8\ncompiler = "sm_90"', "target table [toy.compiler]: 'sm_90' is not a table"),
]
WRONG_GPU = [
    ("core_count = 7\n", "", "missing ['compiler.core_count']"),
    ("core_count = 7", "core_count = 7\ncores = 7", "unknown ['cores']"),
    ('"9.1"', '"9"', "compute_capability as a text such as"),
    ('hbm_bytes_per_s = (2e9|"made up")\n', "", "the target needs memory_bytes and hbm_bytes_per_s"),
    ("memory_bytes = 1", 'device_kinds = "NVIDIA X"\n\\g<0>', "device_kinds='NVIDIA X'; write a list of texts"),
    ("1_000_000_000", '"80GB"', "target table [toy]: {'memory_bytes': '80GB'}; sizes are positive numbers of bytes"),
    ("1_000_000_000", "nan", "{'memory_bytes': nan}"),
    ("1_000_000_000", "2e6", "{'memory_bytes': 2000000.0}; sizes are positive numbers of bytes, written as integers"),
    ("2e9", '"fast"', "{'hbm_bytes_per_s': 'fast'}"),
]


@pytest.mark.parametrize(
    ("entry", "old", "new", "message"), [*((ENTRY, *case) for case in WRONG_ENTRY), *((GPU, *case) for case in WRONG_GPU)]
)
def test_the_table_is_read_strictly(entry: str, old: str, new: str, message: str) -> None:
    text = re.sub(old, new, entry) if entry is GPU else entry.replace(old, new)
    assert text != entry
    with pytest.raises(TargetError, match=re.escape(message)):
        read_table(text)
