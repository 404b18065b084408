"""A block with its policy set: the one form in which every checkpoint of this package reaches JAX."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from remat_jax import compat
from remat_jax.core.established import established
from remat_jax.core.naming import Named, name_linearised
from remat_jax.core.once import transposed_once
from remat_jax.core.origins import is_on_host, origin
from remat_jax.core.repeated import Linearise, NamedBlock, name_block
from remat_jax.core.stack_rows import read_row
from remat_jax.core.walk import of_some
from remat_jax.errors import UnsupportedError
from remat_jax.policy import Action, Candidate, JaxPolicy, Policy

Function = Callable[..., list[Any]]


@dataclass(frozen=True)
class PlannedBlock:
    """A block, the names of its residuals, and its policy.

    Attributes:
      jaxpr: the block as a closed jaxpr, without our names.
      names: the same with every array named, and its linearisations.
      policy: a policy (not `off`), or a policy object of JAX's own.
    """

    jaxpr: Any
    names: NamedBlock
    policy: Policy | JaxPolicy

    @property
    def named(self) -> Named:
        """The block with every array named."""
        return self.names.named

    @functools.cached_property
    def linearised(self) -> Named:
        """The linearisation along every input that has a derivative, its arrays named."""
        smooth = [index for index, aval in enumerate(self.jaxpr.in_avals) if is_smooth(aval)]
        avals = list(self.jaxpr.in_avals)
        return self.names.linearised(*_linearisation(avals, [avals[index].to_tangent_aval() for index in smooth], smooth))

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every array that a policy can select: what the block computes, and what its derivative rules compute beside it."""
        return tuple({**self.named.candidates, **self.linearised.candidates}.values())

    @functools.cached_property
    def offloaded(self) -> frozenset[str]:
        """The names that the policy moves to the host."""
        if not isinstance(self.policy, Policy):
            return frozenset(compat.offloaded_by(self.policy, self.jaxpr))
        if not self.policy.offloads:
            return frozenset()
        return decide(self.named, self.policy)[1] or decide(self.linearised, self.policy)[1]

    @property
    def offloaded_inputs(self) -> dict[int, str]:
        """The inputs that the policy moves to the host: place → name."""
        return {place: name for place, name in enumerate(self.named.inputs) if name in self.offloaded}

    @functools.cached_property
    def moves_bytes(self) -> bool:
        """Whether anything leaves the forward pass for host memory when the block is differentiated along every input.

        What a policy offloads is not moved where the backward pass reads none of it: the output of a dot, when the tanh that
        takes it is saved.
        """
        try:
            return bool(self.host_residuals)
        except Exception:  # a block that has no reverse mode can still be run forwards
            return True

    @functools.cached_property
    def kept(self) -> frozenset[str] | None:
        """`kept_along` every input."""
        return self.kept_along(range(len(self.jaxpr.in_avals)))

    def kept_along(self, inputs: Iterable[int]) -> frozenset[str] | None:
        """The names of what leaves the forward pass for the backward pass when the block is differentiated along some inputs.

        None where that cannot be known: of a policy object of JAX's, and of a block that has no reverse mode.
        """
        if not isinstance(self.policy, Policy):
            return None
        live = tuple(inputs)
        key = *decide(self.linearised, self.policy), live
        return self.names.kept(key, self.linearised, lambda: self._names_between(live))

    def _names_between(self, live: Sequence[int]) -> frozenset[str] | None:
        try:
            jaxpr = self._between(live)
            made = [origin(jaxpr, atom) for atom in jaxpr.outvars] if jaxpr is not None else []
        except Exception:  # a block that has no reverse mode can still be run forwards
            return None
        return frozenset(name for one in made for name in (one.name, *one.aliases))

    @functools.cached_property
    def host_residuals(self) -> tuple[Any, ...]:
        """The types of what is on the host between the passes when the block is differentiated along every input."""
        return self.host_residuals_along(range(len(self.jaxpr.in_avals)))

    def host_residuals_along(self, inputs: Iterable[int]) -> tuple[Any, ...]:
        """The same where it is differentiated along some inputs; what only the gradients of others read stays away."""
        jaxpr = self._between(inputs)
        residuals = jaxpr.outvars if jaxpr is not None else ()
        return tuple(atom.aval for atom in residuals if not hasattr(atom, "val") and is_on_host(atom))

    def _between(self, inputs: Iterable[int]) -> Any:
        """The open jaxpr of the forward pass, whose outputs are what the backward pass along `inputs` reads; None for none."""
        live = [index for index in inputs if is_smooth(self.jaxpr.in_avals[index])]
        block = self.checkpointed(prevent_cse=False)

        def linear(*primals: Any) -> Any:
            def of_live(*changed: Any) -> list[Any]:
                return [out for out in of_some(block, primals, live)(*changed) if is_smooth(out)]

            return jax.linearize(of_live, *(primals[index] for index in live))[1]

        with _noting(None):
            return jax.make_jaxpr(linear)(*self.jaxpr.in_avals).jaxpr if live else None

    def checkpointed(
        self, *, prevent_cse: bool, rows: Sequence[int] = (), once: bool = False, staying: Callable[[], Iterable[int]] = tuple
    ) -> Function:
        """The block as a function of the jaxpr's inputs, under its policy.

        Args:
          rows: the inputs that are rows of stacks. The function takes the stacks and one index behind its other arguments and
            reads the rows there (`graph.rows`), again in the backward pass.
          once: whether its gradient refuses to be differentiated in reverse mode (`graph.once`); a policy object of JAX's does
            not.
          staying: the places of the inputs that stay on the device whatever the policy says, asked when the block is
            differentiated.
        """
        if not isinstance(self.policy, Policy):
            assert not rows, "JAX's own policies could keep what is read"
            return _checkpoint(compat.jaxpr_function(self.jaxpr), self.policy, prevent_cse)
        run = functools.partial(_differentiated_by_name, self.jaxpr, self.names, self.policy, staying=staying)
        return run(prevent_cse=prevent_cse, rows=rows, once=once)


