"""Number formats, tables and pictures of `remat_jax.report`."""

from __future__ import annotations

import dataclasses
import io
import math
import struct
import sys
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from remat_jax.report import (
    demo_pictures,
    format_bytes,
    format_error,
    format_ratio,
    memory_figure,
    table,
    time_figure,
    trade_off_figure,
)
from remat_jax.report.labels import place_labels
from remat_jax.report.rows import mode_label

MIB = 2**20


def row(framework, mode, device, host=0, peaks=(None, None, None), time=1.0, model="decoder"):
    def scaled(mib):
        return None if mib is None else int(mib * MIB)

    return {
        "framework": framework,
        "model": model,
        "mode": mode,
        "loss": 2.31,
        "grad_error": 3e-16,
        "block_executions": 12,
        "residual_device_bytes": scaled(device),
        "residual_host_bytes": scaled(host),
        "peak_bytes": dict(zip(("torch", "cpu", "h200"), map(scaled, peaks), strict=True)),
        "relative_time": time,
    }


ROWS = [
    row("PyTorch", "off", 122, peaks=(190, None, None)),
    row("PyTorch", "checkpoint", 14, peaks=(81, None, None), time=1.29),
    row("PyTorch", "offload", 0, 14, peaks=(70, None, None), time=1.41),
    row("JAX Linen", "off", 230.5, peaks=(None, 310, 280)),
    row("JAX Linen", "checkpoint", 14, peaks=(None, 91, 77), time=1.31),
    row("JAX Linen", "offload", 0, 14, peaks=(None, 91, 64), time=1.33),
    row("JAX Linen", "dots", 118, peaks=(None, 201, 184), time=1.09),
    row("JAX Linen", "offload_dot_with_no_batch_dims", 14, 104, peaks=(None, 201, 88), time=1.19),
    row("JAX Linen", "save: *ffn/up*; offload: *attn/q*; recompute: *", 44, 20, peaks=(None, None, 108), time=None),
    row("JAX NNX", "off", 230.5, peaks=(None, 310, 280)),
    row("JAX NNX", "checkpoint", 14, peaks=(None, 91, 77), time=1.33),
    row("JAX NNX", "offload", None, None, peaks=(None, 91, 64), time=1.35),
    row("JAX NNX", "dots", 118, peaks=(None, 201, 184), time=1.11),
]


def widths(axes, label):
    """The widths of the bars that carry a legend's label, from top to bottom."""
    containers = [container for container in axes.containers if container.get_label() == label]
    return [bar.get_width() for container in containers for bar in container.patches]


def notes(axes):
    return [text.get_text() for text in axes.texts]


def offsets(axes):
    """The points of every framework's scatter, in data coordinates."""
    return [collection.get_offsets().tolist() for collection in axes.collections]


# --- numbers


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (972 * 1024, "972.0 KiB"),
        (MIB - 52, "1023.9 KiB"),
        (MIB - 51, "1.0 MiB"),
        (MIB - 1, "1.0 MiB"),
        (3 * MIB + MIB // 2, "3.5 MiB"),
        (40 * 2**30, "40.0 GiB"),
        (2**50, "1024.0 TiB"),
        (-3 * MIB, "-3.0 MiB"),
        (None, "n/a"),
    ],
)
def test_bytes_are_written_in_the_smallest_unit_below_1024(n, text):
    assert format_bytes(n) == text


def test_bytes_in_a_given_unit():
    assert format_bytes(MIB, unit="GiB") == "0.0 GiB"
    assert format_bytes(1536, unit="B") == "1536 B"
    assert format_bytes(5 * 2**30, unit="MiB") == "5120.0 MiB"


