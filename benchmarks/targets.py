"""`python -m benchmarks.targets`: prints the table of nominal rates of docs/hardware.md."""

from __future__ import annotations

from benchmarks.figures import markdown
from remat_jax.hardware import Target, target, targets
from remat_jax.report import format_bytes


def row(device: Target) -> tuple[str, ...]:
    """The table row of a GPU or TPU; all named ones have these rates."""
    rates = (device.hbm_bytes_per_s or 0) / 1e9, (device.host_link_bytes_per_s or 0) / 1e9
    flops = f"{device.peak_flops['bfloat16'] / 1e12:,.0f} TFLOP/s"
    return (
        f"`{device.name}`",
        format_bytes(device.memory_bytes),
        *(f"{rate:,.0f} GB/s" for rate in rates),
        flops,
        device.description,
    )


if __name__ == "__main__":
    columns = ["target", "memory", "its rate", "to the host, each way", "bfloat16", "what it is"]
    print(markdown(columns, [row(target(name)) for name in targets() if target(name).kind != "cpu"]))
