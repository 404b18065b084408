"""Files from anywhere run nothing: no pickle, no import, no script in a page."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import remat_jax as rj
from remat_jax import porting
from remat_jax.errors import ArgumentError, PortingError, RematError
from remat_jax.hardware import target
from remat_jax.parity import match
from remat_jax.parity.match import MatchedModule, read_mapping
from tests.plan_by_hand import plan

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "</script><script>alert('x')</script>\"'><img src=x onerror=alert(1)>"


class Planted:
    """A pickle of this object runs this when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "ending", [".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".safetensors.index.json", ".bin.index.json"]
)
def test_a_pickle_under_any_name_of_weights_is_refused(tmp_path: Path, ending: str) -> None:
    content = pickle.dumps(Planted(tmp_path / "ran"))
    path = tmp_path / f"model{ending}"
    path.write_bytes(content)
    files = [path]
    if ending in (".pt", ".pth", ".bin", ".ckpt"):
        torch = pytest.importorskip("torch")
        files += [tmp_path / f"zip{ending}", tmp_path / f"old{ending}"]
        torch.save({"a": Planted(tmp_path / "ran")}, files[1])
        torch.save({"a": Planted(tmp_path / "ran")}, files[2], _use_new_zipfile_serialization=False)
    for file in files:
        with pytest.raises(PortingError):
            porting.load(file)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_under_any_other_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    for read in (rj.Plan.load, lambda path: target(f"{path}:mine"), porting.load, lambda path: read_mapping(path, [], [])):
        with pytest.raises(RematError):
            read(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", ['{"a": 3}', '{"a": [1]}', '{"a": {"b": 1}}', '{"a": true}', '{"a": "zz"}'])
def test_what_is_no_path_in_a_mapping_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "m.json").write_text(content)
    given = json.loads(content)["a"]
    with pytest.raises(ArgumentError, match=re.escape(f"mapping: {given!r} is not a called module of the Flax model.")):
        read_mapping(tmp_path / "m.json", [MatchedModule("a", "", None, True)], [MatchedModule("b", "", None, True)])


def test_a_mapping_has_a_size_that_it_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "MOST_BYTES", 100)
    (tmp_path / "m.json").write_text("{}" + " " * 98)
    assert read_mapping(tmp_path / "m.json", [], []) == {}
    (tmp_path / "m.json").write_text("{}" + " " * 99)
    with pytest.raises(ArgumentError, match="cannot be read .it has more than 100 bytes"):
        read_mapping(tmp_path / "m.json", [], [])


@pytest.mark.parametrize("read", [rj.Plan.load, lambda path: read_mapping(path, [], [])], ids=["plan", "mapping"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    os.mkfifo(tmp_path / "file")
    errors: list[BaseException] = []

    def call() -> None:
        try:
            read(tmp_path / "file")
        except RematError as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    assert "cannot be read (it is not a regular file)" in str(*errors)


def test_nothing_that_is_shipped_reads_pickles_or_runs_texts() -> None:
    """`torch.load` only with `weights_only`; no `pickle.load`, `eval`, `exec`, `allow_pickle`."""
    places = []
    for folder in ("remat_jax", "torch_ref", "examples", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and _runs_what_it_reads(node):
                    places.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert places == []


def _runs_what_it_reads(call: ast.Call) -> bool:
    name, keywords = ast.unparse(call.func), {keyword.arg: keyword.value for keyword in call.keywords}
    if name == "torch.load":
        return ast.unparse(keywords.get("weights_only", ast.Constant(False))) != "True"
    return name in ("eval", "exec", "pickle.load", "pickle.loads", "marshal.loads", "shelve.open") or "allow_pickle" in keywords


def test_hostile_names_stay_text_in_a_page(tmp_path: Path) -> None:
    data = json.loads(json.dumps(plan().to_dict()))
    data |= {
        "workload": HOSTILE,
        "target": HOSTILE,
        "findings": [{"kind": "note", "severity": "info", "text": HOSTILE}],
        "jax_version": HOSTILE,
    }
    for part in data["parts"]:
        part |= {"block": HOSTILE, "policy": HOSTILE}
        for row in part["rows"]:
            row["residual"] = HOSTILE
    for point in [*data["frontier"], *data["named"]]:
        point |= {"name": HOSTILE, "remark": HOSTILE}
    (tmp_path / "plan.json").write_text(json.dumps(data))
    page = rj.Plan.load(tmp_path / "plan.json").to_html(tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "<img" not in page and "<script>alert" not in page and page.count("<script") == page.count("</script>") == 1
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
