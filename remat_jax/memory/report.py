"""What a measurement says: plain data, printable."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from remat_jax.apply.replaced import replaced_text
from remat_jax.memory.advice import SHOWN, Advice
from remat_jax.memory.hlo.collectives import Collective, executed
from remat_jax.memory.hlo.copies import Copies, Overlap
from remat_jax.memory.hlo.live import LiveBuffer
from remat_jax.memory.residuals import SharedInput
from remat_jax.report.tables import format_bytes, format_estimate, format_seconds, render, table

_SHOWN_SHARED = 3
"""Shared inputs in a printed report."""


@dataclass(frozen=True)
class Receipt:
    """What an offload really did.

    Attributes:
      offered_bytes: the residuals that the policy hands to the host, from the linearisation; of all devices together.
      host_bytes: what the compiled step keeps in host memory.
      returned_bytes: how much less device memory it needs than under the same policy with `save` for `offload`
        (an offloaded input: kept where it is); None where that was not compiled.
      warnings: what did not happen as asked, in plain words; empty when all is well. On a mesh a residual that every device has
        whole counts once for each in host memory, so that another one that is missing there may go unseen.
      shared: the inputs that the policy offloads and that stay on the device, because several blocks read them: no part of
        what is offered.
    """

    offered_bytes: int | None
    host_bytes: int
    returned_bytes: int | None
    warnings: tuple[str, ...] = ()
    shared: tuple[SharedInput, ...] = ()


@dataclass(frozen=True)
class MemoryReport:
    """The memory of one training step under one policy, as compiled for one target, in bytes.

    Where the workload has a mesh, all figures are those of one device; but for the residuals, and what of them was offered for
    offload, which are counted in the traced program and are those of all devices together.

    Attributes:
      workload, policy, target: what was asked.
      device_bytes: device memory needed: arguments + outputs − aliased + temp. Host memory is never part of it.
      temp_bytes: scratch and everything kept between the passes.
      host_bytes: host memory needed (temp, arguments and outputs that live there).
      argument_bytes, output_bytes, alias_bytes: device memory of arguments, outputs, and outputs in an argument's place.
      residual_device_bytes, residual_host_bytes: what the linearisation keeps between the passes; None for a finished step.
      receipt: what the offload did; None where the policy offloads nothing.
      live: the device buffers that are alive where the step needs most, the largest first; empty for the target `cpu`.
      measured_peak_bytes: the allocator's peak on an attached device; None elsewhere.
      jax_version: what compiled it.
      overlap: what compute covers of the copies to and from the host, in the compiled schedule;
        None where nothing is copied, or the target does not say its rates.
      devices, hosts: how many devices the step is divided among, and in how many hosts they are.
      collectives: what the devices send each other in one step, by kind and phase; None for one device, and the target `cpu`.
      host_warning: that the hosts have too little memory, in plain words; None where they have enough, or it is not known.
      policy_warning: that the policy has no effect, because the model has checkpoints of its own around the blocks; else None.
      compiler_warning: that the compiler could not do without a GPU what it does on one, and what that changes; else None.
      replaced_checkpoints: how many checkpoints of the model's own around the blocks gave way to the policy, those of a scanned
        block counted once.
      memory_limit: the bytes of device memory that XLA was asked to stay within; None for its own limit.
      compiler_options: that limit for the step: `jax.jit(step, compiler_options=report.compiler_options)`. Empty where none was
        asked for, or XLA's own is lower.
      seconds: the estimated time of the step: its compiled schedule, played at the rates that programs reach on the target,
        with copies to and from the host and collectives. None for the target `cpu`, and where a rate is not known.
      no_time: why `seconds` is None, in plain words; empty where it is not.
      compute_seconds: the part of it in which compute runs; the rest is waiting for copies and collectives.
      exchanges: the collectives in the schedule, in the terms of `overlap`; None where there are none.
      untimed: kernels whose operations nobody knows (custom calls): their bytes are counted alone.
      assumed_rates: the rates that nobody measured on such a device, by their names in `Rates`.
      advice: changes beyond the policy that would give back at least 2 % of `device_bytes`, each taken by itself, the largest
        first; empty for the target `cpu`.

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
    compiler_options: dict[str, int] = field(default_factory=dict, hash=False)
    seconds: float | None = None
    compute_seconds: float | None = None
    exchanges: Copies | None = None
    untimed: tuple[str, ...] = ()
    assumed_rates: tuple[str, ...] = ()
    replaced_checkpoints: int = 0
    advice: tuple[Advice, ...] = ()
    no_time: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """All that is to be known before the figures are used: of policy, offload, the hosts' memory, compiler and time.

        That a CPU's step has no time is no warning: no step has one there.
        """
        offload = self.receipt.warnings if self.receipt else ()
        no_time = f"no step time: {self.no_time}" if self.no_time and self.target != "cpu" else ""
        return tuple(filter(None, (self.policy_warning, *offload, self.host_warning, self.compiler_warning, no_time)))

    @property
    def host_bytes_per_host(self) -> int:
        """Host memory that the devices of one host need together."""
        return self.host_bytes * self.devices // self.hosts

    @property
    def exchanged_bytes(self) -> int:
        """Of what is alive at the peak, what a collective gives or takes: gathered parameters, gradients before their sum.

        What the step is given does not count, and neither does what is copied from such a buffer, or into another order for it.
        """
        return sum(one.nbytes for one in self.live if one.collective and one.phase != "argument")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        overlap = self.overlap.to_dict() if self.overlap else None
        more = {"overlap": overlap, "host_bytes_per_host": self.host_bytes_per_host, "exchanged_bytes": self.exchanged_bytes}
        more |= {"exchanges": self.exchanges.to_dict() if self.exchanges else None}
        listed = {name: [asdict(one) for one in getattr(self, name)] for name in ("live", "advice")}
        listed |= {name: list(getattr(self, name)) for name in ("untimed", "assumed_rates")}
        return asdict(self) | listed | more

    @property
    def live_bytes_by_module(self) -> dict[tuple[str, str], int]:
        """Bytes that are alive at the peak: (module path, phase) → bytes, the largest first."""
        found: dict[tuple[str, str], int] = {}
        for one in self.live:
            found[one.module, one.phase] = found.get((one.module, one.phase), 0) + one.nbytes
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    def live_table(self, rows: int = 20) -> Any:
        """What is alive at the peak, by module and phase, as a table of at most `rows` lines."""
        found = list(self.live_bytes_by_module.items())
        lines = [(module or "(elsewhere)", phase, format_bytes(nbytes)) for (module, phase), nbytes in found[:rows]]
        if len(found) > rows:
            lines.append((f"{len(found) - rows} more", "", format_bytes(sum(nbytes for _, nbytes in found[rows:]))))
        total = format_bytes(sum(one.nbytes for one in self.live))
        title = f"On the device at the peak: {self.policy} on {self.target}, {total}"
        return table(title, ("module", "phase", "bytes"), lines)

    def __rich__(self) -> Any:
        names = ("device_bytes", "temp_bytes", "host_bytes", "argument_bytes", "output_bytes", "alias_bytes")
        more = ("residual_device_bytes", "residual_host_bytes")
        rows: list[tuple[Any, ...]] = [
            (name.removesuffix("_bytes").replace("_", " "), getattr(self, name), format_bytes(getattr(self, name)))
            for name in names + more
        ]
        if self.devices > self.hosts:
            rows.insert(3, ("host, each of them", self.host_bytes_per_host, format_bytes(self.host_bytes_per_host)))
        if self.memory_limit is not None:
            rows.insert(1, ("memory limit", self.memory_limit, format_bytes(self.memory_limit)))
        if self.receipt is not None:
            rows.append(("offload: offered", self.receipt.offered_bytes, format_bytes(self.receipt.offered_bytes)))
            rows.append(("offload: given back", self.receipt.returned_bytes, format_bytes(self.receipt.returned_bytes)))
            for one in self.receipt.shared[:_SHOWN_SHARED]:
                rows.append(("stays on the device", one.bytes, f"{format_bytes(one.bytes)} read {one.readers}"))
        if self.measured_peak_bytes is not None:
            rows.append(("measured peak", self.measured_peak_bytes, format_bytes(self.measured_peak_bytes)))
        if self.overlap is not None:
            rows.append(("copies out", self.overlap.out.bytes, _covered(self.overlap.out)))
            rows.append(("copies back", self.overlap.back.bytes, _covered(self.overlap.back)))
            rows.append(("copies both ways", self.overlap.out.bytes + self.overlap.back.bytes, _covered(self.overlap)))
        if self.exchanges is not None:
            rows.append(("exchanged", self.exchanges.bytes, _covered(self.exchanges)))
        if self.seconds is not None:
            rows.append(("estimated step", "", self._estimate()))
        elif self.no_time:
            rows.append(("estimated step", "", f"not known: {self.no_time}"))
        if self.collectives and self.live:
            rows.append(("at the peak, exchanged", self.exchanged_bytes, format_bytes(self.exchanged_bytes)))
        for kind, (count, nbytes) in executed(self.collectives or ()).items():
            rows.append((f"{kind}: {count} arrays", nbytes, format_bytes(nbytes)))
        remarks = [replaced_text(self.replaced_checkpoints)] if self.replaced_checkpoints else []
        remarks += [f"beyond the blocks: {one}" for one in self.advice if one.bytes >= SHOWN * self.device_bytes]
        caption = "\n".join([*remarks, *(f"warning: {one}" for one in self.warnings)])
        each = f", each of {self.devices} devices; residuals of all" if self.devices > 1 else ""
        title = f"{self.workload} under {self.policy} on {self.target}{each} (JAX {self.jax_version})"
        return table(title, ("memory", "bytes", ""), rows, caption=caption or None)

    def _estimate(self) -> str:
        """The time of the step as text: a range where rates are assumed, and what it waits for besides computing."""
        said = format_estimate(self.seconds, bool(self.assumed_rates))
        if self.compute_seconds is not None and (self.overlap is not None or self.exchanges is not None):
            said += f", {format_seconds(self.compute_seconds)} of it compute"
        if self.assumed_rates:
            said += f"; assumed: {', '.join(name.removesuffix('_bytes_per_s') for name in self.assumed_rates)}"
        return f"{said}; counted by bytes alone: {', '.join(self.untimed)}" if self.untimed else said

    def __str__(self) -> str:
        return render(self)


def _covered(copies: Copies | Overlap) -> str:
    return f"covered {copies.covered * 100:.1f} of {copies.coverable * 100:.1f} %"
