"""The benchmarks' own logic: the jobs, a failing child, the rows; and a dry run on the CPU."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cpu
from benchmarks.gpu import __main__ as steps_command
from benchmarks.gpu import child, judge, step_predict, step_run
from benchmarks.gpu.gradients import compare, compare_and_keep
from benchmarks.gpu.job import SMALL, Job
from benchmarks.gpu.rows import Row, relate, table
from benchmarks.gpu.steps import TINY

# Gradients.


def test_the_worst_tensor_is_found_and_a_gradient_of_another_layer_does_not_agree() -> None:
    random = np.random.default_rng(0)
    right = {f"layers_{index}/kernel": random.normal(size=(8, 8)).astype("float32") for index in range(2)}
    swapped = {"layers_0/kernel": right["layers_0/kernel"], "layers_1/kernel": right["layers_0/kernel"]}
    error, worst, whole = compare(right, swapped)
    assert error > 1 and worst == "layers_1/kernel" and 0.5 < whole < error
    assert compare(right, right)[::2] == (0, 0)
    assert compare(right, {"layers_0/kernel": right["layers_0/kernel"]}) == (np.inf, "layers_1/kernel", np.inf)
    assert compare(right, right | {"layers_0/kernel": np.full((8, 8), np.nan, "float32")})[::2] == (np.inf, np.inf)
    # A gradient that cancels is measured by the global norm, and a bit of bfloat16 is seen.
    reference, ones = {"large": np.array([1000.0]), "cancelled": np.array([1e-9])}, np.ones(4, jnp.bfloat16)
    error, worst, _ = compare(reference, reference | {"cancelled": np.array([2e-9])})
    assert worst == "cancelled" and error == pytest.approx(1e-9)
    assert compare({"w": ones}, {"w": ones + np.asarray(2**-7, jnp.bfloat16)})[0] == 2**-7


def test_gradients_are_kept_and_judged_as_the_job_says(tmp_path: Path) -> None:
    job = Job(SMALL, "unrolled", "off", str(tmp_path), keep_gradients="plain.npz")
    right = {"a": np.full(100, 1.0, "float32"), "b": np.full(1, 0.1, "float32")}
    assert compare_and_keep(job, right) == {}
    other = dataclasses.replace(job, reference="plain.npz", keep_gradients=None)
    # Half of a small tensor is rounding relative to the norm of all gradients; a fifth of the large tensor is not.
    small, large = right | {"b": right["b"] * 1.5}, right | {"a": right["a"] * 1.2}
    assert [compare_and_keep(other, one)["gradients_agree"] for one in (right, small, large)] == [True, True, False]
    assert compare_and_keep(other, small)["gradient_error"] == pytest.approx(0.5, rel=1e-5)
    assert not {"gradients_agree"} & compare_and_keep(dataclasses.replace(other, reference="none.npz"), right).keys()


# Children.


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import sys; print('no memory', file=sys.stderr); sys.exit(3)", "ended with exit status 3; it said last: no memory"),
        ("import os; os.kill(os.getpid(), 9)", "ended with signal SIGKILL (out of host memory"),
        ("print('not JSON')", "ended with exit status 0"),
        ("import time; time.sleep(60)", "not done after 1 s, stopped"),
    ],
)
def test_a_child_that_fails_is_an_error_and_not_the_end(
    body: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_row.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = child.run_child("one_row", Job(SMALL, "unrolled", "off", "folder"), 1 if "sleep" in body else 60, {})
    assert answer["error"].startswith(error)


# Rows.


def test_a_row_takes_its_median_and_is_related_to_off() -> None:
    rows = [Row("jax", "scan", "off"), Row("jax", "scan", "offload"), Row("torch", "eager", "offload")]
    rows[0].take({"seconds": [1.0, 3.0, 2.0], "losses": [5.0, 4.0]}, tokens=100)
    rows[1].take({"seconds": [3.0], "gradient_global_error": 1.2, "gradients_agree": False}, tokens=100)
    rows[2].take({"error": "RESOURCE_EXHAUSTED"}, tokens=100)
    relate(rows)
    assert (rows[0].step_seconds, rows[0].tokens_per_second, rows[1].relative_time) == (2.0, 50.0, 1.5)
    assert [row.status for row in rows] == ["done", "done", "failed"] and [row.holds for row in rows] == [True, False, False]
    text = table([*rows, Row("jax", "scan", "dots")])
    assert "1.2e+00 WRONG" in text and "torch/eager/offload: failed: RESOURCE_EXHAUSTED" in text
    assert "jax/scan/dots: skipped: no time was left" in text and Row("jax", "scan", "dots").holds


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


# Peers on the CPU.


def test_more_flops_or_more_memory_than_by_hand_is_a_problem_and_time_is_not() -> None:
    peer = cpu.Measured("linen scan full", "nn.remat", False, 1.0, 100, 1000, 1000, 1.0)
    ours = dataclasses.replace(peer, contender="rj.remat", is_ours=True, trace_seconds=9.0, cpu_temp_bytes=1020)
    assert cpu.problems(ours, peer) == []
    problems = cpu.problems(dataclasses.replace(ours, matmul_flops=101, h200_temp_bytes=1001, cpu_temp_bytes=1021), peer)
    assert len(problems) == 3 and problems[0] == "linen scan full rj.remat: matmul FLOPs 101 against 100 of nn.remat"
    assert cpu.problems(dataclasses.replace(peer, matmul_flops=101), peer) == []
    assert "× 9.000" in cpu.table([[peer, ours]])


# Steps on a GPU: estimated, run, judged.


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


def test_a_plan_that_loses_or_needs_more_than_its_budget_is_told() -> None:
    named = {"model": "mlp", "policy": "dots", "device_bytes": 10, "step_seconds": 1.0, "estimated_seconds": {"nominal": 1.0}}
    plan = named | {"policy": "plan", "budget": 12, "step_seconds": 1.01, "measured_peak_bytes": 12}
    other = named | {"policy": "full", "step_seconds": 3.0, "estimated_seconds": {"nominal": 0.5}}
    judged = judge.judged([named, other, plan])
    assert judged["slower"] == judged["over_budget"] == [] and judged["rank_correlation"]["nominal"] < 0
    assert judged["memory_error"] == pytest.approx(1 / 6) and judge.judged([])["rank_correlation"] == {}

    lost = judge.judged([named, plan | {"step_seconds": 1.03, "measured_peak_bytes": 13}])
    assert lost["slower"] == ["mlp, plan: dots is faster"] and lost["over_budget"] == ["mlp, plan"]
    assert judge.judged([named | {"device_bytes": 13}, plan | {"step_seconds": 1.03}])["slower"] == [], "it does not fit"
    assert "| mlp, plan | 0.00 |" in judge.markdown([plan])