Differentiated = list[tuple[PlannedBlock, list[int]]]
_noted: ContextVar[Differentiated | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def _noting(blocks: Differentiated | None) -> Iterator[None]:
    token = _noted.set(blocks)
    try:
        yield
    finally:
        _noted.reset(token)


@contextlib.contextmanager
def noting_differentiated() -> Iterator[Differentiated]:
    """The blocks that are differentiated meanwhile, each with the inputs that it is differentiated along; not from a cache."""
    blocks: Differentiated = []
    with _noting(blocks):
        yield blocks


def plan_block(jaxpr: Any, policy: Policy | JaxPolicy, path: str, inputs: Sequence[bool]) -> PlannedBlock:
    """Name the residuals of the block `jaxpr`, to run it under `policy`.

    Args:
      jaxpr: the block as a closed jaxpr.
      policy: a policy (not `off`), or a policy object of JAX's own, which is passed on as it is.
      path: the module path that leads the names.
      inputs: for each input of `jaxpr`, whether `@inputs` means it.

    Raises:
      UnsupportedError: the block uses a mutable array.
    """
    compat.warn_of_lost_threads()
    if compat.uses_references(jaxpr):
        raise UnsupportedError(
            f"block {path or 'function'!r} uses a mutable array (jax.new_ref), which JAX cannot differentiate under a "
            "checkpoint. Carry the value as an argument and a result instead."
        )
    # What no output depends on has no name: it could not be kept.
    jaxpr = compat.dce(established(jaxpr))
    with compat.classic_rematerialisation():
        return PlannedBlock(jaxpr, name_block(jaxpr, path, inputs), policy)


def decide(named: Named, policy: Policy) -> tuple[frozenset[str], frozenset[str]]:
    """The names that `policy` saves and those that it offloads."""
    saved, offloaded = set(), set()
    for name, candidate in named.candidates.items():
        action = policy.action(candidate)
        shape = named.shapes[name]
        if action is Action.OFFLOAD and shape != () and 0 not in shape:
            offloaded.add(name)
        elif action is not Action.RECOMPUTE and not candidate.is_input:
            # An input costs nothing to keep: it is there anyway. A scalar is not worth a copy.
            saved.add(name)
    return frozenset(saved), frozenset(offloaded)


@dataclass(frozen=True)
class _NamesPolicy:
    """A policy of JAX's in two lists of names; equal for equal lists, so that JAX's caches hit."""

    saved: frozenset[str]
    offloaded: frozenset[str]

    def __call__(self, primitive: Any, *_: Any, **params: Any) -> Any:
        if primitive.name in _PRINTS:
            # Run in the forward pass only. JAX fails (a KeyError) if it is to be run again and a name it reads is kept.
            return True
        if primitive.name != "name":
            return False
        name = params["name"]
        return compat.OFFLOAD if name in self.offloaded else name in self.saved


_PRINTS = frozenset({"debug_callback", "debug_print"})


def names_policy(saved: frozenset[str], offloaded: frozenset[str]) -> JaxPolicy | None:
    """The two lists of names as a policy of JAX's; None, JAX's word for recomputing everything, if both are empty."""
    return _NamesPolicy(saved, offloaded) if saved or offloaded else None


def _checkpoint(function: Function, policy: JaxPolicy | None, prevent_cse: bool) -> Function:
    def run(*args: Any) -> list[Any]:
        with compat.classic_rematerialisation(), compat.binding_ours():
            return list(jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)(*args))

    return run


def _reading(function: Function, size: int, rows: Sequence[int]) -> Function:
    """`function`, of `size` arguments and more, as one that takes the stacks and the index between these and those."""

    def run(*args: Any) -> list[Any]:
        values, (*stacks, index) = list(args[:size]), args[size : size + len(rows) + 1]
        for place, stack in zip(rows, stacks, strict=True):
            values[place] = read_row(values[place], stack, index)
        return function(*values, *args[size + len(rows) + 1 :])

    return run if rows else function


