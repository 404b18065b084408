"""A call under policies by layer: the function is traced with marks in place of its blocks, then evaluated with policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError

from remat_jax import compat
from remat_jax.apply.nnx import is_node, refuse_nodes
from remat_jax.apply.nnx_state import Changes, Snapshot
from remat_jax.apply.per_layer import kept_programs
from remat_jax.apply.scope import Record
from remat_jax.core.marks import Block
from remat_jax.errors import UnsupportedError

_CLOSED_OVER = (
    "fn writes to an NNX object (a model, an nnx.Rngs, a statistic) that it closes over, or that a jax.jit, jax.grad or scan "
    "inside it closes over: values that are written while tracing cannot leave the trace. Make the object an argument of fn "
    "and pass it in the call, as in checkpoint_blocks(lambda model, x: model(x), policies)(model, x); inside fn use nnx.jit, "
    "nnx.grad, nnx.scan."
)


def run(
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    blocks: frozenset[Block],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Record,
) -> Any:
    """`call(args, kwargs)` with a policy for each layer of `blocks`; `call` runs a function with its blocks intercepted.

    NNX objects among the arguments are split into arrays, and the function's writes to them are written back. Other values than
    arrays reach the function unchanged.

    Raises:
      BlockError: a block's calls are not as many as its policies.
      UnsupportedError: the function takes a gradient of the blocks itself, the layers cannot be distinguished, or the function
        writes to an NNX object that is no argument.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    nodes = {str(index): leaf for index, leaf in enumerate(leaves) if is_node(leaf)}
    graphdef, state = nnx.split(nodes)
    arrays = [index for index, leaf in enumerate(leaves) if str(index) not in nodes and compat.is_array(leaf)]
    traced: list[tuple[list[Any], Any, Changes]] = []

    def pure(state: Any, *values: Any) -> Any:
        inner = nnx.merge(graphdef, state)
        before = Snapshot(inner)
        filled = [inner.get(str(index), leaf) for index, leaf in enumerate(leaves)]
        for index, value in zip(arrays, values, strict=True):
            filled[index] = value
        outputs, structure = jax.tree.flatten(call(*jax.tree.unflatten(treedef, filled)), is_leaf=is_node)
        refuse_nodes(outputs, "a function under policies by layer")
        changes = before.changes()
        # None stands for an array: the trace must not be kept alive.
        traced.append(([None if compat.is_array(out) else out for out in outputs], structure, changes))
        return [out for out in outputs if compat.is_array(out)], changes.values

    operands = (state, *(leaves[index] for index in arrays))
    try:
        jaxpr, shape = jax.make_jaxpr(pure, return_shape=True)(*operands)
    except TraceContextError as error:
        raise UnsupportedError(_CLOSED_OVER) from error
    flat, counts = kept_programs.evaluate(jaxpr, jax.tree.leaves(operands), blocks, found.audit)
    found.reached = (found.reached - blocks) | set(counts)
    found.is_whole = True
    computed, written = jax.tree.unflatten(jax.tree.structure(shape), flat)
    outputs, structure, changes = traced[-1]
    changes.write(nodes, written)
    rest = iter(computed)
    return jax.tree.unflatten(structure, [next(rest) if out is None else out for out in outputs])
