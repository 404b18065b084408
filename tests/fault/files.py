"""Malformed files (plans, targets, weights, mappings): each is refused by our own error, or read as it says."""

from __future__ import annotations

import copy
import json
import random
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import remat_jax as rj
from remat_jax import porting
from remat_jax.hardware import target
from remat_jax.parity.match import MatchedModule, read_mapping
from remat_jax.policy import LayerPolicies, Policy
from tests.fault.texts import _RULES, _TABLE, fault_of, mutated, tried
from tests.plan_by_hand import plan

_STRANGE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 2**63, 2**70, 10**400, 1e308, -0.0, float("inf"), float("nan")),
    *("", "a\nb", "\x00", "\ud800", "__import__('os').abort()", "</script><script>alert(1)</script>", "9" * 5000),
    *("../../etc/passwd", "/dev/zero", "*", "@x", "x" * 100_000, [], {}, [[]], [None] * 3, {"version": 1}, {"a": {"b": []}}),
)


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in plain data."""
    yield at
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places(value, (*at, key))


def changed_data(data: Any, draw: random.Random) -> Any:
    """`data` with one to three places changed: other values, near ones too, a key removed or added, deep nesting."""
    data = copy.deepcopy(data)
    for _ in range(draw.choice((1, 1, 2, 3))):
        inside_places = [place for place in places(data) if place]
        if not inside_places:
            break
        *path, last = draw.choice(inside_places)
        inside = data
        for key in path:
            inside = inside[key]
        change = draw.randint(0, 9)
        if change < 2:
            inside[last] = near(inside[last], draw)
        elif change < 6:
            # A copy, because a later change may be inside it.
            inside[last] = copy.deepcopy(draw.choice(_STRANGE))
        elif change < 7 and isinstance(inside, dict):
            del inside[last]
        elif change < 8 and isinstance(inside, dict):
            inside[f"{last}x"] = inside[last]
        elif change < 9 and isinstance(inside, list):
            inside.append(copy.deepcopy(draw.choice(inside)))
        else:
            inside[last] = json.loads("[" * 200 + "]" * 200)
    return data


def near(value: Any, draw: random.Random) -> Any:
    """Another value of the same type, which may be valid."""
    if isinstance(value, str):
        return draw.choice((f"{value}x", value[::-1], value.upper(), "x"))
    if isinstance(value, int | float) and not isinstance(value, bool):
        half = value // 2 if abs(value) > 2**1000 else value / 2  # larger than any float
        return draw.choice((value + 1, value * 2, half, -value))
    return draw.choice((None, not value)) if isinstance(value, bool | None) else type(value)()


def changed_json(data: Any, draw: random.Random) -> str:
    """JSON of `data`, changed; sometimes with a duplicate key."""
    text = json.dumps(changed_data(data, draw))
    if draw.random() < 0.05:
        # Of duplicate keys the last one counts.
        text = text.replace("{", '{"version": 7, "version": 1, ', 1)
    return text


def _any_toml(data: Any) -> str:
    """TOML in one line; values are written as JSON where both agree, and TOML has no null."""
    if isinstance(data, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_any_toml(value)}" for key, value in data.items()) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(map(_any_toml, data)) + "]"
    if isinstance(data, float):
        return repr(data)
    return "[]" if data is None else json.dumps(data)


def changed(filename: str, valid: bytes, draw: random.Random) -> bytes:
    """A valid file's content, changed: mostly inside its values, so that it can still be read."""
    if draw.random() < 0.3 or not filename.endswith((".json", ".toml", ".safetensors")):
        return changed_bytes(valid, draw)
    if filename.endswith(".toml"):
        table = changed_data(tomllib.loads(valid.decode()), draw)
        return "\n".join(f"{json.dumps(key)} = {_any_toml(value)}" for key, value in table.items()).encode()
    if filename.endswith(".json"):
        return changed_json(json.loads(valid), draw).encode("utf-8", "surrogatepass")
    # Eight bytes for the header's length, the header, the numbers.
    end = 8 + int.from_bytes(valid[:8], "little")
    header = changed_json(json.loads(valid[8:end]), draw).encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + valid[end:]


