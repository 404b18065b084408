"""Google TPUs, which need not be present: libtpu, the TPU compiler of `jax[tpu]`, compiles for a described slice.

The sizes are those of the compiler's buffer assignment, by which the compiler decides whether a step fits. `temp` of JAX's
`memory_analysis` is larger for scans, although nothing else is allocated (`docs/notes/tpu.md`). XLA:TPU refuses a step
that exceeds the chip after it has assigned the buffers, so the sizes of such a step are known, but not its time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.core.nested_offload import refuse_nested_offload
from remat_jax.errors import CompileError
from remat_jax.hardware import Target
from remat_jax.hardware.google import QUIET
from remat_jax.hardware.slices import CHIPS_PER_HOST, wraps
from remat_jax.memory.compile.backends.backend import NESTED_OFFLOAD, Backend, LimitOption, RefusedOffload, without_accelerator
from remat_jax.memory.compile.backends.xla_files import XlaFiles, modelled_time
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.compile.sizes import REFUSED, UNFINISHED, Sizes
from remat_jax.memory.hlo.text import HOST_SPACE, arrays_of
from remat_jax.memory.step_time.collectives import read_collectives

_ALLOCATION = re.compile(r"^allocation \d+: size (?P<bytes>\d+)(?P<is>.*)$", re.MULTILINE)
_SPACE = re.compile(r", color (\d+)")
_NAMES = ("temp", "argument", "output", "alias")
_MIB = 2**20
_NO_ROOM = r"Ran out of memory (in memory space|on) (hbm|HBM)\b"
"""How libtpu refuses a step that exceeds device memory. A kernel that exceeds the core's memory (VMEM) is another error."""


