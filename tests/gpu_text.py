"""Compiles for an H200 in a separate process, to read the text of the compiled module."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from remat_jax import compat
from remat_jax.hardware import target
from remat_jax.memory.compile.options import NEVER_RUN, kernel_options, toolkit_options

_HEAD = """
import json
import sys
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from jax.experimental import topologies
described = pathlib.Path(sys.argv[1]).read_text()
device = topologies.get_topology_desc(platform="cuda", target_config=described, topology="1x1x1").devices[0]
def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))
def keep(name, function, *arguments):
    compiled = jax.jit(function).lower(*arguments).compile(compiler_options=options)
    sizes = compiled.memory_analysis()
    out = pathlib.Path(sys.argv[2])
    (out / f"{name}.hlo").write_text(compiled.as_text())
    found = {kind: getattr(sizes, f"{kind}_size_in_bytes") for kind in ("temp", "argument", "output", "alias", "host_temp")}
    (out / f"{name}.json").write_text(json.dumps(found | {"peak": sizes.peak_memory_in_bytes}))
"""


@dataclass(frozen=True)
class Compiled:
    """A compiled module's text, and XLA's sizes in bytes; the package does not use `peak`."""

    text: str
    temp: int
    argument: int
    output: int
    alias: int
    host_temp: int
    peak: int


def compile_for_h200(folder: pathlib.Path, script: str) -> dict[str, Compiled]:
    """The modules that `script` compiled with `keep(name, function, *structs)`, by name."""
    # Text and sizes are final before kernels are made, and nothing runs. The script's modules share kernels.
    options = f"options = {NEVER_RUN | toolkit_options(folder / 'toolkit') | kernel_options(folder / 'kernels')}\n"
    (folder / "script.py").write_text("import pathlib\n" + options + _HEAD + script)
    (folder / "h200.txt").write_text(target("h200").compiler_description or "")
    flags = compat.xla_flags(compat.GPU_COMPILER_FLAGS)
    environment: dict[str, Any] = {**os.environ, **compat.GPU_COMPILER_ENVIRONMENT, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join((str(pathlib.Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, str(folder / "script.py"), str(folder / "h200.txt"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        path.stem: Compiled(path.read_text(), **json.loads(path.with_suffix(".json").read_text()))
        for path in folder.glob("*.hlo")
    }
