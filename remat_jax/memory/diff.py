"""`diff_policies`: the difference between two policies, by residual and in compiled memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.core.matmuls import eqn_flops
from remat_jax.core.walk import equations
from remat_jax.cost import count
from remat_jax.errors import UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT
from remat_jax.memory.measure import measure_many
from remat_jax.memory.report import MemoryReport
from remat_jax.memory.residuals import SHOWN_ROWS, Residual, ResidualTable, described, residuals
from remat_jax.policy import Action, as_block_policy, is_off
from remat_jax.report.stacked_bars import merged_layers
from remat_jax.report.tables import format_bytes, format_flops, render, table
from remat_jax.warning import silenced, warn
from remat_jax.workload import Workload

NOT_KEPT = "not kept"
_RECOMPUTED = "rematted_computation"
"""The name of JAX's scope around the recomputation in a backward pass."""

_KEPT = (Action.SAVE.value, Action.OFFLOAD.value)


@dataclass(frozen=True)
class Move:
    """A residual with different actions under the two policies; `bytes` is the size of all `count` arrays.

    `before` and `after` are the actions. `not kept` means that the backward pass would not read the array even if everything
    were saved. An example is the output of a matmul: the backward pass reads the saved activation computed from this output.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int
    before: str
    after: str

    @property
    def device_bytes(self) -> int:
        """The change of the residual bytes in device memory."""
        return self.bytes * ((self.after == Action.SAVE.value) - (self.before == Action.SAVE.value))

    @property
    def host_bytes(self) -> int:
        """The change of the residual bytes in host memory."""
        return self.bytes * ((self.after == Action.OFFLOAD.value) - (self.before == Action.OFFLOAD.value))


@dataclass(frozen=True)
class PolicyDiff:
    """The difference between two policies; every difference is after − before.

    Attributes:
      before, after: the reports of `measure` under the two policies.
      moves: the residuals whose action changes, the largest first.
      recompute_flops: (before, after): the FLOPs of the matmuls that a step recomputes, without matmuls inside Pallas and cuDNN
        kernels. None if a loop of unknown length contains matmuls.
      recomputed: a dict from module path to (before, after), the module's part of `recompute_flops`. Paths that differ
        only in a layer's number have one entry. Empty if `recompute_flops` is None.
    """

    before: MemoryReport
    after: MemoryReport
    moves: tuple[Move, ...]
    recompute_flops: tuple[int, ...] | None
    recomputed: dict[str, tuple[int, ...]]

    def change(self, figure: str) -> int:
        """The change of one attribute of the reports, such as `device_bytes`."""
        return (getattr(self.after, figure) or 0) - (getattr(self.before, figure) or 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `before` and `after` are the texts of the policies."""
        names = ("residual_device_bytes", "residual_host_bytes", "device_bytes", "host_bytes")
        return {
            "before": self.before.policy,
            "after": self.after.policy,
            "moves": [asdict(each) | {"device_bytes": each.device_bytes, "host_bytes": each.host_bytes} for each in self.moves],
            "recompute_flops": self.recompute_flops,
            "recomputed": self.recomputed,
            **{name: self.change(name) for name in names},
        }

    def tables(self) -> list[Any]:
        """A list of tables: residuals that move, recomputed matmuls (these two are left out if empty), and totals."""
        return [part for part in (self._moved(), self._products(), self._totals()) if part is not None]

    def __str__(self) -> str:
        return "\n".join(map(render, self.tables()))

    def _moved(self) -> Any:
        merged = _layers_together(self.moves)
        rows = [
            (
                *described(move),
                format_bytes(move.bytes),
                f"{move.before} → {move.after}",
                _signed(move.device_bytes),
                _signed(move.host_bytes),
            )
            for move in merged[:SHOWN_ROWS]
        ]
        title = f"Residuals that move: {self.before.policy} → {self.after.policy}"
        columns = ("residual", "shape", "dtype", "size", "action", "device", "host")
        narrow = ("dtype", "shape", "host", "device")
        return table(title, columns, rows, caption=self._remark(len(merged) - len(rows)), optional=narrow) if rows else None

    def _remark(self, hidden: int) -> str | None:
        sentences = [f"And {hidden} smaller residuals."] if hidden else []
        if any(NOT_KEPT in (move.before, move.after) for move in self.moves):
            sentences.append(
                f"{NOT_KEPT}: under a policy that saves everything, the backward pass reads only arrays computed from this "
                "array."
            )
        if "off" in (self.before.policy, self.after.policy):
            sentences.append("off keeps the same residuals as the policy everything; only checkpointed blocks give them names.")
        return " ".join(sentences) or None

    def _products(self) -> Any:
        rows = [
            (name, *map(format_flops, pair), format_flops(pair[1] - pair[0], sign=True))
            for name, pair in self.recomputed.items()
        ]
        columns = ("module", self.before.policy, self.after.policy, "difference")
        return table("FLOPs of recomputed matmuls", columns, rows) if rows else None

    def _totals(self) -> Any:
        figures = {
            "residuals on the device": "residual_device_bytes",
            "residuals in host memory": "residual_host_bytes",
            "compiled: device memory": "device_bytes",
            "compiled: temp": "temp_bytes",
            "compiled: host memory": "host_bytes",
        }
        rows = []
        for name, figure in figures.items():
            first, second = getattr(self.before, figure) or 0, getattr(self.after, figure) or 0
            rows.append((name, format_bytes(first), format_bytes(second), _signed(second - first)))
        if self.recompute_flops is not None:
            first, second = self.recompute_flops
            rows.append(
                ("recomputed FLOPs", format_flops(first), format_flops(second), format_flops(second - first, sign=True))
            )
        title = f"{self.before.workload} on {self.before.target}: {self.before.policy} → {self.after.policy}"
        return table(title, ("total", self.before.policy, self.after.policy, "difference"), rows)


