"""Tables, pictures and pages from plain data. The only other module of `remat_jax` that this package imports is `reading`."""

from __future__ import annotations

from remat_jax.report.tables import format_bytes, format_error, format_ratio, table

__all__ = ["format_bytes", "format_error", "format_ratio", "table"]
