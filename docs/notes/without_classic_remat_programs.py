"""Does XLA get the same program from a region of `remat_jax` as from one of JAX's classic rematerialisation?

The steps are those of the 36 recorded plans of six models, and of four named policies more.

python docs/notes/without_classic_remat_programs.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
from without_classic_remat_forms import FORMS

import remat_jax as rj
from benchmarks.plan.workloads import CASES
from remat_jax.hardware import target
from remat_jax.memory.compile.exporting import export_step

ROOT = Path(__file__).resolve().parents[2]


def read(text: str) -> Any:
    """The policy, or the policies by layer, that `text` describes."""
    return (rj.LayerPolicies if "×" in text else rj.Policy).parse(text)


def program_text(form: str, job: Any, policy: Any) -> str:
    """The program of a step for an H200, without the names of places in it."""
    jax.clear_caches()
    with FORMS[form]():
        program = export_step("step", job.step(policy), target("h200"))
    text = str(jax.export.deserialize(bytearray(program.blob)).mlir_module())
    return re.sub(r"loc\(#loc\d*\)|#loc.*\n", "", text)


def main() -> None:
    """Print the table."""
    path = ROOT / "benchmarks" / "results" / "2026-11-30-plans-again-h200-jax0.10.2.json"
    policies: dict[str, dict[str, None]] = {}
    for row in json.loads(path.read_text())["rows"]:
        policies.setdefault(row["workload"], {}).update(dict.fromkeys([json.dumps(row["policies"])]))
    print("| model | steps | the same program |\n| --- | ---: | ---: |")
    for case in CASES.values():
        job = case(6).workload
        planned = [{block: read(json.loads(text)[block.__name__]) for block in job.blocks} for text in policies[job.name]]
        every = [*planned, *("full", "dots", "everything", "offload_inputs")]
        same = [len({program_text(form, job, policy) for form in ("classic", "d own region")}) == 1 for policy in every]
        print(f"| {job.name} | {len(same)} | {sum(same)} |", flush=True)


if __name__ == "__main__":
    main()
