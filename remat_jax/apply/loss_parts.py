"""What in a traced loss could be its blocks: the calls of each class of modules, its checkpoints and its scans, with bytes.

The loss is traced once, each call of a module in a named scope of its own. The scopes of an array that passes from the forward
to the backward pass then say inside which calls it was made. The model's own checkpoints and its scans count as calls too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from remat_jax import compat
from remat_jax.core import is_smooth
from remat_jax.core.marks import CHECKPOINTS, SCANS, Block, name_of
from remat_jax.core.origins import Trail, makers_of, origin
from remat_jax.core.rewrite import VIEWS
from remat_jax.core.walk import bodies, differentiated_bodies, filled, interpret, rebind, retrace, variables


@dataclass
class Found:
    """Parts of a loss that could be its blocks: the calls of a class, the model's own checkpoints, or its scans.

    Attributes:
      block: a class, `"checkpoints"` or `"scans"`.
      path: the module path of the first call, or the source line.
      calls: how often they run in one step; an iteration of a scan is a call.
      bytes: those of the residuals that a checkpoint around each call drops, less those of the inputs that it keeps instead.
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


@dataclass
class _Call:
    block: Block
    path: str


class Calls:
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


class TracedLoss:
    """A traced loss, and what could be its blocks.

    Args:
      jaxpr: the loss as a closed jaxpr. trained: the inputs along which its first `outputs` are differentiated.

    Attributes:
      found: the parts by block.
      total: the bytes of all residuals without checkpoints.
    """

    def __init__(self, seen: Calls, jaxpr: ClosedJaxpr, trained: range, outputs: int) -> None:
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

    def _opened(self, jaxpr: ClosedJaxpr, values: Sequence[Any], around: Set[str] = frozenset()) -> list[Any]:
        """`jaxpr` on `values` without checkpoints; each checkpoint and each iteration of a scan in a scope of its own.

        Only the outermost ones have a scope: `around` are the kinds that are around `jaxpr`.
        """

        def scope(part: str, eqn: JaxprEqn) -> AbstractContextManager[Any]:
            return contextlib.nullcontext() if part in around else self._calls.scope(part, compat.source_line(eqn))

        def visit(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
            if compat.is_checkpoint(eqn) and not compat.is_chunk_policy(compat.parameters(eqn).get("policy")):
                with compat.eqn_context(eqn), scope(CHECKPOINTS, eqn):
                    return self._opened(compat.checkpoint_parts(eqn)[0], inputs, around | {CHECKPOINTS})
            if eqn.primitive.name == "scan" and eqn.params["length"] > 1:

                def iteration(*values: Any) -> list[Any]:
                    with scope(SCANS, eqn):
                        return self._opened(bodies(eqn)[0], values, around | {SCANS})

                return rebind(eqn, inputs, lambda _, body: retrace(body, iteration))
            inside = differentiated_bodies(eqn)
            if not inside or eqn.primitive.name == "while":
                return None
            return rebind(eqn, inputs, lambda _, body: retrace(body, lambda *values: self._opened(body, values, around)))

        return interpret(jaxpr, values, visit)

    def _count(self, jaxpr: ClosedJaxpr, rounds: int, outer: tuple[str, ...]) -> None:
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

    def _add_residuals(self, jaxpr: ClosedJaxpr, trained: range) -> int:
        """Add the bytes of residuals inside the calls; return the bytes of all residuals."""
        places = [place for place in trained if is_smooth(jaxpr.in_avals[place])]

        def pullback(*values: Any) -> Callable[..., Any]:
            def of_trained(*some: Any) -> list[Any]:
                outputs = compat.jaxpr_function(jaxpr)(*filled(values, places, some))
                return [out for out in outputs if is_smooth(jax.typeof(out))]

            return jax.vjp(of_trained, *(values[place] for place in places))[1]

        closed = jax.make_jaxpr(pullback)(*jaxpr.in_avals)
        linear = closed.jaxpr
        total, of_call, known, kept = 0, defaultdict[str, int](int), set(), set[Any]()
        for atom in linear.outvars:
            if hasattr(atom, "val"):
                continue
            trail: Trail = []
            source = origin(linear, atom, trail=trail)
            kept.update(var for _, var, _ in trail)
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
        self._take_off_inputs(closed, 1, (), kept | {*linear.invars, *linear.constvars})
        return total

    def _take_off_inputs(self, jaxpr: ClosedJaxpr, rounds: int, outer: tuple[str, ...], free: set[Any]) -> None:
        """Subtract the bytes of the calls' inputs. `free` are the variables that are kept anyway, and arguments."""
        inputs: dict[str, dict[Any, None]] = defaultdict(dict)
        made: dict[str, set[Any]] = defaultdict(set)
        views = set(free)
        for eqn in jaxpr.jaxpr.eqns:
            chain = self._counted((*outer, *compat.scopes(eqn)))
            if eqn.primitive.name in VIEWS and views.issuperset(variables(eqn.invars[:1])):
                views.update(eqn.outvars)
            for name in set(chain) - set(outer):
                inputs[name].update(dict.fromkeys(var for var in variables(eqn.invars) if var not in made[name]))
                made[name].update(eqn.outvars)
            for body in bodies(eqn):
                self._take_off_inputs(body, *_inside(eqn, body, rounds, chain, views, free))
        for name, read in inputs.items():
            found = self.found[self._calls.made[name].block]
            found.bytes -= rounds * sum(compat.tree_bytes(var.aval) for var in read if var not in views)

    def _made_inside(self, trail: Trail) -> Set[str]:
        """The calls inside which an array is made and read, and nowhere else; of nested calls of a block the outermost."""
        jaxpr, var, outer = trail[-1]
        maker = makers_of(jaxpr).get(var)
        chain = self._counted((*outer, *compat.scopes(maker))) if maker is not None else ()
        inside = set(chain)
        around: tuple[Jaxpr, Var] | None = None
        for jaxpr, var, outer in trail:
            if around is not None and around[0] is not jaxpr and _leaves(jaxpr, var, makers_of(around[0])[around[1]]):
                inside &= set(outer)
            for reader in self._readers_of(jaxpr).get(var, ()):
                inside &= {*outer, *compat.scopes(reader)}
            around = jaxpr, var
        outermost = {self._calls.made[name].block: name for name in reversed(chain)}
        return inside & set(outermost.values())

    def _counted(self, scopes: Sequence[str]) -> tuple[str, ...]:
        """The names of the calls among scopes that are in the loss, the outermost first. A derivative rule may have others."""
        return tuple(name for name in self._calls.around(scopes) if name in self._rounds)

    def _readers_of(self, jaxpr: Jaxpr) -> dict[Var, list[JaxprEqn]]:
        """Variable → the equations of the open `jaxpr` that read it."""
        if jaxpr not in self._readers:
            readers = self._readers[jaxpr] = defaultdict(list)
            for eqn in jaxpr.eqns:
                for var in variables(eqn.invars):
                    readers[var].append(eqn)
        return self._readers[jaxpr]


def _inside(
    eqn: JaxprEqn, body: ClosedJaxpr, rounds: int, chain: tuple[str, ...], views: set[Any], kept: set[Any]
) -> tuple[int, tuple[str, ...], set[Any]]:
    """The arguments of `_take_off_inputs` for `body`, a body of `eqn`."""
    free = [hasattr(atom, "val") or atom in views for atom in eqn.invars]
    if eqn.primitive.name == "scan":
        consts, carry = compat.scan_layout(eqn)
        free[consts : consts + carry] = [False] * carry
        rounds *= eqn.params["length"]
    # The operands of a `cond` come after the index.
    size = len(body.jaxpr.invars)
    free = free[len(free) - size :] if len(free) >= size else [True] * size
    inner = {var for var, is_free in zip(body.jaxpr.invars, free, strict=True) if is_free}
    return rounds, chain, kept | inner | {*body.jaxpr.constvars}


def _leaves(body: Jaxpr, var: Var, eqn: JaxprEqn) -> bool:
    """Whether `var` is a result of `body`, the body of `eqn`, and not only an array for the backward pass."""
    if eqn.primitive.name == "scan":
        return var in body.outvars[: compat.scan_layout(eqn)[1]]
    return body.outvars.count(var) > 1
