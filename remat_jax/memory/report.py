"""The report of a measurement, as plain data that can be printed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from remat_jax.apply.blocks import replaced_text
from remat_jax.memory.advice import SHOWN, Advice
from remat_jax.memory.compile.options import GRAPHS
from remat_jax.memory.compile.sizes import MEMORY_ONLY, REFUSED, UNFINISHED
from remat_jax.memory.hlo.copies import Copies, Overlap
from remat_jax.memory.hlo.live import LiveBuffer
from remat_jax.memory.residuals import SHOWN_SHARED, SharedInput
from remat_jax.memory.step_time.collectives import Collective, executed
from remat_jax.report.tables import format_bytes, format_estimate, format_seconds, render, table

GAPS = "between arrays"


@dataclass(frozen=True)
class Receipt:
    """The compiled effect of an offload.

    Attributes:
      offered_bytes: the bytes of the residuals that the policy offloads, on all devices together, as JAX's linearisation lists
        them; None for a finished step that takes no gradient through its blocks, or several.
      host_bytes: the bytes of the compiled step's temporary buffers in host memory, for one device.
      returned_bytes: how much more device memory the step needs if these residuals are saved; None if the step that saves them
        was not compiled.
      warnings: failures of the offload, for example that all devices together have fewer bytes in host memory than
        `offered_bytes`. On a mesh this check can overlook a residual that is not in host memory: the bytes in host memory count
        a replicated residual once per device, but `offered_bytes` counts it only once.
      shared: the offloaded inputs that stay on the device because several blocks read them; not in `offered_bytes`.
      miscompiled: whether the compiler is known to compile this step wrongly (openxla/xla#46231): it must not be run.
    """

    offered_bytes: int | None
    host_bytes: int
    returned_bytes: int | None
    warnings: tuple[str, ...] = ()
    shared: tuple[SharedInput, ...] = ()
    miscompiled: bool = False


@dataclass(frozen=True)
class MemoryReport:
    """The memory of one training step under one policy, as compiled for one target, in bytes.

    On a mesh all figures are for one device, except the bytes of residuals and the receipt's `offered_bytes`, which are for all
    devices together.

    Attributes:
      workload, policy, target: the workload's name, the policy's text and the target's name.
      device_bytes: device memory, which is arguments + outputs − aliased + temp. Host memory never counts.
      temp_bytes: device memory of temporary buffers, including saved residuals.
      host_bytes: host memory of temporary buffers, arguments and outputs.
      argument_bytes, output_bytes, alias_bytes: device memory of arguments, of outputs, and of outputs that reuse an
        argument's buffer.
      residual_device_bytes, residual_host_bytes: the bytes of the saved and of the offloaded residuals, as JAX's linearisation
        lists them; None for a finished step that takes no gradient through its blocks, or several.
      receipt: the effect of the offload; None if the step offloads nothing.
      live: the device buffers alive at the peak, the largest first; empty for the target `cpu`.
      measured_peak_bytes: the allocator's peak in a run on the target `attached`; None for other targets.
      jax_version: the JAX version that compiled the step.
      overlap: how much of the copies to and from the host overlaps compute; None if nothing is copied, or a rate is unknown.
      devices, hosts: the number of devices among which the step is partitioned, and the number of their hosts.
      collectives: the collectives of one step, by kind and phase; None for one device, and for the target `cpu`.
      host_warning: a warning if the hosts have too little memory; None if their memory suffices or is unknown.
      policy_warning: a warning if the model's own checkpoints overrule the policy; else None.
      effect_warning: a warning if the policy frees nothing, or almost nothing, compared with `off`, where `off` has been
        measured for the same target, or if it drops few residuals for the size of the step; None if the policy offloads.
      compiler_warning: a warning if a compilation on a GPU would differ, with the effect on the figures; else None.
      replaced_checkpoints: how many of the model's own checkpoints around blocks the policy replaced. A checkpoint in a scan
        counts once.
      memory_limit: the device memory limit given to XLA, in bytes; None for XLA's own limit.
      compiler_options: the options with which `jax.jit(step, compiler_options=…)` runs the step as it was measured: the memory
        limit, if it is below XLA's own; and, for a scan that offloads, the option with which its copies overlap compute on a
        GPU. Empty if neither is needed.
      seconds: the estimated time of the compiled schedule, with copies and collectives, at the rates that programs reach on the
        target. None for the target `cpu`, if a rate is unknown, if the compiler refuses the step, and if a compilation for a
        TPU was ended once the memory was known, by the timeout or because only that was asked for; `no_time` gives the reason.
      compute_seconds: the part of `seconds` in which compute runs. In the rest, compute waits for copies and collectives.
      exchanges: the bytes, the time and the overlap of the collectives; None if there are none, or `seconds` is None.
      untimed: opcodes and `custom_call_target`s whose arithmetic is unknown to the estimate, which counts only their bytes.
      assumed_rates: the names (in `hardware.rates.Rates`) of rates used for `seconds` that are neither measured nor published.
      advice: changes other than a policy that would each free at least 2 % of `device_bytes`; empty for the target `cpu`.

    >>> import jax, jax.numpy as jnp
    >>> import remat_jax as rj
    >>> from flax import linen
    >>> model, x = linen.Dense(8), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    >>> params = jax.eval_shape(model.init, jax.random.key(0), x)
    >>> job = rj.Workload(lambda params, x: jnp.sum(model.apply(params, x) ** 2), params, (x,), linen.Dense)
    >>> report = rj.measure(job, "full", target="cpu")
    >>> report.argument_bytes  # 8 · 8 + 8 parameters and 4 · 8 inputs of 4 bytes
    416
    >>> report.device_bytes == report.argument_bytes + report.output_bytes - report.alias_bytes + report.temp_bytes
    True
    """

    workload: str
    policy: str
    target: str
    device_bytes: int
    temp_bytes: int
    host_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    residual_device_bytes: int | None
    residual_host_bytes: int | None
    receipt: Receipt | None
    live: tuple[LiveBuffer, ...]
    measured_peak_bytes: int | None
    jax_version: str
    overlap: Overlap | None = None
    devices: int = 1
    hosts: int = 1
    host_warning: str | None = None
    collectives: tuple[Collective, ...] | None = None
    compiler_warning: str | None = None
    policy_warning: str | None = None
    memory_limit: int | None = None
    compiler_options: dict[str, int | str] = field(default_factory=dict, hash=False)
    seconds: float | None = None
    compute_seconds: float | None = None
    exchanges: Copies | None = None
    untimed: tuple[str, ...] = ()
    assumed_rates: tuple[str, ...] = ()
    replaced_checkpoints: int = 0
    advice: tuple[Advice, ...] = ()
    no_time: str = ""
    effect_warning: str | None = None

    @property
    def refused(self) -> bool:
        """Whether the compiler refused the step because it does not fit the device, so that no time is known."""
        return self.no_time == REFUSED

    @property
    def unfinished(self) -> bool:
        """Whether the compilation was ended once the memory was known, so that no time is known."""
        return self.no_time in (UNFINISHED, MEMORY_ONLY)

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings. A missing time is none on the CPU, where no step has a time, and if only the memory was asked for."""
        offload = self.receipt.warnings if self.receipt else ()
        is_expected = self.target == "cpu" or self.no_time == MEMORY_ONLY
        no_time = f"no step time: {self.no_time}" if self.no_time and not is_expected else ""
        return tuple(
            filter(
                None, (self.policy_warning, self.effect_warning, *offload, self.host_warning, self.compiler_warning, no_time)
            )
        )

    @property
    def host_bytes_per_host(self) -> int:
        """The host memory that all devices of one host use together."""
        return self.host_bytes * self.devices // self.hosts

    @property
    def exchanged_bytes(self) -> int:
        """The bytes of the buffers in `live` that collectives read or write. The step's arguments do not count."""
        return sum(buffer.nbytes for buffer in self.live if buffer.collective and buffer.phase != "argument")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        computed = {"host_bytes_per_host": self.host_bytes_per_host, "exchanged_bytes": self.exchanged_bytes}
        timed = {"overlap": self.overlap and self.overlap.to_dict(), "exchanges": self.exchanges and self.exchanges.to_dict()}
        listed = {name: [asdict(each) for each in getattr(self, name)] for name in ("live", "advice")}
        listed |= {name: list(getattr(self, name)) for name in ("untimed", "assumed_rates")}
        return asdict(self) | listed | timed | computed

    @property
    def live_bytes_by_module(self) -> dict[tuple[str, str], int]:
        """A dict from (module path, phase) to the bytes of the live buffers at the peak, the largest first.

        With the bytes between buffers, which no module uses, the sum is `device_bytes`. Empty if live buffers are unknown.
        """
        parts: Counter[tuple[str, str]] = Counter()
        for buffer in self.live:
            parts[buffer.module, buffer.phase] += buffer.nbytes
        if self.live and (unused := self.device_bytes - parts.total()) > 0:
            parts["", GAPS] = unused
        return dict(parts.most_common())

    def live_table(self, rows: int = 20) -> Any:
        """A table of the live buffers at the peak, by module and phase. After `rows` lines, a last line sums up the rest."""
        parts = list(self.live_bytes_by_module.items())
        lines = [(module or "(elsewhere)", phase, format_bytes(nbytes)) for (module, phase), nbytes in parts[:rows]]
        if len(parts) > rows:
            lines.append((f"{len(parts) - rows} more", "", format_bytes(sum(nbytes for _, nbytes in parts[rows:]))))
        total = format_bytes(sum(nbytes for _, nbytes in parts))
        title = f"On the device at the peak: {self.policy} on {self.target}, {total}"
        return table(title, ("module", "phase", "bytes"), lines)

    def __rich__(self) -> Any:
        rows: list[tuple[Any, ...]] = []

        def add(name: str, nbytes: int | None, text: str = "") -> None:
            rows.append((name, nbytes, text or format_bytes(nbytes)))

        add("device", self.device_bytes)
        if self.memory_limit is not None:
            add("memory limit", self.memory_limit)
        add("temp", self.temp_bytes)
        add("host", self.host_bytes)
        if self.devices > self.hosts:
            add("host memory, per host", self.host_bytes_per_host)
        for name in ("argument", "output", "alias", "residual_device", "residual_host"):
            add(name.replace("_", " "), getattr(self, f"{name}_bytes"))
        if self.receipt is not None:
            add("offload: offered", self.receipt.offered_bytes)
            add("offload: freed", self.receipt.returned_bytes)
            for shared in self.receipt.shared[:SHOWN_SHARED]:
                add("stays on the device", shared.bytes, f"{format_bytes(shared.bytes)} read {shared.readers}")
        if self.measured_peak_bytes is not None:
            add("measured peak", self.measured_peak_bytes)
        rows += self._times()
        if self.collectives and self.live:
            add("at the peak, exchanged", self.exchanged_bytes)
        for kind, (count, nbytes) in executed(self.collectives or ()).items():
            add(f"{kind}: {count} arrays", nbytes)
        each = f", each of {self.devices} devices; residuals are totals" if self.devices > 1 else ""
        title = f"{self.workload} under {self.policy} on {self.target}{each} (JAX {self.jax_version})"
        return table(title, ("memory", "bytes", ""), rows, caption=self._caption())

    def _times(self) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        if self.overlap is not None:
            out, back = self.overlap.out, self.overlap.back
            rows.append(("copies out", out.bytes, _covered(out)))
            rows.append(("copies back", back.bytes, _covered(back)))
            rows.append(("copies both ways", out.bytes + back.bytes, _covered(self.overlap)))
        if self.exchanges is not None:
            rows.append(("exchanged", self.exchanges.bytes, _covered(self.exchanges)))
        if self.seconds is not None or self.no_time:
            rows.append(("estimated step", "", self._estimate()))
        return rows

    def _caption(self) -> str | None:
        remarks = [replaced_text(self.replaced_checkpoints)] if self.replaced_checkpoints else []
        if GRAPHS in self.compiler_options:
            remarks.append(
                "the copies in loops overlap compute only with jax.jit(step, compiler_options=report.compiler_options)"
            )
        remarks += [f"beyond the blocks: {advice}" for advice in self.advice if advice.bytes >= SHOWN * self.device_bytes]
        return "\n".join([*remarks, *(f"warning: {warning}" for warning in self.warnings)]) or None

    def _estimate(self) -> str:
        """The step's estimated time as text: a range if rates are assumed. If the step has transfers, adds the compute time."""
        if self.seconds is None:
            return f"not known: {self.no_time}"
        text = format_estimate(self.seconds, bool(self.assumed_rates))
        if self.compute_seconds is not None and (self.overlap is not None or self.exchanges is not None):
            text += f", of which compute {format_seconds(self.compute_seconds)}"
        if self.assumed_rates:
            text += f"; assumed: {', '.join(name.removesuffix('_bytes_per_s') for name in self.assumed_rates)}"
        return f"{text}; timed by bytes alone: {', '.join(self.untimed)}" if self.untimed else text

    def __str__(self) -> str:
        return render(self)


def _covered(copies: Copies | Overlap) -> str:
    return f"covered {copies.covered * 100:.1f} of {copies.coverable * 100:.1f} %"