def test_bytes_take_numpy_integers_but_no_fractions():
    numpy = pytest.importorskip("numpy")
    assert format_bytes(numpy.int64(2048)) == "2.0 KiB"
    with pytest.raises(TypeError, match=r"n=2048\.0 is not a number of bytes: expected an integer"):
        format_bytes(2048.0)
    with pytest.raises(ValueError, match=r"unit='MB' is not a unit of bytes: use one of B, KiB, MiB"):
        format_bytes(1, unit="MB")


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0, "0.00×"), (1, "1.00×"), (0.995, "0.99×"), (9.994, "9.99×"), (9.996, "10.0×"), (99.96, "100×")]
    + [(0.00213, "0.0021×"), (-1.5, "-1.50×"), (math.nan, "nan"), (math.inf, "inf"), (None, "n/a")],
)
def test_ratios(ratio, text):
    assert format_ratio(ratio) == text


@pytest.mark.parametrize(
    ("error", "text"),
    [(0, "0"), (1.249e-16, "1.2e-16"), (9.96e-13, "1.0e-12"), (1.33, "1.3e+00"), (math.nan, "nan"), (None, "n/a")],
)
def test_errors(error, text):
    assert format_error(error) == text


def test_a_negative_error_is_refused():
    with pytest.raises(ValueError, match=r"error=-1e-16 is negative: expected a norm"):
        format_error(-1e-16)


# --- tables


def test_columns_of_numbers_stand_on_the_right():
    result = table(
        "what each mode costs",
        ["mode", "device", "time", "target", "nothing"],
        [["off", 3 * MIB, 1.0, "8xh100", None], ["checkpoint", None, 1.25, "4xa100", None]],
        formats={"device": format_bytes, "time": format_ratio},
    )
    assert [column.justify for column in result.columns] == ["left", "right", "right", "left", "left"]
    assert [str(cell) for cell in result.columns[1].cells] == ["3.0 MiB", "n/a"]
    assert [str(cell) for cell in result.columns[2].cells] == ["1.00×", "1.25×"]


def test_square_brackets_are_no_markup():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table("blocks[bold]", ["name[b]"], [["model/blocks[0]:dot_general"], ["[red]x[/red]"]]))
    rendered = console.export_text()
    assert all(text in rendered for text in ("blocks[bold]", "name[b]", "model/blocks[0]:dot_general", "[red]x[/red]"))


def test_rows_and_formats_must_fit_the_columns():
    with pytest.raises(ValueError, match=r"rows\[1\] has 1 values, expected 2, one for each of \['a', 'b'\]"):
        table("t", ["a", "b"], [[1, 2], [1]])
    with pytest.raises(ValueError, match=r"formats names \['c'\], which are not among the columns \['a', 'b'\]"):
        table("t", ["a", "b"], [], formats={"c": format_bytes})


# --- pictures


def test_every_picture_is_written_as_png_and_svg(tmp_path):
    paths = [Path(path) for path in demo_pictures(ROWS, tmp_path / "new" / "folder")]
    names = ["memory.png", "memory.svg", "time.png", "time.svg", "trade_off.png", "trade_off.svg"]
    assert [path.name for path in paths] == names
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == names
    for path in paths:
        if path.suffix == ".png":
            header = path.read_bytes()[:24]
            assert header.startswith(b"\x89PNG") and struct.unpack(">I", header[16:20])[0] == 1600
        else:
            assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_the_same_rows_give_the_same_files(tmp_path):
    first, second = (demo_pictures(ROWS[:3], tmp_path / name) for name in ("a", "b"))
    assert [Path(path).read_bytes() for path in first] == [Path(path).read_bytes() for path in second]


def test_each_model_has_pictures_of_its_own(tmp_path):
    rows = [row("PyTorch", "off", 100, model="decoder"), row("PyTorch", "off", 1, model="Toy model/2")]
    names = [Path(path).name for path in demo_pictures(rows, tmp_path)]
    assert names[0] == "memory-decoder.png" and names[6] == "memory-toy-model-2.png" and len(set(names)) == 12


