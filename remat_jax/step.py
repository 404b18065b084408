"""A training step as a function of described arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh

from remat_jax.mesh import local_struct


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """A training step: the user's own step (`Workload.from_step`), or a step made from a loss.

    Attributes:
      function: the step; it takes `arguments` and may return anything.
      arguments: pytrees of shapes and dtypes; nothing is allocated.
      donate_argnums: the positions of the donated arguments, whose buffers the step may reuse.
      names: the arguments' names in reports; if empty, reports use positions.
      mesh: the mesh that the step is partitioned over; None for a single device.
      shardings: a tuple with a pytree of shardings for each argument; empty without a mesh.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate_argnums: tuple[int, ...]
    names: tuple[str, ...] = ()
    mesh: AbstractMesh | None = None
    shardings: tuple[Any, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the arguments, or their positions in words."""
        return self.names or tuple(f"argument {place}" for place in range(len(self.arguments)))

    @property
    def local_arguments(self) -> tuple[Any, ...]:
        """One device's shards of the arguments; without a mesh, the arguments."""
        if self.mesh is None:
            return self.arguments
        return jax.tree.map(local_struct, self.arguments, self.shardings)

    def local_like(self, tree: Any) -> Any:
        """One device's shards of the arrays of `tree`, each partitioned as the first argument of its shape and dtype."""
        pairs = zip(*map(jax.tree.leaves, (self.arguments, self.local_arguments)), strict=True)
        local: dict[Any, Any] = {}
        for whole, part in pairs:
            local.setdefault((whole.shape, whole.dtype), part)
        return jax.tree.map(lambda leaf: local.get((leaf.shape, leaf.dtype), leaf), tree)
