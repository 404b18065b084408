"""Lines of `remat_jax.report`: what is drawn, and that it is what was given."""

from __future__ import annotations

from pathlib import Path

import matplotlib.colors
import pytest

from remat_jax.report import Line, Panel, lines_figure, save_figure

CLAIM = Line("claim", [(4, 1.0), (16, 0.5)], dashed=True)
RESULT = Line("measured", [(4, 0.25), (16, 0.3)], [(4, 0.25), (16, 0.3)])
PANEL = Panel("Work", "layers", "share", [CLAIM, RESULT], logarithmic=True, percent=True)


def drawn(axes):
    """The data of every line that has any, with its marker."""
    return [(line.get_xydata().tolist(), line.get_marker()) for line in axes.lines if len(line.get_xdata())]


def test_lines_are_joined_and_points_are_marked():
    (axes,) = lines_figure([PANEL]).axes
    assert drawn(axes) == [
        ([[4, 1.0], [16, 0.5]], "None"),
        ([[4, 0.25], [16, 0.3]], "None"),
        ([[4, 0.25], [16, 0.3]], "s"),
    ]
    assert [line.get_linestyle() for line in axes.lines if len(line.get_xdata())][0] == "--"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["claim", "measured"]
    assert axes.get_xscale() == "log" and axes.get_ylim()[0] == 0


def test_the_same_place_has_the_same_colour_in_every_panel():
    figure = lines_figure([PANEL, Panel("Other", "x", "y", [RESULT, CLAIM], logarithmic_y=True)])
    first, second = ([matplotlib.colors.to_hex(line.get_color()) for line in axes.lines] for axes in figure.axes)
    assert first[0] == second[0] and first[0] != first[-1]
    assert figure.axes[1].get_yscale() == "log" and figure.axes[1].get_title(loc="left") == "Other"


def test_ticks_are_written_plainly():
    figure = lines_figure([Panel("t", "x", "y", [Line("a", [(4, 1), (256, 128)])], True, True)])
    figure.draw_without_rendering()
    texts = {text.get_text() for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis) for text in axis.get_ticklabels()}
    assert {"4", "64", "256", "2", "128"} <= texts and not any("." in text for text in texts if text > "1")


def test_files_are_written_in_both_formats(tmp_path):
    paths = save_figure(lines_figure([PANEL]), tmp_path / "new", "rules")
    assert [Path(path).name for path in paths] == ["rules.png", "rules.svg"]
    again = save_figure(lines_figure([PANEL]), tmp_path / "again", "rules")
    assert all(Path(a).read_bytes() == Path(b).read_bytes() for a, b in zip(paths, again, strict=True))


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="panels is empty"):
        lines_figure([])
    with pytest.raises(ValueError, match=r"panels\[1\] has no point to draw"):
        lines_figure([PANEL, Panel("t", "x", "y", [Line("a")])])
