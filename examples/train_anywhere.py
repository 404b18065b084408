"""`python examples/train_anywhere.py`: one training script for one GPU, eight GPUs, or several hosts.

A decoder learns the source of Python's standard library, byte by byte, under any policy of remat_jax. All devices that JAX sees
take part, and the losses are the same on each mesh and under each policy:

    python examples/train_anywhere.py --checkpoint run                                one process, all its devices on fsdp
    python examples/train_anywhere.py --checkpoint run --mesh data=2,fsdp=4           eight GPUs, parameters divided by four
    python examples/train_anywhere.py --checkpoint run --policy offload_inputs        blocks' inputs in host memory
    JAX_NUM_CPU_DEVICES=8 python examples/train_anywhere.py --layers 2 --width 64 --batch 8 --length 64   eight devices on a CPU

On several hosts, run the same command on each with its own `--process-id`; Slurm and Open MPI need only `--distributed`:

    python examples/train_anywhere.py --checkpoint /shared/run --coordinator host0:1234 --num-processes 2 --process-id 0

You can kill it at any time: the same command continues from the newest checkpoint, also on other devices, processes or meshes.

`job` is the same training step as a workload, for the arguments in the environment's TRAIN_ANYWHERE:

    export TRAIN_ANYWHERE="--mesh fsdp=8 --layers 32 --width 2048"
    remat-jax plan examples/train_anywhere.py:job --target 8xh100 --budget 40GiB --save plan.json
    python examples/train_anywhere.py $TRAIN_ANYWHERE --policy plan.json
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    """Train; the exit status is 0, 1 if the training cannot continue or no checkpoint can be read, 2 for bad usage."""
    if importlib.util.find_spec("orbax") is None:
        print("error: checkpoints are written by orbax: pip install 'remat_jax[train]'", file=sys.stderr)
        return 2
    if __package__:
        command = importlib.import_module(".distributed.command", __package__)
    else:  # run as a file, which belongs to no package until the folder above is on the path
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        command = importlib.import_module("examples.distributed.command")
    return command.main(arguments)


def job() -> Any:
    """Return the training step as a workload, for the arguments in TRAIN_ANYWHERE, by default for one device.

    >>> job().batch[0].shape
    (32, 256)
    """
    import jax

    from remat_jax.errors import ArgumentError

    from .distributed import command, processes, training

    options = command.parser().parse_args(shlex.split(os.environ.get("TRAIN_ANYWHERE", "")))
    sizes = {"fsdp": 1} if options.mesh is None else processes.parsed_mesh(options.mesh)
    setting = command.setting_of(options)
    if setting.dtype == "float64" and not jax.config.jax_enable_x64:
        raise ArgumentError("TRAIN_ANYWHERE: --dtype float64 needs 64-bit types: set JAX_ENABLE_X64=1 as well")
    return training.workload(setting, sizes)


if __name__ == "__main__":
    sys.exit(main())
