"""A substitute for NVIDIA's CUDA toolkit, so that XLA compiles for a GPU on a machine without the toolkit.

XLA assigns a step's memory first. Then LLVM turns each kernel into PTX, with the mathematical functions of NVIDIA's file
`libdevice`, and `ptxas` turns the PTX into machine code. XLA ends with an error if either is missing. But a step that is
compiled only for its sizes never runs, so the substitute has a `libdevice` without functions, and a `ptxas` that writes empty
files. Sizes are the same with the real toolkit (`tests/test_kernels.py`), and compiling takes longer with it.
"""

from __future__ import annotations

import os
from pathlib import Path

TOOLKIT = "xla_gpu_cuda_data_dir"
"""The option that names the folder of the toolkit."""

# XLA parses the version, from which it takes the version of PTX.
_PROGRAM = """\
#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; fi
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then : > "$2"; fi
  shift
done
"""
_LIBDEVICE = 'target triple = "nvptx64-nvidia-cuda"\n'


def toolkit_options(folder: Path) -> dict[str, str]:
    """Write the substitute to `folder`, and return the compiler option with which XLA uses it.

    Returns no option if `folder` is on a file system that runs no programs; XLA then needs an installed toolkit.
    """
    for name in ("ptxas", "nvlink"):
        program = folder / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(_PROGRAM, encoding="utf-8")
        program.chmod(0o700)
        if not os.access(program, os.X_OK):
            return {}
    library = folder / "nvvm" / "libdevice" / "libdevice.10.bc"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_text(_LIBDEVICE, encoding="utf-8")
    return {TOOLKIT: str(folder)}
