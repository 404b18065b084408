"""The common style of the pictures: palette, fonts, colours of the frameworks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from remat_jax.report.rows import Row, group

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind readers can distinguish.
BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
INK, GREY = "#222222", "#8a8a8a"

_FRAMEWORK_COLOURS = {"PyTorch": VERMILLION, "JAX Linen": BLUE, "JAX NNX": GREEN}
_SPARE_COLOURS = (PURPLE, ORANGE, SKY)
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#bbbbbb",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "grid.color": "#e6e6e6",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "hatch.color": "white",
    "hatch.linewidth": 1.2,
    "figure.facecolor": "white",
    "savefig.dpi": 160,
    # A fixed salt makes the SVG files of equal pictures equal.
    "svg.hashsalt": "remat_jax",
}
_WIDTH = 10.0


def framework_colours(rows: Sequence[Row]) -> dict[str, str]:
    """The colour of every framework in `rows`; PyTorch, Linen and NNX have fixed colours.

    >>> framework_colours([{"framework": "PyTorch"}, {"framework": "Haiku"}])
    {'PyTorch': '#D55E00', 'Haiku': '#CC79A7'}
    """
    spare = iter(_SPARE_COLOURS * len(rows))
    return {name: _FRAMEWORK_COLOURS.get(name) or next(spare) for name in group(rows, "framework")}


def new_figure(height: float) -> Figure:
    """An empty figure of the common width and `height` inches; call it inside `style`."""
    from matplotlib.figure import Figure

    # Unlike pyplot's figures, this one needs no window system, and no global list keeps it alive.
    return Figure(figsize=(_WIDTH, height), layout="constrained")


@contextmanager
def style() -> Iterator[None]:
    """Draw in the common style; the user's own Matplotlib settings neither matter nor change.

    Raises `ImportError` if Matplotlib is not installed.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise ImportError("pictures need Matplotlib, not installed here: pip install 'remat_jax[report]'") from error
    # Reading the key "backend" would choose a backend and load pyplot.
    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}
    with matplotlib.rc_context({**defaults, **_STYLE}):
        yield
