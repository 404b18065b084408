"""Makes the checkpoint of every block, around the linearisation of the block.

For a block f with inputs x:

    y, f_lin = jax.linearize(f, x)
    r        = the residuals: the arrays that f_lin reads, each named by `checkpoint_name`
    ẏ        = f_lin(ẋ)              forward mode
    x̄        = f_linᵀ(ȳ)             the backward pass transposes f_lin

    (y, ẏ)   = checkpoint(policy)((x, ẋ) ↦ (f(x), f_lin(ẋ)))(x, ẋ)

The checkpoint's policy is two sets of names: saved residuals and offloaded residuals. Only these residuals and the block's
inputs pass from the forward to the backward pass; the backward pass recomputes the rest. The checkpoint wraps the
linearisation, not f: JAX would linearise `jax.checkpoint(f)` after naming, so arrays that derivative rules compute would have
no name.

In the code, `live` lists the indices of the inputs along which f is differentiated: their tangents are neither symbolic zeros
nor of dtype float0 (`is_live`). `directions` are the tangents ẋ of the live inputs. A value is `smooth` if its dtype is
floating-point or complex (`is_smooth`); other values have no derivative. Each smooth output has a tangent in ẏ.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.core.decided import NamesPolicy, decide
from remat_jax.core.naming import Named, name_linearised
from remat_jax.core.once import transposed_once
from remat_jax.core.origins import Origin, is_on_host, origin
from remat_jax.core.repeated import Linearise, NamedBlock, name_block
from remat_jax.core.rewrite import established
from remat_jax.core.stack_rows import read_row
from remat_jax.core.walk import of_some, retrace
from remat_jax.errors import UnsupportedError
from remat_jax.policy import Candidate, JaxPolicy, Policy

Function = Callable[..., list[Any]]


@dataclass(frozen=True)
class BlockUnderPolicy:
    """A block f, the names of its residuals, and its policy.

    Attributes:
      jaxpr: f as a closed jaxpr.
      names: f and its linearisations, with every array named.
      policy: a policy other than `off`, or a JAX policy object.
    """

    jaxpr: ClosedJaxpr
    names: NamedBlock
    policy: Policy | JaxPolicy

    @property
    def named(self) -> Named:
        """The block with every array named."""
        return self.names.named

    @functools.cached_property
    def _along_all(self) -> tuple[list[int], Named]:
        return _linearised_along_all(self.jaxpr.in_avals, self.names.linearised)

    @property
    def linearised(self) -> Named:
        """The linearisation `(x, ẋ) ↦ (f(x), f_lin(ẋ))` along every input that has a derivative, with its arrays named."""
        return self._along_all[1]

    @functools.cached_property
    def _decided(self) -> tuple[frozenset[str], frozenset[str]]:
        assert isinstance(self.policy, Policy)
        return decide(self.linearised, self.policy)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every array that a policy can select: arrays of the block, and arrays that its derivative rules add."""
        return tuple({**self.named.candidates, **self.linearised.candidates}.values())

    @functools.cached_property
    def offloaded(self) -> frozenset[str]:
        """The names of the arrays that the policy offloads."""
        if not isinstance(self.policy, Policy):
            return frozenset(compat.offloaded_by(self.policy, self.jaxpr))
        if not self.policy.offloads:
            return frozenset()
        return decide(self.named, self.policy)[1] or self._decided[1]

    @property
    def offloaded_inputs(self) -> dict[int, str]:
        """The inputs that the policy offloads: index → name."""
        return {place: name for place, name in enumerate(self.named.inputs) if name in self.offloaded}

    @functools.cached_property
    def moves_bytes(self) -> bool:
        """Whether the forward pass moves a residual to the host when the block is differentiated along every input.

        An array that the policy offloads is not moved if the backward pass does not read it. For example, in tanh(x @ w) the
        backward pass does not read x @ w if the tanh is saved.
        """
        between = self._between(self._along_all[0])
        return between is None or any(on_host for _, on_host in between)

    def residuals(self) -> list[Origin] | None:
        """The arrays that pass to the backward pass when the block is differentiated along every input.

        Inputs on the device and constants are left out. None if the block has no reverse-mode derivative.
        """
        between = self._between(self._along_all[0])
        if between is None:
            return None
        return [source for source, on_host in between if on_host or source.kind not in ("argument", "constant")]

    def kept(self, inputs: Sequence[int] | None = None) -> frozenset[str] | None:
        """The names of the residuals that the policy keeps when the block is differentiated along `inputs` (None: all inputs).

        Returns None if they are unknown: under a JAX policy object, or if the block has no reverse-mode derivative.
        """
        if not isinstance(self.policy, Policy):
            return None
        live = tuple(self._along_all[0] if inputs is None else inputs)
        key = *self._decided, live
        return self.names.kept(key, self.linearised, lambda: self._names_between(live))

    def _names_between(self, live: Sequence[int]) -> frozenset[str] | None:
        between = self._between(live)
        if between is None:
            return None
        return frozenset(name for source, _ in between for name in (source.name, *source.aliases))

    def _between(self, inputs: Iterable[int]) -> list[tuple[Origin, bool]] | None:
        """The residuals along `inputs`, each with whether it is on the host; None without a reverse-mode derivative."""
        smooth = [index for index in inputs if is_smooth(self.jaxpr.in_avals[index])]
        if not smooth:
            return []
        block = self.checkpointed(prevent_cse=False)
        try:
            with compat.setting(_differentiated, None):
                jaxpr = retrace(self.jaxpr, lambda *primals: linear_part(block, primals, smooth)).jaxpr
            return [(origin(jaxpr, atom), not hasattr(atom, "val") and is_on_host(atom)) for atom in jaxpr.outvars]
        except Exception:  # a block without a reverse-mode derivative can still run forward
            return None

    def checkpointed(
        self, *, prevent_cse: bool, rows: Sequence[int] = (), once: bool = False, staying: Callable[[], Iterable[int]] = tuple
    ) -> Function:
        """The block f under its policy, as a function of the jaxpr's inputs.

        The result is a `custom_jvp` function, whose derivative rule runs the linearisation under `checkpoint(policy)`. Under a
        JAX policy object the result is `jax.checkpoint(f)`.

        Args:
          rows: indices of inputs that are rows of stacked arrays. The function takes the stacks and one row index after its
            other arguments, and both passes read each row from its stack (`core.stack_rows`).
          once: if true, a reverse-mode derivative of the block's gradient raises an error (`core.once`).
          staying: called when the block is differentiated; returns the indices of inputs that stay on the device although the
            policy offloads them.
        """
        compat.install_hooks()
        if not isinstance(self.policy, Policy):
            assert not rows, "a JAX policy could save a row that is read from its stack"
            return lambda *args: compat.bind_region(self.jaxpr, args, policy=self.policy, prevent_cse=prevent_cse)
        size = len(self.jaxpr.in_avals)

        def run(*primals: Any) -> list[Any]:
            outputs = _reading(compat.jaxpr_function(self.jaxpr), size, rows)(*primals)
            return list(map(compat.batch_axis_in_front, outputs))

        def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            live = [index for index, tangent in enumerate(tangents) if is_live(tangent)]
            if (blocks := _differentiated.get()) is not None:
                # For a differentiated stack, record the index of the input that the block reads from this stack.
                places = [*range(size), *rows]
                blocks.append((self, [places[index] for index in live if index < len(places)]))
            if not live:
                outputs = run(*primals)
                return outputs, [zero_tangent(out) for out in outputs]
            directions = [transposed_once(tangents[index]) if once else tangents[index] for index in live]
            linearised, policy = self._linearised_under_policy(primals[:size], directions, live, staying())
            operands = [*primals, *directions]
            if rows:
                # Rows must be read inside the checkpoint, or they would become residuals.
                with compat.established_forms():
                    linearised = jax.make_jaxpr(_reading(compat.jaxpr_function(linearised), size, rows))(*operands)
            results = compat.bind_region(linearised, operands, policy=policy, prevent_cse=prevent_cse)
            outputs, changes = results[: len(self.jaxpr.out_avals)], iter(results[len(self.jaxpr.out_avals) :])
            changes = map(transposed_once, changes) if once else changes
            return outputs, [next(changes) if is_smooth(out) else zero_tangent(out) for out in outputs]

        return compat.block_function(run, compat.with_axes_bound_now(jvp))

    def _linearised_under_policy(
        self, primals: Sequence[Any], directions: Sequence[Any], live: Sequence[int], staying: Iterable[int]
    ) -> tuple[ClosedJaxpr, JaxPolicy | None]:
        """The linearisation along the `live` inputs as a closed jaxpr, and the JAX policy for its checkpoint."""
        assert isinstance(self.policy, Policy)
        linearisation = _linearisation(list(primals), list(directions), live, self.names)
        saved, offloaded = decide(self.names.linearised(*linearisation), self.policy)
        offloaded = offloaded.difference(self.named.inputs[place] for place in staying)
        linearised = self.names.keeping(saved | offloaded, *linearisation)
        # Under the policy None, `jax.checkpoint` recomputes everything.
        return linearised, NamesPolicy(saved, offloaded) if saved or offloaded else None


