"""The table of residuals: the arrays that pass from the forward to the backward pass in JAX's own linearisation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply.audit import check_differentiated
from remat_jax.apply.blocks import replaced_text
from remat_jax.apply.own_checkpoints import KEPT
from remat_jax.apply.scope import tracing_anew
from remat_jax.core import noting_differentiated
from remat_jax.core.marks import name_of
from remat_jax.core.origins import Origin, is_on_host, origin
from remat_jax.core.shared import Reading, collecting
from remat_jax.core.walk import checkpoints_around_blocks
from remat_jax.policy import Action, LayerPolicies, Policy, as_block_policy, is_off
from remat_jax.report.tables import format_bytes, render, table
from remat_jax.warning import warn
from remat_jax.workload import Workload

SHOWN_ROWS, SHOWN_SHARED = 40, 3
"""The largest numbers of rows, and of shared inputs below the rows, in a printed table. `to_dict` has all of them."""

_EVERY_NAME, _EVERY_NAME_TOO = Policy.parse("save: *"), Policy.parse("save: **")


@dataclass(frozen=True)
class Residual:
    """An array that the backward pass reads, or several such arrays with one name.

    Attributes:
      name: the residual name; `module/path:primitive` for arrays made outside the blocks, `…:carry#k` for a scan's carry.
      shape, dtype: the shape and dtype of one array; a scanned residual has the layers as its first axis.
      bytes: the size of all `count` arrays together.
      action: `save`, `offload` or `recompute`.
      source: the user's source line.
      count: the number of arrays of this name.
      scanned: whether the array is an output of a `scan`, with the layers stacked.
      layers: under policies by layer, the residual's layers (start, stop), counted from 0, `stop` excluded; else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    action: str
    source: str
    count: int = 1
    scanned: bool = False
    layers: tuple[int, int] | None = None


@dataclass(frozen=True)
class SharedInput:
    """An input that stays on the device although the policy offloads it, because several blocks read it.

    Attributes:
      name: the residual name in the first block that reads the input.
      bytes: the size of the array.
      blocks: the number of blocks that read the input; None if a loop reads it in every iteration.
    """

    name: str
    bytes: int
    blocks: int | None

    @property
    def readers(self) -> str:
        """The blocks that read the input, in words."""
        return "in every iteration of a loop" if self.blocks is None else f"by {self.blocks} blocks"


@dataclass(frozen=True)
class ResidualTable:
    """The residuals of one workload under one policy; parameters and batch are not residuals.

    Attributes:
      rows: the saved, then the offloaded, then the recomputed residuals, the largest of each first.
      policy: the policy's text.
      warning: a warning if the policy has no effect because the workload keeps the model's own checkpoints around the blocks
        (`own_checkpoints="keep"`); else None.
      shared: the offloaded inputs that stay on the device because several blocks read them, the largest first. If an argument
        of the loss is such an input, it is not in `rows`.
      replaced_checkpoints: how many of the model's own checkpoints around blocks the policy replaced.
    """

    rows: tuple[Residual, ...]
    policy: str
    warning: str | None = None
    shared: tuple[SharedInput, ...] = ()
    replaced_checkpoints: int = 0

    def _total(self, action: Action) -> int:
        return sum(row.bytes for row in self.rows if row.action == action.value)

    @property
    def device_bytes(self) -> int:
        """The bytes of saved residuals, which are in device memory between the passes."""
        return self._total(Action.SAVE)

    @property
    def host_bytes(self) -> int:
        """The bytes of offloaded residuals, which are in host memory between the passes."""
        return self._total(Action.OFFLOAD)

    @property
    def recompute_bytes(self) -> int:
        """The bytes of residuals that the backward pass recomputes."""
        return self._total(Action.RECOMPUTE)

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        totals = {name: getattr(self, name) for name in ("device_bytes", "host_bytes", "recompute_bytes")}
        listed = {"shared": [asdict(each) for each in self.shared], "rows": [asdict(row) for row in self.rows]}
        return asdict(self) | totals | listed

    def __rich__(self) -> Any:
        totals = {"device": self.device_bytes, "host": self.host_bytes, "recompute": self.recompute_bytes}
        title = ", ".join(f"{word} {format_bytes(amount)}" for word, amount in totals.items())
        hidden = self.rows[SHOWN_ROWS:]
        columns = ["residual", "shape", "dtype", "size", "action", "source"]
        rows = [[*described(row), row.bytes, row.action, row.source] for row in self.rows[:SHOWN_ROWS]]
        if any(row.layers for row in self.rows):
            columns.insert(1, "layers")
            for cells, row in zip(rows, self.rows, strict=False):
                cells.insert(1, _layers(row))
        rest = f"and {len(hidden)} more, {format_bytes(sum(row.bytes for row in hidden))}" if hidden else None
        stays = [f"{each.name}, {format_bytes(each.bytes)} read {each.readers}, stays on the device" for each in self.shared]
        replaced = replaced_text(self.replaced_checkpoints) if self.replaced_checkpoints else None
        warning = f"warning: {self.warning}" if self.warning else None
        caption = "\n".join(filter(None, (rest, *stays[:SHOWN_SHARED], replaced, warning)))
        formats = {"size": format_bytes}
        title, narrow = f"residuals under {self.policy}: {title}", ("source", "dtype", "shape")
        return table(title, columns, rows, formats=formats, caption=caption or None, optional=narrow)

    def __str__(self) -> str:
        return render(self)


