"""How the state of an optimizer lies on a mesh."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from remat_jax import compat


def state_shardings(optimizer: Any, state: Any, trained: Any, shardings: Any) -> Any:
    """The shardings of an optimizer's state: an array like a parameter lies as that parameter does, the rest is everywhere.

    `optax.tree_map_params` says which array of the state belongs to which parameter. What is in host memory is on the
    host of each device that has it.
    """
    everywhere = NamedSharding(jax.tree.leaves(shardings)[0].mesh, PartitionSpec())
    places = {
        path: (leaf.shape, place)
        for (path, leaf), place in zip(jax.tree.leaves_with_path(trained), jax.tree.leaves(shardings), strict=True)
    }

    def one(path: Any, array: Any) -> Any:
        # A wrapper may mask a parameter (optax.masked), or have several arrays for one (sm3).
        starts = (path[:length] for length in range(len(path), -1, -1))
        shape, place = next((places[start] for start in starts if start in places), (None, everywhere))
        return at(array, place if array.shape == shape else everywhere)

    def at(array: Any, place: NamedSharding) -> NamedSharding:
        return place.with_memory_kind("pinned_host") if compat.is_on_host(array) else place

    return optax.tree_map_params(
        optimizer,
        lambda part: jax.tree.map_with_path(one, part),
        state,
        transform_non_params=lambda array: at(array, everywhere),
        is_leaf=lambda _: True,
    )
