"""The forward pass of the scanned deep perceptron in segments: a scan over segments, which contains a scan over layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax import remat

from .functions import check_cut


def fold_layers(tree: Mapping[str, Any], segments: int) -> dict[str, Any]:
    """Return stacked layers, (hidden layers, …), as (segments, layers of a segment, …); other parameters are unchanged.

    Raises:
        ValueError: when `segments` does not divide the number of hidden layers.

    >>> folded = fold_layers({"layers": jnp.zeros((6, 4)), "head": jnp.zeros(3)}, 2)
    >>> folded["layers"].shape, folded["head"].shape
    ((2, 3, 4), (3,))
    """
    check_cut(len(jax.tree.leaves(tree["layers"])[0]), segments)
    return {**tree, "layers": jax.tree.map(lambda leaf: leaf.reshape(segments, -1, *leaf.shape[1:]), tree["layers"])}


def unfold_layers(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `fold_layers`."""
    return {**tree, "layers": jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree["layers"])}


def nested_scan(params: Mapping[str, Any], x: jax.Array, *, policy: Any = "full") -> jax.Array:
    """The output of `DeepMLP`, (B, in_features) → (B, out_features), for its parameters after `fold_layers`.

    The hidden layers run in a scan over segments, each segment a block under `policy` with a scan over its layers. Only one
    segment is compiled. Unlike in `checkpoint_sequential`, the last segment is checkpointed too, and the first layer and the
    head are in no segment, because the iterations of a scan must be equal.

    >>> layer = {"kernel": jnp.eye(2), "bias": jnp.zeros(2)}
    >>> hidden = {"linear": jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), layer)}
    >>> params = fold_layers({"first": {"linear": layer}, "layers": hidden, "head": layer}, 2)
    >>> nested_scan(params, jnp.array([[3.0, -1.0]])).tolist()
    [[3.0, 0.0]]
    """

    def one_layer(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return _mlp_layer(layer, x), None

    def layers_of_a_segment(x: jax.Array, layers: Any) -> jax.Array:
        return jax.lax.scan(one_layer, x, layers)[0]

    segment = remat(layers_of_a_segment, policy)
    x = _mlp_layer(params["first"], x)
    x, _ = jax.lax.scan(lambda x, layers: (segment(x, layers), None), x, params["layers"])
    return _linear(params["head"], x)


def _mlp_layer(layer: Mapping[str, Any], x: jax.Array) -> jax.Array:
    return jax.nn.relu(_linear(layer["linear"], x))


def _linear(layer: Mapping[str, Any], x: jax.Array) -> jax.Array:
    return jnp.dot(x, layer["kernel"]) + layer["bias"]