def residuals(workload: Workload, policy: Any) -> ResidualTable:
    """The residuals that `workload` saves, offloads and recomputes under `policy`.

    Saved and offloaded rows are exactly the arrays that pass from the forward to the backward pass in JAX's own linearisation,
    each array once. Recomputed rows are the further arrays that would pass if every named array were saved. Nothing is
    allocated or run. On a mesh, shapes and bytes are those of all devices together. `policy` is a policy, its name or text
    (also `"off"`), policies by layer, or a mapping from block to any of these.

    Raises:
      UnsupportedError: the workload is a finished step that takes no gradient through its blocks, or several.
      PolicyError, BlockError, NoEffectError: the policy is malformed, or has no effect on this workload.

    >>> import jax, jax.numpy as jnp, flax.linen as nn
    >>> model = nn.Sequential([nn.Dense(8), nn.Dense(8)])
    >>> x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> params = jax.eval_shape(model.init, jax.random.key(0), x)
    >>> job = Workload(lambda p, x: (model.apply(p, x) ** 2).mean(), params, (x,), blocks=nn.Dense)
    >>> residuals(job, "offload: @inputs").host_bytes  # the inputs of both layers
    128
    """
    kept, aliases = _checked_and_kept(workload, policy)
    if is_off(policy if isinstance(policy, dict) else as_block_policy(policy)):
        return kept
    kept_names = {(row.name, row.layers) for row in kept.rows} | aliases
    by_block = policy if isinstance(policy, dict) else dict.fromkeys(workload.blocks, policy)
    everything = {block: _every_name(as_block_policy(of_block)) for block, of_block in by_block.items()}
    named, _ = _kept(workload, everything, only_named=True)
    recomputed = [replace(row, action="recompute") for row in named if (row.name, row.layers) not in kept_names]
    # If nothing is recomputed, one more trace checks whether the model's own checkpoints overrule the policy.
    warning = None if recomputed else _overruled(workload, everything)
    warn(warning)
    return replace(kept, rows=tuple(_ordered([*kept.rows, *recomputed])), warning=warning)


def kept_residuals(workload: Workload, policy: Any) -> ResidualTable:
    """`residuals` without the recomputed rows. Traces the loss once instead of twice."""
    return _checked_and_kept(workload, policy)[0]


def _checked_and_kept(workload: Workload, policy: Any) -> tuple[ResidualTable, set[tuple[str, Any]]]:
    """The table of saved and offloaded residuals, and a set of pairs (alias of a residual's name, range of layers)."""
    checked = as_block_policy(policy) if not isinstance(policy, dict) else None
    with collecting() as read, _effect_checked(policy.values() if isinstance(policy, dict) else [checked]):
        rows, aliases = _kept(workload, policy)
    of_blocks = (
        {f"{name_of(block)}: ": as_block_policy(policy[block]) for block in policy} if checked is None else {"": checked}
    )
    text = "; ".join(f"{block}{getattr(of_block, 'name', None) or of_block}" for block, of_block in of_blocks.items())
    replaced = 0 if is_off(checked) else workload.replaced_checkpoints
    return ResidualTable(tuple(_ordered(rows)), workload.policy_text(text), None, _shared(read), replaced), aliases


@contextlib.contextmanager
def _effect_checked(policies: Iterable[Any]) -> Iterator[None]:
    """At the end of this context, check the globs in `policies` that save or offload (`Policy.kept_globs`).

    A glob that keeps no array needed for the requested gradients raises `NoEffectError`. For this check everything inside the
    context is traced again, without JAX's cached traces. If no policy has such a glob, the context does nothing.
    """
    selecting: list[Policy] = []
    for policy in map(as_block_policy, policies):
        plain = [run[1] for run in policy.runs] if isinstance(policy, LayerPolicies) else [policy]
        selecting += [each for each in plain if isinstance(each, Policy) and each.kept_globs]
    if not selecting:
        yield
        return
    with tracing_anew(), noting_differentiated() as blocks:
        yield
    check_differentiated(blocks, selecting)


