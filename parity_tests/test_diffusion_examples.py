"""`examples/qwen_image.py` and `examples/wan.py`: every form of both frameworks trains the same; the command."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from examples.diffusion import command, qwen_image, training, wan
from remat_jax.parity import TOLERANCES
from remat_jax.parity.compiling import compile_options

STEPS = 3
SIDES = {"qwen_image": qwen_image, "wan": wan}
MODES = ("off", "checkpoint", "offload")
FORMS = [*(("torch", mode) for mode in (*MODES, "offload as in DiffSynth-Studio")), *(("jax", mode) for mode in MODES)]
sides = pytest.mark.parametrize("name", SIDES)


@pytest.fixture(scope="module")
def rows() -> Callable[[str], dict[tuple[str, str], dict[str, Any]]]:
    """The rows of a model by framework and mode; trained once, and compiled quickly, because nothing is timed."""

    @functools.cache
    def trained(name: str) -> dict[tuple[str, str], dict[str, Any]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "compile_options", lambda dtype: compile_options("float64"))
            results = training.run_all(SIDES[name].pair(), SIDES[name].batches(STEPS), lambda line: None)
        return {(row["framework"], row["mode"]): row for row in results}

    return trained


@sides
def test_every_form_trains_the_same_and_learns(name: str, rows: Any) -> None:
    by_form = rows(name)
    assert list(by_form) == FORMS
    plain = by_form["torch", "off"]["losses"]
    assert len(plain) == STEPS and plain[-1] < plain[0] * 0.9
    for (framework, mode), row in by_form.items():
        assert row["difference"] <= (0 if framework == "torch" else TOLERANCES["loss"].value), (framework, mode)
        assert row["difference"] == np.abs(np.array(row["losses"]) / plain - 1).max()


@sides
def test_what_they_keep(name: str, rows: Any) -> None:
    """A block's arguments go to the host: Qwen-Image's two streams or Wan's one, of each layer; shared arguments once."""
    by_form = rows(name)
    for framework in ("torch", "jax"):
        off, kept, away = (by_form[framework, mode] for mode in training.MODES)
        assert away["device"] < kept["device"] < off["device"] / 3
        assert off["host"] == kept["host"] == 0 < away["host"]
    faithful, kept = by_form["torch", "offload as in DiffSynth-Studio"], by_form["torch", "checkpoint"]
    # Qwen-Image passes its arguments by keyword, and they stay; Wan passes them by position, and they move, shared ones once
    # per layer.
    if name == "qwen_image":
        assert faithful["host"] == 0 < faithful["offered"] and faithful["device"] == kept["device"]
    else:
        assert faithful["host"] > by_form["torch", "offload"]["host"] and faithful["device"] < kept["device"]
    image, video, words, numbers = 48, 72, 18, qwen_image.BATCH * qwen_image.CONFIG.hidden_size
    streams = {"qwen_image": 2 * (image + words), "wan": 2 * video + words}[name] * numbers * 4
    assert streams < by_form["torch", "offload"]["host"] < 1.12 * streams


@sides
def test_the_command_prints_every_row(name: str, rows: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(training, "run_all", lambda *given: list(rows(name).values()))
    assert command.main(name, ["--steps", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(row["framework"], row["mode"]) for row in said["rows"]] == FORMS and said["steps"] == 1
    assert command.main(name, ["--steps", "1"]) == 0
    printed = capsys.readouterr().out
    moved_nothing = printed.count("moved nothing: every argument goes by keyword")
    assert moved_nothing == (name == "qwen_image") and printed.count("KiB") >= 6
    worse = [{**row, "difference": float(row["mode"] == "checkpoint")} for row in rows(name).values()]
    monkeypatch.setattr(training, "run_all", lambda *given: worse)
    assert command.main(name, ["--steps", "1", "--json"]) == 1