Differentiated = list[tuple[BlockUnderPolicy, list[int]]]
_differentiated: ContextVar[Differentiated | None] = ContextVar("differentiated", default=None)


@contextlib.contextmanager
def noting_differentiated() -> Iterator[Differentiated]:
    """Collects the blocks that are differentiated inside this context, each with the indices of its differentiated inputs.

    If JAX reuses a cached trace, the blocks inside it are not collected.
    """
    blocks: Differentiated = []
    with compat.setting(_differentiated, blocks):
        yield blocks


def block_under_policy(jaxpr: ClosedJaxpr, policy: Policy | JaxPolicy, path: str, inputs: Sequence[bool]) -> BlockUnderPolicy:
    """Name the residuals of the block `jaxpr`, and set its policy.

    Args:
      policy: a policy other than `off`, or a JAX policy object, which is passed to `jax.checkpoint` unchanged.
      path: the module path, with which every automatic name begins.
      inputs: for each input of `jaxpr`, whether `@inputs` selects it.

    Raises:
      UnsupportedError: the block uses a mutable array.
    """
    compat.warn_of_lost_threads()
    if compat.uses_references(jaxpr):
        raise UnsupportedError(
            f"block {path or 'function'!r} uses a mutable array (jax.new_ref), which JAX cannot differentiate under a "
            "checkpoint. Carry the value as an argument and a result instead."
        )
    # Dead code is removed before naming, so that a policy cannot select arrays that nothing reads.
    jaxpr = compat.dce(established(jaxpr))
    with compat.established_forms():
        return BlockUnderPolicy(jaxpr, name_block(jaxpr, path, inputs), policy)