def _ordered(rows: list[Residual]) -> list[Residual]:
    actions = [action.value for action in Action]
    return sorted(rows, key=lambda row: (actions.index(row.action), -row.bytes, row.name))


def _shared(read: list[Reading]) -> tuple[SharedInput, ...]:
    """The offloaded inputs that stay on the device. An input of a loop is listed once even if the loop is traced twice."""
    by_name: dict[tuple[str, int], SharedInput] = {}
    for reading in read:
        if reading.name and reading.stays():
            nbytes = compat.tree_bytes(reading.aval)
            blocks = None if reading.in_every_round else reading.blocks
            by_name.setdefault((reading.name, nbytes), SharedInput(reading.name, nbytes, blocks))
    return tuple(sorted(by_name.values(), key=lambda shared: -shared.bytes))


def _overruled(workload: Workload, everything: dict[Any, Policy | LayerPolicies]) -> str | None:
    """A warning if the model's own checkpoints are around the blocks and overrule any policy; otherwise None."""
    loss, trained, frozen = workload.split_loss(everything)
    return KEPT if checkpoints_around_blocks(jax.make_jaxpr(loss)(trained, frozen, *workload.batch)) else None


def _every_name(policy: Any) -> Policy | LayerPolicies:
    """A policy that saves every named array, with the same runs of layers as `policy`.

    Neighbouring runs with equal policies would be merged, so runs alternate between two spellings of the policy.
    """
    if not isinstance(policy, LayerPolicies):
        return _EVERY_NAME
    runs = enumerate(policy.ranges)
    return LayerPolicies(tuple((len(layers), (_EVERY_NAME, _EVERY_NAME_TOO)[nth % 2]) for nth, (layers, _) in runs))


def _kept(workload: Workload, policy: Any, *, only_named: bool = False) -> tuple[list[Residual], set[tuple[str, Any]]]:
    """Rows for the arrays that pass from the forward to the backward pass, and pairs (alias of a row's name, layers).

    `only_named` leaves out arrays that no policy can select: arrays made outside the blocks, and carries of a scan.
    """
    loss, trained, frozen = workload.split_loss(policy)

    def pullback(trained: Any, frozen: Any, *batch: Any) -> Any:
        return jax.vjp(lambda p: loss(p, frozen, *batch), trained, has_aux=workload.has_aux)[1]

    jaxpr = jax.make_jaxpr(pullback)(trained, frozen, *workload.batch).jaxpr
    origins: dict[Any, tuple[Origin, Any]] = {}
    for atom in jaxpr.outvars:
        if hasattr(atom, "val"):
            continue
        array_origin = origin(jaxpr, atom)
        if array_origin.kind == "named" or (not only_named and array_origin.kind not in ("argument", "constant")):
            origins.setdefault((array_origin.key, is_on_host(atom)), (array_origin, atom))
    rows: dict[Any, Residual] = {}
    aliases: set[tuple[str, Any]] = set()
    for array_origin, atom in origins.values():
        row = _row(array_origin, atom)
        aliases.update((alias, row.layers) for alias in array_origin.aliases)
        key = (row.name, row.shape, row.dtype, row.action, row.layers)
        before = rows.get(key)
        rows[key] = replace(row, bytes=before.bytes + row.bytes, count=before.count + 1) if before else row
    return list(rows.values()), aliases


def _row(array_origin: Origin, atom: Any) -> Residual:
    return Residual(
        name=array_origin.name,
        shape=tuple(atom.aval.shape),
        dtype=str(atom.aval.dtype),
        bytes=compat.tree_bytes(atom.aval),
        action=(Action.OFFLOAD if is_on_host(atom) else Action.SAVE).value,
        source=array_origin.source,
        scanned=array_origin.scanned,
        layers=(array_origin.layers.start, array_origin.layers.stop) if array_origin.layers else None,
    )


def described(row: Any) -> tuple[str, str, str]:
    """The first table cells for a `Residual` or a `Move` (`diff.py`): name with number of arrays, shape, dtype."""
    name = f"{row.name} ×{row.count}" if row.count > 1 else row.name
    return name, "×".join(map(str, row.shape)) or "scalar", row.dtype


def _layers(row: Residual) -> str:
    if row.layers is None:
        return ""
    first, end = row.layers
    return str(first) if end == first + 1 else f"{first}–{end - 1}"
