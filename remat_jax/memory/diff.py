"""`compare_policies`: what changes from one policy to another, residual by residual, and what the compiler makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from remat_jax import compat
from remat_jax.core.products import eqn_flops
from remat_jax.cost import count
from remat_jax.errors import UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory.measure import DEFAULT_TIMEOUT, measure_many
from remat_jax.memory.report import MemoryReport
from remat_jax.memory.residuals import Residual, ResidualTable, residuals
from remat_jax.policy import Action, as_block_policy, is_off
from remat_jax.report.stacked import merged_layers
from remat_jax.report.tables import format_bytes, format_flops, render, table
from remat_jax.warning import silenced, warn
from remat_jax.workload import Workload

NOT_KEPT = "not kept"
_RECOMPUTED = "rematted_computation"
"""The scope that JAX gives to what a backward pass computes again."""

_SHOWN = 40
"""Rows of a printed table; `to_dict` has them all."""

_KEPT = (Action.SAVE.value, Action.OFFLOAD.value)


@dataclass(frozen=True)
class Move:
    """A residual that one policy keeps elsewhere than the other.

    Attributes:
      name, shape, dtype, count: as in the table of residuals; `count` arrays of the name.
      bytes: of all of them.
      before, after: `save`, `offload`, `recompute`, or `not kept`: neither kept nor read by a backward pass that keeps
        everything, as the output of a product whose activation is kept.
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
        """What it adds to the residuals on the device."""
        return self.bytes * ((self.after == Action.SAVE.value) - (self.before == Action.SAVE.value))

    @property
    def host_bytes(self) -> int:
        """What it adds to the residuals in host memory."""
        return self.bytes * ((self.after == Action.OFFLOAD.value) - (self.before == Action.OFFLOAD.value))


