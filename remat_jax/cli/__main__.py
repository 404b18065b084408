"""`python -m remat_jax.cli`, for use without the script `remat-jax`."""

from __future__ import annotations

from remat_jax.cli import main

main()
