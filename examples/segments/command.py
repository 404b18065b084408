"""The command line of `examples/deep_mlp.py`: measure everything, then a table or JSON, and pictures."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remat_jax import compat
from remat_jax.cli.output import console, finite, progress
from remat_jax.errors import RematError
from remat_jax.parity import TOLERANCES, float64_error
from remat_jax.parity.torch_side import imports_frozen

from ..demo.torch_rows import one_thread
from . import depths, jax_forms, show, torch_forms
from .setting import QUICK, Row, Setting, cuts
from .timing import relative_times

Tell = Callable[[str, int, int], None]


def torch_row(setting: Setting, name: str, cut: tuple[int, ...], plain: dict[str, Any]) -> Row:
    """One form of PyTorch, not yet timed."""
    from .. import pytorch

    segments = torch_forms.segments_of(name, cut)
    executions, matmuls = torch_forms.counts(setting, segments)
    cost = pytorch.deep_mlp_cost(setting.num_layers, cut, batch=setting.batch, **setting.widths)
    fields = ("saved_bytes", "peak_bytes", "executions", "matmuls")
    return Row(
        framework=torch_forms.FRAMEWORK,
        form=name,
        saved_bytes=torch_forms.saved_bytes(setting, segments),
        peak_bytes=torch_forms.peak_bytes(setting, segments),
        executions=executions,
        matmuls=matmuls,
        gradient_error=float64_error(plain, torch_forms.gradients(setting, segments))[0],
        relative_time=None,
        closed_form={field: getattr(cost, field) for field in fields},
    )


def jax_row(setting: Setting, name: str, form: jax_forms.Form, plain: dict[str, Any], state: dict[str, Any]) -> Row:
    """One form of JAX, not yet timed."""
    matmuls = jax_forms.matmul_count(setting, form)
    backward = 2 * setting.num_layers - 1
    return Row(
        framework=jax_forms.FRAMEWORK,
        form=name,
        saved_bytes=jax_forms.saved_bytes(setting, form),
        peak_bytes=jax_forms.peak_bytes(setting, form),
        executions=matmuls - backward,
        matmuls=matmuls,
        gradient_error=float64_error(plain, jax_forms.gradients(setting, form, state))[0],
        relative_time=None,
        closed_form={"saved_bytes": form.saved_bytes, "matmuls": setting.num_layers + backward + form.recomputed},
    )


def run(setting: Setting, tell: Tell) -> dict[str, Any]:
    """Measure all forms at `setting` and all depths; plain data, except for the rows."""
    done, parts = 0, len(cuts(setting.num_layers)) + len(jax_forms.forms(setting)) + 2 * len(setting.depths) + 2

    def next_part(what: str) -> None:
        nonlocal done
        tell(what, done, parts)
        done += 1

    # Counting kept bytes collects garbage, which takes long if much is imported.
    with one_thread(), imports_frozen():
        plain, state = torch_forms.gradients(setting, None), torch_forms.model_of(setting).state_dict()
        rows, steppers = [], {torch_forms.FRAMEWORK: {}, jax_forms.FRAMEWORK: {}}
        for name, cut in cuts(setting.num_layers).items():
            next_part(f"{torch_forms.FRAMEWORK}: {name}")
            rows.append(torch_row(setting, name, cut, plain))
            steppers[torch_forms.FRAMEWORK][name] = torch_forms.Stepper(setting, torch_forms.segments_of(name, cut))
        for name, form in jax_forms.forms(setting).items():
            next_part(f"{jax_forms.FRAMEWORK}: {name}")
            rows.append(jax_row(setting, name, form, plain, state))
            steppers[jax_forms.FRAMEWORK][name] = jax_forms.Stepper(setting, form, state)
        times = {}
        for framework, its_steppers in steppers.items():
            next_part(f"{framework}: step times")
            # `relative_times` calls the reference `off`.
            in_turn = {"off" if name == "plain" else name: one for name, one in its_steppers.items()}
            times[framework] = relative_times(in_turn, [()], setting.rounds)
        rows = [_timed(row, times[row.framework], steppers[row.framework][row.form]) for row in rows]
        kept, rules = {}, []
        for depth in setting.depths:
            next_part(f"kept bytes at {depth} layers")
            kept[depth] = depths.kept_at(setting, depth)
            next_part(f"the rules of thumb at {depth} layers")
            rules.append(depths.rule_at(setting, depth, kept[depth]))
    tell("done", done, parts)
    return {"rows": rows, "depths": kept, "rules": rules}


def _timed(row: Row, times: dict[str, float], stepper: Any) -> Row:
    compiled = stepper.compiled_matmuls()
    honest = compiled is None or compiled == row.matmuls
    return dataclasses.replace(row, relative_time=times["off" if row.form == "plain" else row.form] if honest else None)


def problems(found: dict[str, Any]) -> list[str]:
    """The figures that differ from their closed forms, and the gradients that differ from the plain model's."""
    wrong = [f"{row.framework}, {row.form}: {', '.join(row.wrong)}" for row in found["rows"] if row.wrong]
    limit = TOLERANCES["float64"].value
    wrong += [f"{row.framework}, {row.form}: gradients" for row in found["rows"] if not row.gradient_error <= limit]
    for depth, forms in found["depths"].items():
        wrong += [f"{depth} layers, {name}" for name, one in forms.items() if one["measured"] != one["closed_form"]]
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments, run, and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="deep_mlp.py", description="A deep perceptron in checkpointed segments.")
    parser.add_argument("--output", type=Path, default=Path("build/deep_mlp"), help="folder for the pictures (build/deep_mlp)")
    parser.add_argument("--layers", type=int, help="layers of the model in the table (62, or 14 with --quick)")
    parser.add_argument("--rounds", type=int, help="rounds of timed steps (9, or 1 with --quick)")
    parser.add_argument("--target", choices=("h200", "none"), default=None, help="what JAX's steps are compiled for (h200)")
    parser.add_argument("--quick", action="store_true", help="a small model, and no compiling for a target")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    changes: dict[str, Any] = {"num_layers": options.layers, "rounds": options.rounds}
    changes = {name: value for name, value in changes.items() if value is not None}
    if options.target:
        changes["target"] = None if options.target == "none" else options.target
    try:
        setting = dataclasses.replace(QUICK if options.quick else Setting(), **changes)
        options.output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    compat.keep_to_cpu_without_gpu()
    try:
        with progress() as show_step:
            found = run(setting, show_step)
    except RematError as error:
        print(f"error: {error}\nWith --target none nothing is compiled for a GPU.", file=sys.stderr)
        return 1
    wrong = problems(found)
    try:
        pictures = show.pictures(setting, found, options.output)
    except ImportError as error:
        pictures = []
        print(f"no pictures: {error}", file=sys.stderr)
    if options.json:
        data = {**found, "rows": [row.to_dict() for row in found["rows"]], "setting": dataclasses.asdict(setting)}
        print(json.dumps(finite({**data, "pictures": pictures, "problems": wrong, "passed": not wrong}), allow_nan=False))
    else:
        for part in show.report(setting, found, pictures, wrong):
            console().print(part, markup=False)
    return 1 if wrong else 0