def _reading(function: Function, size: int, rows: Sequence[int]) -> Function:
    """A function that calls `function` with the inputs at the indices `rows` read from stacked arrays.

    Its arguments are the first `size` arguments of `function`, the stacked arrays, one row index, and the remaining
    arguments of `function`.
    """

    def run(*args: Any) -> list[Any]:
        values, (*stacks, index) = list(args[:size]), args[size : size + len(rows) + 1]
        for place, stack in zip(rows, stacks, strict=True):
            values[place] = read_row(values[place], stack, index)
        return function(*values, *args[size + len(rows) + 1 :])

    return run if rows else function


def _linearisation(
    primals: list[Any], directions: list[Any], live: Sequence[int], names: NamedBlock | None = None
) -> tuple[Hashable, Linearise]:
    """A cache key for a linearisation of a block, and the function that traces it.

    The linearisation maps `(*primals, *directions)` to the outputs, followed by the tangents of the smooth outputs. If the
    block's `names` are given, each array has the same name as in the linearisation along all inputs.
    """
    types = [compat.type_of(value) for value in (*primals, *directions)]
    key = tuple(live), tuple((aval, aval.weak_type) for aval in types), compat.block_settings()

    def linearise(named: Named) -> Named:
        function = compat.jaxpr_function(named.jaxpr)

        def push(primals: list[Any], directions: list[Any]) -> list[Any]:
            of_live = of_some(function, primals, live)
            outputs, changes = jax.jvp(of_live, tuple(primals[index] for index in live), tuple(directions))
            return [*outputs, *(change for out, change in zip(outputs, changes, strict=True) if is_smooth(out))]

        with compat.established_forms():
            # An array that a `custom_jvp` rule closes over becomes a constant of this closed jaxpr, not an input.
            jaxpr = compat.dce(jax.make_jaxpr(push)(primals, directions))
            whole = None if names is None else _along_all(named, primals, live, names)
            return name_linearised(named, jaxpr, len(primals), whole)

    return key, linearise


