"""The value and gradient of a loss over examples in micro-batches: the same function, found from the traced loss.

    loss = f(S),  S = Σ_i Sᵢ        Sᵢ: the sums over the rows of micro-batch i (`example_sums` finds them)
    ∂loss/∂params = ∂f/∂params + Σ_i ⟨∂f/∂S, ∂Sᵢ/∂params⟩

f must be linear in the sums that depend on parameters. So ∂f/∂S, such as one over the number of targets, is known before the
first micro-batch runs, and each micro-batch runs once forward and once backward.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_jax import compat
from remat_jax.errors import PlanningError
from remat_jax.train import sums
from remat_jax.train.example_sums import ROWS, ExampleRegion
from remat_jax.train.head_program import Program, Value, program_of, read, run_nodes
from remat_jax.train.head_region import NotPerToken, text
from remat_jax.train.parts import accumulate_gradients, check_batch, is_key
from remat_jax.train.same_program import needed_operations, twins_of

Function = Callable[..., Any]


def micro_batched(loss: Function, n: int, *, has_aux: bool = False, states: int = 0, declared: str | None = None) -> Function:
    """`jax.value_and_grad` of the scalar `loss(trained, frozen, *batch)` in `n` micro-batches, with the memory of one.

    The result is the same function, up to the order of additions, because the traced loss shows that it depends on the batch
    through sums over rows alone: a sum or a mean, also a mean over the targets of a mask. Micro-batch i has the rows `x[i::n]`,
    and `jax.random.fold_in(key, i)` for each scalar key in the batch, so random numbers differ from those of the whole batch.

    Args:
      loss: returns a real scalar, or `(scalar, aux)` if `has_aux`; aux also depends on the batch through sums alone.
      n: the number of micro-batches; it divides the number of rows.
      states: how many of the batch's arguments, from the first, are not rows: the other state of an NNX model.
      declared: `"sum"` or `"mean"`: believe that the loss is one over the rows, with equal weights. Then aux has a new leading
        axis of length `n`, as in `accumulate_gradients`.

    Raises (when it is called or traced):
      PlanningError: an operation combines examples before a sum over them, the loss is not linear in the sums, or it is traced
        differently for fewer rows; the message names the operation.
      ArgumentError: as `accumulate_gradients`.

    >>> def loss(w, frozen, x, mask):
    ...     return ((w * x) ** 2 * mask).sum() / mask.sum()
    >>> x, mask = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([1.0, 1.0, 1.0, 0.0])
    >>> value, gradient = micro_batched(loss, 2)(jnp.float32(1.0), (), x, mask)
    >>> round(float(value), 4), round(float(gradient), 4)  # 14 / 3 and 28 / 3
    (4.6667, 9.3333)
    """

    if n == 1:
        return jax.value_and_grad(loss, has_aux=has_aux)

    def as_declared(trained: Any, frozen: Any, *batch: Any) -> Any:
        places = _parted_places(batch, states)

        def counted(trained: Any, *parted: Any) -> Any:
            value, aux = _pair(loss(trained, frozen, *_with_leaves(batch, places, parted)), has_aux)
            return (value, 1 if declared == "mean" else np.float32(1 / n)), aux

        (value, aux), gradients = accumulate_gradients(counted, n, has_aux=True)(trained, *_leaves_at(batch, places))
        return ((value, aux) if has_aux else value), gradients

    def value_and_gradient(trained: Any, frozen: Any, *batch: Any) -> Any:
        whole = _Loss(loss, trained, frozen, batch, states)
        check_batch(tuple(whole.parted), n)
        rest = _Rest(whole)
        weights = rest.weights()

        def counted(trained: Any, *parted: Any) -> Any:
            part = _Loss.of_part(loss, trained, frozen, _with_leaves(batch, whole.places, parted), states)
            summed = rest.sums_of(part)
            terms = [jnp.sum(weight * each).real for weight, each in zip(weights, summed, strict=True) if weight is not None]
            return (sum(map(sums.widened, terms)), np.float32(1 / n)), summed

        (_, parts), gradients = accumulate_gradients(counted, n, has_aux=True)(trained, *whole.parted)
        summed = [sums.widened(each).sum(0).astype(value.aval.dtype) for each, value in zip(parts, rest.sums, strict=True)]
        if not rest.reads_trained:
            outputs = rest.run(summed, trained)
        else:
            value, pullback, outputs = jax.vjp(lambda trained: _split(rest.run(summed, trained)), trained, has_aux=True)
            (direct,) = pullback(jnp.ones_like(value))
            gradients = jax.tree.map(lambda total, term: sums.plus_scaled(None, total, term), gradients, direct)
        result = jax.tree.unflatten(whole.results, outputs)
        return result, gradients

    return value_and_gradient if declared is None else as_declared


def fewer_rows(batch: tuple[Any, ...], n: int, states: int = 0) -> tuple[Any, ...]:
    """The structs of one of `n` micro-batches of `batch`, structs; the first `states` arguments, and keys, stay.

    >>> fewer_rows((jax.ShapeDtypeStruct((8, 3), "float32"),), 2)[0].shape
    (4, 3)
    """
    places = _parted_places(batch, states)
    rows = [
        leaf if is_key(leaf) or not leaf.ndim else leaf.update(shape=(leaf.shape[0] // n, *leaf.shape[1:]))
        for leaf in _leaves_at(batch, places)
    ]
    return _with_leaves(batch, places, rows)


def _parted_places(batch: tuple[Any, ...], states: int) -> list[int]:
    """The places of the leaves that differ between micro-batches: rows and keys."""
    first = len(jax.tree.leaves(batch[:states]))
    return [place for place, leaf in enumerate(jax.tree.leaves(batch)) if place >= first or is_key(leaf)]


def _leaves_at(batch: tuple[Any, ...], places: Sequence[int]) -> list[Any]:
    leaves = jax.tree.leaves(batch)
    return [leaves[place] for place in places]


def _with_leaves(batch: tuple[Any, ...], places: Sequence[int], replaced: Sequence[Any]) -> tuple[Any, ...]:
    """`batch` with `replaced` in place of the leaves at `places`."""
    leaves, treedef = jax.tree.flatten(batch)
    for place, leaf in zip(places, replaced, strict=True):
        leaves[place] = leaf
    whole: tuple[Any, ...] = jax.tree.unflatten(treedef, leaves)
    return whole


def _pair(result: Any, has_aux: bool) -> Any:
    return result if has_aux else (result, None)


def _split(outputs: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    return outputs[0], outputs


class _Loss:
    """A loss traced for some rows of the batch.

    Attributes:
      program: its operations.
      trained: the inputs of the program that are trained parameters.
      places, parted: the leaves of the batch that differ between micro-batches, rows and keys, and their places.
      results: the structure of what the loss returns; the loss itself comes first.
    """

    def __init__(self, loss: Function, trained: Any, frozen: Any, batch: tuple[Any, ...], states: int) -> None:
        jaxpr, shape = jax.make_jaxpr(loss, return_shape=True)(trained, frozen, *batch)
        if jaxpr.effects:
            raise PlanningError(f"the loss has an effect ({next(iter(jaxpr.effects))}), which micro-batches would repeat")
        self.results = jax.tree.structure(shape)
        self.program = program_of(compat.dce(jaxpr))
        self.inputs = jax.tree.leaves((trained, frozen, batch))
        self.trained = self.program.inputs[: len(jax.tree.leaves(trained))]
        first, leaves = len(jax.tree.leaves((trained, frozen))), jax.tree.leaves(batch)
        self.places = _parted_places(batch, states)
        self.parted = _leaves_at(batch, self.places)
        self.rows = [self.program.inputs[first + place] for place in self.places if not is_key(leaves[place])]
        self.keys = [self.program.inputs[first + place] for place in self.places if is_key(leaves[place])]

    @classmethod
    def of_part(cls, *arguments: Any) -> _Loss:
        """The loss traced for one micro-batch."""
        try:
            return cls(*arguments)
        except PlanningError:
            raise
        except Exception as error:  # whatever the user's loss raises for fewer rows
            raise NotPerToken(f"the loss cannot be traced for fewer examples: {error}") from error

    def values(self, trained: Any) -> dict[Any, Any]:
        """The values of constants and inputs, with these trained parameters."""
        leaves = jax.tree.leaves(trained)
        inputs = [*leaves, *self.inputs[len(leaves) :]]
        return {**self.program.constants, **dict(zip(self.program.inputs, inputs, strict=True))}


class _Rest:
    """What a loss computes from sums over examples, and from what does not depend on the batch.

    Attributes:
      sums: the sums over examples that depend on a trained parameter, in the order of the program.
      reads_trained: whether a trained parameter is also read otherwise, as by a penalty on the weights.
    """

    def __init__(self, loss: _Loss) -> None:
        self._loss, program = loss, loss.program
        self.region = ExampleRegion(program, dict.fromkeys(loss.rows, ROWS), loss.rows[0].aval.shape[0])
        self.region.find_rows()
        if not self.region.drawn <= _reached(program, loss.keys):
            raise NotPerToken(
                "the loss draws random numbers for each example, but its batch has no key for them, and all "
                "micro-batches would draw the same: give the key in the batch, as jax.random.key(…)"
            )
        self._nodes, needed = needed_operations(program, program.outputs, self._is_sum)
        self.sums = [value for node in program.nodes for value in node.results if value in needed and self._is_sum(value)]
        unsummed = [value for value in self.region.cuts if value in needed and value in self._varied]
        reasons = [self.region.reasons[value] for value in unsummed if value in self.region.reasons]
        if unsummed:
            returned = next((value for value in program.outputs if value in unsummed), unsummed[0])
            alone = f"the loss returns {text(returned)}, an array with a row for each example"
            raise NotPerToken(next(iter(reasons), alone))
        if not any(map(_is_smooth, self.sums)):
            reasons = [why for value, why in self.region.reasons.items() if value in needed]
            raise NotPerToken(next(iter(reasons), "the loss has no sum over examples that depends on a parameter"))
        self.reads_trained = not needed.isdisjoint(loss.trained)

    @functools.cached_property
    def _varied(self) -> set[Value]:
        """The values that depend on a trained parameter."""
        return _reached(self._loss.program, self._loss.trained)

    def _is_sum(self, value: Value) -> bool:
        return value in self.region.sums and value in self._varied

    def run(self, summed: Sequence[Any], trained: Any) -> list[Any]:
        """The leaves of what the loss returns, from the values of `sums`."""
        env = {**self._loss.values(trained), **dict(zip(self.sums, summed, strict=True))}
        run_nodes(self._nodes, env)
        return [jnp.asarray(read(each, env)) for each in self._loss.program.outputs]

    def weights(self) -> list[Any]:
        """The derivative of the loss by each of `sums`; None for a sum of integers.

        Raises:
          NotPerToken: a derivative depends on the sums, so the loss is not linear in them.
        """
        zeros = [jnp.zeros(value.aval.shape, value.aval.dtype) for value in self.sums]
        flags = list(map(_is_smooth, self.sums))

        def derivatives(summed: Sequence[Any]) -> list[Any]:
            def of_floats(floats: Sequence[Any]) -> Any:
                made = iter(floats)
                return self.run([next(made) if flag else each for each, flag in zip(summed, flags, strict=True)], trained)[0]

            trained = jax.tree.unflatten(jax.tree.structure(self._loss.trained), self._loss.inputs[: len(self._loss.trained)])
            value, pullback = jax.vjp(of_floats, list(itertools.compress(summed, flags)))
            return pullback(jnp.ones_like(value))[0]

        traced = compat.dce(jax.make_jaxpr(derivatives)(zeros)).jaxpr
        read_here = {id(var) for eqn in traced.eqns for var in eqn.invars} | {id(var) for var in traced.outvars}
        for value, var in zip(self.sums, traced.invars, strict=True):
            if id(var) in read_here:
                raise NotPerToken(f"the loss is not linear in the sum over examples {self.region.sums[value]}")
        made = iter(derivatives(zeros))
        return [next(made) if flag else None for flag in flags]

    def sums_of(self, part: _Loss) -> list[Any]:
        """The values of `sums` for some of the rows.

        Raises:
          NotPerToken: the loss is traced differently for fewer rows.
        """
        rows = part.rows[0].aval.shape[0]
        twins = twins_of(self.region, part.program, self.sums, rows)
        other = part.program
        chosen, _ = needed_operations(other, [twins[value] for value in self.sums], lambda value: False)
        env = part.values(jax.tree.unflatten(jax.tree.structure(part.trained), part.inputs[: len(part.trained)]))
        run_nodes(chosen, env)
        return [env[twins[value]] for value in self.sums]


def _reached(program: Program, start: Sequence[Value]) -> set[Value]:
    """`start`, and the values that depend on it."""
    reached = set(start)
    for node in program.nodes:
        if not reached.isdisjoint(node.values):
            reached.update(node.results)
    return reached


def _is_smooth(value: Value) -> bool:
    return bool(jnp.issubdtype(value.aval.dtype, jnp.inexact))
