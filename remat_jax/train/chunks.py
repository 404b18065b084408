"""`in_chunks`: a function whose results are sums along an axis, run on one part of that axis at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from remat_jax import compat
from remat_jax.errors import ArgumentError
from remat_jax.train.cut import check_devices, check_divides, cut

P = ParamSpec("P")
R = TypeVar("R")


def in_chunks(fn: Callable[P, R], n: int, *, axis: int | tuple[int | None, ...] = 0) -> Callable[P, R]:
    """`fn`, whose results are sums along an axis of its arguments, run in `n` chunks of that axis with the memory of one chunk.

    Use it for a model's head and its loss. A head with 128,256 words computes an array of tokens × 128,256 logits, and its
    backward pass a second one; in `n` chunks only 1/n of each is alive at a time. Each chunk is a checkpoint: the backward pass
    recomputes its logits, which costs the head's forward pass once more, whatever `n` is. Values and gradients are those of
    `fn`, up to the order of additions.

        def head_loss(params, hidden, targets):  # a sum, and the number of its terms
            losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["head"], targets)
            return losses.sum(), losses.size

        total, count = rj.in_chunks(head_loss, 8, axis=(None, 1, 1))(params, hidden, targets)
        loss = total / count

    **Results are added over the chunks**, so each must be a sum along the axis: a summed loss, a count. `fn` must not return a
    mean: the sum of the chunks' means is `n` times the mean. Divide outside, as above. Results of a dtype below float32 are
    added in float32.

    Chunk i has the positions i, i + n, i + 2n, … of the axis, so an array that is sharded along the axis stays sharded. `fn`
    must treat each position by itself: a shift of the targets by one position belongs outside.

    On a mesh choose an axis along which the arrays are not sharded, usually the sequence. Otherwise the positions of one chunk
    must divide over the devices. `rj.replan` does not change the checkpoints of chunks.

    Args:
      fn: a function of arrays and pytrees of arrays. Values that it closes over (parameters, a bound Linen module, an NNX
        module) are the same for every chunk. `fn` cannot write a module's state.
      n: the number of chunks; it divides the axis. With 1 the result is `fn(…)`, without a checkpoint.
      axis: the axis to cut in every array of every argument; or a tuple with an entry for each argument in the order of `fn`'s
        signature: an axis, or None for an argument that every chunk gets whole. With a tuple, keyword-only arguments are whole.
        A random key that is passed whole draws the same numbers in every chunk.

    Raises:
      ArgumentError: `n` is not a positive integer or does not divide the axis; `axis` does not fit the arguments; a result
        is not a sum along the axis, since its shape depends on the length.

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
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ArgumentError(f"n={n!r}: expected the number of chunks, a positive int")
    axes = axis if isinstance(axis, tuple) else (axis,)
    is_axis = [isinstance(entry, int) and not isinstance(entry, bool) for entry in axes]
    if not any(is_axis) or not all(
        ok or (entry is None and isinstance(axis, tuple)) for ok, entry in zip(is_axis, axes, strict=True)
    ):
        raise ArgumentError(
            f"axis={axis!r}: expected an int (the axis along which every argument is cut), or a tuple with an int or None for "
            "each argument and at least one int"
        )

    @functools.wraps(fn)
    def chunked(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, places, rebuilt = _parted(fn, axis, args, kwargs)
        _check_lengths(places, leaves, n)
        if n == 1:
            return fn(*args, **kwargs)
        rows = [jnp.moveaxis(cut(leaf, n, at), at + 1, 0) for leaf, (_, at) in zip(leaves, places, strict=True)]

        def one_chunk(chunk: list[Any]) -> Any:
            return rebuilt(chunk)

        body = compat.chunk_checkpoint(one_chunk)
        _, stacked = jax.lax.scan(lambda _, chunk: (None, body(chunk)), None, rows)
        _check_sums(jax.eval_shape(rebuilt, leaves), stacked, n)
        return jax.tree.map(_sum, stacked)

    return chunked


def _parted(fn: Any, axis: Any, args: Any, kwargs: Any) -> tuple[list[Any], list[tuple[str, int]], Callable[[list[Any]], Any]]:
    """The arrays to cut, the name and the axis of each, and `fn` as a function of these arrays."""
    if kwargs and isinstance(axis, tuple):
        bound = inspect.signature(fn).bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
    if isinstance(axis, tuple) and len(axis) != len(args):
        raise ArgumentError(
            f"axis={axis!r} has {len(axis)} entries, but the function is called with {len(args)} positional arguments: give "
            "an axis or None for each argument"
        )
    of_args = axis if isinstance(axis, tuple) else (axis,) * len(args)
    asked = [(f"argument {place}", cut_axis, arg) for place, (cut_axis, arg) in enumerate(zip(of_args, args, strict=True))]
    if not isinstance(axis, tuple):
        asked += [(f"argument {name!r}", axis, arg) for name, arg in kwargs.items()]
    leaves: list[Any] = []
    places: list[tuple[str, int]] = []
    for name, cut_axis, arg in asked:
        for path, leaf in jax.tree.leaves_with_path(arg) if cut_axis is not None else ():
            leaves.append(leaf)
            places.append(_place(f"{name}{jax.tree_util.keystr(path)}", cut_axis, leaf))

    def rebuilt(chunk: list[Any]) -> Any:
        values = iter(chunk)
        filled = [
            arg
            if cut_axis is None
            else jax.tree.unflatten(jax.tree.structure(arg), [next(values) for _ in jax.tree.leaves(arg)])
            for _, cut_axis, arg in asked
        ]
        named = dict(zip(kwargs, filled[len(args) :], strict=True)) if not isinstance(axis, tuple) else kwargs
        return fn(*filled[: len(args)], **named)

    return leaves, places, rebuilt


def _place(name: str, axis: int, leaf: Any) -> tuple[str, int]:
    """The name of an array and its axis, counted from the front."""
    if not compat.is_array(leaf) or not -leaf.ndim <= axis < leaf.ndim:
        shown = f"{leaf.dtype}{list(leaf.shape)}" if compat.is_array(leaf) else repr(leaf)
        raise ArgumentError(
            f"axis={axis}: {name} is {shown}, which has no such axis; give None for it in axis=(…), or bind it into fn"
        )
    return name, axis % leaf.ndim


def _check_lengths(places: list[tuple[str, int]], leaves: list[Any], n: int) -> None:
    lengths = {name: leaf.shape[at] for leaf, (name, at) in zip(leaves, places, strict=True)}
    if not lengths:
        raise ArgumentError("axis: no argument that is to be cut contains an array")
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ArgumentError(f"axis: expected the same length along it in all arrays, but {shown}")
    name, length = next(iter(lengths.items()))
    check_divides(n, length, f"axis {places[0][1]} of {name}, which has {length} positions")
    for leaf, (name, at) in zip(leaves, places, strict=True):
        check_devices(leaf, n, at, f"a chunk of {name}", "positions")


def _check_sums(whole: Any, stacked: Any, n: int) -> None:
    for (path, expected), chunks in zip(jax.tree.leaves_with_path(whole), jax.tree.leaves(stacked), strict=True):
        if chunks.shape[1:] != expected.shape or not jnp.issubdtype(chunks.dtype, jnp.number):
            raise ArgumentError(
                f"fn: its result{jax.tree_util.keystr(path)} is {expected.dtype}{list(expected.shape)} for all positions, but "
                f"{chunks.dtype}{list(chunks.shape[1:])} for one of {n} chunks: expected a sum along the axis, whose shape "
                "does not depend on the axis' length; sum inside fn"
            )


def _sum(chunks: Any) -> Any:
    is_float = jnp.issubdtype(chunks.dtype, jnp.floating)
    wide = jnp.promote_types(chunks.dtype, jnp.float32) if is_float else chunks.dtype
    return jnp.sum(chunks, axis=0, dtype=wide).astype(chunks.dtype)
