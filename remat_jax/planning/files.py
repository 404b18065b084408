"""Plans as JSON with a version. Every value read is checked; nothing that a file names is imported or run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remat_jax.core.marks import CHECKPOINTS, Block
from remat_jax.errors import ArgumentError, PlanningError, RematError
from remat_jax.memory.compile.options import OPTION
from remat_jax.planning.model import Model, block_key, find_block
from remat_jax.planning.plan_data import PlanData
from remat_jax.planning.point import LayerRow, Part, Point
from remat_jax.policy import LayerPolicies, Policy
from remat_jax.reading import read_limited
from remat_jax.report.document import write_whole
from remat_jax.workload import Workload

VERSION = 3
READ = (1, 2, 3)
"""The versions that can be read. From 2 on, adjacent runs of one policy are separate scans. From 3 on, a file has the mesh and
the number of the loss's own checkpoints, and blocks may be functions and checkpoints."""
MOST_BYTES = 64 * 2**20
"""A larger file is not a plan."""

MOST_RUNS = 10_000
"""The most runs of one block: no model has more layers, and reading takes quadratic time."""

MOST_FACTOR = 100
"""The largest memory limit, in per cent."""

_ACTIONS = ("save", "offload", "recompute")


def to_dict(plan: PlanData) -> dict[str, Any]:
    """The plan as plain data."""
    values = {one.name: getattr(plan, one.name) for one in dataclasses.fields(plan)}
    for name in ("frontier", "named", "parts"):
        values[name] = [dataclasses.asdict(one) for one in values[name]]
    policies = [{"block": list(block_key(block)), **_written(policy)} for block, policy in plan.policies.items()]
    best = plan.best_named
    said = {"texts": plan.texts, "best_named": best.name if best else None}
    return {"version": VERSION, **values, "policies": policies, "model": dataclasses.asdict(plan.model), **said}


def to_json(plan: PlanData) -> str:
    """The plan as JSON."""
    return json.dumps(to_dict(plan), indent=1, allow_nan=False) + "\n"


def write(path: str | os.PathLike[str], text: str, argument: str) -> Path:
    """Write a file atomically: a concurrent reader finds the old or the new file, and concurrent writers are safe.

    Raises:
      PlanningError: the file cannot be written.
    """
    try:
        return write_whole(path, text)
    except (OSError, TypeError, ValueError) as error:
        raise PlanningError(f"{argument}={str(path)!r} cannot be written ({error}); give another file") from None


