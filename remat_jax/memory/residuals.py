"""The table of residuals: what is really kept between the forward and the backward pass, read from JAX's own linearisation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply.audit import check_differentiated
from remat_jax.apply.own_checkpoints import KEPT
from remat_jax.apply.replaced import replaced_text
from remat_jax.apply.scope import tracing_anew
from remat_jax.core import noting_differentiated
from remat_jax.core.origins import Origin, is_on_host, origin
from remat_jax.core.shared import Reading, collecting
from remat_jax.core.walk import block_under_checkpoint
from remat_jax.errors import UnsupportedError
from remat_jax.policy import Action, LayerPolicies, Policy, as_block_policy, is_off
from remat_jax.report.tables import format_bytes, render, table
from remat_jax.warning import warn
from remat_jax.workload import Workload

_SHOWN = 40
"""Rows of a printed table; `to_dict` has them all."""

_SHOWN_SHARED = 3
"""Shared inputs under a printed table."""

_EVERY_NAME, _EVERY_NAME_TOO = Policy.parse("save: *"), Policy.parse("save: **")


@dataclass(frozen=True)
class Residual:
    """One array that the backward pass reads, or several of the same name.

    Attributes:
      name: its residual name; `module/path:primitive` for what is made outside the blocks, `…:carry#k` for what a scan carries.
      shape, dtype: of one array; a scanned one has the layers in front.
      bytes: of all `count` arrays together.
      action: what happens to it under the policy.
      source: the user's source line.
      count: how many arrays of this name there are.
      scanned: whether it comes out of a `scan`, the layers stacked.
      layers: under policies by layer, the layers it belongs to: the first, and the one after the last, counted from 0.
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
    """An input that the policy offloads, and that stays on the device because several blocks read it.

    Attributes:
      name: its residual name in the first block that reads it.
      bytes: of the array, which is there once.
      blocks: how many blocks read it; None where a loop reads it in every round.
    """

    name: str
    bytes: int
    blocks: int | None

    @property
    def readers(self) -> str:
        """Who reads it, in words."""
        return "in every round of a loop" if self.blocks is None else f"by {self.blocks} blocks"