def _differentiated_by_name(
    jaxpr: Any,
    names: NamedBlock,
    policy: Policy,
    *,
    prevent_cse: bool,
    rows: Sequence[int],
    once: bool,
    staying: Callable[[], Iterable[int]],
) -> Function:
    """The block with a derivative of its own: the checkpoint stands around the linearisation, where every residual has a name.

    `jax.checkpoint` around the block would be linearised by JAX itself, after the names were given.
    """
    size, bound = len(jaxpr.in_avals), compat.bound_axes()

    def run(*primals: Any) -> list[Any]:
        return _reading(compat.jaxpr_function(jaxpr), size, rows)(*primals)

    # `replan` knows a block of ours by this name.
    run.__name__ = run.__qualname__ = compat.block_name()
    block = jax.custom_jvp(run)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        with bound():
            return differentiated(primals, tangents)

    def differentiated(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        live = [index for index, tangent in enumerate(tangents) if is_live(tangent)]
        if (noted := _noted.get()) is not None:
            # The gradient of a row goes to its stack.
            places = [*range(size), *rows]
            noted.append((PlannedBlock(jaxpr, names, policy), [places[index] for index in live if index < len(places)]))
        if not live:
            outputs = run(*primals)
            return outputs, [zero_tangent(out) for out in outputs]
        directions = [transposed_once(tangents[index]) if once else tangents[index] for index in live]
        linearisation = _linearisation(list(primals[:size]), directions, live, names)
        saved, offloaded = decide(names.linearised(*linearisation), policy)
        kept = saved, offloaded.difference(names.named.inputs[place] for place in staying())
        linearised = names.keeping(frozenset.union(*kept), *linearisation)
        operands, keep = [*primals, *directions], names_policy(*kept)
        if rows:
            reading = _reading(compat.jaxpr_function(linearised), size, rows)
            results = _checkpoint(reading, keep, prevent_cse)(*operands)
        else:
            results = compat.bind_checkpoint(linearised, operands, policy=keep, prevent_cse=prevent_cse)
        outputs, changes = results[: len(jaxpr.out_avals)], iter(results[len(jaxpr.out_avals) :])
        changes = map(transposed_once, changes) if once else changes
        return outputs, [next(changes) if is_smooth(out) else zero_tangent(out) for out in outputs]

    block.defjvp(jvp, symbolic_zeros=True)
    return block


def _linearisation(
    primals: list[Any], directions: list[Any], live: Sequence[int], names: NamedBlock | None = None
) -> tuple[Any, Linearise]:
    """What a linearisation depends on beside the block; and what makes it.

    It takes `(*primals, *directions)` to the outputs and to the tangents of the smooth ones. Along some of the inputs, arrays
    have the names that they have along all, if the block's `names` are given.
    """
    types = [compat.type_of(value) for value in (*primals, *directions)]
    key = tuple(live), tuple((one, one.weak_type) for one in types), compat.block_settings()

    def linearise(named: Named) -> Named:
        function = compat.jaxpr_function(named.jaxpr)

        def push(primals: list[Any], directions: list[Any]) -> list[Any]:
            of_live = of_some(function, primals, live)
            outputs, changes = jax.jvp(of_live, tuple(primals[index] for index in live), tuple(directions))
            return [*outputs, *(change for out, change in zip(outputs, changes, strict=True) if is_smooth(out))]

        with compat.classic_rematerialisation():
            # A block's own constants are its inputs; the rule of a `custom_jvp` may read others, which stay where they are.
            jaxpr = compat.dce(jax.make_jaxpr(push)(primals, directions))
            return name_linearised(named, jaxpr, len(primals), _along_all(named, primals, live, names))

    return key, linearise


def _along_all(named: Named, primals: list[Any], live: Sequence[int], names: NamedBlock | None) -> Named | None:
    """The linearisation along every input that has a derivative; None where that is along `live`, or where there is none."""
    avals = [compat.type_of(value) for value in primals]
    smooth = [index for index, aval in enumerate(avals) if is_smooth(aval)]
    if names is None or list(live) == smooth:
        return None
    key, linearise = _linearisation(avals, [avals[index].to_tangent_aval() for index in smooth], smooth)
    try:
        found = names.first.linearised(key, linearise) if named is names.first.named else None
        return found or linearise(named)
    except Exception:  # an input that the caller does not differentiate may have no derivative
        return None


def is_live(tangent: Any) -> bool:
    """Whether a tangent of a `custom_jvp` rule with symbolic zeros is one that is differentiated along."""
    return not isinstance(tangent, SymbolicZero) and tangent.dtype != jax.dtypes.float0


def is_smooth(out: Any) -> bool:
    """Whether an output has a derivative; integers, booleans and RNG keys have not."""
    return bool(jnp.issubdtype(out.dtype, jnp.inexact))


def zero_tangent(out: Any) -> Any:
    """The zero tangent of `out`; what has no derivative has tangents of dtype float0."""
    return jnp.zeros(out.shape, out.dtype) if is_smooth(out) else np.zeros(out.shape, jax.dtypes.float0)
