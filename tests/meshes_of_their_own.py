"""Steps that name a mesh with devices, measured for other numbers of devices; run as a script, it prints the errors as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from remat_jax.hardware import target
from remat_jax.memory.compile.exporting import export_step
from tests.planning_models import Layer, mlp

SHARDINGS = (None, P("data"))


def job(of: Any = None, **options: Any) -> rj.Workload:
    """The perceptrons; with `of`, their loss constrains its input by it."""
    plain = mlp()

    def loss(params: Any, x: jax.Array) -> Any:
        return plain.loss(params, x if of is None else jax.lax.with_sharding_constraint(x, of))

    return rj.Workload(loss, plain.params, plain.batch, Layer, **options)


def told(of: Callable[[], rj.Workload], name: str) -> list[str]:
    """The error's kind and words, or the program's number of devices if there is no error."""
    try:
        program = export_step("step", of().step("full"), target(name))
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", str(dict(program.mesh))]


def main(path: Path) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    its_own = NamedSharding(mesh, P("data"))
    messages = {
        "alone": told(lambda: job(its_own), "cpu"),
        "on another": told(lambda: job(its_own).on_mesh("data=2"), "2xcpu"),
        "on the same": told(lambda: job(its_own, mesh={"data": 4}, shardings=SHARDINGS), "4xcpu"),
        "by a spec": told(lambda: job(P("data"), mesh={"data": 2}, shardings=SHARDINGS), "2xcpu"),
    }
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(Mesh(mesh.devices, ("data",), axis_types=(kind,))):
            messages[f"under {kind.name}, alone"] = told(job, "cpu")
            messages[f"under {kind.name}, on another"] = told(lambda: job(mesh={"data": 2}, shardings=SHARDINGS), "2xcpu")
            messages[f"under {kind.name}, on the same"] = told(lambda: job(mesh={"data": 4}, shardings=SHARDINGS), "4xcpu")
    path.write_text(json.dumps(messages))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