@dataclass(frozen=True)
class ResidualTable:
    """The residuals of one workload under one policy; parameters and batch are not residuals.

    Attributes:
      rows: the residuals, the kept ones first, largest first.
      policy: the policy's text.
      device_bytes, host_bytes: what is kept between the passes, in device and in host memory.
      recompute_bytes: what the backward pass makes again.
      warning: that the policy cannot keep anything, because the blocks stand inside checkpoints of the model's own.
      shared: the inputs that the policy offloads and that stay on the device, because several blocks read them; the largest
        first. One that is an argument of the loss is none of the rows.
      replaced_checkpoints: how many checkpoints of the model's own around the blocks gave way to the policy.
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
        """What stays in device memory between the passes."""
        return self._total(Action.SAVE)

    @property
    def host_bytes(self) -> int:
        """What waits in host memory between the passes."""
        return self._total(Action.OFFLOAD)

    @property
    def recompute_bytes(self) -> int:
        """What the backward pass makes again."""
        return self._total(Action.RECOMPUTE)

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        return {
            "policy": self.policy,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "recompute_bytes": self.recompute_bytes,
            "warning": self.warning,
            "shared": [asdict(one) for one in self.shared],
            "replaced_checkpoints": self.replaced_checkpoints,
            "rows": [asdict(row) for row in self.rows],
        }

    def __rich__(self) -> Any:
        totals = {"device": self.device_bytes, "host": self.host_bytes, "recompute": self.recompute_bytes}
        title = ", ".join(f"{word} {format_bytes(amount)}" for word, amount in totals.items())
        shown, hidden = self.rows[:_SHOWN], self.rows[_SHOWN:]
        by_layer = any(row.layers for row in self.rows)
        rows = [
            (
                row.name + (f" ×{row.count}" if row.count > 1 else ""),
                *((_layers(row),) if by_layer else ()),
                "×".join(map(str, row.shape)) or "scalar",
                row.dtype,
                row.bytes,
                row.action,
                row.source,
            )
            for row in shown
        ]
        columns = ("residual", *(("layers",) if by_layer else ()), "shape", "dtype", "size", "action", "source")
        rest = f"and {len(hidden)} more, {format_bytes(sum(row.bytes for row in hidden))}" if hidden else None
        stays = [f"{one.name}, {format_bytes(one.bytes)} read {one.readers}, stays on the device" for one in self.shared]
        replaced = replaced_text(self.replaced_checkpoints) if self.replaced_checkpoints else None
        warning = f"warning: {self.warning}" if self.warning else None
        caption = "\n".join(filter(None, (rest, *stays[:_SHOWN_SHARED], replaced, warning)))
        formats = {"size": format_bytes}
        return table(f"residuals under {self.policy}: {title}", columns, rows, formats=formats, caption=caption or None)

    def __str__(self) -> str:
        return render(self)


def residuals(workload: Workload, policy: Any) -> ResidualTable:
    """What `workload` keeps between its forward and its backward pass under `policy`, and what it computes again.

    Read from the linearisation that JAX itself makes under the policy: saved and offloaded rows are exactly the arrays that
    leave its forward pass for its backward pass, each array once. Recomputed rows are the residuals that would be kept
    if every named array were. Nothing is allocated or run. On a mesh, shapes and bytes are those of all devices together.

    Args:
      workload: with a loss; a finished step has taken its gradient already.
      policy: a policy, its name or text, `"off"` included; policies by layer; a mapping from block to any of these.

    Raises:
      UnsupportedError: the workload was made by `Workload.from_step`.
      PolicyError, BlockError, NoEffectError: the policy is none, or has no effect on this workload.

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
    known = {(row.name, row.layers) for row in kept.rows} | aliases
    given = policy if isinstance(policy, dict) else dict.fromkeys(workload.blocks, as_block_policy(policy))
    everything = {block: _every_name(as_block_policy(one)) for block, one in given.items()}
    named, _ = _kept(workload, everything, only_named=True)
    again = [replace(row, action="recompute") for row in named if (row.name, row.layers) not in known]
    # A policy that computes something again has an effect; looking costs another trace.
    warning = None if again else _overruled(workload, everything)
    warn(warning)
    return replace(kept, rows=tuple(_ordered([*kept.rows, *again])), warning=warning)


def kept_residuals(workload: Workload, policy: Any) -> ResidualTable:
    """`residuals` without the rows that are computed again: the loss is traced once, not twice."""
    return _checked_and_kept(workload, policy)[0]


def _checked_and_kept(workload: Workload, policy: Any) -> tuple[ResidualTable, set[tuple[str, Any]]]:
    """The table of what is kept, and other names of the same arrays."""
    checked = as_block_policy(policy) if not isinstance(policy, dict) else None
    if not workload.has_loss:
        raise UnsupportedError(
            f"workload={workload.name!r} was made from a finished step, which takes its gradient inside: what it keeps between "
            "the passes cannot be read from outside. Make a Workload of the loss instead."
        )
    with collecting() as read, _effect_checked(policy.values() if isinstance(policy, dict) else [checked]):
        rows, aliases = _kept(workload, policy)
    text = str(checked) if checked is not None else "; ".join(f"{block}: {one}" for block, one in policy.items())
    replaced = 0 if is_off(checked) else workload.replaced_checkpoints
    return ResidualTable(tuple(_ordered(rows)), workload.policy_text(text), None, _shared(read), replaced), aliases


@contextlib.contextmanager
def _effect_checked(policies: Iterable[Any]) -> Iterator[None]:
    """What is traced meanwhile is traced anew, and each selector must keep something for the gradients that it takes."""
    given = [as_block_policy(one) for one in policies]
    plain = [
        one for policy in given for one in ([run[1] for run in policy.runs] if isinstance(policy, LayerPolicies) else [policy])
    ]
    named = [one for one in plain if isinstance(one, Policy) and one.kept_globs]
    if not named:
        yield
        return
    with tracing_anew(), noting_differentiated() as blocks:
        yield
    check_differentiated(blocks, named)