@dataclass(frozen=True)
class PolicyDiff:
    """From one policy to another; everything that is called a difference is after − before.

    Attributes:
      before, after: the compiled memory of the two.
      moves: what is kept elsewhere, the largest first.
      recompute_flops: (before, after): the FLOPs of the products that a step computes again; a kernel's own products are not
        counted. None where a loop of unknown length has products in it.
      recomputed: module path, consecutive layers together → the same by module. It names the products, not the residuals.
    """

    before: MemoryReport
    after: MemoryReport
    moves: tuple[Move, ...]
    recompute_flops: tuple[int, ...] | None
    recomputed: dict[str, tuple[int, ...]]

    @property
    def residual_device_bytes(self) -> int:
        """What the policy after keeps more on the device between the passes."""
        return (self.after.residual_device_bytes or 0) - (self.before.residual_device_bytes or 0)

    @property
    def residual_host_bytes(self) -> int:
        """What the policy after keeps more in host memory between the passes."""
        return (self.after.residual_host_bytes or 0) - (self.before.residual_host_bytes or 0)

    @property
    def device_bytes(self) -> int:
        """What the compiled step needs more on the device."""
        return self.after.device_bytes - self.before.device_bytes

    @property
    def host_bytes(self) -> int:
        """What the compiled step needs more in host memory."""
        return self.after.host_bytes - self.before.host_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names, the reports are named by their policies."""
        names = ("residual_device_bytes", "residual_host_bytes", "device_bytes", "host_bytes")
        return {
            "before": self.before.policy,
            "after": self.after.policy,
            "moves": [asdict(one) | {"device_bytes": one.device_bytes, "host_bytes": one.host_bytes} for one in self.moves],
            "recompute_flops": self.recompute_flops,
            "recomputed": self.recomputed,
            **{name: getattr(self, name) for name in names},
        }

    def tables(self) -> list[Any]:
        """What moved, which products are computed again, and the totals; the first two only where there are any."""
        return [one for one in (self._moved(), self._products(), self._totals()) if one is not None]

    def __str__(self) -> str:
        return "\n".join(map(render, self.tables()))

    def _moved(self) -> Any:
        together = _layers_together(self.moves)
        rows = [
            (
                one.name + (f" ×{one.count}" if one.count > 1 else ""),
                "×".join(map(str, one.shape)) or "scalar",
                one.dtype,
                format_bytes(one.bytes),
                f"{one.before} → {one.after}",
                _signed(one.device_bytes),
                _signed(one.host_bytes),
            )
            for one in together[:_SHOWN]
        ]
        title = f"Residuals that move: {self.before.policy} → {self.after.policy}"
        columns = ("residual", "shape", "dtype", "size", "action", "device", "host")
        return table(title, columns, rows, caption=self._remark(len(together) - len(rows))) if rows else None

    def _remark(self, hidden: int) -> str | None:
        said = [f"And {hidden} more, smaller ones."] if hidden else []
        if any(NOT_KEPT in (one.before, one.after) for one in self.moves):
            said.append(f"{NOT_KEPT}: the backward pass does not read it where everything is kept, only what is made of it.")
        if "off" in (self.before.policy, self.after.policy):
            said.append("off keeps what everything keeps; residuals have names only in a checkpointed block.")
        return " ".join(said) or None

    def _products(self) -> Any:
        rows = [
            (name, *map(format_flops, pair), format_flops(pair[1] - pair[0], sign=True))
            for name, pair in self.recomputed.items()
        ]
        columns = ("module", self.before.policy, self.after.policy, "difference")
        return table("FLOPs of the products that are computed again", columns, rows) if rows else None

    def _totals(self) -> Any:
        rows = [
            _total("residuals on the device", self.before.residual_device_bytes, self.after.residual_device_bytes),
            _total("residuals in host memory", self.before.residual_host_bytes, self.after.residual_host_bytes),
            _total("compiled: device memory", self.before.device_bytes, self.after.device_bytes),
            _total("compiled: of it temp", self.before.temp_bytes, self.after.temp_bytes),
            _total("compiled: host memory", self.before.host_bytes, self.after.host_bytes),
        ]
        if self.recompute_flops is not None:
            first, second = self.recompute_flops
            rows.append(
                ("FLOPs computed again", format_flops(first), format_flops(second), format_flops(second - first, sign=True))
            )
        title = f"{self.before.workload} on {self.before.target}: {self.before.policy} → {self.after.policy}"
        return table(title, ("total", self.before.policy, self.after.policy, "difference"), rows)


def compare_policies(
    workload: Workload,
    before: Any,
    after: Any,
    target: str | Target = "cpu",
    timeout: float = DEFAULT_TIMEOUT,
    *,
    memory_limit: Any = None,
) -> PolicyDiff:
    """What changes when `after` takes the place of `before`: which residuals move where, and what that costs.

    Bytes of residuals are those of JAX's own linearisation (`residuals`), device and host memory those of the compiled step
    (`measure`), FLOPs those of the products in the recomputed part of the step's jaxpr.

    Args:
      before, after: policies, their names or texts.
      memory_limit: what XLA is to stay within, as for `measure`.

    Raises:
      UnsupportedError: the workload was made by `Workload.from_step`.
      PolicyError, BlockError, NoEffectError, TargetError, CompileError: as `measure` raises them.

    >>> import jax.numpy as jnp, flax.linen as nn
    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return jnp.exp(nn.Dense(8, name="up")(x)) * x
    >>> x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> params = jax.eval_shape(Block().init, jax.random.key(0), x)
    >>> job = Workload(lambda p, x: (Block().apply(p, x) ** 2).mean(), params, (x,), blocks=Block)
    >>> found = compare_policies(job, "full", "save: *exp*")
    >>> [(one.name, one.before, one.after, one.device_bytes) for one in found.moves]
    [('Block:exp#0', 'recompute', 'save', 64)]
    >>> found.recompute_flops  # the product of 2×8 and 8×8
    (256, 0)
    """
    with silenced():  # the reports have these warnings too
        tables = [_table(workload, policy) for policy in (before, after)]
    first, second = measure_many(workload, [before, after], target, timeout, memory_limit=memory_limit)
    warn((*first.warnings, *second.warnings))
    by_module = _recomputed(workload, before, after)
    totals = None if by_module is None else tuple(sum(pair[side] for pair in by_module.values()) for side in (0, 1))
    return PolicyDiff(first, second, _moves(*tables), totals, by_module or {})


def _table(workload: Workload, policy: Any) -> ResidualTable:
    """The residuals under `policy`; of `off`, which has no named ones, those of `everything`."""
    checked = as_block_policy(policy) if not isinstance(policy, dict) else policy
    return residuals(workload, "everything" if is_off(checked) else policy)


def _moves(before: ResidualTable, after: ResidualTable) -> tuple[Move, ...]:
    """What is kept elsewhere; where the same name stands for several actions (some of its arrays), each is a row."""
    tables = [{(row.name, row.shape, row.dtype, row.action): row for row in one} for one in (before, after)]
    names = dict.fromkeys(key[:3] for one in tables for key in one)
    found = []
    for name in names:
        first, second = (
            [rows[*name, action] for action in (*_KEPT, "recompute") if (*name, action) in rows] for rows in tables
        )
        found += _moved(first, second)
    return tuple(sorted(found, key=lambda one: (-one.bytes, one.name)))


def _moved(before: list[Residual], after: list[Residual]) -> list[Move]:
    """The moves of one name: what is kept on both sides alike stays, and the rest pairs off in order."""
    if {(row.action, row.bytes) for row in before} == {(row.action, row.bytes) for row in after}:
        return []
    sides = [[row for row in side if row.action in _KEPT] for side in (before, after)]
    if not any(sides):
        return []
    rest = [next((row.action for row in side if row.action not in _KEPT), NOT_KEPT) for side in (before, after)]
    pairs = max(map(len, sides))
    found = []
    for index in range(pairs):
        first, second = (side[index] if index < len(side) else None for side in sides)
        row = second or first
        assert row is not None
        actions = [side.action if side else other for side, other in zip((first, second), rest, strict=True)]
        if actions[0] != actions[1]:
            found.append(Move(row.name, row.shape, row.dtype, row.count, row.bytes, *actions))
    return found


def _layers_together(moves: tuple[Move, ...]) -> list[Move]:
    """Unrolled layers whose residuals move alike, as one row."""
    found: dict[Any, list[Move]] = {}
    for one, name in zip(moves, merged_layers(move.name for move in moves), strict=True):
        found.setdefault((name, one.shape, one.dtype, one.before, one.after), []).append(one)
    together = [
        replace(alike[0], name=key[0], count=sum(one.count for one in alike), bytes=sum(one.bytes for one in alike))
        for key, alike in found.items()
    ]
    return sorted(together, key=lambda one: (-one.bytes, one.name))


def _recomputed(workload: Workload, *policies: Any) -> dict[str, tuple[int, ...]] | None:
    """The FLOPs of the products that a step computes again under each policy, by module; None where they cannot be counted."""
    steps = [workload.step(policy) for policy in policies]
    jaxprs = [compat.dce(jax.make_jaxpr(step.function)(*step.arguments)) for step in steps]
    paths: dict[str, None] = {}

    def note(eqn: Any) -> int:
        path = _recomputed_path(eqn)
        if path is not None and eqn_flops(eqn):
            paths[path] = None
        return 0

    for jaxpr in jaxprs:
        count.count(jaxpr, note)
    merged = dict(zip(paths, merged_layers(paths), strict=True))

    def of(module: str) -> Callable[[Any], int]:
        return lambda eqn: eqn_flops(eqn) if merged.get(_recomputed_path(eqn) or "") == module else 0

    try:
        found = {module: tuple(count.count(jaxpr, of(module)) for jaxpr in jaxprs) for module in dict.fromkeys(merged.values())}
    except UnsupportedError:
        return None
    return dict(sorted(found.items(), key=lambda entry: (-max(entry[1]), entry[0])))


def _recomputed_path(eqn: Any) -> str | None:
    """The module path of an equation of the recomputed part; None for any other equation."""
    scopes = compat.scopes(eqn)
    if _RECOMPUTED not in scopes:
        return None
    # A lifted module opens its scope again: `layers.body/layers/ffn`.
    return "/".join(part for part in scopes[scopes.index(_RECOMPUTED) + 1 :] if "." not in part) or "(no module)"


def _total(name: str, before: int | None, after: int | None) -> tuple[str, str, str, str]:
    first, second = before or 0, after or 0
    return name, format_bytes(first), format_bytes(second), _signed(second - first)


def _signed(n: int) -> str:
    return f"{'+' if n > 0 else ''}{format_bytes(n)}" if n else ""
