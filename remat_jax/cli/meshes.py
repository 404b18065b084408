"""The option `--mesh`: the axes that a workload is divided by, in place of its own."""

from __future__ import annotations

from typing import Annotated

import typer
from jax.sharding import AbstractMesh

from remat_jax.cli.workloads import load_workload
from remat_jax.hardware import Target
from remat_jax.memory.compile.devices import check_size
from remat_jax.mesh import as_mesh
from remat_jax.workload import Workload

MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXIS=SIZE,…",
        help="Divide by these axes, such as data=8,fsdp=8, in place of the workload's own mesh; its shardings stay. Where "
        "it has none, the batch lies over data and fsdp, and each parameter over fsdp.",
    ),
]


def checked_mesh(text: str | None, target: Target | None) -> AbstractMesh | None:
    """The mesh that was asked for, of as many devices as the target; None where none was.

    Raises:
      ArgumentError: it is no mesh, or of another size.
    """
    if text is None:
        return None
    found = as_mesh(text)
    if target is not None:
        check_size(found, target, f"mesh={text!r}")
    return found


def load_on_mesh(name: str, mesh: AbstractMesh | None) -> Workload:
    """The workload that `name` stands for, on `mesh` where there is one."""
    job = load_workload(name)
    return job if mesh is None else job.on_mesh(mesh)
