"""State dicts in safetensors files, without PyTorch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from remat_jax import porting
from remat_jax.errors import PortingError
from tests.fault.texts import in_time


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    numbers = np.arange(6.0).reshape(2, 3)
    kept = {
        "half": numbers.astype(ml_dtypes.bfloat16),
        # A view whose memory order differs from its reading order.
        "turned": numbers.T,
        "jax": jnp.asarray(numbers, jnp.float32),
        "one": np.array(3, np.int64),
        "none": np.zeros((0, 2), np.float16),
    }
    porting.save(tmp_path / "a.safetensors", kept, metadata={"by": "test"})
    loaded = porting.load(str(tmp_path / "a.safetensors"))
    assert loaded.keys() == kept.keys()
    for name, array in kept.items():
        assert loaded[name].dtype == array.dtype and loaded[name].shape == array.shape and np.array_equal(loaded[name], array)
    loaded["turned"] += 1  # a copy, and not the file
    assert porting.load(tmp_path)["turned"][0, 0] == 0
    header = (tmp_path / "a.safetensors").read_bytes()
    assert json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"] == {"by": "test", "format": "pt"}


def shards(folder: Path) -> dict[str, dict[str, str]]:
    porting.save(folder / "model-1.safetensors", {"a": np.zeros(1, np.float32)})
    porting.save(folder / "model-2.safetensors", {"b": np.ones(2, np.float32), "c": np.ones(3, np.float32)})
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    return {"weight_map": places}


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(shards(tmp_path)))
    for path in (index, tmp_path):
        assert {name: array.size for name, array in porting.load(path).items()} == {"a": 1, "b": 2, "c": 3}


def test_shards_that_do_not_agree_with_their_index_are_named(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    wrong = shards(tmp_path)
    porting.save(tmp_path / "model-1.safetensors", {"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)})
    del wrong["weight_map"]["c"]
    wrong["weight_map"]["d"] = "model-1.safetensors"
    index.write_text(json.dumps(wrong))
    with pytest.raises(PortingError) as error:
        porting.load(index)
    lines = str(error.value).splitlines()
    assert lines[1:] == [
        "  b: duplicated, in model-1.safetensors and in model-2.safetensors",
        "  d: not in model-1.safetensors, although the index says so",
        "  c: in model-2.safetensors, but not in the index",
    ]


def test_what_is_no_file_of_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"no such thing")
    header = json.dumps({"a": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "huge.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "text.txt").write_text("")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("gone.safetensors", "no such file"),
        ("bad.safetensors", "not a safetensors file"),
        ("huge.safetensors", r"not a safetensors file \(.*too (big|large)"),
        ("text.txt", "not the name of a model file"),
        ("empty", "a folder without a model"),
    ):
        with pytest.raises(PortingError, match=message):
            porting.load(tmp_path / name)
    with pytest.raises(PortingError, match=r"key='model': bad.safetensors holds tensors alone"):
        porting.load(tmp_path / "bad.safetensors", key="model")
    with pytest.raises(PortingError, match=r"key=\['model'\]: expected the name of an entry"):
        porting.load(tmp_path / "bad.safetensors", key=["model"])
    with pytest.raises(PortingError, match=r"give a name that ends in \.safetensors or one of"):
        porting.save(tmp_path / "a.npz", {})
    with pytest.raises(PortingError, match="no arrays or tensors: a"):
        porting.save(tmp_path / "a.safetensors", {"a": [1]})
    with pytest.raises(PortingError, match=r"has no float8: a \(float8_e5m2\); write a .pt file"):
        porting.save(tmp_path / "a.safetensors", {"a": np.zeros(1, ml_dtypes.float8_e5m2)})
    with pytest.raises(PortingError, match="a .pt file cannot store metadata"):
        porting.save(tmp_path / "a.pt", {}, metadata={"a": "b"})


X = np.zeros(2, np.float32)
KEY = "these cannot be written: a \\(.*; give arrays of numbers; for a random key, give jax.random.key_data"


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        ("no/x", {"a": X}, "path='.*no/x.*' cannot be written .there is no such folder.; give a file in an existing folder"),
        ("folder", {"a": X}, "path='.*folder.*' cannot be written .it is a folder."),
        ("a\0b", {"a": X}, r"path='.*a\\x00b.*' cannot be written .embedded null byte."),
        ("x" * 300, {"a": X}, "path='.*' cannot be written .*File name too long"),
        ("a", [X], "state_dict is a list; give name → array, as to_torch returns it"),
        ("a", {"a": jax.random.key(0)}, KEY),
        ("a", {"a": np.array([object()])}, r"cannot be written.*(object|numpy.object_)"),
        ("a", {3: [1]}, "no arrays or tensors: 3; give what to_torch returns"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path: Path, suffix: str, name: str, state: Any, message: str) -> None:
    if suffix == ".pt":
        pytest.importorskip("torch")
    (tmp_path / f"folder{suffix}").mkdir()
    with pytest.raises(PortingError, match=message):
        porting.save(tmp_path / f"{name}{suffix}", state)
    assert [path.name for path in tmp_path.iterdir()] == [f"folder{suffix}"]


def test_safetensors_hold_texts_alone_beside_the_arrays(tmp_path: Path) -> None:
    for metadata in ({"epoch": 3}, {3: "a"}, "epoch", [("a", "b")]):
        with pytest.raises(PortingError, match=r"metadata=.*a safetensors file takes only texts; give text → text"):
            porting.save(tmp_path / "a.safetensors", {"a": X}, metadata=metadata)  # type: ignore[arg-type]
    with pytest.raises(PortingError, match=r"names that are not texts: 1, \('b',\); .* give str\(name\)"):
        porting.save(tmp_path / "a.safetensors", {1: X, ("b",): X, "c": X})  # type: ignore[dict-item]


@pytest.mark.parametrize("path", [None, 3])
def test_a_path_that_is_none_is_named(path: Any) -> None:
    for call in (porting.load, lambda path: porting.save(path, {"a": X})):
        with pytest.raises(PortingError, match=f"path={path}: expected the path of a file"):
            call(path)


@pytest.mark.parametrize(("kind", "shape", "size"), [("F4", [4], 2), ("F8_E4M3", [4], 4), ("F8_E8M0", [4], 4)])
def test_floats_that_numpys_reader_has_not_are_named(tmp_path: Path, kind: str, shape: list[int], size: int) -> None:
    header = json.dumps({"a": {"dtype": kind, "shape": shape, "data_offsets": [0, size]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(PortingError, match=rf"^a\.safetensors: .* this float dtype: a \({kind}\); cast them in PyTorch\.$"):
        porting.load(tmp_path)


def test_a_pipe_in_a_folder_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.pt")
    # Opening a pipe would wait for a writer.
    with in_time(), pytest.raises(PortingError, match="path='.*model.pt': no such file, or not a regular file"):
        porting.load(tmp_path)
