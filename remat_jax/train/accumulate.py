"""`accumulate_gradients`: the gradient of a whole batch from micro-batches, normalised once by the number of all targets.

`optax.microbatching` cannot replace this `lax.scan`: it is newer than the oldest supported optax, adds gradients up in their
own dtype, and does not pass the micro-batch's index to the function, which dropout needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax.errors import ArgumentError
from remat_jax.train.cut import check_devices, check_divides, cut


def accumulate_gradients(
    loss: Callable[..., Any], n: int, *, has_aux: bool = False, dtype: Any = None
) -> Callable[..., tuple[Any, Any]]:
    """A function `(params, *batch)` that returns the mean loss over all targets of the batch, and its gradient, like
    `jax.value_and_grad` of the whole batch, with the memory of one micro-batch and one more tree of gradients.

    The batch's leading axis is cut into `n` equal micro-batches that run one after the other; micro-batch i has the rows
    `x[i::n]`. Each micro-batch contributes a sum over its targets. The sums are divided once, at the end, by the number of all
    targets. A mean of the micro-batches' means would give more weight to targets in micro-batches with few targets.

    On a mesh every device keeps its own rows and has 1/n of them in each micro-batch. The rows of one micro-batch must divide
    over the devices that the batch is divided over.

    Args:
      loss: `loss(params, *micro_batch)` returns `(sum of the losses over the targets, number of targets)`, two scalars, or
        `((sum, number), aux)` if `has_aux`.
      n: the number of micro-batches; it divides the leading axis of every array in the batch. A scalar `jax.random.key` in the
        batch is not cut: micro-batch i gets `jax.random.fold_in(key, i)`.
      has_aux: the result is `((mean, aux), gradients)`; every array of aux has a new leading axis of length `n`.
      dtype: the dtype of the sums of gradients and of the returned gradients. By default gradients are summed in the
        parameter's dtype, in float32 for bfloat16 and float16, and returned in the parameter's dtype.

    A batch without targets has loss and gradients 0 if its sums are 0: nothing is divided by 0.

    Raises:
      ArgumentError: `n` is not a positive integer or does not divide an array of the batch, `loss` returns another form, or on
        mesh axes of type Explicit the rows of a micro-batch do not divide over the devices.

    >>> import jax.numpy as jnp
    >>> def loss(w, x, mask):
    ...     return jnp.sum(mask * (w * x) ** 2), jnp.sum(mask)
    >>> x, mask = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([1, 1, 1, 0])
    >>> value, gradient = accumulate_gradients(loss, 2)(jnp.float32(1.0), x, mask)
    >>> round(float(value), 4), round(float(gradient), 4)  # 14 / 3 and 28 / 3; the mean of means is 5.75
    (4.6667, 9.3333)
    """
    if not callable(loss):
        raise ArgumentError(f"loss={loss!r}: expected a function loss(params, *micro_batch)")
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ArgumentError(f"n={n!r}: expected the number of micro-batches, a positive int")
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ArgumentError(f"dtype={dtype!r}: expected a floating-point dtype to sum gradients in, such as jnp.float32")

    def summed(params: Any, *micro_batch: Any) -> tuple[Any, Any]:
        (total, count), aux = _parts(loss(params, *micro_batch), has_aux)
        return total, (count, aux)

    def value_and_gradient(params: Any, *batch: Any) -> tuple[Any, Any]:
        params = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), params)
        leaves, treedef = jax.tree.flatten(batch)
        keys = [index for index, leaf in enumerate(leaves) if _is_key(leaf)]
        _check_sizes(batch, n)
        _check_devices(batch, n)
        parted = [leaf if index in keys else cut(leaf, n) for index, leaf in enumerate(leaves)]

        def micro_batch(index: Any) -> Any:
            rows = [
                jax.random.fold_in(leaf, index)
                if place in keys
                else jax.lax.dynamic_index_in_dim(leaf, index, 1, keepdims=False)
                for place, leaf in enumerate(parted)
            ]
            return jax.tree.unflatten(treedef, rows)

        def body(sums: Any, index: Any) -> tuple[Any, Any]:
            (total, (count, aux)), gradients = jax.value_and_grad(summed, has_aux=True)(params, *micro_batch(index))
            added = jax.tree.map(lambda s, term: s + term.astype(s.dtype), sums, (total, count, gradients))
            return added, aux

        total, (count, _) = jax.eval_shape(lambda: summed(params, *micro_batch(0)))
        zeros = (
            jnp.zeros((), _wide(total.dtype, None)),
            jnp.zeros((), count.dtype),
            jax.tree.map(lambda p: jnp.zeros_like(p, _wide(p.dtype, dtype)), params),
        )
        (total, count, gradients), aux = jax.lax.scan(body, zeros, jnp.arange(n))
        count = jnp.where(count == 0, 1, count)
        mean = total / count.astype(total.dtype)
        gradients = jax.tree.map(lambda g, p: (g / count.astype(g.dtype)).astype(dtype or p.dtype), gradients, params)
        return ((mean, aux) if has_aux else mean), gradients

    return value_and_gradient


def value_and_grad_of_parts(loss: Callable[..., Any], n: int, *, has_aux: bool = False) -> Callable[..., Any]:
    """`jax.value_and_grad` of the scalar `loss(trained, frozen, *batch)` in `n` micro-batches of equal weight."""
    if n == 1:
        return jax.value_and_grad(loss, has_aux=has_aux)

    def value_and_gradient(trained: Any, frozen: Any, *batch: Any) -> Any:
        def counted(trained: Any, *micro_batch: Any) -> Any:
            value, aux = loss(trained, frozen, *micro_batch) if has_aux else (loss(trained, frozen, *micro_batch), None)
            return ((value, 1), aux) if has_aux else (value, 1)

        return accumulate_gradients(counted, n, has_aux=has_aux)(trained, *batch)

    return value_and_gradient


def _wide(dtype: Any, asked: Any) -> Any:
    """The dtype of sums: `asked`, or at least float32."""
    return asked or jnp.promote_types(dtype, jnp.float32)


def _is_key(leaf: Any) -> bool:
    return jnp.ndim(leaf) == 0 and jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def _check_sizes(batch: tuple[Any, ...], n: int) -> None:
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree.leaves_with_path(batch):
        name = "batch" + jax.tree_util.keystr(path)
        if _is_key(leaf):
            continue
        if jnp.ndim(leaf) == 0:
            raise ArgumentError(
                f"{name} is a scalar and has no leading axis to cut into micro-batches: bind it into the loss "
                "(functools.partial), or give an array with one value for each row"
            )
        sizes[name] = leaf.shape[0]
    if not sizes:
        raise ArgumentError("batch: expected at least one array, whose leading axis is cut into micro-batches")
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ArgumentError(
            f"batch: expected leading axes of one length, but {shown}. A random key goes into the batch as jax.random.key(…)"
        )
    name, size = next(iter(sizes.items()))
    check_divides(n, size, f"the leading axis of {name}, which has {size} rows")


def _check_devices(batch: tuple[Any, ...], n: int) -> None:
    for path, leaf in jax.tree.leaves_with_path(batch):
        if not _is_key(leaf):
            check_devices(leaf, n, 0, f"a micro-batch of batch{jax.tree_util.keystr(path)}", "rows")


def _parts(result: Any, has_aux: bool) -> Any:
    pair, aux = result if has_aux and isinstance(result, tuple) and len(result) == 2 else (result, None)
    scalars = isinstance(pair, tuple) and len(pair) == 2 and all(jnp.shape(scalar) == () for scalar in pair)
    if not scalars or not jnp.issubdtype(jnp.result_type(pair[0]), jnp.floating):
        expected = "((sum of losses, number of targets), aux)" if has_aux else "(sum of losses, number of targets)"
        shown = jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", result)
        raise ArgumentError(f"loss returned {shown}: expected {expected}, two scalars, the sum a float; not a mean")
    return (pair[0], jnp.asarray(pair[1])), aux
