"""Parameters and other pytrees of a step: shapes, bytes and paths of their arrays, and which parameters are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax import compat
from remat_jax.errors import ArgumentError


def result_structs(function: Callable[..., Any], *args: Any) -> Any:
    """The structs of the arrays that `function(*args)` returns; only traces the function."""
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    leaves, treedef = jax.tree.flatten(shapes)
    return jax.tree.unflatten(
        treedef, [compat.struct(aval.shape, leaf.dtype, aval) for aval, leaf in zip(jaxpr.out_avals, leaves, strict=True)]
    )


def device_bytes(tree: Any) -> int:
    """The bytes of the arrays of `tree` in device memory; arrays in host memory do not count."""
    return compat.tree_bytes([leaf for leaf in jax.tree.leaves(tree) if not compat.is_on_host(leaf)])


def structs(tree: Any, argument: str) -> Any:
    """`tree` with a `ShapeDtypeStruct` in place of every array; Python scalars become arrays of their JAX type."""

    def as_struct(leaf: Any) -> Any:
        if isinstance(leaf, bool | int | float | complex):
            leaf = jnp.asarray(leaf)
        if not compat.is_array(leaf):
            raise ArgumentError(
                f"{argument} holds {leaf!r} of type {type(leaf).__name__}: expected arrays or jax.ShapeDtypeStruct. Bind other "
                "values into the loss (a lambda or functools.partial)."
            )
        # Use the dtype that JAX gives NumPy's float64 and int64, which depends on jax_enable_x64.
        return compat.struct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True), leaf)

    return jax.tree.map(as_struct, tree)


def split(params: Any, trainable: Any) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """The trained and the frozen leaves, as dicts by path, and a function that joins both to a tree like `params`.

    If `trainable` is None, the trained leaves are `params` itself and the frozen leaves are {}.
    """
    if trainable is None:
        return params, {}, lambda trained, _: trained
    leaves, treedef = jax.tree.flatten_with_path(params)
    paths = [path_text(path) for path, _ in leaves]
    chosen = [_is_trainable(trainable, path, leaf) for path, (_, leaf) in zip(paths, leaves, strict=True)]
    if not any(chosen):
        raise ArgumentError(f"trainable={trainable!r} selects no parameter; the first paths are: {', '.join(paths[:5])}")
    trained = {path: leaf for path, (_, leaf), yes in zip(paths, leaves, chosen, strict=True) if yes}
    frozen = {path: leaf for path, (_, leaf), yes in zip(paths, leaves, chosen, strict=True) if not yes}

    def join(trained: Any, frozen: Any) -> Any:
        return jax.tree.unflatten(treedef, [(trained if path in trained else frozen)[path] for path in paths])

    return trained, frozen, join


def parted_like(params: Any, trainable: Any, tree: Any) -> tuple[Any, Any]:
    """The leaves of `tree`, a pytree like `params`, for trained and for frozen parameters, in the form of `split`."""
    if trainable is None:
        return tree, {}
    trained, frozen, _ = split(params, trainable)
    by_path = {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
    return {path: by_path[path] for path in trained}, {path: by_path[path] for path in frozen}


def parted(params: Any, trainable: Any) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """`split` with trees like `params` in place of the dicts; each tree has None in place of the leaves of the other.

    >>> parted({"up": 1.0, "lora": 2.0}, "*lora*")[:2]
    ({'lora': 2.0, 'up': None}, {'lora': None, 'up': 1.0})
    """
    if trainable is None:
        return params, None, lambda trained, _: trained
    by_path, _, _ = split(params, trainable)
    trained = jax.tree.map_with_path(lambda path, leaf: leaf if path_text(path) in by_path else None, params)
    frozen = jax.tree.map_with_path(lambda path, leaf: None if path_text(path) in by_path else leaf, params)

    def join(trained: Any, frozen: Any) -> Any:
        return jax.tree.map(lambda one, other: other if one is None else one, trained, frozen, is_leaf=lambda x: x is None)

    return trained, frozen, join


def path_text(keys: Any) -> str:
    """A path in a pytree as text, such as `params/up/kernel`."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def check_trained(trained: Any) -> None:
    """Raise ArgumentError for a trained parameter that has no gradient."""
    for path, leaf in jax.tree.flatten_with_path(trained)[0]:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            name = path_text(path)
            raise ArgumentError(
                f"params: {name!r} is {leaf.dtype} and has no gradient; pass it in batch, or select the other parameters with "
                "trainable"
            )


def _is_trainable(trainable: Any, path: str, leaf: Any) -> bool:
    if callable(trainable):
        return bool(trainable(path, leaf))
    globs = (trainable,) if isinstance(trainable, str) else trainable
    if not isinstance(globs, Sequence) or not all(isinstance(glob, str) for glob in globs):
        raise ArgumentError(
            f"trainable={trainable!r}: expected a glob on parameter paths, several of them, or a function of path and leaf"
        )
    return any(fnmatchcase(path, glob) for glob in globs)


def check_batch(batch: Any) -> None:
    """Raise ArgumentError unless `batch` is a tuple."""
    if not isinstance(batch, tuple):
        raise ArgumentError(f"batch={type(batch).__name__}: expected a tuple of arguments; write (batch,) for a single one")


def check_value(out: Any, has_aux: bool) -> None:
    """Raise ArgumentError unless `out`, what a loss returns, is a floating-point scalar, or a pair of one and aux."""
    is_pair = isinstance(out, tuple) and len(out) == 2
    value: Any = (out[0] if is_pair else None) if has_aux else out
    if not hasattr(value, "shape") or value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        shown = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", out)
        expected = "(scalar, aux)" if has_aux else "a floating-point scalar; with aux, pass has_aux=True"
        raise ArgumentError(f"loss: it returns {shown}, expected {expected}")
