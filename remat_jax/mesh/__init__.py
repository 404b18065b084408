"""A workload over several devices: the shardings of its arguments on a mesh, and each device's shard of them."""

from __future__ import annotations

from remat_jax.mesh.arguments import argument_shardings, check_context, local_struct, on_mesh, pinned, state_shardings, under
from remat_jax.mesh.axes import as_mesh, shown, specs_for, usual_shardings

__all__ = [
    "argument_shardings",
    "as_mesh",
    "check_context",
    "local_struct",
    "on_mesh",
    "pinned",
    "shown",
    "specs_for",
    "state_shardings",
    "under",
    "usual_shardings",
]
