"""The predictions of `rj.measure`: `python -m benchmarks.gpu.predict JOB FILE CASE…`, during the run but without its GPU.

Each case is `form/mode`; each answer is appended to FILE as a line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import remat_jax as rj
from benchmarks.gpu.jax_run import precision, step_of, workload
from benchmarks.gpu.job import Job
from benchmarks.record import gpus
from examples.models import linen
from remat_jax.hardware import target


def target_of(job: Job) -> str:
    """The target to predict for: the first GPU that the driver names, or an H200 if it names none."""
    if job.device == "cpu":
        return "cpu"
    name = next((gpu["name"] for gpu in gpus()), None)
    return "h200" if name is None else target(name).name


def predict(job: Job) -> dict[str, Any]:
    """The fields of one row that are known before it runs."""
    with precision(job.size.dtype):
        if job.variant == "accumulate":
            step = step_of(dataclasses.replace(job, mode="off+accumulate"))  # the policy comes from measure
            whole, policy = finished(step), job.policy
        elif job.variant == "unlinked":
            whole, policy = finished(step_of(job)), "off"  # it has its policy already
        else:
            whole, policy = workload(job), job.policy
        report = rj.measure(whole, policy, target=target_of(job))
    return {
        "predicted_target": report.target,
        "predicted_device_bytes": report.device_bytes,
        "predicted_host_bytes": report.host_bytes,
        "predicted_warnings": list(report.warnings),
    }


def finished(step: Any) -> rj.Workload:
    """A finished training step as a workload."""
    return rj.Workload.from_step(step.function, *step.arguments, blocks=linen.DecoderLayer, donate_argnums=step.donate_argnums)


def main() -> None:
    """Predict every case, one after the other."""
    template, path = Job.from_json(sys.argv[1]), Path(sys.argv[2])
    for case in sys.argv[3:]:
        form, mode = case.split("/", 1)
        try:
            answer = predict(dataclasses.replace(template, form=form, mode=mode))
        except Exception as error:
            # A case that does not compile must not stop the other predictions.
            answer = {"predicted_error": f"{type(error).__name__}: {error}"[:1500]}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": case, **answer}) + "\n")


if __name__ == "__main__":
    main()
