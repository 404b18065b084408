"""The Typer application with all commands."""

from __future__ import annotations

from typing import Annotated

import typer

from remat_jax.cli.calibrate import calibrate
from remat_jax.cli.demo import demo
from remat_jax.cli.doctor import doctor
from remat_jax.cli.lists import policies, targets
from remat_jax.cli.measure import measure
from remat_jax.cli.parity import parity
from remat_jax.cli.plan import plan
from remat_jax.cli.report import report

app = typer.Typer(
    help="Activation checkpointing and host offload for Flax models: apply, measure, plan, and prove against PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every command takes --json. Exit status: 0 on success, 1 if a check or the compiler fails, 2 for bad usage, 3 if "
    "nothing fits the budget.",
)
for command in (calibrate, demo, doctor, measure, parity, plan, policies, report, targets):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        from remat_jax import __version__

        typer.echo(f"remat-jax {__version__}")
        raise typer.Exit()


_Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")]


@app.callback()
def _options(version: _Version = False) -> None:
    pass
