"""Tables and pictures, drawn from plain data: this package imports nothing else of `remat_jax`.

Matplotlib is imported when a picture is drawn, not before.
"""

from __future__ import annotations

from remat_jax.report.bars import memory_figure, time_figure
from remat_jax.report.lines import Line, Panel, lines_figure
from remat_jax.report.plots import demo_pictures, save_figure
from remat_jax.report.tables import format_bytes, format_error, format_ratio, table
from remat_jax.report.trade_off import trade_off_figure

__all__ = [
    "Line",
    "Panel",
    "demo_pictures",
    "format_bytes",
    "format_error",
    "format_ratio",
    "lines_figure",
    "memory_figure",
    "save_figure",
    "table",
    "time_figure",
    "trade_off_figure",
]
