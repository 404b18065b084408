"""The gallery of models that others wrote: the output of its example of an installed library, and the table of all."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from examples.others import __main__ as gallery
from examples.others import equinox_decoder
from examples.others.shared import runs

FIGURES = re.compile(r"^(.+?): ([\d.]+) MiB", re.MULTILINE)


def test_the_example_of_an_installed_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["equinox_decoder", "--small", "--target", "cpu", "--budget", "24 MiB"])
    equinox_decoder.main()
    printed, errors = capsys.readouterr()
    assert errors == ""

    sizes = {name: float(size) for name, size in FIGURES.findall(printed)}
    assert list(sizes) == ["off", "full", "dots_with_no_batch_dims", "plan within 24 MiB"]
    assert sizes["full"] < sizes["dots_with_no_batch_dims"] < sizes["plan within 24 MiB"] <= 24 < sizes["off"]
    wall, first = re.findall(r"found in (\d+) s, the first answer that fits after (\d+) s", printed)[0]
    assert int(first) <= int(wall)
    best = r"^  best named policy that fits: dots, 2[23]\.\d\d MiB, estimated [\d.]+ ms$"
    assert re.search(best, printed, re.MULTILINE)

    steps = re.findall(r"a step of a small one (.+): loss ([\d.]+), parameters changed by ([\d.]+)", printed)
    assert [name for name, *_ in steps] == ["as written", "under full", "under its plan, Layer in one run of 4"]
    assert len({tuple(figures) for _, *figures in steps}) == 1 and float(steps[0][2]) > 0.01
    # At initialisation the loss is the logarithm of 512 words, 6.24.
    assert float(printed.split()[-1]) < 3


def test_runs_in_words() -> None:
    parts = [SimpleNamespace(block=block, layers=layers) for block, layers in (("Layer", 24), ("Layer", 7), ("Head", 1))]
    assert runs(SimpleNamespace(parts=parts)) == "Layer in runs of 24 and 7, Head in one run of 1"


def test_the_table_is_what_the_files_say_that_they_printed() -> None:
    text = gallery.README.read_text(encoding="utf-8")
    assert gallery.with_table(text) == text, "run python -m examples.others"
    assert set(gallery.FILES) == {path.stem for path in gallery.HERE.glob("*.py")} - {"__init__", "__main__", "shared"}
