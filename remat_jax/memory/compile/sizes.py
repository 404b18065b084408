"""The sizes of a compiled program, with what the compiled text says of its buffers, schedule and collectives."""

from __future__ import annotations

from dataclasses import dataclass, field

from remat_jax import compat
from remat_jax.memory.compile.options import overlapping_options
from remat_jax.memory.hlo.copies import Overlap
from remat_jax.memory.hlo.live import LiveBuffer, Timeline
from remat_jax.memory.step_time.collectives import Collective
from remat_jax.memory.step_time.schedule import StepTime

REFUSED = "the step does not fit"
"""`Sizes.no_time` of a step that the compiler refuses because it does not fit the device."""
UNFINISHED = "the compilation was ended once the memory was known, before the machine code"
"""`Sizes.no_time` of a step whose compilation was ended by the timeout, or because its memory was enough."""
MEMORY_ONLY = "only the memory was asked for"
"""`MemoryReport.no_time` of such a step if only its memory was asked for."""

_UNTILED = (
    "a matmul fits none of the Triton tiles that XLA assumes without a GPU, so the step was compiled without Triton matmuls "
    "(xla_gpu_enable_triton_gemm=false); on a GPU the step may need a few per cent less memory, and no cuBLAS workspace of "
    "32 MiB"
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of one compiled program on one device, in bytes; `host_*` are in host memory, the others in device memory.

    For the target `cpu`, `live` is empty, and `timeline`, `time` and `collectives` are None.

    Attributes:
      live, timeline: the device buffers at the peak, and over the whole schedule.
      time, no_time: the modelled time of the compiled schedule, and the reason if it is unknown (`time` is then None).
      miscompiled: whether a loop copies a wrong slot of a host buffer (`slots.py`); None if the step uses host memory but its
        copies cannot be checked.
      collectives: the collectives on a mesh; None for one device, or if the compiled text is unknown.
      untiled: whether a matmul fits no Triton tile, so that all matmuls were compiled without Triton.
      limit_options: the memory limit of the compilation, as options for `jax.jit`; empty for XLA's own limit.
      refusal: the compiler's message if it refused the step because it does not fit the device; the sizes are then those with
        which the compiler gave up.
      starts_slice_copies: whether a loop starts copies of slices to or from the host that XLA would record in CUDA graphs;
        False if XLA_FLAGS has the option `GRAPHS`.
    """

    temp: int
    argument: int
    output: int
    alias: int
    host_temp: int
    host_argument: int
    host_output: int
    host_alias: int
    live: tuple[LiveBuffer, ...] = ()
    time: StepTime | None = None
    miscompiled: bool | None = False
    collectives: tuple[Collective, ...] | None = None
    untiled: bool = False
    limit_options: dict[str, int] = field(default_factory=dict, hash=False)
    starts_slice_copies: bool = False
    timeline: Timeline | None = None
    no_time: str = ""
    refusal: str = ""

    @property
    def unfinished(self) -> bool:
        """Whether the compilation was ended once the memory was known, so that no time is known."""
        return self.no_time == UNFINISHED

    @property
    def seconds(self) -> float | None:
        """The modelled time of the step; None if unknown."""
        return None if self.time is None else self.time.seconds

    @property
    def overlap(self) -> Overlap | None:
        """The copies to and from the host in the schedule; None if there are none, or a rate is unknown."""
        overlap = None if self.time is None else self.time.overlap
        return overlap if overlap is not None and overlap.out.count + overlap.back.count else None

    @property
    def compiler_options(self) -> dict[str, int | str]:
        """The options for `jax.jit` with which the step needs this memory and this time on a GPU."""
        return {**self.limit_options, **(overlapping_options() if self.starts_slice_copies else {})}

    @property
    def is_miscompiled(self) -> bool:
        """`miscompiled`; if it is None, whether this version of JAX is known to compile copies of a wrong slot."""
        if self.miscompiled is None:
            return compat.JAX_VERSION in compat.SCANNED_OFFLOAD_MISCOMPILED
        return self.miscompiled

    @property
    def warning(self) -> str | None:
        """For an `untiled` step, the differences from a compilation on an attached GPU; for a refused step, why; else None."""
        if self.refusal:
            return f"the compiler refuses this step, because it does not fit: {self.refusal}"
        return _UNTILED if self.untiled else None

    @property
    def device(self) -> int:
        """Arguments + outputs − aliased + temp in device memory."""
        return self.argument + self.output - self.alias + self.temp

    @property
    def host(self) -> int:
        """Arguments + outputs − aliased + temp in host memory."""
        return self.host_temp + self.host_argument + self.host_output - self.host_alias
