"""`examples/train_anywhere.py`: the same losses on every mesh, after a kill, and after damage to what was saved."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from examples import train_anywhere
from examples.distributed import command, processes, training
from examples.distributed.checkpoints import CheckpointError, Checkpoints, checksums
from examples.distributed.setting import Setting
from remat_jax.errors import ArgumentError, PolicyError

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--layers", "1", "--width", "16", "--heads", "2", "--length", "8", "--batch", "4")
# In float64 a run differs from another one by the order of its sums alone.
EXACT = (*SMALL, "--dtype", "float64", "--log-every", "1")
SETTING = Setting(layers=1, width=16, heads=2, length=8, batch=4)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """The command turns 64-bit types on for its whole process."""
    yield
    jax.config.update("jax_enable_x64", False)


def losses(path: Path) -> dict[int, list[float]]:
    """The losses of each step in a file of metrics, in the order in which they were computed."""
    found: dict[int, list[float]] = {}
    for line in path.read_text().splitlines():
        found.setdefault(json.loads(line)["step"], []).append(json.loads(line)["loss"])
    return found


@contextlib.contextmanager
def started(log: Path, environment: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The script in a process of its own, which does not outlive the test."""
    with log.open("wb") as output:
        line = [sys.executable, str(ROOT / "examples" / "train_anywhere.py"), *EXACT, *arguments]
        child = subprocess.Popen(line, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield child
        finally:
            child.kill()
            child.wait()


def wait_for(holds: Callable[[], bool], children: list[subprocess.Popen[bytes]], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit and all(child.poll() is None for child in children)
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_process_is_killed_and_the_losses_go_on_on_another_mesh(tmp_path: Path, in_a_hurry: dict[str, str]) -> None:
    """Two processes of two devices each, one of them killed; then one process of two; against one device undisturbed."""
    environment = in_a_hurry | {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
    metrics, saved = tmp_path / "metrics.jsonl", tmp_path / "run"
    common = ("--metrics", str(metrics), "--checkpoint", str(saved), "--save-every", "3")
    together = ("--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2", "--heartbeat", "10")
    first = (*common, *together, "--mesh", "data=2,fsdp=2", "--steps", "100000")
    with (
        started(tmp_path / "0.log", environment, *first, "--process-id", "0") as survivor,
        started(tmp_path / "1.log", environment, *first, "--process-id", "1") as victim,
    ):
        wait_for(lambda: metrics.exists() and len(losses(metrics)) >= 8, [survivor, victim], 240)
        victim.send_signal(signal.SIGKILL)
        # By itself, or ended by JAX after the heartbeat, where it waits for the other one outside of a step.
        assert survivor.wait(120) in (command.FAILED, -signal.SIGABRT)
    lost = losses(metrics)
    steps = 1 + max(lost) + 3
    second = (*common, "--mesh", "fsdp=2", "--policy", "offload_inputs", "--steps", str(steps))
    with started(tmp_path / "again.log", environment, *second) as child:
        assert child.wait(240) == 0, (tmp_path / "again.log").read_text()
    told = (tmp_path / "again.log").read_text()
    found, begun = losses(metrics), int(told.split("at step ")[1].split(",")[0])
    assert 3 <= begun <= max(lost) + 1 and begun % 3 == 0 and "fsdp=2" in told

    undisturbed = tmp_path / "undisturbed.jsonl"
    assert train_anywhere.main([*EXACT, "--policy", "off", "--metrics", str(undisturbed), "--steps", str(steps)]) == 0
    expected = {step: values[0] for step, values in losses(undisturbed).items()}
    assert found.keys() == expected.keys() == set(range(steps))
    # What was lost with the kill has been computed twice.
    assert [len(found[step]) for step in sorted(found)] == [1] * begun + [2] * (max(lost) + 1 - begun) + [1] * 3
    for step, values in found.items():
        np.testing.assert_allclose(values, expected[step], rtol=1e-10, err_msg=f"step {step}")
    assert expected[0] - expected[steps - 1] > 0.1, "the losses would be alike if nothing were learnt"
