"""A compilation removes its files, a page keeps the kind, place and mode of its path; without a place, the error says so."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax import errors
from remat_jax.errors import CompileError
from remat_jax.hardware import target
from remat_jax.memory.compile import cache, process
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.process import _remedy
from remat_jax.overview.save import checked_path
from remat_jax.report.document import write_whole
from remat_jax.step import TrainingStep
from tests.report_pages import JOB

HOLD = """
import sys, time
from remat_jax.memory.compile.process import scratch
with scratch() as folder:
    print(folder, flush=True)
    time.sleep(100)
"""

WRITE = """
import jax, jax.numpy as jnp
from remat_jax.hardware import target
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step
from remat_jax.step import TrainingStep
step = TrainingStep(lambda x: x * 2, (jax.ShapeDtypeStruct((8,), jnp.float32),), ())
compile_programs([export_step("full", step, target("cpu"))], target("cpu"), timeout=60)
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    process._sweep.cache_clear()
    return tmp_path


def test_what_a_killed_process_left_is_removed_and_nothing_else(parent: Path) -> None:
    alive, killed = (subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) for _ in range(2))
    held, left = (Path(child.stdout.readline().strip()) for child in (alive, killed) if child.stdout)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    others = [parent / name for name in ("remat_jax_results", "remat_jax_compile_new")]
    unlocked, now = parent / "remat_jax_compile_old", time.time()
    for folder in (held, left, *others, unlocked):
        folder.mkdir(exist_ok=True)
        os.utime(folder, (1, 1) if folder in (others[0], unlocked) else (now - 10, now - 10))
    with process.scratch() as scratch:
        assert set(parent.iterdir()) == {held, scratch, *others} and scratch.is_dir()
    assert set(parent.iterdir()) == {held, *others}
    alive.terminate()
    alive.communicate()


def test_a_limit_of_a_files_length_is_named(parent: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 1; exec {sys.executable} -B -c '{WRITE}'"],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(parent)},
    )
    assert "CompileError: the program to compile cannot be written ([Errno 27] File too large" in done.stderr
    assert f"The temporary folder {str(parent)!r} is full, or a file exceeds the size limit (ulimit -f)" in done.stderr
    assert not [*parent.iterdir()]


def test_a_full_disk_is_named_as_that_and_not_as_too_little_memory(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = export_step("full", TrainingStep(lambda x: x * 2, (jax.ShapeDtypeStruct((8,), jnp.float32),), ()), target("cpu"))
    cache.forget()

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CompileError, match=rf"No space left on device.*The temporary folder '{parent}' is full.*TMPDIR"):
        compile_programs([program], target("cpu"), timeout=60)
    message = f"RESOURCE_EXHAUSTED: {parent}/tempfile-1; No space left on device"
    assert "is full" in _remedy(message, 1) and "memory" not in _remedy(message, 1)
    assert "ran out of memory" in _remedy("RESOURCE_EXHAUSTED: out of memory", 1)


# Pages.


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    # Opened for both, so that neither side waits for the other for ever.
    held = os.open(pipe, os.O_RDWR)
    reader = threading.Thread(target=lambda: read.append(os.read(held, 100)), daemon=True)
    reader.start()
    assert write_whole(pipe, "text") == pipe
    reader.join(10)
    os.close(held)
    assert read == [b"text"] and pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_links_target_is_written_and_keeps_its_mode(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "report.html", tmp_path / "link.html"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    assert write_whole(link, "new") == link
    assert link.is_symlink() and target.read_text() == "new" and target.stat().st_mode & 0o777 == 0o600
    assert list(target.parent.iterdir()) == [target]


def test_a_device_may_be_given_where_its_folder_cannot_be_written_to(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert checked_path(pipe) == pipe
    with pytest.raises(errors.ArgumentError, match="cannot be written .*Permission denied"):
        checked_path(tmp_path / "report.html")
    with pytest.raises(errors.ArgumentError, match="cannot be written .*File name too long"):
        checked_path(tmp_path / ("a" * 300))


def test_a_null_byte_is_refused_in_words_and_a_lone_surrogate_is_shown_as_an_escape(tmp_path):
    with pytest.raises(errors.ArgumentError, match="path='a.*' cannot be written .*null (byte|character)"):
        rj.save_report("a\0b", JOB, ["full"], "cpu")
    odd = rj.Workload(JOB.loss, JOB.params, JOB.batch, JOB.blocks, name="\ud800")
    rj.save_report(tmp_path / "report.html", odd, ["full"], "cpu")
    assert r"\ud800" in (tmp_path / "report.html").read_text()
