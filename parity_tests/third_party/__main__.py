"""Prints the figures behind the tests, as two tables: `python -m parity_tests.third_party [NAME …]`."""

from __future__ import annotations

import sys

from parity_tests.third_party import checks
from parity_tests.third_party import ports as p
from parity_tests.third_party.ports import Case, Port
from remat_jax.parity import float64_error, judge
from remat_jax.report.tables import render, table

LAYERS = 6


def agreement(name: str, port: Port) -> list[object]:
    """The largest error in float64, and the largest multiple of PyTorch's own error in the working dtypes."""
    row: list[object] = [name]
    exact = p.torch_step(port, "off", "float64")
    ported = p.jax_step(port, Case("scan", "offload", "float64"))
    row += [f"{float64_error(reference, candidate)[0]:.1e}" for reference, candidate in zip(exact, ported, strict=True)]
    for dtype in ("float32", "bfloat16"):
        ported, plain = p.jax_step(port, Case("scan", "offload", dtype)), p.torch_step(port, "off", dtype)
        row.append(
            f"{max(judged.ratio for each in zip(exact, ported, plain, strict=True) for judged in judge(*each, dtype)):.2f}"
        )
    return row


def bytes_kept(name: str, port: Port) -> list[list[object]]:
    """Device + host bytes that `LAYERS` layers and the code around them keep, in every mode and form."""
    rows = []
    for mode in p.MODES:
        kept = [checks.kept(port, form, mode, LAYERS) for form in ("torch", "unrolled", "scan")]
        rows.append([name, mode, *(f"{each.device} + {each.host}" for each in kept)])
    return rows


def main(names: list[str]) -> None:
    """Print both tables for the named ports, by default for all."""
    chosen = {name: checks.PORTS[name] for name in names or checks.PORTS}
    columns = ["port", "outputs", "gradients", "after AdamW", "float32 ratio", "bfloat16 ratio"]
    print(render(table("against transformers and diffusers", columns, [agreement(*each) for each in chosen.items()])))
    columns = ["port", "mode", "PyTorch", "JAX, unrolled", "JAX, scanned"]
    rows = [row for each in chosen.items() for row in bytes_kept(*each)]
    print(render(table(f"bytes kept by {LAYERS} layers, device + host", columns, rows)))


if __name__ == "__main__":
    main(sys.argv[1:])
