"""Plans as versioned JSON. Every value read is checked; nothing that a file names is imported or executed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from remat_jax.core.marks import PARTS
from remat_jax.errors import ArgumentError, PlanningError, RematError
from remat_jax.memory.compile.backends import LIMIT_OPTIONS
from remat_jax.memory.compile.options import GRAPHS
from remat_jax.memory.compile.options import KINDS as GRAPH_KINDS
from remat_jax.planning.changes import CHANGES
from remat_jax.planning.findings import KINDS, SEVERITIES, PlanFinding
from remat_jax.planning.model import Model, block_key, find_block
from remat_jax.planning.plan_data import Beyond, LayerRow, Part, PlanData, Point
from remat_jax.policy import LayerPolicies, Policy
from remat_jax.reading import read_limited
from remat_jax.report.document import write_whole
from remat_jax.workload import Workload

VERSION = 4
READ = (1, 2, 3, 4)
"""The versions that can be read. Since version 2, adjacent runs of one policy are separate scans. Since version 3, a file has
the mesh and the number of the loss's own checkpoints, and blocks may be functions or checkpoints. Since version 4, findings and
promises are data instead of notes."""
MOST_BYTES = 64 * 2**20
"""The maximum size of a plan file."""
MOST_RUNS = 10_000
"""The maximum number of runs of one block: no model has more layers, and the time to read them is quadratic."""
_MOST = 2**127
"""Every count is below this. 2⁶³ is too small: the FLOPs of a large cluster's step exceed it."""
_ACTIONS = ("save", "offload", "recompute")
_DERIVED = ("version", "texts", "best_named", "notes")
"""Keys of a file that are not fields of `PlanData`."""


def to_dict(plan: PlanData) -> dict[str, Any]:
    """The plan as plain data."""
    values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    for name in ("frontier", "named", "parts", "findings", "beyond"):
        values[name] = [dataclasses.asdict(item) for item in values[name]]
    policies = [{"block": list(block_key(block)), **_written(policy)} for block, policy in plan.policies.items()]
    best = plan.best_named
    derived = {"texts": plan.texts, "best_named": best.name if best else None, "notes": list(plan.notes)}
    return {"version": VERSION, **values, "policies": policies, "model": dataclasses.asdict(plan.model), **derived}


def _written(policy: Policy | LayerPolicies) -> dict[str, Any]:
    """A policy as plain data: its runs of equal layers, and its groups of layers if there are any."""
    if isinstance(policy, Policy):
        return {"runs": [[None, policy.to_dict()]]}
    # Older readers refuse a file with `groups`, so the key is written only if there are groups.
    groups = {"groups": [list(group) for group in policy.groups]} if policy.groups else {}
    return {"runs": [[len(layers), of_run.to_dict()] for layers, of_run in policy.ranges], **groups}


def to_json(plan: PlanData) -> str:
    """The plan as JSON."""
    return json.dumps(to_dict(plan), indent=1, allow_nan=False) + "\n"


def write(path: str | os.PathLike[str], text: str) -> Path:
    """Write a file atomically: concurrent readers see the old or the new file, and concurrent writers are safe."""
    try:
        return write_whole(path, text)
    except (OSError, TypeError, ValueError) as error:
        raise PlanningError(f"path={str(path)!r} cannot be written ({error}); give another file") from None


