"""A training step as a function of described arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh

from remat_jax.apply.donation import OwnArguments
from remat_jax.mesh import local_struct
from remat_jax.report.stacked_bars import ARGUMENT


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """A training step: the user's own step (`Workload.from_step`), or a step made from a loss.

    Attributes:
      function: the step; it takes `arguments` and may return anything.
      arguments: pytrees of shapes and dtypes; nothing is allocated.
      donate_argnums: the positions of the donated arguments, whose buffers the step may reuse.
      names: the roles of the arguments, such as `parameters`; empty for the user's own step.
      mesh: the mesh that the step is partitioned over; None for a single device.
      shardings: a tuple with a pytree of shardings for each argument; empty without a mesh.
      signature: the names that the user's own step gives its arguments.
      own: which arguments the user's own step replaces, and how its `jit` donates them.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate_argnums: tuple[int, ...]
    names: tuple[str, ...] = ()
    mesh: AbstractMesh | None = None
    shardings: tuple[Any, ...] = ()
    signature: tuple[str, ...] = ()
    own: OwnArguments | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The arguments' names in reports: their roles, or `argument` and the name in the step's signature, or the position."""
        return self.names or tuple(f"{ARGUMENT}{name}" for name in self.signature or range(len(self.arguments)))

    @property
    def array_names(self) -> tuple[str, ...]:
        """The name of each array: the name of its argument, and its path.

        A state's attributes, such as those of a `TrainState`, count as arguments.

        >>> import collections, jax.numpy as jnp
        >>> State = collections.namedtuple("State", ["params", "step"])
        >>> state = State({"up": {"kernel": jnp.ones(2)}}, jnp.zeros(()))
        >>> TrainingStep(print, (state, jnp.ones(3)), (), signature=("state", "x")).array_names
        ('argument state.params/up/kernel', 'argument state.step', 'argument x')
        """
        names = []
        for label, argument in zip(self.labels, self.arguments, strict=True):
            for path, _ in jax.tree.leaves_with_path(argument):
                if path and isinstance(path[0], jax.tree_util.GetAttrKey) and not (self.names or callable(argument)):
                    owner, path = f"{label}.{path[0].name}", path[1:]
                else:
                    owner = label
                names.append("/".join(filter(None, [owner, jax.tree_util.keystr(path, simple=True, separator="/")])))
        return tuple(names)

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
