"""`write_whole`: the file at the path keeps its kind, its place and its mode."""

from __future__ import annotations

import os
import tempfile
import threading

import pytest

import remat_jax as rj
from remat_jax import errors
from remat_jax.overview.save import checked_path
from remat_jax.report.document import write_whole
from tests.report_pages import JOB


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