def read(path: str | os.PathLike[str], workload: Workload | None) -> dict[str, Any]:
    """The arguments of a `Plan`, from a file with the text that `to_json` returned."""
    file = f"the plan file {str(path)!r}"
    if workload is not None and not isinstance(workload, Workload):
        raise ArgumentError(f"workload={workload!r}: expected a remat_jax.Workload, or nothing")
    try:
        data = json.loads(read_limited(path, MOST_BYTES).decode("utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise PlanningError(f"{file} cannot be read ({error}); give a file that Plan.save wrote") from None
    try:
        return _arguments(data, workload, file)
    except _Malformed as error:
        raise PlanningError(f"{file} is malformed: {error}; give a file that Plan.save wrote") from None
    except RecursionError:
        raise PlanningError(f"{file} is malformed: it is nested too deeply; give a file that Plan.save wrote") from None


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")


def _arguments(data: object, workload: Workload | None, file: str) -> dict[str, Any]:
    if not isinstance(data, dict) or "version" not in data:
        raise _Malformed("it is not an object with a version")
    if type(data["version"]) is not int or data["version"] not in READ:
        readable = f"{', '.join(map(str, READ[:-1]))} and {READ[-1]}"
        raise PlanningError(
            f"{file} has version {data['version']!r}, but this release reads only versions {readable}: plan again"
        )
    if data["version"] < 4:
        data = {**data, "findings": _old_findings(data)}
    values = _fields({key: value for key, value in data.items() if key not in _DERIVED}, _PLAN, _NEWER, "the plan")
    if workload is not None:
        values["model"].check_workload(workload, file)
    policies = [(find_block(key, workload, file), policy) for key, policy in values["policies"]]
    if not policies:
        raise _Malformed("policies is empty")
    values["policies"] = dict(policies)
    if len(values["policies"]) < len(policies):
        raise _Malformed("policies lists a block twice")
    return values


def _old_findings(data: dict[str, Any]) -> list[dict[str, str]]:
    """The findings of a file before version 4: its notes, and what it does not say."""
    notes = [{"kind": "note", "severity": "info", "text": text} for text in _list(data.get("notes"), "notes")]
    text = (
        f"The plan's file has version {data['version']}: it does not say whether a further residual fits, whether the timeout "
        "ended the search, or whether an offload is needed; plan again"
    )
    return [*notes, {"kind": "old_file", "severity": "info", "text": text}]


# --- checks of values -------------------------------------------------------------------------------------------------


class _Malformed(Exception):
    """Raised for a wrong value in the file; the message names the value."""


_Check = Callable[[Any, str], Any]
"""Converts a value of the file to the plan's value, or raises `_Malformed`; the second argument is the value's name."""


def _text(value: object, name: str) -> str:
    # Unprintable text could harm a terminal or a file.
    if not isinstance(value, str) or not value.isprintable():
        raise _Malformed(f"{name}={ascii(value)[:40]} is not a text of one line")
    return value


def _count(value: object, name: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _MOST:
        raise _Malformed(f"{name}={str(value)[:40]} is not an integer from {least} to 2¹²⁷")
    return value


_positive = functools.partial(_count, least=1)


def _seconds(value: object, name: str) -> float:
    # math.isfinite raises for an integer larger than any float. These comparisons do not, and they are false for NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise _Malformed(f"{name}={str(value)[:40]} is not a number of at least 0")
    return float(value)


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise _Malformed(f"{name}={value!r} is neither true nor false")
    return value


def _one_of(words: Collection[str]) -> _Check:
    def check(value: object, name: str) -> str:
        if value not in tuple(words):
            raise _Malformed(f"{name}={ascii(value)[:40]} is none of {', '.join(words)}")
        return str(value)

    return check


def _compiler_options(value: object, name: str) -> dict[str, int | str]:
    """Accept only the options that a plan may have, because the options are passed to the compiler."""
    if not isinstance(value, dict) or set(value) - {*LIMIT_OPTIONS, GRAPHS}:
        others = ", ".join(map(repr, LIMIT_OPTIONS))
        raise _Malformed(f"{name}={ascii(value)[:80]}: expected an object with no other keys than {others} and {GRAPHS!r}")
    for option, most in LIMIT_OPTIONS.items():
        limit = value.get(option, 1)
        if type(limit) is not int or not 1 <= limit <= most:
            raise _Malformed(f"{name}={ascii(value)[:80]}: {option} is an integer from 1 to {most}")
    kinds = value.get(GRAPHS, "FUSION")
    if not isinstance(kinds, str) or not re.fullmatch(r"[A-Z_]{1,40}(,[A-Z_]{1,40}){0,20}", kinds):
        raise _Malformed(f"{name}={ascii(value)[:120]}: {GRAPHS!r} must be a list of kinds, such as {GRAPH_KINDS!r}")
    return dict(value)


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Malformed(f"{name}={str(value)[:40]} is not a list")
    return value


def _items(value: Any, count: int, name: str) -> list[Any]:
    if len(_list(value, name)) != count:
        raise _Malformed(f"{name} has {len(value)} items, expected {count}")
    return value


def _or_none(check: _Check) -> _Check:
    return lambda value, name: None if value is None else check(value, name)


def _each(check: _Check) -> _Check:
    return lambda value, name: tuple(check(item, name) for item in _list(value, name))


def _pair(first: _Check, second: _Check, where: str = "") -> _Check:
    def check(value: object, name: str) -> tuple[Any, Any]:
        items = _items(value, 2, where or name)
        return first(items[0], name), second(items[1], name)

    return check


def _object(
    make: Callable[..., Any], checks: Mapping[str, _Check], where: str, newer: Mapping[str, Any] | None = None
) -> _Check:
    """A check for JSON objects with these keys; `newer` has the defaults of keys that older files lack."""
    return lambda value, name: make(**_fields(value, checks, newer or {}, where))


def _fields(data: object, checks: Mapping[str, _Check], newer: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _Malformed(f"{where} is not a JSON object")
    data = {**newer, **data}
    missing, unknown = [name for name in checks if name not in data], [name for name in data if name not in checks]
    if missing or unknown:
        raise _Malformed(f"{where} lacks {missing} and has {unknown}" if unknown else f"{where} lacks {missing}")
    return {name: check(data[name], name) for name, check in checks.items()}


# --- the parts of a plan ----------------------------------------------------------------------------------------------


def _leaf(value: object, name: str) -> tuple[str, tuple[int, ...], str]:
    path, shape, dtype = _items(value, 3, "a parameter of model")
    return _text(path, "path"), _each(_count)(shape, "shape"), _text(dtype, "dtype")


def _key(value: object, name: str) -> tuple[str, str, str]:
    kind, block, module = (_text(item, "block") for item in _items(value, 3, "block"))
    if kind not in {"class", "function", "glob", *PARTS} or not block:
        raise _Malformed(f"block={value!r} is neither a class, a function nor a glob")
    return kind, block, module


def _runs(value: Any, name: str) -> tuple[tuple[int | None, Policy], ...]:
    if len(_list(value, name)) > MOST_RUNS:
        raise _Malformed(f"{name} has {len(value)} items, expected at most {MOST_RUNS}")
    return tuple(_pair(_or_none(_positive), _run_policy)(run, name) for run in value)


def _run_policy(value: Any, name: str) -> Policy:
    try:
        return Policy.from_dict(value)
    except RematError as error:
        raise _Malformed(f"policies: {error}") from None


def _policy(block: tuple[str, str, str], runs: tuple[Any, ...], groups: tuple[Any, ...]) -> tuple[Any, Policy | LayerPolicies]:
    """A block's key, and its `Policy` or `LayerPolicies`, from runs of equal layers."""
    if len(runs) == 1 and runs[0][0] is None:
        return block, runs[0][1]
    ends = list(itertools.accumulate(count or 0 for count, _ in runs))
    if not runs or any(count is None for count, _ in runs) or ends[-1] > 10**6:
        raise _Malformed("runs: expected pairs of a number of layers and a policy")
    try:
        return block, LayerPolicies(runs, tuple(ends[:-1]), groups)
    except RematError as error:
        raise _Malformed(f"policies: {error}") from None


_ROW: dict[str, _Check] = {"residual": _text, "action": _one_of(_ACTIONS), "bytes": _count, "seconds": _or_none(_seconds)}
_PART: dict[str, _Check] = {
    **dict.fromkeys(("block", "policy"), _text),
    **dict.fromkeys(("first", "layers", "saved_bytes", "offloaded_bytes", "recomputed_bytes"), _count),
    "every": _positive,
    "rows": _each(_object(LayerRow, _ROW, "a residual")),
    **dict.fromkeys(("forward_seconds", "backward_seconds", "recompute_seconds", "copy_seconds"), _seconds),
}
# Older plans have no `every`: their layers are adjacent.
_parts = _each(_object(Part, _PART, "a part", {"every": 1}))
_POINT: dict[str, _Check] = {
    "name": _text,
    "device_bytes": _or_none(_count),
    "host_bytes": _count,
    "seconds": _or_none(_seconds),
    "compiled": _flag,
    "parts": _parts,
    "remark": _text,
    "timed": _flag,
}
_MODEL: dict[str, _Check] = {
    **dict.fromkeys(("parameters", "batch"), _each(_leaf)),
    "blocks": _each(_key),
    "mesh": _or_none(_each(_pair(_text, functools.partial(_count, least=2), "an axis of mesh"))),
    "checkpoints": _or_none(_count),
}
_BEYOND: dict[str, _Check] = {
    "change": _one_of(CHANGES),
    "device_bytes": _or_none(_count),
    "seconds": _or_none(_seconds),
    "compiled": _flag,
    "remark": _text,
    "times": _positive,
}
_FINDING: dict[str, _Check] = {"kind": _one_of(KINDS), "severity": _one_of(SEVERITIES), "text": _text}


def _beyond(**given: Any) -> Beyond:
    """A change that can be made so often."""
    _check_times(given["change"], given["times"], "beyond")
    return Beyond(**given)


def _changes(value: object, name: str) -> tuple[str, ...]:
    """The changes of a plan, none more often than it can be made."""
    changes: tuple[str, ...] = _each(_one_of(CHANGES))(value, name)
    for change, times in Counter(changes).items():
        _check_times(change, times, name)
    return changes


def _check_times(change: str, times: int, name: str) -> None:
    if times > CHANGES[change].most:
        raise _Malformed(f"{name}: {change} is made {times} times; at most {CHANGES[change].most}")


_POLICY: dict[str, _Check] = {"block": _key, "runs": _runs, "groups": _each(_pair(_count, _positive))}
_PLAN: dict[str, _Check] = {
    "policies": _each(_object(_policy, _POLICY, "policies", {"groups": []})),
    **dict.fromkeys(("device_bytes", "predicted_bytes", "host_bytes", "recompute_flops", "budget"), _count),
    **dict.fromkeys(("seconds", "base_seconds"), _seconds),
    **dict.fromkeys(("frontier", "named"), _each(_object(Point, _POINT, "a point of the frontier", {"timed": False}))),
    "parts": _parts,
    "tried": _each(_pair(_text, _count)),
    **dict.fromkeys(("assumed_rates", "left_out"), _each(_text)),
    "changes": _changes,
    "beyond": _each(_object(_beyond, _BEYOND, "a change", {"times": 1})),
    "findings": _each(_object(PlanFinding, _FINDING, "a finding")),
    **dict.fromkeys(("is_maximal", "cut_short", "offload_needed"), _or_none(_flag)),
    **dict.fromkeys(("workload", "target", "jax_version"), _text),
    "host_budget": _or_none(_count),
    **dict.fromkeys(("next_gib_seconds", "lower_bound"), _or_none(_seconds)),
    "timed": _flag,
    "next_bytes": _positive,
    # Plans before version 3 have neither a mesh nor the number of checkpoints.
    "model": _object(Model, _MODEL, "model", {"mesh": None, "checkpoints": None}),
    "compiler_options": _compiler_options,
}
_NEWER: dict[str, Any] = {
    **{"compiler_options": {}, "lower_bound": None, "timed": False, "assumed_rates": [], "next_bytes": 2**30},
    **{"is_maximal": None, "cut_short": None, "offload_needed": None, "left_out": []},
    **{"changes": [], "beyond": []},
}
"""The values of fields that older files lack. Older plans have no memory limit and no lower bound, and their times are traced
estimates; before version 4, promises are unknown."""