def test_residual_bars_stack_host_on_device():
    left, _ = memory_figure(ROWS).axes
    assert widths(left, "on the device") == [122, 14, 0, 230.5, 14, 0, 118, 14, 44, 230.5, 14, 118]
    assert widths(left, "on the host") == [14, 14, 104, 20]
    hosts = [c.patches[0] for c in left.containers if c.get_label() == "on the host"]
    assert [bar.get_x() for bar in hosts] == [0, 0, 14, 44]
    assert left.get_xlabel() == "residuals, MiB"


def test_peaks_have_a_bar_for_each_value_and_a_note_for_each_gap():
    _, right = memory_figure(ROWS).axes
    assert widths(right, "PyTorch, tracked") == [190, 81, 70]
    assert widths(right, "JAX, compiled for CPU") == [310, 91, 91, 201, 201, 310, 91, 91, 201]
    assert widths(right, "JAX, compiled for H200") == [280, 77, 64, 184, 88, 108, 280, 77, 64, 184]
    # PyTorch has no compiled peak and that is no gap; the policy without a CPU peak is the one gap.
    assert notes(right).count("n/a") == 1


def test_missing_residuals_are_noted_not_drawn_as_zero():
    left, _ = memory_figure(ROWS).axes
    assert notes(left).count("n/a") == 1
    assert sum(len(container.patches) for container in left.containers) == 12 + 4
    assert notes(left)[7:9] == ["14.0 + 104.0", "44.0 + 20.0"]


def test_half_known_residuals_say_which_half_is_missing():
    left, _ = memory_figure([row("PyTorch", "a", 3, None), row("PyTorch", "b", None, 4)]).axes
    assert notes(left) == ["3.0 + n/a", "n/a + 4.0"]
    assert (widths(left, "on the device"), widths(left, "on the host")) == ([3], [4])


def test_bars_of_one_panel_share_the_unit_of_the_longest():
    left, right = memory_figure([row("JAX", "a", 2048, peaks=(None, 1, 0.5)), row("JAX", "b", 512)]).axes
    assert widths(left, "on the device") == [2.0, 0.5]
    assert left.get_xlabel().endswith(", GiB") and right.get_xlabel().endswith(", MiB")


def test_times_have_value_labels_and_missing_ones_no_bar():
    (axes,) = time_figure(ROWS).axes
    drawn = [bar.get_width() for bar in axes.patches]
    assert drawn == [r["relative_time"] for r in ROWS if r["relative_time"] is not None]
    assert len(drawn) == 12 and notes(axes) == [format_ratio(r["relative_time"]) for r in ROWS]
    assert notes(axes)[8] == "n/a" and notes(axes)[1] == "1.29×"
    # From zero, so that lengths can be compared; the dashed line at 1 is in view however short the bars.
    assert axes.get_xlim()[0] == 0
    assert time_figure([row("JAX", "a", 1, time=0.5)]).axes[0].get_xlim()[1] > 1


def test_modes_stand_below_their_framework():
    (axes,) = time_figure(ROWS).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[:5] == ["PyTorch", "off", "checkpoint", "offload", "JAX Linen"] and len(names) == len(ROWS) + 3
    bold = [label.get_text() for label in axes.get_yticklabels() if label.get_fontweight() == "bold"]
    assert bold == ["PyTorch", "JAX Linen", "JAX NNX"]


def test_trade_off_draws_the_measured_points_only():
    figure = trade_off_figure(ROWS)
    torch, linen, nnx = offsets(figure.axes[0])
    assert torch == [[1.0, 122.0], [1.29, 14.0], [1.41, 0.0]]
    assert linen == [[1.0, 230.5], [1.09, 118.0], [1.19, 14.0], [1.31, 14.0], [1.33, 0.0]]
    assert nnx == [[1.0, 230.5], [1.11, 118.0], [1.33, 14.0]]
    assert notes(figure.axes[0]).count("checkpoint") == 3 and len(notes(figure.axes[0])) == 11
    assert figure.get_supxlabel() == f"Not measured, so not drawn: JAX Linen {mode_label(ROWS[8])}, JAX NNX offload"