def _ordered(rows: list[Residual]) -> list[Residual]:
    order = [action.value for action in Action]
    return sorted(rows, key=lambda row: (order.index(row.action), -row.bytes, row.name))


def _shared(read: list[Reading]) -> tuple[SharedInput, ...]:
    """Of the arrays that blocks read, those that a policy offloads and that stay; a loop that is traced twice counts once."""
    found: dict[tuple[str, int], SharedInput] = {}
    for reading in read:
        if reading.name and reading.stays():
            nbytes = _bytes(reading.aval)
            blocks = None if reading.in_every_round else reading.blocks
            found.setdefault((reading.name, nbytes), SharedInput(reading.name, nbytes, blocks))
    return tuple(sorted(found.values(), key=lambda one: -one.bytes))


def _overruled(workload: Workload, everything: dict[Any, Policy | LayerPolicies]) -> str | None:
    """Why no policy computes anything again that another keeps; None where this one keeps everything."""
    loss, trained, frozen = workload.split_loss(everything)
    if not block_under_checkpoint(jax.make_jaxpr(loss)(trained, frozen, *workload.batch)):
        return None
    return KEPT


def _every_name(policy: Any) -> Policy | LayerPolicies:
    """The policy that keeps everything; for the same runs of layers, which two ways to write it keep apart."""
    if not isinstance(policy, LayerPolicies):
        return _EVERY_NAME
    runs = enumerate(policy.ranges)
    return LayerPolicies(tuple((len(layers), (_EVERY_NAME, _EVERY_NAME_TOO)[nth % 2]) for nth, (layers, _) in runs))


def _kept(workload: Workload, policy: Any, *, only_named: bool = False) -> tuple[list[Residual], set[tuple[str, Any]]]:
    """The arrays that leave the forward pass for the backward pass, those of one name together, and their other names.

    `only_named` leaves out what no policy can choose: what is made outside the blocks, and what a scan carries.
    """
    loss, trained, frozen = workload.split_loss(policy)

    def pullback(trained: Any, frozen: Any, *batch: Any) -> Any:
        return jax.vjp(lambda p: loss(p, frozen, *batch), trained, has_aux=workload.has_aux)[1]

    jaxpr = jax.make_jaxpr(pullback)(trained, frozen, *workload.batch).jaxpr
    found: dict[Any, tuple[Origin, Any]] = {}
    for atom in jaxpr.outvars:
        if hasattr(atom, "val"):
            continue
        made = origin(jaxpr, atom)
        if made.kind == "named" or (not only_named and made.kind not in ("argument", "constant")):
            found.setdefault((made.key, is_on_host(atom)), (made, atom))
    rows: dict[Any, Residual] = {}
    for made, atom in found.values():
        row = _row(made, atom)
        key = (row.name, row.shape, row.dtype, row.action, row.layers)
        before = rows.get(key)
        rows[key] = replace(row, bytes=before.bytes + row.bytes, count=before.count + 1) if before else row
    aliases = {(alias, row.layers) for made, atom in found.values() for row in [_row(made, atom)] for alias in made.aliases}
    return list(rows.values()), aliases


def _row(made: Origin, atom: Any) -> Residual:
    aval = atom.aval
    action = Action.OFFLOAD if is_on_host(atom) else Action.SAVE
    layers = (made.layers.start, made.layers.stop) if made.layers else None
    return Residual(
        made.name, tuple(aval.shape), str(aval.dtype), _bytes(aval), action.value, made.source, 1, made.scanned, layers
    )


def _layers(row: Residual) -> str:
    if row.layers is None:
        return ""
    first, end = row.layers
    return str(first) if end == first + 1 else f"{first}–{end - 1}"


def _bytes(aval: Any) -> int:
    """The bytes of an array; an RNG key is as large as its data."""
    return math.prod(aval.shape) * compat.itemsize(aval.dtype)
