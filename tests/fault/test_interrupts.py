"""Interrupted runs: the file at a path stays whole, and no other file is left beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.record import write_json
from remat_jax import porting
from remat_jax.cost.calibrate import Calibration
from remat_jax.errors import TargetError
from remat_jax.report.document import write_whole, written_whole
from tests.plan_by_hand import plan

ROOT = Path(__file__).resolve().parents[2]


CALIBRATION = Calibration("mine", "cpu", {"float32": 1e9}, 1e9, source="a test")
WRITERS: dict[str, Callable[[Path], object]] = {
    "plan.json": lambda path: plan().save(path),
    "plan.html": lambda path: plan().to_html(path),
    "a.safetensors": lambda path: porting.save(path, {"a": np.zeros(3, np.float32)}),
    "record.json": lambda path: write_json(path, {"a": 1}),
    "mine.toml": lambda path: CALIBRATION.save(path, overwrite=True),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("there", [False, True])
def test_an_interrupt_while_a_file_is_written_leaves_the_old_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, there: bool
) -> None:
    path, write = tmp_path / name, WRITERS[name]
    if there:
        path.write_text("the old one")
    with monkeypatch.context() as patched:
        # At the latest moment: everything is written, but not yet renamed.
        patched.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(path)
    assert [file.name for file in tmp_path.iterdir()] == [name] * there
    assert not there or path.read_text() == "the old one"
    write(path)
    assert [file.name for file in tmp_path.iterdir()] == [name] and path.stat().st_size > 6


def test_a_target_that_is_there_already_is_not_overwritten_even_at_the_last_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, link = tmp_path / "mine.toml", os.link

    def another_was_quicker(*args: Any) -> None:
        path.write_text("another's")
        link(*args)

    monkeypatch.setattr(os, "link", another_was_quicker)
    for _ in range(2):
        with pytest.raises(TargetError, match="exists already"):
            CALIBRATION.save(path)
        assert path.read_text() == "another's" and list(tmp_path.iterdir()) == [path]


def test_a_text_that_cannot_be_made_leaves_no_empty_file(tmp_path: Path) -> None:
    with pytest.raises(TargetError):
        Calibration("mine", "cpu", {"float32": -1.0}, 1e9, source="a test").save(tmp_path / "mine.toml")
    assert list(tmp_path.iterdir()) == []


def test_two_that_write_one_file_leave_one_whole(tmp_path: Path) -> None:
    with written_whole(tmp_path / "a") as first, written_whole(tmp_path / "a") as second:
        first.write_text("first")
        second.write_text("second")
    assert (tmp_path / "a").read_text() == "first" and len(list(tmp_path.iterdir())) == 1
    assert write_whole(tmp_path / "a", "third").read_text() == "third"


LOOP = """
import pathlib, signal, sys
from remat_jax.report.document import write_whole
# What a shell started in the background ignores an interrupt, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
path, number = pathlib.Path(sys.argv[1]), 0
while True:
    number += 1
    write_whole(path, "[" + str(number) + ", 0" * 200_000 + "]")
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path, sent: signal.Signals) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "numbers.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script), str(path)], env=environment, stderr=subprocess.DEVNULL) as child:
        while not path.exists() and child.poll() is None:
            time.sleep(0.01)
        time.sleep(0.05)
        child.send_signal(sent)
        try:
            child.wait(timeout=60)
        finally:
            child.kill()
    assert len(json.loads(path.read_text())) == 200_001
    left = [file.name for file in path.parent.iterdir() if file != path]
    assert left == [] or (sent is signal.SIGKILL and len(left) == 1 and left[0].endswith(".new.json"))
