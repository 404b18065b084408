"""Tying a block to its place in the schedule, so that unrolled offload frees device memory.

Read from the compiled schedule, XLA:GPU leaves an unrolled block's offload without effect for two reasons: the copy to the
host waits until the backward pass wants it, so the device buffer lives on; and the weight-gradient matmuls are put off to the
end, each keeping a block's activations alive. Three ties with `optimization_barrier` cure both: the block's output with its
residuals in the forward pass, its cotangent with its residuals on entering the backward pass, and its gradients, each at its
place inside the backward pass (`gradient_ties`) and all together on leaving it. Values do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from remat_jax import compat
from remat_jax.apply.gradient_ties import in_program_order
from remat_jax.graph import is_live, is_smooth, zero_tangent

Block = Callable[..., list[Any]]


def tied(block: Block) -> Block:
    """`block`, a function of flat arrays to a list of arrays, tied to its place in the schedule when it is differentiated.

    Forward-mode differentiation, forward-over-reverse, `vmap` and `jit` work as without the ties.
    """

    def run(*primals: Any) -> list[Any]:
        return block(*primals)

    # `replan` knows a tied block by this name.
    run.__name__ = run.__qualname__ = compat.BLOCK_NAME
    tied_block = jax.custom_jvp(run)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        live = [index for index, tangent in enumerate(tangents) if is_live(tangent)]
        if not live:
            outputs = block(*primals)
            return outputs, [zero_tangent(out) for out in outputs]

        def of_live(*changed: Any) -> list[Any]:
            arguments = list(primals)
            for index, value in zip(live, changed, strict=True):
                arguments[index] = value
            return block(*arguments)

        outputs, linear = jax.linearize(of_live, *(primals[index] for index in live))
        residuals, treedef = jax.tree.flatten(linear)
        outputs, residuals = compat.optimization_barrier((outputs, residuals))
        smooth = [index for index, out in enumerate(outputs) if is_smooth(out)]

        def pushforward(residuals: list[Any], *directions: Any) -> list[Any]:
            changes = jax.tree.unflatten(treedef, residuals)(*directions)
            return [changes[index] for index in smooth]

        directions = [tangents[index] for index in live]
        jaxpr = jax.make_jaxpr(pushforward)(residuals, *directions)
        changes = [zero_tangent(out) for out in outputs]
        linear_outputs = tied_linear_p.bind(*residuals, *directions, jaxpr=jaxpr, num_residuals=len(residuals))
        for index, change in zip(smooth, linear_outputs, strict=True):
            changes[index] = change
        return outputs, changes

    tied_block.defjvp(jvp, symbolic_zeros=True)
    return tied_block


# The linear part of a tied block: tangents in, tangents out, given residuals. A primitive of its own, because neither
# `custom_vjp` (no forward mode) nor `linear_call` (no batching) lets the transpose be written by hand and all else be kept.
tied_linear_p = jex.Primitive("tied_linear")
tied_linear_p.multiple_results = True


def _evaluate(*args: Any, jaxpr: Any, num_residuals: int) -> list[Any]:
    return jex.jaxpr_as_fun(jaxpr)(*args)


def _abstract(*_: Any, jaxpr: Any, num_residuals: int) -> list[Any]:
    return list(jaxpr.out_avals)


def _transpose(cotangents: Sequence[Any], *args: Any, jaxpr: Any, num_residuals: int) -> list[Any]:
    residuals, tangents = args[:num_residuals], args[num_residuals:]
    concrete = [ad.instantiate_zeros(ct) for ct in cotangents]
    residuals, concrete = compat.optimization_barrier((list(residuals), concrete))

    def pullback(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
        linear = jax.linear_transpose(
            lambda *directions: jex.jaxpr_as_fun(jaxpr)(*residuals, *directions), *(tangent.aval for tangent in tangents)
        )
        return list(linear(cotangents))

    gradients = in_program_order(jax.make_jaxpr(pullback)(residuals, concrete), residuals, concrete)
    return [None] * num_residuals + list(compat.optimization_barrier(gradients))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, num_residuals: int) -> tuple[Any, Any]:
    # Someone differentiates forward through forward: nothing is kept for a backward pass here, so nothing is tied.
    return jax.jvp(jex.jaxpr_as_fun(jaxpr), tuple(primals), tuple(ad.instantiate_zeros(t) for t in tangents))


def _batch(
    axis: Any, args: Sequence[Any], axes: Sequence[int | None], *, jaxpr: Any, num_residuals: int
) -> tuple[list[Any], list[int]]:
    moved = [arg if dim is None else jnp.moveaxis(arg, dim, 0) for arg, dim in zip(args, axes, strict=True)]
    in_axes = [None if dim is None else 0 for dim in axes]
    # The name of the axis, for the collectives inside.
    vmapped = jax.vmap(
        jex.jaxpr_as_fun(jaxpr), in_axes=in_axes, axis_size=axis.size, axis_name=axis.name, spmd_axis_name=axis.spmd_name
    )
    outputs = tied_linear_p.bind(*moved, jaxpr=jax.make_jaxpr(vmapped)(*moved), num_residuals=num_residuals)
    return outputs, [0] * len(outputs)


tied_linear_p.def_impl(_evaluate)
# Asked for where the block has a region of `jax_remat3` in it, when everything is differentiated.
tied_linear_p.to_lojax = _evaluate
tied_linear_p.def_abstract_eval(_abstract)
mlir.register_lowering(tied_linear_p, mlir.lower_fun(_evaluate, multiple_results=True))
ad.primitive_transposes[tied_linear_p] = _transpose
ad.primitive_jvps[tied_linear_p] = _jvp
batching.fancy_primitive_batchers[tied_linear_p] = _batch