def diff_policies(
    workload: Workload,
    before: Any,
    after: Any,
    target: str | Target = "cpu",
    timeout: float = DEFAULT_TIMEOUT,
    *,
    memory_limit: Any = None,
) -> PolicyDiff:
    """The change from the policy `before` to `after`: the residuals that move, and the change of memory and FLOPs.

    The bytes of residuals come from JAX's own linearisation (`residuals`), device and host memory from the compiled step
    (`measure`), and FLOPs from the matmuls in the recomputed part of the step's jaxpr. Raises the errors of `measure` and
    of `residuals`.
    """
    with silenced():  # the reports below have the same warnings
        tables = [_table(workload, policy) for policy in (before, after)]
    first, second = measure_many(workload, [before, after], target, timeout, memory_limit=memory_limit)
    warn((*first.warnings, *second.warnings))
    by_module = _recomputed(workload, before, after)
    totals = None if by_module is None else tuple(sum(pair[side] for pair in by_module.values()) for side in (0, 1))
    return PolicyDiff(first, second, _moves(*tables), totals, by_module or {})


def _table(workload: Workload, policy: Any) -> ResidualTable:
    """The residuals under `policy`. If it is `off`, which names no residuals, the equal residuals under `everything`."""
    checked = as_block_policy(policy) if not isinstance(policy, dict) else policy
    return residuals(workload, "everything" if is_off(checked) else policy)


def _moves(before: ResidualTable, after: ResidualTable) -> tuple[Move, ...]:
    """The residuals whose action changes. A name has several moves if its arrays have several actions."""
    by_name: dict[Any, tuple[list[Residual], list[Residual]]] = {}
    for side, rows in enumerate((before, after)):
        for row in rows:
            by_name.setdefault((row.name, row.shape, row.dtype), ([], []))[side].append(row)
    moves = [move for sides in by_name.values() for move in _moves_of_name(*sides)]
    return tuple(sorted(moves, key=lambda move: (-move.bytes, move.name)))


def _moves_of_name(before: list[Residual], after: list[Residual]) -> list[Move]:
    """The moves of one residual name, from its rows under both policies. Saved and offloaded rows are paired in order.

    A row without a partner is recomputed or not kept under the other policy.
    """
    if {(row.action, row.bytes) for row in before} == {(row.action, row.bytes) for row in after}:
        return []
    moves = []
    kept = [[row for row in side if row.action in _KEPT] for side in (before, after)]
    rest = [next((row.action for row in side if row.action not in _KEPT), NOT_KEPT) for side in (before, after)]
    for first, second in zip_longest(*kept):
        row = second or first
        actions = (first.action if first else rest[0]), (second.action if second else rest[1])
        if actions[0] != actions[1]:
            moves.append(Move(row.name, row.shape, row.dtype, row.count, row.bytes, *actions))
    return moves


def _layers_together(moves: tuple[Move, ...]) -> list[Move]:
    by_key: dict[Any, list[Move]] = {}
    for move, name in zip(moves, merged_layers(move.name for move in moves), strict=True):
        by_key.setdefault((name, move.shape, move.dtype, move.before, move.after), []).append(move)
    merged = [
        replace(equal[0], name=key[0], count=sum(move.count for move in equal), bytes=sum(move.bytes for move in equal))
        for key, equal in by_key.items()
    ]
    return sorted(merged, key=lambda move: (-move.bytes, move.name))


def _recomputed(workload: Workload, *policies: Any) -> dict[str, tuple[int, ...]] | None:
    """A dict from module path to the FLOPs of its recomputed matmuls under each policy; None if they cannot be counted."""
    steps = [workload.step(policy) for policy in policies]
    jaxprs = [compat.dce(jax.make_jaxpr(step.function)(*step.arguments)) for step in steps]
    products = (eqn for jaxpr in jaxprs for eqn in equations(jaxpr) if eqn_flops(eqn))
    paths = dict.fromkeys(path for eqn in products if (path := _recomputed_path(eqn)) is not None)
    merged = dict(zip(paths, merged_layers(paths), strict=True))

    def flops_of(module: str, jaxpr: ClosedJaxpr) -> int:
        return count.count(jaxpr, lambda eqn: eqn_flops(eqn) if merged.get(_recomputed_path(eqn) or "") == module else 0)

    try:
        flops = {module: tuple(flops_of(module, jaxpr) for jaxpr in jaxprs) for module in dict.fromkeys(merged.values())}
    except UnsupportedError:
        return None
    return dict(sorted(flops.items(), key=lambda entry: (-max(entry[1]), entry[0])))


def _recomputed_path(eqn: JaxprEqn) -> str | None:
    """The module path of a recomputed equation; None for any other equation."""
    scopes = compat.scopes(eqn)
    if _RECOMPUTED not in scopes:
        return None
    # Flax opens the scope of a lifted module twice, as in `layers.body/layers/ffn`. The name with a dot is skipped.
    return "/".join(part for part in scopes[scopes.index(_RECOMPUTED) + 1 :] if "." not in part) or "(no module)"


def _signed(n: int) -> str:
    return f"{'+' if n > 0 else ''}{format_bytes(n)}" if n else ""
