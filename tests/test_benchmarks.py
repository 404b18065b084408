"""Benchmarks of steps on a GPU, in dry runs on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.gpu import __main__ as steps_command
from benchmarks.gpu import child, step_predict, step_run
from benchmarks.gpu.steps import TINY


def test_a_dry_run_measures_scan_and_offload_from_end_to_end(tmp_path: Path, in_a_hurry: dict[str, str]) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.modes", "--dry-run", "--output", str(tmp_path), "--commit", "abc"]
    command += ["--only", "jax/unrolled/off,jax/scan/offload"]
    # Without LLVM's optimizations both forms would round alike, and equal gradients would not show that they are compared.
    optimized = in_a_hurry | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    done = subprocess.run(command, env=optimized, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "modes.json").read_text())
    assert result["provenance"]["commit"] == "abc" and result["provenance"]["versions"]["jax"] == jax.__version__
    off, offload = result["rows"]
    assert off["losses"] == pytest.approx(offload["losses"], rel=1e-5) and (len(off["losses"]), len(off["seconds"])) == (3, 1)
    assert 0 < offload["gradient_error"] < 1e-5 and offload["gradient_reference"] == "jax/unrolled/off"
    assert off["predicted_device_bytes"] == pytest.approx(off["compiled_device_bytes"], rel=0.02)
    assert off["predicted_target"] == "cpu" and off["measured_peak_bytes"] is None and off["compiled_host_bytes"] == 0


def test_the_command_writes_one_file_of_what_was_estimated_and_measured(tmp_path, monkeypatch, children_as_here):
    """Run in this process on its processor: the rest only starts processes."""
    options = steps_command.parse(["--dry-run", "--only", "mlp", "torch", "--output", str(tmp_path), "--commit", "abc"])
    run = steps_command.Run(options, tmp_path)
    order = [("mlp", "off"), ("mlp", "full")]
    targets = {"calibrated": "cpu"}

    def tell(line: dict[str, Any]) -> None:
        with run.told.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    step_predict.predict(order, TINY, targets, tell)
    ran: list[str] = []

    def in_this_process(module: str, job: Any, seconds: float, env: dict[str, str]) -> dict[str, Any]:
        ran.append(module)
        done = {"seconds": [0.5, 0.5]} if module == "benchmarks.gpu.torch_run" else step_run.run(job)
        if len(ran) == 5:
            run.ends = 0.0
        return done

    monkeypatch.setattr(child, "run_child", in_this_process)
    run.run_peers()
    run.run_steps(subprocess.Popen(["true"]))
    data = json.loads((tmp_path / "gpu.json").read_text())
    rows = {(row["model"], row["policy"]): row for row in data["rows"]}
    assert [row for row in rows if row[0] == "torch"] == [("torch", mode) for mode in ("off", "checkpoint", "offload")]
    off, full = rows["mlp", "off"], rows["mlp", "full"]
    assert full["loss"] == pytest.approx(off["loss"], rel=1e-2) and full["compiled_device_bytes"] == full["device_bytes"]
    assert full["estimated_seconds"]["calibrated"] > off["estimated_seconds"]["calibrated"] > 0
    assert rows["mlp", "offload_inputs"]["error"] == "not reached in time"
    assert data["judged"]["ratio_error"].keys() == set(targets) and data["provenance"]["commit"] == "abc"

    again: list[dict[str, Any]] = []
    ran_on_a_gpu = data | {"rows": [off | {"measured_peak_bytes": 2**20}, full, rows["torch", "off"]]}
    step_predict.predict_again(ran_on_a_gpu, targets, again.append)
    assert [(line["policy"], line["measured_peak_bytes"]) for line in again] == [("off", 2**20)]
    assert again[0]["device_bytes"] == off["device_bytes"]
