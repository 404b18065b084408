"""Two processes on one machine, each with four of a mesh's eight devices: a step equals that of one device in every mode."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.two_processes import MODES

ROOT = Path(__file__).parents[1]
SECONDS = 400


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_both(address, folder, environment):
    """The exit statuses of both processes (the second is ended if the first fails), and their last output."""
    command = [sys.executable, "-m", "tests.two_processes", address]
    logs = [(folder / f"log_{rank}").open("w+") for rank in range(2)]
    both = [
        subprocess.Popen([*command, str(rank), str(folder / f"{rank}.npz")], env=environment, cwd=ROOT, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    try:
        ends = time.monotonic() + SECONDS
        while (
            time.monotonic() < ends
            and any(process.poll() is None for process in both)
            and not any(process.poll() for process in both)
        ):
            time.sleep(0.2)
    finally:
        for process, log in zip(both, logs, strict=True):
            process.kill()  # nothing happens to one that has ended
            process.wait()
            log.close()
    output = "\n".join((folder / f"log_{rank}").read_text()[-3000:] for rank in range(2))
    return [process.returncode for process in both], output


@pytest.fixture(scope="module")
def results(tmp_path_factory, in_a_hurry):
    environment = in_a_hurry | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": f"{in_a_hurry['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
    }
    for _ in range(3):
        folder = tmp_path_factory.mktemp("processes")
        codes, output = run_both(f"127.0.0.1:{free_port()}", folder, environment)
        # Another program may take the port between its choice and its use.
        if codes == [0, 0] or "in use" not in output:
            break
    assert codes == [0, 0], output
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(2)]


@pytest.mark.parametrize("policy", MODES)
def test_a_step_of_two_processes_is_that_of_one_device(results, policy):
    first, second = results
    alone = {name.partition("/")[2]: value for name, value in first.items() if name.startswith("alone/")}
    assert len(alone) > 10
    for place, expected in alone.items():
        actual = first[f"{policy}/{place}"]
        assert actual.dtype == expected.dtype == np.float64
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())
        assert np.array_equal(actual, second[f"{policy}/{place}"]), "both see the same array"


def test_each_process_has_half_of_what_is_divided(results):
    first, second = results
    halves = 0
    for name in (name for name in first if name.startswith("full/") and not name.endswith("/here")):
        whole, here = first[name].nbytes, int(first[f"{name}/here"])
        assert here == int(second[f"{name}/here"]) and here in (whole // 2, 4 * whole), "divided by 8, or on all of 4 devices"
        halves += here == whole // 2
    assert halves == 9, "seven matrices of the layers, the embedding and the head"
