"""Evaluates a loss in equal parts of its arrays: gradients over micro-batches, and sums over chunks of an axis."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from remat_jax import compat
from remat_jax.errors import ArgumentError
from remat_jax.train import sums
from remat_jax.train.parameters import path_text

P = ParamSpec("P")
R = TypeVar("R")
NamedArray = tuple[str, Any, int]
"""An array to split: its name in an error, the array, and the axis."""


# `optax.microbatching` cannot replace the scan below: it is newer than the oldest supported optax, adds gradients up in their
# own dtype, and does not pass the micro-batch's index to the function, which dropout needs.
def accumulate_gradients(
    loss: Callable[..., Any], n: int, *, has_aux: bool = False, dtype: Any = None
) -> Callable[..., tuple[Any, Any]]:
    """The mean loss and its gradient, computed in `n` micro-batches with the memory of one.

    The batch's leading axis is split into `n` equal micro-batches that run one after the other; micro-batch i has the rows
    `x[i::n]`. The sums of gradients need memory for one more tree of gradients. Sums are divided once, by the number of all
    targets: a mean of the micro-batches' means would give more weight to targets in micro-batches with few targets. On a mesh
    every device keeps its own rows, and the rows of a micro-batch must divide evenly over the devices that share the batch.

    Args:
      loss: `loss(params, *micro_batch)` returns `(sum of the losses over the targets, number of targets)`, two real scalars of
        any dtype, or `((sum, number), aux)` if `has_aux`. Both are added up without rounding; only `loss` itself can round them
        (a bfloat16 sum of a mask is exact up to 256: `jnp.sum(mask, dtype=jnp.float32)`).
      n: the number of micro-batches; it divides the leading axis of every array in the batch. A scalar `jax.random.key` in the
        batch is not split: micro-batch i gets `jax.random.fold_in(key, i)`.
      has_aux: if True, the result is `((mean, aux), gradients)`; every array of aux has a new leading axis of length `n`.
      dtype: the dtype of the sums of gradients and of the returned gradients; for complex parameters, of their real and
        imaginary parts. By default gradients are summed in the parameter's dtype (narrower ones than float32 in float32), and
        returned in the parameter's dtype.

    Returns:
      A function `(params, *batch)` that returns `(mean loss over all targets, gradients)`, like `jax.value_and_grad` of the
      whole batch. If the batch has no targets, the sums of losses and of gradients are divided by 1 instead of 0. So a sum of 0
      gives 0, not NaN.

    Raises:
      ArgumentError: `n` is not a positive integer or does not divide an array of the batch, `loss` returns another form, a
        parameter has no gradient (integers), `dtype` is float64 while `jax_enable_x64` is off, or on mesh axes of type Explicit
        the rows of a micro-batch do not divide over the devices.

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
    check_count(n, "micro-batches")
    sums.check_dtype(dtype)

    def summed(params: Any, *micro_batch: Any) -> tuple[Any, Any]:
        (total, count), aux = _parts(loss(params, *micro_batch), has_aux)
        return jnp.asarray(total), (sums.pair(count), aux)

    def value_and_gradient(params: Any, *batch: Any) -> tuple[Any, Any]:
        params = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), params)
        _check_parameters(params)
        check_batch(batch, n)
        parts = jax.tree.map(lambda leaf: leaf if is_key(leaf) else cut_axis(leaf, n, 0), batch)
        precision = sums.available(dtype)

        def micro_batch(index: Any) -> Any:
            def rows(part: Any) -> Any:
                if is_key(part):
                    return jax.random.fold_in(part, index)
                return jax.lax.dynamic_index_in_dim(part, index, 1, keepdims=False)

            return jax.tree.map(rows, parts)

        def body(carry: Any, index: Any) -> tuple[Any, Any]:
            total, count, gradients = carry
            term, backward, (terms, aux) = jax.vjp(lambda params: summed(params, *micro_batch(index)), params, has_aux=True)
            # Like a mean, and unlike a sum, a scaled loss has gradients that float16 can represent. A power of two is exact.
            scale = sums.power_of_two(sums.value(terms), term.dtype) if is_narrow else None
            scaled = backward(jnp.ones_like(term) if scale is None else (1 / scale).astype(term.dtype))[0]
            for each in terms:
                count = sums.plus(count, each)
            total = sums.plus(total, term.astype(total[0].dtype))
            return (total, count, jax.tree.map(functools.partial(sums.plus_scaled, scale), gradients, scaled)), aux

        traced = jax.make_jaxpr(lambda: jnp.zeros((), _mean_dtype(*_parts(loss(params, *micro_batch(0)), has_aux)[0])))()
        mean_dtype, is_narrow = traced.out_avals[0].dtype, sums.overflows_early(traced)
        dtypes = jax.tree.map(lambda p: sums.with_precision(p.dtype, precision) if precision is not None else p.dtype, params)
        summands = jax.tree.map(
            lambda p, out: jnp.zeros_like(p, out if precision is not None else sums.wide(out)), params, dtypes
        )
        (total, count, gradients), aux = jax.lax.scan(body, (sums.zero(), sums.zero(), summands), jnp.arange(n))
        divisor = sums.value(count)
        divisor = jnp.where(divisor == 0, 1, divisor)
        mean = (sums.value(total) / divisor).astype(mean_dtype)
        gradients = jax.tree.map(lambda g, out: sums.divided(g, divisor).astype(out), gradients, dtypes)
        return ((mean, aux) if has_aux else mean), gradients

    return value_and_gradient


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is one random key (`jax.random.key`)."""
    return jnp.ndim(leaf) == 0 and jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def check_batch(batch: tuple[Any, ...], n: int) -> None:
    """Raise ArgumentError unless `n` divides the leading axis of every array of `batch` that is no key."""
    arrays = [
        (f"batch{jax.tree_util.keystr(path)}", leaf, 0) for path, leaf in jax.tree.leaves_with_path(batch) if not is_key(leaf)
    ]
    for name, leaf, _ in arrays:
        if jnp.ndim(leaf) == 0:
            raise ArgumentError(
                f"{name} is a scalar and has no leading axis to cut into micro-batches: bind it into the loss "
                "(functools.partial), or give an array with one value for each row"
            )
    if not arrays:
        raise ArgumentError("batch: expected at least one array, whose leading axis is cut into micro-batches")
    differ = "batch: expected leading axes of one length, but {}. A random key goes into the batch as jax.random.key(…)"
    _check_lengths(arrays, n, differ, "the leading axis", "a micro-batch", "rows")


def _check_parameters(params: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ArgumentError(
                f"params: {path_text(path)!r} is {leaf.dtype} and has no gradient; bind it into the loss (functools.partial)"
            )


def _parts(result: Any, has_aux: bool) -> Any:
    pair, aux = result if has_aux and isinstance(result, tuple) and len(result) == 2 else (result, None)
    scalars = isinstance(pair, tuple) and len(pair) == 2 and all(jnp.shape(scalar) == () for scalar in pair)
    if not scalars or not jnp.issubdtype(_dtype(pair[0]), jnp.floating) or not _is_real(_dtype(pair[1])):
        expected = "((sum of losses, number of targets), aux)" if has_aux else "(sum of losses, number of targets)"
        shown = jax.tree.map(lambda leaf: f"{_dtype(leaf)}{list(jnp.shape(leaf))}", result)
        raise ArgumentError(f"loss returned {shown}: expected {expected}, two real scalars, the sum a float; not a mean")
    return pair, aux


def _dtype(leaf: Any) -> Any:
    # JAX's type of a Python int has at most 32 bits, NumPy's has more.
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


def _mean_dtype(total: Any, count: Any) -> Any:
    """The dtype of `total / count`."""
    total = jnp.asarray(total)
    if not hasattr(count, "dtype"):  # a Python number takes the dtype of the array
        return total.dtype
    try:
        return jnp.result_type(total, jax.dtypes.canonicalize_dtype(count.dtype))
    except ValueError:  # float8 is never promoted
        return total.dtype


def in_chunks(fn: Callable[P, R], n: int, *, axis: int | tuple[int | None, ...] = 0) -> Callable[P, R]:
    """`fn`, which sums along an axis, run in `n` chunks of this axis with the memory of one chunk.

    Use it for a model's output head (the matmul that computes the logits) with its loss: only 1/n of the logits, and of their
    gradient, is in memory at a time. Each chunk is a checkpoint: the backward pass recomputes its logits. For any `n` above 1
    this costs one more forward pass of the head. Values and gradients are those of `fn`, up to the order of additions.

        def head_loss(params, hidden, targets):  # a sum, and the number of its terms
            losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["head"], targets)
            return losses.sum(), losses.size

        total, count = rj.in_chunks(head_loss, 8, axis=(None, 1, 1))(params, hidden, targets)
        loss = total / count

    **Results are added over the chunks**, so each result must be a sum along the axis, such as a summed loss or a count. Means
    of `n` chunks would add up to `n` times the mean: divide outside, as above. Results of a dtype below float32 are added in
    float32, and so are the chunks' gradients of what every chunk reads whole, such as a bfloat16 head: the sum takes the memory
    of the head's gradient in float32.

    Chunk i has the positions i, i + n, i + 2n, … of the axis, so an array that is sharded along the axis stays sharded if the
    positions of one chunk divide evenly over the devices. An axis that is not sharded, usually the sequence, is the better
    choice. `fn` must treat each position independently: shift targets outside `fn`. `rj.replan` does not change the checkpoints
    of chunks.

    Args:
      fn: a function of arrays and pytrees of arrays. Values that it closes over (parameters, a bound Linen module, an NNX
        module) are the same for every chunk. `fn` cannot write a module's state.
      n: the number of chunks; it divides the axis. With 1 the result is `fn(…)`, without a checkpoint.
      axis: the axis to split in every array of every argument; or a tuple with an entry for each argument in the order of
        `fn`'s signature: an axis, or None for an argument that every chunk gets whole. With a tuple, keyword-only arguments are
        not split. A random key that is passed whole draws the same numbers in every chunk.

    Returns:
      A function with the arguments and results of `fn`.

    Raises:
      ArgumentError: `n` is not a positive integer or does not divide the axis; `axis` does not fit the arguments; the shape of
        a result depends on the axis' length, so the result is not a sum along the axis.

    >>> def summed(w, x):
    ...     return jnp.sum(jnp.exp(x @ w))
    >>> w, x = jnp.ones((2, 5)), jnp.arange(8.0).reshape(4, 2) / 8
    >>> chunked = in_chunks(summed, 4, axis=(None, 0))
    >>> bool(jnp.allclose(chunked(w, x), summed(w, x)))
    True
    >>> bool(jnp.allclose(jax.grad(chunked)(w, x), jax.grad(summed)(w, x)))
    True
    """
    if not callable(fn):
        raise ArgumentError(
            f"fn={fn!r}: expected a function whose results are sums along the axis, such as a head and its loss"
        )
    check_count(n, "chunks")
    axes = [entry for entry in axis if entry is not None] if isinstance(axis, tuple) else [axis]
    if not axes or not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in axes):
        raise ArgumentError(
            f"axis={axis!r}: expected an int (the axis along which every argument is cut), or a tuple with an int or None for "
            "each argument and at least one int"
        )

    @functools.wraps(fn)
    def chunked(*args: P.args, **kwargs: P.kwargs) -> R:
        arrays, one_chunk = _cut_arguments(fn, axis, args, kwargs)
        if not arrays:
            raise ArgumentError("axis: no argument that is to be cut contains an array")
        differ = "axis: expected the same length along it in all arrays, but {}"
        _check_lengths(arrays, n, differ, f"axis {arrays[0][2]}", "a chunk", "positions")
        if n == 1:
            return fn(*args, **kwargs)
        chunks = [jnp.moveaxis(cut_axis(leaf, n, at), at + 1, 0) for _, leaf, at in arrays]
        body = compat.chunk_checkpoint(sums.with_wide_gradients(one_chunk, [chunk[0] for chunk in chunks]))
        _, results = jax.lax.scan(lambda _, chunk: (None, body(chunk)), None, chunks)
        _check_sums(jax.eval_shape(one_chunk, [leaf for _, leaf, _ in arrays]), results, n)
        return jax.tree.map(lambda result: jnp.sum(result, 0, dtype=sums.wide(result.dtype)).astype(result.dtype), results)

    return chunked


def _cut_arguments(fn: Any, axis: Any, args: Any, kwargs: Any) -> tuple[list[NamedArray], Callable[[list[Any]], Any]]:
    """The arrays to split, with their axes counted from the front, and `fn` as a function of these arrays."""
    if kwargs and isinstance(axis, tuple):
        bound = inspect.signature(fn).bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
    if isinstance(axis, tuple) and len(axis) != len(args):
        raise ArgumentError(
            f"axis={axis!r} has {len(axis)} entries, but the function is called with {len(args)} positional arguments: give "
            "an axis or None for each argument"
        )
    values = [*args, *kwargs.values()]
    axes = [*axis, *[None] * len(kwargs)] if isinstance(axis, tuple) else [axis] * len(values)
    names = [*range(len(args)), *map(repr, kwargs)]
    chosen = [(name, at, value) for name, at, value in zip(names, axes, values, strict=True) if at is not None]
    leaves, treedef = jax.tree.flatten_with_path([value for _, _, value in chosen])
    arrays = []
    for (argument, *keys), leaf in leaves:
        name, at, _ = chosen[argument.idx]
        arrays.append(_checked(f"argument {name}{jax.tree_util.keystr(keys)}", leaf, at))

    def one_chunk(chunk: list[Any]) -> Any:
        parts = iter(jax.tree.unflatten(treedef, chunk))
        filled = [value if at is None else next(parts) for value, at in zip(values, axes, strict=True)]
        return fn(*filled[: len(args)], **dict(zip(kwargs, filled[len(args) :], strict=True)))

    return arrays, one_chunk


def _checked(name: str, leaf: Any, axis: int) -> NamedArray:
    if not compat.is_array(leaf) or not -leaf.ndim <= axis < leaf.ndim:
        shown = f"{leaf.dtype}{list(leaf.shape)}" if compat.is_array(leaf) else repr(leaf)
        raise ArgumentError(
            f"axis={axis}: {name} is {shown}, which has no such axis; give None for it in axis=(…), or bind it into fn"
        )
    return name, leaf, axis % leaf.ndim


def _check_sums(whole: Any, stacked: Any, n: int) -> None:
    for (path, expected), chunks in zip(jax.tree.leaves_with_path(whole), jax.tree.leaves(stacked), strict=True):
        if chunks.shape[1:] != expected.shape or not jnp.issubdtype(chunks.dtype, jnp.number):
            raise ArgumentError(
                f"fn: its result{jax.tree_util.keystr(path)} is {expected.dtype}{list(expected.shape)} for all positions, but "
                f"{chunks.dtype}{list(chunks.shape[1:])} for one of {n} chunks: expected a sum along the axis, whose shape "
                "does not depend on the axis' length; sum inside fn"
            )


def check_count(n: Any, parts: str) -> None:
    """Raise ArgumentError unless `n` is a positive int, a number of `parts`."""
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ArgumentError(f"n={n!r}: expected the number of {parts}, a positive int")


def cut_axis(leaf: Any, n: int, axis: int) -> Any:
    """`leaf` with `axis` shortened to one part, and a new axis of `n` parts after it. Part i has the positions i, i + n, …"""
    # A new axis before `axis` would inherit the sharding of `axis`, and all devices would compute every part.
    leaf = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    shape = leaf.shape
    return leaf.reshape(*shape[:axis], shape[axis] // n, n, *shape[axis + 1 :])


def _check_lengths(arrays: Sequence[NamedArray], n: int, differ: str, which_axis: str, part: str, positions: str) -> None:
    """Raise ArgumentError unless `n` divides the common length of `arrays` into parts that divide evenly over the devices."""
    lengths = {name: leaf.shape[axis] for name, leaf, axis in arrays}
    if len(set(lengths.values())) > 1:
        raise ArgumentError(differ.format(", ".join(f"{name} has {length}" for name, length in lengths.items())))
    name, length = next(iter(lengths.items()))
    if length == 0 or length % n:
        divisors = [count for count in range(1, length + 1) if length % count == 0]
        near = sorted({*[count for count in divisors if count < n][-1:], *[count for count in divisors if count > n][:1]})
        nearest = f"; the nearest divisors: {' and '.join(map(str, near))}" if near else ""
        raise ArgumentError(f"n={n} does not divide {which_axis} of {name}, which has {length} {positions}{nearest}")
    for name, leaf, axis in arrays:
        _check_devices(leaf, n, axis, f"{part} of {name}", positions)


def _check_devices(leaf: Any, n: int, axis: int, part: str, positions: str) -> None:
    # Check mesh axes of type Explicit, for which JAX's own error is about a reshape. Other shardings are unknown while tracing.
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    if sharding is None:
        return
    entry = next(iter(sharding.spec[axis:]), None)
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    devices = math.prod(sharding.mesh.shape[name] for name in names)
    length = leaf.shape[axis]
    if length // n % devices:
        fitting = [count for count in range(1, length + 1) if length % (count * devices) == 0]
        raise ArgumentError(
            f"n={n}: {part} has {length // n} {positions}, which do not divide over the {devices} devices of {entry!r}; n can "
            f"be {', '.join(map(str, fitting))}; or take a larger batch"
        )
