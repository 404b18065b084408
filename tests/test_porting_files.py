"""State dicts in safetensors files, without PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from remat_jax import porting
from remat_jax.errors import PortingError


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    numbers = np.arange(6.0).reshape(2, 3)
    kept = {
        "half": numbers.astype(ml_dtypes.bfloat16),
        # A view that does not lie in memory as it is read.
        "turned": numbers.T,
        "jax": jnp.asarray(numbers, jnp.float32),
        "one": np.array(3, np.int64),
        "none": np.zeros((0, 2), np.float16),
    }
    porting.save(tmp_path / "a.safetensors", kept, metadata={"by": "test"})
    found = porting.load(str(tmp_path / "a.safetensors"))
    assert found.keys() == kept.keys()
    for name, array in kept.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape and np.array_equal(found[name], array)
    found["turned"] += 1  # a copy, and not the file
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
        "  d: not in model-1.safetensors, where the index has it",
        "  c: in model-2.safetensors, but not in the index",
    ]
    index.write_text(json.dumps({"weight_map": {"a": "../model-1.safetensors"}}))
    with pytest.raises(PortingError, match=r"must lie beside it, unlike \.\./model-1"):
        porting.load(index)
    index.write_text("[]")
    with pytest.raises(PortingError, match="expected JSON with a weight_map"):
        porting.load(index)


def test_what_is_no_file_of_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"no such thing")
    (tmp_path / "text.txt").write_text("")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("gone.safetensors", "no such file"),
        ("bad.safetensors", "not a safetensors file"),
        ("text.txt", "not a name of a model's"),
        ("empty", "a folder without a model"),
    ):
        with pytest.raises(PortingError, match=message):
            porting.load(tmp_path / name)
    with pytest.raises(PortingError, match=r"key='model': bad.safetensors holds tensors alone"):
        porting.load(tmp_path / "bad.safetensors", key="model")
    with pytest.raises(PortingError, match=r"give a name that ends in \.safetensors or one of"):
        porting.save(tmp_path / "a.npz", {})
    with pytest.raises(PortingError, match="no arrays or tensors: a"):
        porting.save(tmp_path / "a.safetensors", {"a": [1]})
    with pytest.raises(PortingError, match=r"has no float8: a \(float8_e5m2\); write a .pt file"):
        porting.save(tmp_path / "a.safetensors", {"a": np.zeros(1, ml_dtypes.float8_e5m2)})
    with pytest.raises(PortingError, match="a .pt file has no place for it"):
        porting.save(tmp_path / "a.pt", {}, metadata={"a": "b"})
