"""A workload over several devices: how its arguments lie on a mesh, and what of them each device holds."""

from __future__ import annotations

from remat_jax.mesh.arguments import argument_shardings
from remat_jax.mesh.axes import as_mesh, shown
from remat_jax.mesh.state import state_shardings
from remat_jax.mesh.tracing import check_context, local_struct, pinned, under
from remat_jax.mesh.usual import specs_for, usual_shardings

__all__ = [
    "argument_shardings",
    "as_mesh",
    "check_context",
    "local_struct",
    "pinned",
    "shown",
    "specs_for",
    "state_shardings",
    "under",
    "usual_shardings",
]
