"""`python -m remat_jax.cli`, where the script `remat-jax` is not on the path."""

from __future__ import annotations

from remat_jax.cli import main

main()
