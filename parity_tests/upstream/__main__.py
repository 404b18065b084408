"""Compares the ports with their originals: `python -m parity_tests.upstream --diffsynth CHECKOUT --openpi CHECKOUT`.

With both checkouts it writes docs/notes/upstream.md. It fails if an error exceeds its limit.

    pip install einops                                                       # DiffSynth-Studio
    pip install augmax beartype==0.19.0 chex einops jaxtyping==0.2.36 ml_collections numpydantic    # OpenPI
    pip install transformers==4.53.2                                         # OpenPI in PyTorch, and in transformers' folder
    cp -r CHECKOUT/src/openpi/models_pytorch/transformers_replace/* …        # these files of OpenPI's, as its README says
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import warnings
from pathlib import Path

from parity_tests.upstream import checkouts, comparing, diffsynth, openpi
from parity_tests.upstream.comparing import Pair, Row

NOTE = Path(__file__).parents[2] / "docs" / "notes" / "upstream.md"
PACKAGES = ("torch", "transformers", "jax", "flax")
TEXT = """# The ports compared with their originals

Do the ports compute the same as DiffSynth-Studio and OpenPI, from weights under these projects' own names? The projects'
modules are imported from a checkout, at a small size and with every parameter perturbed, and checkpoint with their own switch.
The port gets their weights by the maps of `examples/models/rules`. This note is written by

    python -m parity_tests.upstream --diffsynth CHECKOUT --openpi CHECKOUT

with {versions}, on a CPU. DiffSynth-Studio: {diffsynth}. OpenPI: {openpi}.

The table has the port's errors relative to the original: of the output, of the whole gradient, and of the gradient tensor
that is furthest off. A tensor's error is relative to its own norm, or to a thousandth of the whole gradient's norm if that is
larger, because some gradients are 0. The first two errors must be within the limit, in float64 all three. In float32 original
and port are also compared with a float64 run of the original, or of the port if the original has no float64. The table gives
both errors (output, gradient) and the largest ratio of any tensor by the [parity rule](../parity.md), which allows 4.

{rows}

- DiffSynth-Studio runs through `model_fn_qwen_image` and `model_fn_wan_video` with its own two flags. `WanModel.forward` itself
  cannot run at this commit: it expects two results from `patchify`, which returns one. `QwenImageDiT` hard-codes the published
  widths, so the test assembles a small model from its modules.
- Qwen-Image is compared at times {early} and {late} of 1000. PyTorch rounds the last bit of some of its 128 frequencies
  differently, and a late time multiplies this difference. {late_text} Wan is compared at time 900, because DiffSynth-Studio
  computes its time features in float64, and the port is as exact.
- OpenPI's JAX model has its own checkpoints around every layer; `rj.enable_gradient_checkpointing` replaces them by the policy
  of each mode. The model cannot run in float64. {rounding}
- OpenPI's PyTorch model has a switch for checkpointing but none for offload. In mode `offload` only the port offloads.
  {pytorch}
"""
LATE = (
    "At {at:g} the outputs of both differ by {0.output:.1e}, and the original and its float64 run by {0.original.output:.1e}."
)
ROUNDING = (
    "The model's float32 gradient differs from the port's float64 gradient by up to {original:.1e}, and the port's float32"
    " gradient by up to {port:.1e}; the limit is therefore {limit:.0e}. Its times are early, because it rounds the features of"
    " late times."
)
REPLACED = "It ran with `transformers` 4.53.2 and OpenPI's replacement files."
NOT_REPLACED = "It did not run: `transformers` 4.53.2 with OpenPI's replacement files was not installed."


def table(rows: list[Row]) -> str:
    """All rows in Markdown."""
    titles = ("model", "dtype", "mode", "layers", "output", "gradient", "furthest tensor", "limit")
    titles += ("original from float64", "port from float64", "ratio")
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for row in rows:
        errors = f"{row.output:.1e} | {row.gradient:.1e} | {row.tensor:.1e}, `{row.name}`"
        sides = " | ".join(
            "" if side is None else f"{side.output:.1e}, {side.gradient:.1e}" for side in (row.original, row.port)
        )
        ratio = f"{row.ratio:.2f}" if row.original else ""
        cells = (row.pair, row.dtype, row.mode, row.layers, errors, f"{row.limit:.0e}", sides, ratio)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def note(rows: list[Row], commits: dict[str, str]) -> str:
    """The note, with the commits of both projects."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in PACKAGES)
    pytorch = REPLACED if openpi.has_replaced_files() else NOT_REPLACED
    late = max((row for row in rows if row.pair == diffsynth.LATE_NAME and row.original), key=lambda row: row.output)
    jax_rows = [row for row in rows if row.pair.endswith("JAX")]
    furthest = {side: max(getattr(row, side).gradient for row in jax_rows) for side in ("original", "port")}
    texts = {
        "late_text": LATE.format(late, at=diffsynth.LATE),
        "rounding": ROUNDING.format(limit=openpi.JAX_LIMIT, **furthest),
        "pytorch": pytorch,
    }
    times = {"early": f"{diffsynth.EARLY:g}", "late": f"{diffsynth.LATE:g}"}
    return TEXT.format(versions=versions, rows=table(rows), **texts, **times, **commits)


def run(pairs: list[Pair]) -> list[Row]:
    """Compare pairs, and print whether each row passes."""
    rows = []
    for pair in pairs:
        for row in comparing.compare(pair):
            state = "ok" if row.passed else "FAILED"
            where = f"{row.pair}, {row.dtype}, {row.mode}, {row.layers}"
            print(
                f"{state:6} {where}: output {row.output:.1e}, gradient {row.gradient:.1e}, {row.name} {row.tensor:.1e}"
                + (f"; from float64 {row.original.output:.1e} and {row.port.output:.1e}" if row.original and row.port else "")
                + (f"; ratio {row.ratio:.2f}" if row.original else ""),
                flush=True,
            )
            rows.append(row)
    return rows


def main(arguments: list[str]) -> int:
    """Compare with the given checkouts."""
    parser = argparse.ArgumentParser(
        prog="python -m parity_tests.upstream", description="Ports beside the code they come from."
    )
    parser.add_argument("--diffsynth", metavar="CHECKOUT", help="the root of a checkout of DiffSynth-Studio")
    parser.add_argument("--openpi", metavar="CHECKOUT", help="the root of a checkout of OpenPI")
    given = vars(parser.parse_args(arguments))
    projects = {name: module for name, module in (("diffsynth", diffsynth), ("openpi", openpi)) if given[name]}
    if not projects:
        parser.error("give --diffsynth, --openpi or both")
    try:
        roots = {name: module.use(given[name]) for name, module in projects.items()}
    except checkouts.CheckoutError as error:
        parser.error(str(error))
    warnings.simplefilter("ignore")  # theirs
    rows = [row for module in projects.values() for row in run(module.pairs())]
    if len(projects) == 2:
        NOTE.write_text(note(rows, {name: checkouts.commit(root) for name, root in roots.items()}), encoding="utf-8")
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows)} comparisons, {failed} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