def read(path: str | os.PathLike[str], workload: Workload | None) -> dict[str, Any]:
    """The arguments of a `Plan` from a file that `to_json` wrote.

    Raises:
      PlanningError: the file cannot be read, is malformed or of another version, or is for another model.
    """
    told = f"the plan file {str(path)!r}"
    if workload is not None and not isinstance(workload, Workload):
        raise ArgumentError(f"workload={workload!r}: expected a remat_jax.Workload, or nothing")
    try:
        data = json.loads(read_limited(path, MOST_BYTES).decode("utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise PlanningError(f"{told} cannot be read ({error}); give a file that Plan.save wrote") from None
    try:
        return _checked(data, workload, told)
    except _Malformed as error:
        raise PlanningError(f"{told} is malformed: {error}; give a file that Plan.save wrote") from None
    except RecursionError:
        raise PlanningError(f"{told} is malformed: it is nested too deeply; give a file that Plan.save wrote") from None


_Checks = dict[str, Callable[[Any, str], Any]]
"""By key, the check of an object's value."""


class _Malformed(Exception):
    """A value of the file is wrong; the message names it."""


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")


def _checked(data: Any, workload: Workload | None, told: str) -> dict[str, Any]:
    if not isinstance(data, dict) or "version" not in data:
        raise _Malformed("it is not an object with a version")
    if type(data["version"]) is not int or data["version"] not in READ:
        known = f"{', '.join(map(str, READ[:-1]))} and {READ[-1]}"
        raise PlanningError(f"{told} has version {data['version']!r}, but this release reads only versions {known}: plan again")
    values = _fields({**_NEWER, **data}, _PLAN, "the plan")
    model = _model(values["model"])
    if workload is not None:
        model.check_workload(workload, told)
    values["model"] = model
    values["policies"] = _policies(values["policies"], workload, told)
    for name in ("frontier", "named"):
        values[name] = tuple(_point(one) for one in values[name])
    values["parts"] = _parts(values["parts"])
    values["tried"] = tuple((_text(name, "tried"), _count(size, "tried")) for name, size in _pairs(values["tried"]))
    values["assumed_rates"] = tuple(_text(one, "assumed_rates") for one in values["assumed_rates"])
    values["notes"] = tuple(_text(one, "notes") for one in values["notes"])
    return values


def _model(data: Any) -> Model:
    checks: _Checks = {**dict.fromkeys(("parameters", "batch", "blocks"), _list), "mesh": _or_none(_list)}
    checks["checkpoints"] = _or_none(_count)
    # Plans before version 3 have neither.
    values = _fields({"mesh": None, "checkpoints": None, **data} if isinstance(data, dict) else data, checks, "model")
    parameters, batch = (tuple(_leaf(one) for one in values[name]) for name in ("parameters", "batch"))
    blocks = tuple(_key({"block": one}) for one in values["blocks"])
    mesh = None if values["mesh"] is None else tuple(_axis(one) for one in values["mesh"])
    return Model(parameters, batch, blocks, mesh, values["checkpoints"])


def _axis(data: Any) -> tuple[str, int]:
    axis, size = _items(data, 2, "an axis of mesh")
    return _text(axis, "mesh"), _count(size, "mesh", least=2)


def _leaf(data: Any) -> tuple[str, tuple[int, ...], str]:
    path, shape, dtype = _items(data, 3, "a parameter of model")
    return _text(path, "path"), tuple(_count(one, "shape") for one in _list(shape, "shape")), _text(dtype, "dtype")


def _key(data: dict[str, Any]) -> tuple[str, str, str]:
    kind, name, module = (_text(one, "block") for one in _items(data["block"], 3, "block"))
    if kind not in ("class", "function", "glob", CHECKPOINTS) or not name:
        raise _Malformed(f"block={data['block']!r} is neither a class, a function nor a glob")
    return kind, name, module


def _policies(data: list[Any], workload: Workload | None, told: str) -> dict[Block, Any]:
    # `groups` is written only if there are groups: an older reader refuses the file.
    full = [{"groups": [], **one} if isinstance(one, dict) else one for one in data]
    found = [(find_block(_key(one), workload, told), _policy(one)) for one in full if _has(one, "block", "runs", "groups")]
    if not found:
        raise _Malformed("policies is empty")
    if len(dict(found)) < len(found):
        raise _Malformed("policies has a block twice")
    return dict(found)


def _policy(data: dict[str, Any]) -> Any:
    """A policy, or a policy for each layer, from runs of equal layers."""
    runs = []
    if len(_list(data["runs"], "runs")) > MOST_RUNS:
        raise _Malformed(f"runs has {len(data['runs'])} items, expected at most {MOST_RUNS}")
    for run in data["runs"]:
        count, policy = _items(run, 2, "runs")
        try:
            runs.append((None if count is None else _count(count, "runs", least=1), Policy.from_dict(policy)))
        except RematError as error:
            raise _Malformed(f"policies: {error}") from None
    if len(runs) == 1 and runs[0][0] is None:
        return runs[0][1]
    groups = tuple(_group(one) for one in _list(data["groups"], "groups"))
    ends = list(itertools.accumulate(count or 0 for count, _ in runs))
    if not runs or any(count is None for count, _ in runs) or ends[-1] > 10**6:
        raise _Malformed("runs: expected pairs of a number of layers and a policy")
    try:
        return LayerPolicies(tuple((count or 0, policy) for count, policy in runs), tuple(ends[:-1]), groups)
    except RematError as error:
        raise _Malformed(f"policies: {error}") from None


def _group(data: Any) -> tuple[int, int]:
    first, last = _items(data, 2, "groups")
    return _count(first, "groups"), _count(last, "groups", least=1)


def _written(policy: Any) -> dict[str, Any]:
    """A policy as runs of equal layers, and the groups of layers if there are any."""
    if isinstance(policy, Policy):
        return {"runs": [[None, policy.to_dict()]]}
    groups = {"groups": [list(group) for group in policy.groups]} if policy.groups else {}
    return {"runs": [[len(layers), one.to_dict()] for layers, one in policy.ranges], **groups}


def _point(data: Any) -> Point:
    values = _fields({"timed": False, **data} if isinstance(data, dict) else data, _POINT, "a point of the frontier")
    return Point(**values | {"parts": _parts(values["parts"])})


def _parts(data: list[Any]) -> tuple[Part, ...]:
    found = []
    for one in data:
        # Older plans have no `every`; the layers were adjacent.
        values = _fields({"every": 1, **one} if isinstance(one, dict) else one, _PART, "a part")
        found.append(Part(**values | {"rows": tuple(LayerRow(**_fields(row, _ROW, "a residual")) for row in values["rows"])}))
    return tuple(found)


# --- checks of values -------------------------------------------------------------------------------------------------


def _text(value: Any, name: str) -> str:
    # Unprintable text could harm a terminal or a file.
    if not isinstance(value, str) or not value.isprintable():
        raise _Malformed(f"{name}={ascii(value)[:40]} is not a text of one line")
    return value


def _count(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _MOST:
        raise _Malformed(f"{name}={str(value)[:40]} is not an integer from {least} to 2¹²⁷")
    return value


def _seconds(value: Any, name: str) -> float:
    # math.isfinite fails on an integer larger than any float. The comparisons also refuse NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise _Malformed(f"{name}={str(value)[:40]} is not a number of at least 0")
    return float(value)


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise _Malformed(f"{name}={value!r} is neither true nor false")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Malformed(f"{name}={str(value)[:40]} is not a list")
    return value


def _compiler_options(value: Any, name: str) -> dict[str, int]:
    """The memory limit and no other option, because the options go to the compiler."""
    if not isinstance(value, dict) or set(value) - {OPTION}:
        raise _Malformed(f"{name}={ascii(value)[:80]} is none of {{}} and {{{OPTION!r}: a factor}}")
    if not all(type(factor) is int and 1 <= factor <= MOST_FACTOR for factor in value.values()):
        raise _Malformed(f"{name}={ascii(value)[:80]}: the factor is an integer from 1 to {MOST_FACTOR}")
    return dict(value)


def _any(value: Any, name: str) -> Any:
    return value


def _action(value: Any, name: str) -> str:
    if value not in _ACTIONS:
        raise _Malformed(f"{name}={value!r} is none of {', '.join(_ACTIONS)}")
    return str(value)


def _or_none(check: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, name: None if value is None else check(value, name)


def _items(value: Any, count: int, name: str) -> list[Any]:
    if len(_list(value, name)) != count:
        raise _Malformed(f"{name} has {len(value)} items, expected {count}")
    return value


def _pairs(value: Any) -> list[list[Any]]:
    return [_items(one, 2, "tried") for one in _list(value, "tried")]


def _has(data: Any, *names: str) -> bool:
    _fields(data, dict.fromkeys(names, _any), "policies")
    return True


def _fields(data: Any, checks: _Checks, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _Malformed(f"{where} is no object")
    known = {*checks, *(_SAID if checks is _PLAN else ())}
    missing, unknown = [name for name in checks if name not in data], [name for name in data if name not in known]
    if missing or unknown:
        raise _Malformed(f"{where} lacks {missing} and has {unknown}" if unknown else f"{where} lacks {missing}")
    return {name: check(data[name], name) for name, check in checks.items()}


_MOST = 2**127
"""The largest count: the FLOPs of a large cluster's step exceed 2⁶³."""
_SAID = ("version", "texts", "best_named")
_ROW: _Checks = {"residual": _text, "action": _action, "bytes": _count, "seconds": _or_none(_seconds)}
_PART: _Checks = {
    **dict.fromkeys(("block", "policy"), _text),
    **dict.fromkeys(("first", "layers", "saved_bytes", "offloaded_bytes", "recomputed_bytes"), _count),
    "every": lambda value, name: _count(value, name, least=1),
    "rows": _list,
    **dict.fromkeys(("forward_seconds", "backward_seconds", "recompute_seconds", "copy_seconds"), _seconds),
}
_POINT: _Checks = {
    "name": _text,
    "device_bytes": _or_none(_count),
    "host_bytes": _count,
    "seconds": _or_none(_seconds),
    "compiled": _flag,
    "parts": _list,
    "remark": _text,
    "timed": _flag,
}
_NEWER: dict[str, Any] = {"compiler_options": {}, "lower_bound": None, "timed": False, "assumed_rates": [], "next_bytes": 2**30}
"""The values of fields that older files lack: no memory limit, traced times, no bound."""
_PLAN: _Checks = {
    "policies": _list,
    **dict.fromkeys(("device_bytes", "predicted_bytes", "host_bytes", "recompute_flops", "budget"), _count),
    **dict.fromkeys(("seconds", "base_seconds"), _seconds),
    **dict.fromkeys(("frontier", "named", "parts", "tried", "notes", "assumed_rates"), _list),
    **dict.fromkeys(("workload", "target", "jax_version"), _text),
    "host_budget": _or_none(_count),
    **dict.fromkeys(("next_gib_seconds", "lower_bound"), _or_none(_seconds)),
    "timed": _flag,
    "next_bytes": lambda value, name: _count(value, name, least=1),
    "model": _any,
    "compiler_options": _compiler_options,
}
