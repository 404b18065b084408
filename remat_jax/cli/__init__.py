"""The command line `remat-jax`: one file per command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line on this process's arguments; exits with 0, 1 (a check fails), 2 (bad usage) or 3 (nothing fits)."""
    from remat_jax.cli.output import prepare_streams, written

    prepare_streams()
    try:
        os.getcwd()
    except OSError:
        sys.exit("error: the working directory is gone; change into another one")
    from remat_jax.cli.app import app

    with written():
        app(prog_name="remat-jax")


__all__ = ["main"]
