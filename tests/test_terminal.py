"""Terminal output: control characters are escaped, and no stream or folder ends a command in a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax.errors import ArgumentError, PolicyError
from remat_jax.report.document import escaped

ROOT = Path(__file__).resolve().parents[1]
TRAIN = r"""
import flax.linen as nn, jax, jax.numpy as jnp, remat_jax as rj

class Up(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(8)(x))

class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + Up(name="up\x1b[31m\x07")(x)

def job():
    x, layer = jax.ShapeDtypeStruct((4, 8), jnp.float32), Layer()
    params = jax.eval_shape(layer.init, jax.random.key(0), x)
    return rj.Workload(lambda p, x: layer.apply(p, x).sum(), params, (x,), Layer, name="a \x1b]0;title \u202e job")
"""
COMMAND = [
    sys.executable,
    "-m",
    "remat_jax.cli",
    "measure",
    "train.py:job",
    "--target",
    "cpu",
    "-p",
    "everything",
    "--residuals",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("terminal")
    (made / "train.py").write_text(TRAIN)
    return made


def run(folder: Path, *command: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | more.pop("env", {})
    return subprocess.run(command or COMMAND, cwd=folder, env=environment, capture_output=True, timeout=120, **more)


def check_table(shown: bytes, encoding: str) -> None:
    """Neither stream has a control character, and what the encoding lacks is replaced."""
    assert b"Traceback" not in shown, shown.decode()
    assert not set(shown) & {*range(10), *range(11, 32), 127}
    text = shown.decode(encoding)
    assert r"a \x1b]0;title \u202e job" in text and r"up\x1b[31m" in text
    assert ("outputs − aliased" if encoding == "utf-8" else "outputs - aliased") in text and "?" not in text


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_table_in_any_encoding_has_no_control_character(folder: Path, encoding: str) -> None:
    done = run(folder, env={"PYTHONIOENCODING": encoding})
    assert done.returncode == 0
    check_table(done.stdout + done.stderr, encoding)


def test_a_closed_stream_and_a_folder_that_is_gone(folder: Path) -> None:
    """With one stream closed, the other is that of the command in a third encoding."""
    latin = {"PYTHONIOENCODING": "latin-1"}
    without_output = run(folder, "sh", "-c", f"{' '.join(COMMAND)} >&-", env=latin)
    assert without_output.returncode == 0 and b"compiled everything" in without_output.stderr
    without_errors = run(folder, "sh", "-c", f"{' '.join(COMMAND)} 2>&-", env=latin)
    assert without_errors.returncode == 0
    check_table(without_errors.stdout + without_output.stderr, "latin-1")
    gone = run(folder, "sh", "-c", f"mkdir gone && cd gone && rmdir ../gone && {' '.join(COMMAND)}")
    assert gone.returncode == 1 and gone.stderr.startswith(b"error: the working directory is gone") and not gone.stdout


@pytest.mark.parametrize("json", ["", " --json"])
def test_a_full_disk_under_standard_output_is_an_error(folder: Path, json: str) -> None:
    full = run(folder, "sh", "-c", f"{sys.executable} -m remat_jax.cli targets{json} > /dev/full")
    assert full.returncode == 1
    assert full.stderr == b"error: standard output cannot be written (No space left on device)\n"


def test_errors_warnings_and_pages_show_escapes() -> None:
    with pytest.raises(PolicyError, match=r"\\x1b\[2J"):
        rj.Policy.parse("keep: \x1b[2J")
    assert str(ArgumentError("a\nb\t\x07")) == "a\nb\t\\x07"
    assert escaped("<\x1b[2J>") == r"&lt;\x1b[2J&gt;"


def test_a_source_line_is_known_where_the_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    job = rj.Workload(lambda w, x: Block.run(w, x).sum(), jnp.ones((4, 4)), (jnp.ones((2, 4)),), Block.run)
    (row, *_) = [row for row in rj.residuals(job, "everything").rows if "cos" in row.name]
    assert row.source.startswith(__file__)


class Block:
    @staticmethod
    @rj.block
    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sin(jnp.tanh(x @ w))
