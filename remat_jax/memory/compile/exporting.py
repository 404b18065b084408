"""Exports a training step, lowered for the target's platform and serialised, so that another process can compile it."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export

from remat_jax import compat
from remat_jax.cost.pallas import named_kernels
from remat_jax.errors import UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.mesh import check_context
from remat_jax.report.activity import activity
from remat_jax.step import TrainingStep
from remat_jax.train.parameters import device_bytes

# JAX understands "ALL" from 0.11 on. An older version's error names the refused custom calls, which are then allowed.
_CUSTOM_CALLS = ("annotate_device_placement", "ALL")
_REFUSED = re.compile(r'custom_call @"?([^\s("]+)"?\(')


def export_step(key: str, step: TrainingStep, target: Target) -> ExportedProgram:
    """`step` lowered for the platform of `target`; nothing is compiled or allocated here."""
    if not Path(__file__).is_file():
        raise UnsupportedError(
            f"remat_jax was imported from {__file__.partition('/remat_jax/')[0]!r}, which is not a folder, but the compile "
            "process must start from a file: install remat-jax, or unpack it"
        )
    compat.warn_of_lost_threads()
    devices = 1 if step.mesh is None else step.mesh.size
    check_context(devices, f"a step for {_counted(devices)}")
    leaves, treedef = jax.tree.flatten(step.arguments)
    owners = [index for index, argument in enumerate(step.arguments) for _ in jax.tree.leaves(argument)]
    donated = tuple(place for place, owner in enumerate(owners) if owner in step.donate_argnums)

    def flat(*values: Any) -> list[Any]:
        return jax.tree.leaves(step.function(*jax.tree.unflatten(treedef, values)))

    with activity(f"tracing the step under {key}"), compat.cudnn_explained(), compat.without_source_lines():
        try:
            exported, kernels = _exported(flat, leaves, target, jax.tree.leaves(step.shardings))
        except ValueError as error:
            if "device assignment" not in str(error):
                raise
            raise _of_another_mesh(devices, str(error)) from error
    # A program without shardings is exported for one device, but it runs on all devices of the mesh.
    if exported.nr_devices not in (1, devices):
        raise _of_another_mesh(devices, f"the program is for {_counted(exported.nr_devices)}")
    mesh = tuple(zip(step.mesh.axis_names, step.mesh.axis_sizes, strict=True)) if step.mesh is not None else ()
    held = _held_bytes(step, exported.out_avals, donated)
    return ExportedProgram(key, bytes(exported.serialize()), donated, step.array_names, mesh, held, kernels)


def _held_bytes(step: TrainingStep, results: Sequence[Any], donated: Sequence[int]) -> int:
    """`held_bytes` of a step. A result is assumed to be sharded like an argument of the same shape, dtype and memory space."""
    local = jax.tree.leaves(step.local_arguments)
    reusable: Counter[Any] = Counter()
    shards: dict[Any, Any] = {}
    for index, (whole, part) in enumerate(zip(jax.tree.leaves(step.arguments), local, strict=True)):
        shards.setdefault(_type(whole), part)
        reusable[_type(whole)] += index in donated
    held = device_bytes(local)
    for result in results:
        if reusable[_type(result)]:
            reusable[_type(result)] -= 1
        else:
            held += device_bytes(shards.get(_type(result), result))
    return held


def _type(leaf: Any) -> tuple[Any, ...]:
    return tuple(leaf.shape), leaf.dtype, compat.is_on_host(leaf)


def _exported(
    flat: Callable[..., Any], leaves: Sequence[Any], target: Target, shardings: Sequence[Any]
) -> tuple[Any, tuple[tuple[str, float], ...]]:
    """The exported `flat`, and the value of `ExportedProgram.kernels`, which cannot be read from the exported program.

    Custom calls without a stable serialised form are allowed, because the same version of JAX compiles the program.
    """
    backend = backend_of(target)
    described: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    allowed: tuple[str, ...] = _CUSTOM_CALLS
    places = {"in_shardings": tuple(shardings)} if shardings else {}
    jitted: Any = jax.jit(flat, keep_unused=True, **places)
    for _ in range(3):
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in allowed]
        try:
            with described():
                exported = export.export(jitted, platforms=[backend.platform], disabled_checks=checks)(*leaves)
            # Exporting has cached this trace.
            jaxpr = jitted.trace(*leaves).jaxpr
            backend.check_program(jaxpr)
            return exported, tuple(sorted(named_kernels(jaxpr).items()))
        except ValueError as error:
            if "mesh passed to shard_map" in str(error) and described is not contextlib.nullcontext:
                raise UnsupportedError(
                    "the step has a Pallas kernel and a shard_map with mesh=…, and this mesh does not name the device to "
                    "compile for: leave out mesh=… in every shard_map, because the loss is traced under the workload's mesh"
                ) from error
            refused = tuple(dict.fromkeys(_REFUSED.findall(str(error))))
            if not refused or set(refused) <= set(allowed):
                raise
            allowed += refused
        except RuntimeError as error:
            # JAX lowers a Pallas kernel for the attached device unless a context names another device.
            if "AbstractDevice" not in str(error) or described is not contextlib.nullcontext:
                raise
            described = functools.partial(
                compat.lowering_for, target.name, target.device_kinds, target.kind, backend.cores(target)
            )
    raise AssertionError("each reason to try again is met once")


def _of_another_mesh(devices: int, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"the step is compiled for {_counted(devices)}, but it contains a mesh of another size: in the NamedSharding of a "
        f"constraint, of a jit, or of an array that the loss closes over ({reason}). Write constraints as bare PartitionSpecs, "
        "and give their mesh to Workload(…, mesh=…, shardings=…)"
    )


def _counted(devices: int) -> str:
    return f"{devices} device{'s' * (devices > 1)}"
