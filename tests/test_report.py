"""Number formats, tables and pictures of `remat_jax.report`."""

from __future__ import annotations

import io
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from examples.pictures import demo_pictures, memory_picture, mode_label, time_picture, trade_off_picture
from remat_jax.report import format_bytes, format_error, format_ratio, table
from remat_jax.report.svg import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION

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


SVG = "{http://www.w3.org/2000/svg}"


def root(picture):
    return ElementTree.fromstring(picture.svg())


def says(picture):
    """The tooltips of bars and marks, in the order of drawing."""
    return [title.text for title in root(picture).iter(f"{SVG}title")]


def texts(picture, **attributes):
    """The texts with the given attributes, in the order of drawing."""
    wanted = {name.replace("_", "-"): value for name, value in attributes.items()}
    return [element.text for element in root(picture).iter(f"{SVG}text") if wanted.items() <= element.attrib.items()]


def bars(picture, colour):
    """(x, width) of the bars of one colour, from top to bottom, without the legend's."""
    rects = [element.attrib for element in root(picture).iter(f"{SVG}rect") if element.get("fill") == colour]
    return [(float(rect["x"]), float(rect["width"])) for rect in rects if rect["height"] != "12.00"]


# --- numbers


def test_bytes_are_written_in_the_smallest_unit_below_1024():
    written = {0: "0 B", 1: "1 B", 1023: "1023 B", 1024: "1.0 KiB", 972 * 1024: "972.0 KiB", MIB - 52: "1023.9 KiB"}
    written |= {MIB - 51: "1.0 MiB", 7 * MIB // 2: "3.5 MiB", 40 * 2**30: "40.0 GiB", 2**50: "1024.0 TiB", None: "n/a"}
    written |= {-3 * MIB: "-3.0 MiB"}
    assert {size: format_bytes(size) for size in written} == written
    assert format_bytes(np.int64(2048)) == "2.0 KiB"
    assert [format_bytes(1536, unit=unit) for unit in ("B", "KiB", "GiB")] == ["1536 B", "1.5 KiB", "0.0 GiB"]
    with pytest.raises(TypeError, match=r"n=2048\.0 is not a number of bytes: expected an integer"):
        format_bytes(2048.0)
    with pytest.raises(ValueError, match=r"unit='MB' is not a unit of bytes: use one of B, KiB, MiB"):
        format_bytes(1, unit="MB")


def test_ratios_and_errors_have_two_digits_or_more():
    ratios = {0: "0.00×", 1: "1.00×", 0.995: "0.99×", 9.994: "9.99×", 9.996: "10.0×", 99.96: "100×", 0.00213: "0.0021×"}
    ratios |= {-1.5: "-1.50×", math.nan: "nan", math.inf: "inf", None: "n/a"}
    assert {ratio: format_ratio(ratio) for ratio in ratios} == ratios
    errors = {0: "0", 1.249e-16: "1.2e-16", 9.96e-13: "1.0e-12", 1.33: "1.3e+00", math.nan: "nan", None: "n/a"}
    assert {error: format_error(error) for error in errors} == errors
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


def test_every_picture_is_written_as_svg_and_the_same_rows_give_the_same_files(tmp_path):
    first, second = ([Path(path) for path in demo_pictures(ROWS, tmp_path / "new" / name)] for name in ("a", "b"))
    assert [path.name for path in first] == ["memory.svg", "time.svg", "trade_off.svg"]
    assert {*first, *second} == {*(tmp_path / "new").glob("*/*")}
    for path, same in zip(first, second, strict=True):
        drawn = ElementTree.parse(path).getroot()
        assert drawn.tag == f"{SVG}svg" and drawn.get("width") == "1000" and len(list(drawn.iter())) > 60
        assert path.read_bytes() == same.read_bytes()


def test_another_ending_is_an_error_that_names_svg(tmp_path):
    with pytest.raises(ValueError, match=r"ends in '\.png': pictures are written as SVG; expected a name that ends in \.svg"):
        time_picture(ROWS).save(tmp_path / "new" / "time.png")
    assert not (tmp_path / "new").exists()


def test_each_model_has_pictures_of_its_own(tmp_path):
    rows = [row("PyTorch", "off", 100, model="decoder"), row("PyTorch", "off", 1, model="Toy model/2")]
    names = [Path(path).name for path in demo_pictures(rows, tmp_path)]
    assert names[0] == "memory-decoder.svg" and names[3] == "memory-toy-model-2.svg" and len(set(names)) == 6


def test_residual_bars_stack_host_on_device():
    picture = memory_picture(ROWS)
    device = [float(text.rsplit(": ")[-1].split()[0]) for text in says(picture) if text.endswith("on the device")]
    host = [float(text.rsplit(": ")[-1].split()[0]) for text in says(picture) if text.endswith("on the host")]
    assert device == [122, 14, 230.5, 14, 118, 14, 44, 230.5, 14, 118] and host == [14, 14, 104, 20]
    on_device, on_host = bars(picture, BLUE), bars(picture, SKY)
    start, scale = on_device[0][0], on_device[0][1] / 122
    assert [width for _, width in on_device] == pytest.approx([scale * size for size in device], abs=0.01)
    assert [x for x, _ in on_host] == pytest.approx([start + scale * before for before in (0, 0, 14, 44)], abs=0.02)
    assert picture.svg().count('class="hatch"') == 4 + 1 and "kept for the backward pass, MiB" in texts(picture)


def test_peaks_have_a_bar_for_each_value_and_a_note_for_each_gap():
    picture = memory_picture(ROWS)
    for colour, sizes in (
        (VERMILLION, [190, 81, 70]),
        (ORANGE, [310, 91, 91, 201, 201, 310, 91, 91, 201]),
        (GREEN, [280, 77, 64, 184, 88, 108, 280, 77, 64, 184]),
    ):
        scale = bars(picture, VERMILLION)[0][1] / 190
        assert [width for _, width in bars(picture, colour)] == pytest.approx([scale * size for size in sizes], abs=0.02)
    # PyTorch has no compiled peak, which is no gap. Gaps are the policy without a CPU peak and the NNX row without residuals.
    assert texts(picture, font_style="italic") == ["n/a", "n/a"]


def test_times_have_value_labels_and_missing_ones_no_bar():
    picture = time_picture(ROWS)
    widths = [width for colour in (VERMILLION, BLUE, GREEN) for _, width in bars(picture, colour)]
    times = [r["relative_time"] for r in ROWS if r["relative_time"] is not None]
    assert len(widths) == 12 and [width / widths[0] for width in widths] == pytest.approx(times, abs=1e-3)
    notes = texts(picture, font_size="11")
    assert notes == [format_ratio(r["relative_time"]) for r in ROWS] and notes[8] == "n/a" and notes[1] == "1.29×"
    # Bars start at zero, so that lengths can be compared; the dashed line at 1 is visible however short the bars.
    short = time_picture([row("JAX", "a", 1, time=0.5)])
    ((start, width),) = bars(short, PURPLE)
    dashed = next(path for path in root(short).iter(f"{SVG}path") if path.get("stroke-dasharray"))
    assert float(dashed.get("d").split()[0][1:]) == pytest.approx(start + 2 * width, abs=0.02) and start + 2 * width < 1000


def test_trade_off_draws_the_measured_points_only():
    picture = trade_off_picture(ROWS)
    torch, linen = says(picture)[:3], says(picture)[3:6]
    assert torch == ["off: 1, 122", "checkpoint: 1.29, 14", "offload: 1.41, 0"]
    assert linen == ["off: 1, 230.5", "dots: 1.09, 118", "offload_dot_with_no_batch_dims: 1.19, 14"]
    assert texts(picture, font_size="12").count("checkpoint") == 3
    assert f"Not measured, so not drawn: JAX Linen {mode_label(ROWS[8])}, JAX NNX offload" in texts(picture)


def test_nothing_measured_is_drawn_as_nothing(tmp_path):
    nothing = row("PyTorch", "off", None, None, time=None)
    rows = [nothing, {**nothing, "framework": "JAX", "peak_bytes": None}]
    picture = memory_picture(rows)
    assert says(picture) == [] and texts(picture, font_style="italic") == ["n/a"] * 4
    assert [Path(path).name for path in demo_pictures(rows, tmp_path)] == ["memory.svg", "time.svg"]


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], ValueError, r"rows is empty: expected at least one row"),
        ([ROWS[0], {"framework": "x"}], ValueError, r"rows\[1\] lacks model, mode, .*: give them, as None where"),
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
