"""Module paths in the names of operators."""

from __future__ import annotations

import re
from itertools import pairwise

_BRACKET_OR_SEPARATOR = re.compile(r"[(\[{)\]},/]")
_WRAPPER = re.compile(r"^(?:jvp|transpose|vmap|pmap|checkpoint|custom_jvp|custom_vjp|shard_map)\((?P<inside>.*)\)$")
_STRUCTURE = re.compile(
    r"while|closed_call|checkpoint|rematted_computation|call_exported|custom_jvp_call|custom_vjp_call|eval_jaxpr|pjit|branch_\d+_fun"
    r"|layers\[\d+:\d+\]"
)


def module_path(op_name: str) -> tuple[str, str, str]:
    """The module path, the primitive and the phase in an operator's name.

    >>> module_path("jit(step)/transpose(jvp(Model.loss))/Model/while/body/layers.body/layers/ffn/up/dot_general")
    ('Model/layers/ffn/up', 'dot_general', 'backward')

    The layer ranges of a per-layer policy (`layers[0:8]`) are not part of the path. Flax may reopen a scope inside itself, so
    repeated names are merged. This also merges a module with a parent of the same name.
    """
    phases = {"rematted_computation": "recomputed", "transpose(": "backward", "jvp(": "forward"}
    phase = next((phase for mark, phase in phases.items() if mark in op_name), "other")
    parts: list[str] = []
    for part in split_outside_brackets(op_name.partition(";")[0], "/"):  # newer compilers join merged operators' names by ";"
        while (wrapped := _WRAPPER.match(part)) is not None:
            part = wrapped["inside"]
        inside = split_outside_brackets(part, "/")
        parts += [inner for inner in inside if inner and not inner.startswith(("jit(", "remat("))]
    # A loop's body is not a module, but a module may be called `body`.
    parts = [part for before, part in pairwise(["", *parts]) if not (before == "while" and part in ("body", "cond"))]
    parts = [part for part in parts if _STRUCTURE.fullmatch(part) is None]
    primitive = parts.pop() if parts else ""
    path: list[str] = []
    for part in parts:
        name = part.partition(".")[0]
        if path and name == path[0]:
            path = []  # a reopened scope starts from the model
        if name and (not path or path[-1] != name):
            path.append(name)
    return "/".join(path), primitive, phase


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """Split `text` at each `separator` (`,` or `/`) that is outside brackets."""
    parts, depth, start = [], 0, 0
    for mark in _BRACKET_OR_SEPARATOR.finditer(text):
        depth += (mark[0] in "([{") - (mark[0] in ")]}")
        if mark[0] == separator and depth == 0:
            parts.append(text[start : mark.start()])
            start = mark.end()
    return [*parts, text[start:]]