def _linearised_along_all(avals: Sequence[Any], linearised: Callable[[Hashable, Linearise], Named]) -> tuple[list[int], Named]:
    """The indices of the inputs along which a block has a derivative, and `linearised` of its linearisation along them.

    An input need not have a derivative if the caller does not differentiate it, for example the input of a callback.
    """

    def along(places: list[int]) -> Named:
        return linearised(*_linearisation(list(avals), [avals[place].to_tangent_aval() for place in places], places))

    def has_derivative(place: int) -> bool:
        try:
            along([place])
        except Exception:  # whatever a user's derivative rule raises
            return False
        return True

    smooth = [index for index, aval in enumerate(avals) if is_smooth(aval)]
    try:
        return smooth, along(smooth)
    except Exception:  # JAX's errors do not tell which input has no derivative
        places = list(filter(has_derivative, smooth))
        return places, along(places)


def _along_all(named: Named, primals: Sequence[Any], live: Sequence[int], names: NamedBlock) -> Named | None:
    """The linearisation along every input with a derivative; None if `live` is every smooth input, or tracing fails."""
    avals = [compat.type_of(value) for value in primals]
    if list(live) == [index for index, aval in enumerate(avals) if is_smooth(aval)]:
        return None

    def linearised(key: Hashable, linearise: Linearise) -> Named:
        remembered = names.first.linearised(key, linearise) if named is names.first.named else None
        return remembered or linearise(named)

    try:
        return _linearised_along_all(avals, linearised)[1]
    except Exception:  # the block may use an axis or a context that this trace does not have
        return None


def linear_part(function: Function, primals: Sequence[Any], places: Sequence[int]) -> Function:
    """The derivative of `function` at `primals`: maps tangents of the inputs at `places` to tangents of the smooth outputs."""

    def of_places(*changed: Any) -> list[Any]:
        return [out for out in of_some(function, primals, places)(*changed) if is_smooth(out)]

    return jax.linearize(of_places, *(primals[place] for place in places))[1]


def is_live(tangent: jax.Array | SymbolicZero) -> bool:
    """Whether a tangent in a `custom_jvp` rule is neither a symbolic zero nor of dtype float0."""
    return not isinstance(tangent, SymbolicZero) and jnp.result_type(tangent) != jax.dtypes.float0


def is_smooth(out: Any) -> bool:
    """Whether a value has a derivative; integers, booleans and RNG keys have none."""
    return bool(jnp.issubdtype(out.dtype, jnp.inexact))


def zero_tangent(out: jax.Array) -> jax.Array | np.ndarray[Any, Any]:
    """The zero tangent of `out`; its dtype is float0 if `out` has no derivative."""
    return jnp.zeros(out.shape, out.dtype) if is_smooth(out) else np.zeros(out.shape, jax.dtypes.float0)
