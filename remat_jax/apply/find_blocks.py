"""Finds the blocks of a model: the repeated parts of a loss whose checkpoints would save the most memory.

The loss is traced once, each call of a module in a named scope of its own. The scopes of an array that passes from the forward
to the backward pass then say inside which calls it was made. The model's own checkpoints and its scans count as calls too.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply import calls
from remat_jax.apply.effect import with_blocks
from remat_jax.apply.inner_loss import gradients_of
from remat_jax.apply.scope import BlockPolicies, applying
from remat_jax.core import is_smooth
from remat_jax.core.marks import CHECKPOINTS, SCANS, Block, name_of
from remat_jax.core.origins import Trail, makers_of, origin
from remat_jax.core.walk import bodies, differentiated_bodies, filled, interpret, rebind, retrace, variables
from remat_jax.errors import BlockError
from remat_jax.policy import Policy
from remat_jax.report.tables import format_bytes, render, table

_WORTH, _EQUAL = 0.03, 0.02
"""Shares of all residuals: what one more class of blocks must save, and below which a difference does not count."""


@dataclass
class Found:
    """Parts of a loss that could be its blocks: the calls of a class, the model's own checkpoints, or its scans.

    Attributes:
      block: a class, `"checkpoints"` or `"scans"`.
      path: the module path of the first call, or the source line.
      calls: how often they run in one step; an iteration of a scan is a call.
      bytes: of the residuals, those that a checkpoint around each call drops.
      largest: the most of these bytes in one call, which the backward pass needs again.
      inside: the blocks, each of whose calls is inside one of these.
      meets: the blocks of which some call is inside one of these, or the other way round; the block itself if it is nested.
    """

    block: Block
    path: str
    calls: int = 0
    bytes: int = 0
    largest: int = 0
    inside: set[Block] = field(default_factory=set)
    meets: set[Block] = field(default_factory=set)

    @property
    def saved(self) -> int:
        """The bytes that checkpoints around these calls free at the peak."""
        return self.bytes - self.largest

    @property
    def name(self) -> str:
        """The name of the class, or the text that selects the parts."""
        return name_of(self.block)


@dataclass(frozen=True)
class FoundBlocks:
    """The blocks that were found in a loss.

    Attributes:
      taken: the blocks, those that save the most first.
      others: what else could be blocks.
      residual_bytes: the bytes of all residuals without checkpoints.
    """

    taken: tuple[Found, ...]
    others: tuple[Found, ...]
    residual_bytes: int

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, as `Workload` takes them."""
        return tuple(each.block for each in self.taken)

    @property
    def text(self) -> str:
        """What was taken and why, in one sentence, and what else could be blocks."""
        taken = " and ".join(f"{each.name} ({each.calls} calls)" for each in self.taken)
        dropped, again = sum(each.bytes for each in self.taken), max(each.largest for each in self.taken)
        others = [each.name for each in self.others if each.calls > 1][:4]
        return (
            f"Blocks found: {taken}. Checkpoints around these calls drop {format_bytes(dropped)} of "
            f"{format_bytes(self.residual_bytes)} of residuals, and need {format_bytes(again)} again for one call"
            + (f". Other choices: {', '.join(others)}" if others else "")
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""

        def plain(found: Sequence[Found]) -> list[dict[str, Any]]:
            keys = ("name", "path", "calls", "bytes", "largest", "saved")
            return [{key: getattr(each, key) for key in keys} for each in found]

        return {"taken": plain(self.taken), "others": plain(self.others), "residual_bytes": self.residual_bytes}

    def __rich__(self) -> Any:
        columns = ("block", "first call", "calls", "dropped", "needed again", "freed")
        rows = [
            (f"{each.name} (taken)" if each in self.taken else each.name, each.path or "(root)", each.calls)
            + (each.bytes, each.largest, each.saved)
            for each in (*self.taken, *self.others)
        ]
        caption = (
            "dropped: residuals inside the calls, which a checkpoint around each call drops; needed again: those of the "
            "largest call, in the backward pass; freed: the difference"
        )
        formats = dict.fromkeys(columns[3:], format_bytes)
        title = f"what could be blocks: {format_bytes(self.residual_bytes)} of residuals without checkpoints"
        return table(title, columns, rows, formats=formats, caption=caption)

    def __str__(self) -> str:
        return render(self)


@dataclass
class _Call:
    block: Block
    path: str


class _Calls:
    """The calls of one trace, each with a number, which is in the name of its scope."""

    def __init__(self) -> None:
        self._numbers, self.made = itertools.count(), dict[str, _Call]()

    def scope(self, block: Block, path: str) -> AbstractContextManager[Any]:
        """A named scope for one more call."""
        name = f"remat_jax_call{next(self._numbers)}"
        self.made[name] = _Call(block, path)
        return jax.named_scope(name)

    def around(self, scopes: Sequence[str]) -> tuple[str, ...]:
        """The names of the calls among scopes, the outermost first."""
        return tuple(dict.fromkeys(scope for scope in scopes if scope in self.made))


_ANYWHERE = BlockPolicies((("\0", Policy.parse("full")),), waits=True)
"""Policies that select nothing, under which all calls of modules are intercepted."""


def find_blocks(loss: Callable[..., Any], trained: Any, others: tuple[Any, ...], name: str) -> FoundBlocks:
    """The blocks of `loss(trained, *others)`, a scalar; the arguments are pytrees of arrays or of their types.

    Raises:
      BlockError: nothing in the loss is repeated, or two choices are equally good.
    """
    seen = _Calls()
    policies = _ANYWHERE.anew()
    with applying(policies), calls.listening(seen.scope):
        jaxpr = jax.make_jaxpr(lambda *args: with_blocks(policies, loss, args, {}))(trained, *others)
    return _chosen([_Loss(seen, jaxpr, range(len(jax.tree.leaves(trained))), 1)], name)


def find_blocks_of_step(step: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> FoundBlocks:
    """The blocks of the losses that a training step differentiates.

    Raises:
      BlockError: the step differentiates nothing, nothing in the losses is repeated, or two choices are equally good.
    """
    seen = _Calls()
    with calls.listening(seen.scope):
        gradients, *_ = gradients_of(step, arguments, _ANYWHERE.anew())
    different = {str(each.jaxpr): each for each in gradients}.values()
    if not different:
        raise BlockError(f"step={name!r}: it takes no gradient (jax.grad, value_and_grad, vjp), so it has no blocks to find")
    losses = [_Loss(seen, each.jaxpr, range(len(each.frozen), len(each.jaxpr.in_avals)), each.outputs) for each in different]
    return _chosen(losses, name)


class _Loss:
    """A traced loss, and what could be its blocks.

    Args:
      jaxpr: the loss as a closed jaxpr. trained: the inputs along which its first `outputs` are differentiated.

    Attributes:
      found: the parts by block.
      total: the bytes of all residuals without checkpoints.
    """

    def __init__(self, seen: _Calls, jaxpr: Any, trained: range, outputs: int) -> None:
        self._calls = seen
        self._readers: dict[Any, dict[Any, list[Any]]] = {}
        opened = retrace(jaxpr, lambda *values: self._opened(jaxpr, values)[:outputs])
        opened = compat.dce(opened)
        self._rounds: defaultdict[str, int] = defaultdict(int)
        self._chains: set[tuple[str, ...]] = set()
        self._count(opened, 1, ())
        self.found: dict[Block, Found] = {}
        self._add_calls()
        self.total = self._add_residuals(opened, trained)

    def _opened(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        """`jaxpr` on `values` without checkpoints; each checkpoint and each iteration of a scan in a scope of its own."""

        def visit(eqn: Any, inputs: list[Any]) -> list[Any] | None:
            if compat.is_checkpoint(eqn) and not compat.is_chunk_policy(compat.parameters(eqn).get("policy")):
                with compat.eqn_context(eqn), self._calls.scope(CHECKPOINTS, compat.source_line(eqn)):
                    return self._opened(compat.checkpoint_parts(eqn)[0], inputs)
            if eqn.primitive.name == "scan" and eqn.params["length"] > 1:
                line = compat.source_line(eqn)

                def iteration(*values: Any) -> list[Any]:
                    with self._calls.scope(SCANS, line):
                        return self._opened(bodies(eqn)[0], values)

                return rebind(eqn, inputs, lambda _, body: retrace(body, iteration))
            inside = differentiated_bodies(eqn)
            if not inside or eqn.primitive.name == "while":
                return None
            return rebind(eqn, inputs, lambda _, body: retrace(body, lambda *values: self._opened(body, values)))

        return interpret(jaxpr, values, visit)

    def _count(self, jaxpr: Any, rounds: int, outer: tuple[str, ...]) -> None:
        """Count how often each call runs, and collect the chains of calls that are inside each other."""
        here: set[str] = set()
        for eqn in jaxpr.jaxpr.eqns:
            chain = self._calls.around((*outer, *compat.scopes(eqn)))
            self._chains.add(chain)
            for name in set(chain) - set(outer) - here:
                self._rounds[name] += rounds
                here.add(name)
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for body in bodies(eqn):
                self._count(body, rounds * times, chain)

    def _add_calls(self) -> None:
        for name, rounds in self._rounds.items():
            call = self._calls.made[name]
            self.found.setdefault(call.block, Found(call.block, call.path)).calls += rounds
        around: dict[Block, list[set[Block]]] = defaultdict(list)
        for chain in self._chains:
            blocks = [self._calls.made[name].block for name in chain]
            for place, block in enumerate(blocks):
                around[block].append(set(blocks[:place]))
                self.found[block].meets.update(blocks[:place], blocks[place + 1 :])
        for block, outside in around.items():
            for outer in set.intersection(*outside) - {block}:
                self.found[outer].inside.add(block)

    def _add_residuals(self, jaxpr: Any, trained: range) -> int:
        """Add the bytes of residuals inside the calls; return the bytes of all residuals."""
        places = [place for place in trained if is_smooth(jaxpr.in_avals[place])]

        def pullback(*values: Any) -> Any:
            def of_trained(*some: Any) -> list[Any]:
                outputs = compat.jaxpr_function(jaxpr)(*filled(values, places, some))
                return [out for out in outputs if is_smooth(jax.typeof(out))]

            return jax.vjp(of_trained, *(values[place] for place in places))[1]

        linear = jax.make_jaxpr(pullback)(*jaxpr.in_avals).jaxpr
        total, of_call, known = 0, defaultdict[str, int](int), set()
        for atom in linear.outvars:
            if hasattr(atom, "val"):
                continue
            trail: Trail = []
            source = origin(linear, atom, trail=trail)
            if source.kind in ("argument", "constant") or source.key in known:
                continue
            known.add(source.key)
            size = compat.tree_bytes(atom.aval)
            total += size
            if source.kind != "carry":
                for name in self._made_inside(trail):
                    of_call[name] += size
        for name, size in of_call.items():
            found, rounds = self.found[self._calls.made[name].block], self._rounds[name]
            found.bytes += size
            found.largest = max(found.largest, size // max(rounds, 1))
        return total

    def _made_inside(self, trail: Trail) -> Set[str]:
        """The calls inside which an array is made and read, and nowhere else; of nested calls of a block the outermost."""
        jaxpr, var, outer = trail[-1]
        maker = makers_of(jaxpr).get(var)
        chain = self._calls.around((*outer, *compat.scopes(maker))) if maker is not None else ()
        inside = set(chain)
        around: Any = None
        for jaxpr, var, outer in trail:
            if around is not None and around[0] is not jaxpr and _leaves(jaxpr, var, makers_of(around[0])[around[1]]):
                inside &= set(outer)
            for reader in self._readers_of(jaxpr).get(var, ()):
                inside &= {*outer, *compat.scopes(reader)}
            around = jaxpr, var
        outermost = {self._calls.made[name].block: name for name in reversed(chain)}
        return inside & set(outermost.values())

    def _readers_of(self, jaxpr: Any) -> dict[Any, list[Any]]:
        """Variable → the equations of the open `jaxpr` that read it."""
        if jaxpr not in self._readers:
            readers = self._readers[jaxpr] = defaultdict(list)
            for eqn in jaxpr.eqns:
                for var in variables(eqn.invars):
                    readers[var].append(eqn)
        return self._readers[jaxpr]


def _leaves(body: Any, var: Any, eqn: Any) -> bool:
    """Whether `var` is a result of `body`, the body of `eqn`, and not only an array for the backward pass."""
    if eqn.primitive.name == "scan":
        return var in body.outvars[: compat.scan_layout(eqn)[1]]
    return body.outvars.count(var) > 1


def _chosen(losses: Sequence[_Loss], name: str) -> FoundBlocks:
    total = sum(loss.total for loss in losses)
    found: dict[Block, Found] = {}
    for each in (each for loss in losses for each in loss.found.values()):
        before = found.setdefault(each.block, each)
        if before is not each:
            before.calls, before.bytes = before.calls + each.calls, before.bytes + each.bytes
            before.largest = max(before.largest, each.largest)
            before.inside, before.meets = before.inside & each.inside, before.meets | each.meets
    ranked = sorted(found.values(), key=lambda each: (-each.saved, -each.bytes))
    repeated = [each for each in ranked if each.saved > 0 and each.block not in each.meets]
    candidates = [each for each in repeated if not any(_instead(other, each) for other in repeated)]
    if not candidates:
        raise BlockError(_nothing(ranked, total, name))
    close = [each for each in candidates if candidates[0].saved - each.saved <= _EQUAL * total]
    best = min(close, key=_kind)
    if rivals := [each for each in close if each is not best and _kind(each) == _kind(best) and best.block in each.meets]:
        shown = " or ".join(f"blocks={_shown(each)}" for each in (best, rivals[0]))
        raise BlockError(f"blocks=None: two choices save equally much in {name!r}; name one of them: {shown}")
    taken = [best]
    for each in candidates:
        if not each.meets & {other.block for other in taken} and each not in taken:
            gain = each.bytes - max(0, each.largest - max(other.largest for other in taken))
            taken += [each] if gain > _WORTH * total else []
    return FoundBlocks(tuple(taken), tuple(each for each in ranked if each not in taken and each.bytes), total)


def _kind(found: Found) -> int:
    """The order of preference: classes, then the model's own checkpoints, then scans."""
    return (CHECKPOINTS, SCANS).index(found.block) + 1 if isinstance(found.block, str) else 0


def _instead(better: Found, found: Found) -> bool:
    """Whether `better` stands for the same calls as `found`: one contains the other, equally often.

    The outer one does, unless it only wraps the inner one, or is no class.
    """
    if better.calls != found.calls:
        return False
    if better.block in found.inside:
        share = 1.0 if _kind(better) == _kind(found) else 0.9
        return _kind(better) <= _kind(found) and better.bytes >= share * found.bytes
    return found.block in better.inside and not _instead(found, better)


def _shown(found: Found) -> str:
    return f"{found.name!r}" if isinstance(found.block, str) else found.name


def _nothing(ranked: Sequence[Found], total: int, name: str) -> str:
    listed = "; ".join(f"{_shown(each)} ({format_bytes(each.bytes)})" for each in ranked[:8] if each.bytes)
    seen = f" The parts with the most of its {format_bytes(total)} of residuals, each called once: {listed}." if listed else ""
    return (
        f"blocks=None: no module, checkpoint or scan in {name!r} is repeated, so there is no block to find.{seen} Name the "
        "blocks; to make a plain function a block, mark it with @remat_jax.block."
    )
