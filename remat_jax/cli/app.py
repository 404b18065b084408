"""The Typer application with all commands, and its commands `policies` and `targets`."""

from __future__ import annotations

import inspect
import re
from typing import Annotated

import typer

from remat_jax.cli.batch import batch
from remat_jax.cli.blocks import blocks
from remat_jax.cli.calibrate import calibrate
from remat_jax.cli.demo import demo
from remat_jax.cli.doctor import doctor
from remat_jax.cli.measure import measure
from remat_jax.cli.output import Json, answering
from remat_jax.cli.parity import parity
from remat_jax.cli.plan import plan
from remat_jax.cli.report import report
from remat_jax.hardware import Target, target
from remat_jax.hardware import targets as target_names
from remat_jax.hardware.rates import Rates
from remat_jax.policy import ALIASES, MEANINGS, NAMED
from remat_jax.report import format_bytes, table

_GRAMMAR = (
    "Or write your own: action: selector[, selector]; ...  Actions: save, offload, recompute. Selectors: globs on residual "
    "names, @inputs, @dots, @dots_with_no_batch_dims, @convs, @primitive:NAME. The first rule that matches wins; a residual "
    'without a rule is recomputed. Example: "offload: *ffn/up*; save: @dots_with_no_batch_dims". The names of a model\'s '
    "residuals: remat-jax measure FILE:FUNCTION --residuals"
)

_SEVERAL = (
    "8xh100 means eight GPUs, 8x8xh200 eight hosts with eight GPUs each; v5p-128 and v5p:4x4x4 a slice of TPUs, 2xv5p-128 "
    "two slices; FILE.toml:NAME is a target in a file of your own, in the form of remat_jax/hardware/targets.toml."
)

_RATES = (
    "Nominal rates; in brackets the rates that estimates use: published measurements (for matmuls, of the best shape), else "
    "an assumed share of the nominal rate (*)."
)


def policies(as_json: Json = False) -> None:
    """List the named policies with their texts and effects."""
    with answering(as_json) as answer:
        rows = [
            {
                "name": name,
                "text": str(policy),
                "meaning": MEANINGS[name],
                "aliases": [alias for alias, meant in ALIASES.items() if meant == name],
            }
            for name, policy in NAMED.items()
        ]
        cells = [(row["name"], row["text"], row["meaning"]) for row in rows]
        also = [f"{row['name']} is also called {', '.join(row['aliases'])}." for row in rows if row["aliases"]]
        policy_table = table("Policies", ("name", "text", "what it does"), cells, optional=("text",))
        answer.show(policy_table, *also, _GRAMMAR)
        answer.data({"policies": rows})


def targets(as_json: Json = False) -> None:
    """List the targets: hardware for which steps can be measured and planned. The hardware need not be present."""
    with answering(as_json) as answer:
        listed = [target(name) for name in target_names()]
        cells = [
            (described.name, format_bytes(described.memory_bytes), *_rates(described), described.description)
            for described in listed
        ]
        columns = ("name", "memory", "memory rate", "to the host, each way", "bfloat16", "description")
        narrow = ("to the host, each way", "memory rate", "bfloat16")
        answer.show(table("Targets", columns, cells, caption=_RATES, optional=narrow), _SEVERAL)
        answer.data({"targets": [entry.to_dict() for entry in listed]})


def _rates(described: Target) -> list[str | None]:
    """Three cells: the nominal rates of memory, host link and bfloat16 matmuls; in brackets the rates that estimates use."""
    if not described.peak_flops:
        return [None, None, None]
    rates = Rates.of(described)
    assumed = rates.assumed(["bfloat16"])

    def written(nominal: float | None, reached: float | None, name: str, unit: str = "GB/s", scale: float = 1e9) -> str | None:
        if nominal is None or reached is None:
            return None
        return f"{nominal / scale:,.0f} {unit} ({reached / scale:,.0f}{'*' if name in assumed else ''})"

    return [
        written(described.hbm_bytes_per_s, rates.hbm_bytes_per_s, "hbm_bytes_per_s"),
        written(described.host_link_bytes_per_s, rates.out_bytes_per_s, "out_bytes_per_s"),
        written(described.peak_flops.get("bfloat16"), rates.flops_per_s("bfloat16"), "flops", "TFLOP/s", 1e12),
    ]


def reflowed(docstring: str) -> str:
    r"""A command's help: each paragraph on one line, which the terminal breaks. Indented lines and list items keep theirs.

    >>> reflowed("Plan a\nstep.\n\n    remat-jax plan a.py:job\n    remat-jax plan b.py:job")
    'Plan a step.\n\n    remat-jax plan a.py:job\n    remat-jax plan b.py:job'
    """
    return re.sub(r"(?<=\S)\n(?![-*] |\s)", " ", inspect.cleandoc(docstring))


app = typer.Typer(
    help="Activation checkpointing and host offload for JAX models: apply, measure, plan, and prove against PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every command takes --json. Exit status: 0 on success, 1 if a check or the compiler fails, 2 for bad usage, 3 if "
    "nothing fits the budget.",
)
for command in (batch, blocks, calibrate, demo, doctor, measure, parity, plan, policies, report, targets):
    app.command(help=reflowed(command.__doc__ or ""))(command)


def _version(wanted: bool) -> None:
    if wanted:
        from remat_jax import __version__

        typer.echo(f"remat-jax {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
