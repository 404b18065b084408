"""Tables, pictures and pages from plain data: this package imports of `remat_jax` only `reading`."""

from __future__ import annotations

from remat_jax.report.tables import format_bytes, format_error, format_ratio, table

__all__ = ["format_bytes", "format_error", "format_ratio", "table"]
