"""Where the state of an optimizer lies when its parameters are divided over several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from remat_jax import compat
from remat_jax.train.order import owners
from remat_jax.train.traced import Path

_PARAMETERS, _STATE = jax.tree_util.SequenceKey(0), jax.tree_util.SequenceKey(1)


def divided_places(
    params: Sequence[Any], paths: Sequence[Path], state_paths: Sequence[Path], state: Sequence[Any], to_host: Sequence[bool]
) -> list[NamedSharding] | None:
    """A sharding for each array of the `state` of arrays that lie on one mesh of several devices; None where they do not.

    A state's array like its parameter lies as that does, the rest is everywhere: `optax` itself, called op by op, makes
    `zeros_like` its parameters, which in a traced `init` is a shape alone.
    """
    # A tracer's sharding is not known; there the compiler decides, or the caller of `jit`.
    lie = [None if compat.is_traced(one) else getattr(one, "sharding", None) for one in params]
    divided = [one for one in lie if isinstance(one, NamedSharding) and len(one.device_set) > 1]
    if not divided:
        return None
    # Of one set of devices there may be several meshes; what belongs to no parameter may lie over any of them.
    everywhere = NamedSharding(divided[0].mesh, PartitionSpec())
    of_params = [(_PARAMETERS, *path[1:]) for path in paths]
    owned = owners([*of_params, *((_STATE, *path) for path in state_paths)])[len(params) :]
    places = []
    for array, owner, away in zip(state, owned, to_host, strict=True):
        like = lie[owner] if owner is not None and params[owner].shape == array.shape else None
        place = like if isinstance(like, NamedSharding) else everywhere
        places.append(place.with_memory_kind("pinned_host" if away else "device"))
    return places