def test_hollow_points_have_residuals_on_the_host():
    torch = trade_off_figure(ROWS).axes[0].collections[0]
    white = [tuple(colour[:3]) == (1, 1, 1) for colour in torch.get_facecolors()]
    assert white == [False, False, True]


def test_labels_of_points_cover_neither_labels_nor_points():
    figure = trade_off_figure(ROWS)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 11
    assert [(a, b) for a, b in combinations(boxes, 2) if a.overlaps(b)] == []
    points = [axes.transData.transform(point) for collection in offsets(axes) for point in collection]
    assert [point for point in points for box in boxes if box.contains(*point)] == []
    area = axes.get_window_extent()
    assert all(area.x0 <= box.x0 and box.x1 <= area.x1 and area.y0 <= box.y0 and box.y1 <= area.y1 for box in boxes)


def test_coincident_points_get_separate_labels_and_a_full_area_still_one_each():
    boxes = place_labels([(50, 50)] * 4, [(30, 10)] * 4, (0, 0, 200, 100))
    for one, other in combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    assert len(place_labels([(5, 5)] * 9, [(30, 10)] * 9, (0, 0, 10, 10))) == 9


def test_a_label_at_the_edge_turns_inwards():
    ((left, bottom, right, top),) = place_labels([(98, 50)], [(30, 10)], (0, 0, 100, 100))
    # To the right it would be cut; the first place inside the area is to the left, a little higher than the point.
    assert (left, right) == pytest.approx((59.818, 89.818), abs=1e-3)
    assert (bottom, top) == pytest.approx((48.623, 58.623), abs=1e-3)


def test_nothing_measured_is_drawn_as_nothing(tmp_path):
    nothing = row("PyTorch", "off", None, None, time=None)
    rows = [nothing, {**nothing, "framework": "JAX", "peak_bytes": None}]
    left, right = memory_figure(rows).axes
    assert (left.containers, right.containers) == ([], []) and notes(left) == notes(right) == ["n/a", "n/a"]
    (axes,) = trade_off_figure(rows).axes
    assert offsets(axes) == [] and len(demo_pictures(rows, tmp_path)) == 6


def test_rows_may_be_dataclass_instances():
    Row = dataclasses.make_dataclass("Row", list(ROWS[0]))
    (axes,) = time_figure([Row(**given) for given in ROWS[:3]]).axes
    assert [bar.get_width() for bar in axes.patches] == [1.0, 1.29, 1.41]


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], ValueError, r"rows is empty: expected at least one row"),
        ([ROWS[0], {"framework": "x"}], ValueError, r"rows\[1\] lacks model, mode, .*: give these keys, with None where"),
        ([{**ROWS[0], "peak_bytes": {"a100": 1}}], ValueError, r"rows\[0\]\['peak_bytes'\] has \['a100'\]: expected"),
        ([{**ROWS[0], "relative_time": math.nan}], ValueError, r"rows\[0\]\['relative_time'\]=nan: expected a ratio"),
        ([{**ROWS[0], "relative_time": 0}], ValueError, r"rows\[0\]\['relative_time'\]=0: expected a ratio above 0"),
        ([("PyTorch", "off")], TypeError, r"rows\[0\] is a tuple: expected a mapping or a dataclass instance"),
    ],
)
def test_rows_that_cannot_be_drawn(rows, error, message, tmp_path):
    with pytest.raises(error, match=message):
        demo_pictures(rows, tmp_path / "pictures")
    assert not (tmp_path / "pictures").exists()


def test_pictures_leave_the_users_settings_alone_and_do_not_follow_them():
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"axes.spines.top": True, "font.size": 31.0, "axes.linewidth": 7.0}):
        (axes,) = time_figure(ROWS).axes
        assert not axes.spines["top"].get_visible() and axes.xaxis.label.get_fontsize() == 10
        assert axes.spines["bottom"].get_linewidth() < 1
        assert matplotlib.rcParams["font.size"] == 31.0


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pictures need Matplotlib.*pip install 'remat_jax\[report\]'"):
        memory_figure(ROWS)
