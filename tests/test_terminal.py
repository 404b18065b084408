"""Terminal output: control characters are escaped, and no stream or folder ends a command in a traceback."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

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
COMMAND = f"{sys.executable} -m remat_jax.cli"
MEASURE = f"{COMMAND} measure train.py:job --target cpu -p everything --residuals"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("terminal")
    (made / "train.py").write_text(TRAIN)
    return made


def run(folder: Path, command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(["sh", "-c", command], cwd=folder, env=environment, capture_output=True, timeout=240)


def test_a_table_has_no_control_character_and_no_letter_that_the_encoding_lacks(folder: Path) -> None:
    """Standard output is read while standard error is closed, and the other way round."""
    table = run(folder, f"{MEASURE} 2>&-", PYTHONIOENCODING="ascii")
    assert table.returncode == 0 and without_control_characters(table.stdout)
    text = table.stdout.decode("ascii")
    assert r"a \x1b]0;title \u202e job" in text and r"up\x1b[31m" in text
    assert "outputs - aliased" in text and "?" not in text
    progress = run(folder, f"{MEASURE} >&-", PYTHONIOENCODING="latin-1")
    assert progress.returncode == 0 and b"compiled everything" in progress.stderr
    assert without_control_characters(progress.stderr)


def test_a_terminal_shows_what_goes_on_while_the_users_code_runs_and_is_traced(folder: Path) -> None:
    """In a pipe each step has its line, and nothing else is printed."""
    (folder / "slow.py").write_text(
        "import time\nfrom train import *\nof_train = job\n\ndef slow():\n    time.sleep(0.5)\n    made = of_train()\n"
        "    loss = made.loss\n    made.loss = lambda *args: [time.sleep(0.5), loss(*args)][1]\n    return made\n"
    )
    command = f"{COMMAND} measure slow.py:slow --target cpu -p full"
    piped = run(folder, command).stderr.decode()
    lines = [re.sub(r"\d+ s", "N s", line) for line in piped.splitlines()]
    assert lines[0].startswith("[0/1, N s] a ")
    assert sorted(lines[1:]) == [f"[1/1, N s] compiled {policy} for cpu" for policy in ("full", "off")]
    main, worker = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "70", "TERM": "xterm"}
    process = subprocess.Popen(["sh", "-c", command], cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=worker)
    os.close(worker)
    text = ""
    with contextlib.suppress(OSError):  # Linux ends a pseudo-terminal with an error
        while part := os.read(main, 1 << 16):
            text += part.decode()
    os.close(main)
    assert process.wait(240) == 0
    for activity in ("running slow.py:slow", "tracing the step under full", "tracing what full keeps"):
        assert re.search(rf"{activity}, \d+ s", text), text
    assert "tracing," in text and "…" not in text, "a long line is broken, not cut"


def without_control_characters(shown: bytes) -> bool:
    assert b"Traceback" not in shown, shown.decode()
    return not set(shown) & {*range(10), *range(11, 32), 127}


def test_a_full_disk_and_a_folder_that_is_gone_are_errors(folder: Path) -> None:
    full = run(folder, f"{COMMAND} targets --json > /dev/full")
    assert full.returncode == 1
    assert full.stderr == b"error: standard output cannot be written (No space left on device)\n"
    gone = run(folder, f"mkdir gone && cd gone && rmdir ../gone && {MEASURE}")
    assert gone.returncode == 1 and gone.stderr.startswith(b"error: the working directory is gone") and not gone.stdout


def test_errors_warnings_and_pages_show_escapes() -> None:
    with pytest.raises(PolicyError, match=r"\\x1b\[2J"):
        rj.Policy.parse("keep: \x1b[2J")
    assert str(ArgumentError("a\nb\t\x07")) == "a\nb\t\\x07"
    assert escaped("<\x1b[2J>") == r"&lt;\x1b[2J&gt;"
