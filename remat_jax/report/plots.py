"""Pictures of the memory and time of checkpointing modes, written to files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat_jax.report.bars import memory_figure, time_figure
from remat_jax.report.document import written_whole
from remat_jax.report.rows import Row, group, plain_rows
from remat_jax.report.style import style
from remat_jax.report.trade_off import trade_off_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def demo_pictures(rows: Iterable[Any], folder: str | Path) -> list[str]:
    """Draw memory, time and trade-off of `rows` into `folder`, each as PNG and as SVG; returns the paths.

    A row is a mapping or a dataclass instance with the keys `framework`, `model`, `mode`, `residual_device_bytes`,
    `residual_host_bytes`, `peak_bytes` (by `torch`, `cpu`, `h200`) and `relative_time`; a value of `None` is drawn as
    missing, never as zero. Creates `folder` if it does not exist. Models differ in size, so each model has its own pictures;
    with several models their file names end in the model's name (`memory-decoder.png`).

    Raises `ValueError` for rows that cannot be drawn, `ImportError` if Matplotlib is not installed.

    >>> import tempfile
    >>> row = {"framework": "PyTorch", "model": "toy", "mode": "off", "residual_device_bytes": 4096,
    ...        "residual_host_bytes": 0, "peak_bytes": {"torch": 8192}, "relative_time": 1.0}
    >>> [Path(path).name for path in demo_pictures([row], tempfile.mkdtemp())][:3]
    ['memory.png', 'memory.svg', 'time.png']
    """
    models = group(plain_rows(rows), "model")
    figures: dict[str, Callable[[Sequence[Row]], Figure]] = {
        "memory": memory_figure,
        "time": time_figure,
        "trade_off": trade_off_figure,
    }
    paths: list[str] = []
    for model, its_rows in models.items():
        suffix = f"-{re.sub(r'[^A-Za-z0-9]+', '-', model).strip('-').lower()}" if len(models) > 1 else ""
        for name, draw in figures.items():
            paths += save_figure(draw(its_rows), folder, f"{name}{suffix}")
    return paths


def save_figure(figure: Figure, folder: str | Path, name: str) -> list[str]:
    """Write `figure` into `folder` as `name`.png and as `name`.svg; returns the paths. Creates the folder if needed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[str] = []
    for ending, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        path = folder / f"{name}.{ending}"
        with style(), written_whole(path) as new:
            figure.savefig(new, metadata=metadata)
        paths.append(str(path))
    return paths