class TpuBackend(Backend):
    """XLA:TPU, from libtpu."""

    platform = "tpu"
    limit_option = LimitOption("xla_tpu_max_hbm_size_mib", 2**30)
    # The kernel that computes an array writes it into the stack, which nothing fills before.
    stack_passes = 0
    knows_memory_early = True
    fuses_into_matmuls = True

    def require(self, target: Target) -> None:
        """The libtpu that belongs to the installed JAX is required."""
        compat.require_tpu_compiler()

    def environment(self, target: Target) -> dict[str, str]:
        """No TPU is looked for. Without the last variable libtpu locks a file, and a second compile process is refused."""
        return without_accelerator(**QUIET, ALLOW_MULTIPLE_LIBTPU_LOAD="1")

    def cores(self, target: Target) -> int | None:
        """Two in the configuration "megacore", which makes one device of a chip's two cores."""
        return 2 if target.chip["config"] == "megacore" else 1

    def topology(self, target: Target) -> dict[str, Any] | None:
        """The slices, on hosts with four chips; the slice of a single chip has a host of its own."""
        shape, chip = target.topology, target.chip
        chips = target.devices // target.slices // chip["devices_per_chip"]
        return {
            "platform": "tpu",
            "topology_name": f"{chip['topology']}:{'x'.join(map(str, shape))}",
            "chip_config_name": chip["config"],
            "chips_per_host_bounds": [2, 2, 1] if chips >= CHIPS_PER_HOST else [1, 1, 1],
            "num_slices": target.slices,
            "wrap": list(wraps(shape)),
        }

    def check_program(self, jaxpr: ClosedJaxpr) -> None:
        """XLA:TPU cannot compile offload in a scan inside another scan."""
        refuse_nested_offload(jaxpr)

    def refused_offload(self, *, scanned: bool, nested: bool, devices: int) -> RefusedOffload | None:
        """Offload in a scan inside another scan, and of unrolled layers on several devices.

        The latter frees no memory (`compat.data_ties`).
        """
        if scanned or devices == 1:
            return NESTED_OFFLOAD if nested else None
        reason = "on several TPUs, XLA copies the offloaded residuals of unrolled layers back at once"
        return RefusedOffload(reason, f"{reason} (docs/notes/tpu.md), so unrolled layers offload nothing here; scan them")

    def attention_kernel(self, *, needs: str = "", cudnn_refuses: str = "") -> str:
        """JAX's kernel in Pallas."""
        return f"{super().attention_kernel(needs=needs)}, such as jax.experimental.pallas.ops.tpu.splash_attention"

    def entry(self, folder: Path) -> dict[str, Any]:
        """XLA's dump, and the final text, which alone has the compiler's estimates of cycles."""
        files = XlaFiles(folder)
        return {"compiler_options": files.options, "text": str(files.compiled_text), "refusal": _NO_ROOM}

    def limit_options(self, limit: int | None, target: Target, held_bytes: int) -> dict[str, int]:
        """The size of device memory that XLA:TPU assumes, in MiB."""
        if limit is None or target.memory_bytes is None or limit >= target.memory_bytes:
            return {}
        return {self.limit_option.name: max(1, limit // _MIB)}

    def knows_memory(self, folder: Path) -> bool:
        """Whether the memory is assigned. That takes seconds; machine code, which alone gives the cycles, takes minutes."""
        return XlaFiles(folder).is_dumped("after_buffer_assignment.txt")  # written after the files that are read

    def read_unfinished(self, folder: Path, program: ExportedProgram, target: Target) -> Sizes:
        """The sizes, from the files of `knows_memory`."""
        XlaFiles(folder).compiled_text.unlink(missing_ok=True)  # perhaps only a part of it was written
        return replace(self.read({}, folder, program, target), time=None, no_time=UNFINISHED)

    def unfinished_results(self, folder: Path) -> Sequence[Sequence[int]] | None:
        """The shapes of the arrays that the optimised program returns."""
        module = XlaFiles(folder).optimised("after_optimizations.txt")
        return None if module is None else [array.dims for array in arrays_of(module.entry.root.shape)]

    def read(self, answer: Mapping[str, Any], folder: Path, program: ExportedProgram, target: Target) -> Sizes:
        """Sizes and buffers from XLA's dump, the time from the final text; a refused step has no final text."""
        files, refusal = XlaFiles(folder), answer.get("refusal", "")
        assignment = files.dumped("after_optimizations-buffer-assignment.txt")
        if assignment is None:
            raise CompileError(f"compiling for target={target.name!r}: {refusal or 'XLA wrote no buffer assignment'}")
        optimised = files.optimised("after_optimizations.txt")
        time, no_time = (None, REFUSED) if refusal else modelled_time(files.compiled(), target, program)
        live, timeline = files.live(optimised, program)
        return Sizes(
            **_sizes(assignment),
            live=live,
            timeline=timeline,
            time=time,
            no_time=no_time,
            collectives=read_collectives(optimised) if optimised is not None and program.mesh else None,
            refusal=refusal,
        )


def _sizes(assignment: str) -> dict[str, Any]:
    """The sizes by the names of `Sizes`, from the allocations of XLA's buffer assignment in device and host memory.

    >>> _sizes('''allocation 0: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
    ... allocation 1: size 100, preallocated-temp:
    ... allocation 2: size 7, color 1, preallocated-temp:''')["temp"]
    100
    """
    sizes = Counter[str](dict.fromkeys((f"{place}{name}" for place in ("", "host_") for name in _NAMES), 0))
    for allocation in _ALLOCATION.finditer(assignment):
        space = _SPACE.search(allocation["is"])
        number = int(space[1]) if space else 0
        if number not in (0, HOST_SPACE):
            continue  # a memory inside the core
        place, nbytes = "host_" if number else "", int(allocation["bytes"])
        is_argument, is_result = ", parameter " in allocation["is"], ", maybe-live-out" in allocation["is"]
        sizes[f"{place}argument"] += nbytes * is_argument
        sizes[f"{place}output"] += nbytes * is_result
        sizes[f"{place}alias"] += nbytes * (is_argument and is_result)
        sizes[f"{place}temp"] += nbytes * (not is_argument and not is_result)
    return dict(sizes)