def changed_bytes(content: bytes, draw: random.Random) -> bytes:
    """`content` changed as a text, or with one of the last bytes changed, a tensor's numbers."""
    if draw.random() < 0.8:
        return mutated(content.decode("latin-1"), draw).encode("latin-1", "replace")
    data = bytearray(content)
    data[-draw.randint(1, min(len(data), 20))] ^= 1
    return bytes(data)


# --- the files --------------------------------------------------------------------------------------------------------


def _plan(path: Path) -> None:
    loaded = rj.Plan.load(path)
    assert str(loaded) and loaded.explain()
    page = loaded.to_html(path.with_suffix(".html")).read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert rj.Plan.load(loaded.save(path.with_suffix(".again"))) == loaded


def _target_file(path: Path) -> None:
    gpu = target(f"{path}:mine")
    assert gpu.name == "mine" and (gpu.memory_bytes is None or gpu.memory_bytes > 0)


def _weights(path: Path) -> None:
    for name, array in porting.load(path).items():
        assert isinstance(name, str) and array.shape is not None


_MODULES = [MatchedModule(path, "Block", 4, bool(path)) for path in ("h/0", "h/1", "h/2", "")]


def _mapping(path: Path) -> None:
    names = {module.path for module in _MODULES}
    for key, value in read_mapping(path, _MODULES, _MODULES).items():
        assert key in names and (value is None or value in names)


def _read(read: Callable[[str], Any]) -> Callable[[Path], None]:
    def of_file(path: Path) -> None:
        value = read(path.read_text(encoding="utf-8", errors="surrogateescape"))
        assert read(value.to_json()) == value

    return of_file


Kind = tuple[Callable[[Path], None], str, bytes]


def kinds(folder: Path) -> dict[str, Kind]:
    """For each kind of file: its reader, its name, and a valid content; other files that it needs are in the folder."""
    arrays = {"a.weight": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.zeros(2, ml_dtypes.bfloat16)}
    porting.save(folder / "shard.safetensors", arrays)
    index = {"metadata": {"total_size": 28}, "weight_map": dict.fromkeys(arrays, "shard.safetensors")}
    table: dict[str, Kind] = {
        "plan": (_plan, "plan.json", json.dumps(json.loads(json.dumps(plan().to_dict()))).encode()),
        "targets": (_target_file, "targets.toml", _TABLE.encode()),
        "policy": (_read(Policy.from_json), "policy.json", Policy.parse("save: @dots; offload: *up*").to_json().encode()),
        "policies by layer": (
            _read(LayerPolicies.from_json),
            "layers.json",
            LayerPolicies.parse("2 x full | 1 x save: *up*").to_json().encode(),
        ),
        "rules": (_read(porting.Rules.from_json), "rules.json", porting.Rules.parse(_RULES).to_json().encode()),
        "safetensors": (_weights, "one.safetensors", (folder / "shard.safetensors").read_bytes()),
        "index": (_weights, "model.safetensors.index.json", json.dumps(index).encode()),
        "mapping": (_mapping, "mapping.json", b'{"h/0": "h/1", "h/1": "h/0", "h/2": null}'),
    }
    return table


def torch_kinds(folder: Path) -> dict[str, Kind]:
    """The files that PyTorch writes."""
    import torch

    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    torch.save(tensors, folder / "zip")
    torch.save(tensors, folder / "pickle", _use_new_zipfile_serialization=False)
    return {
        "zip of torch's": (_weights, "one.pt", (folder / "zip").read_bytes()),
        "pickle of torch's": (_weights, "one.bin", (folder / "pickle").read_bytes()),
    }


def check_files(number: int, seed: int, folder: Path, say: Callable[[str], None], *, torch: bool = True) -> int:
    """Try a number of files; report each that raises anything but RematError, and return their number."""
    if not number:
        return 0
    draw = random.Random(seed)
    every = kinds(folder) | (torch_kinds(folder) if torch else {})

    def attempt(name: str) -> tuple[str | None, str]:
        read, filename, valid = every[name]
        path = folder / filename
        content = changed(filename, valid, draw)
        path.write_bytes(content)
        return fault_of(read, path), repr(content)

    return tried("files", list(every), number, attempt, say)
