"""`examples/qwen_image.py` and `examples/wan.py`: every form of both frameworks trains the same, the command, wrong use."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from examples.diffusion import command, qwen_image, training, wan
from examples.models.diffusion import pack
from remat_jax.parity import TOLERANCES
from remat_jax.parity.compiling import compile_options

STEPS = 3
SIDES = {"qwen_image": qwen_image, "wan": wan}
FORMS = [
    ("torch", "off"),
    ("torch", "checkpoint"),
    ("torch", "offload"),
    ("torch", "offload as in DiffSynth-Studio"),
    ("jax", "off"),
    ("jax", "checkpoint"),
    ("jax", "offload"),
]
sides = pytest.mark.parametrize("name", SIDES)


@pytest.fixture(scope="module")
def rows() -> Callable[[str], dict[tuple[str, str], dict[str, Any]]]:
    """The rows of a model half as wide, by framework and mode; trained once."""

    @functools.cache
    def trained(name: str) -> dict[tuple[str, str], dict[str, Any]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "compile_options", lambda dtype: compile_options("float64"))
            patch.setattr(SIDES[name], "CONFIG", dataclasses.replace(SIDES[name].CONFIG, hidden_size=32, num_heads=2))
            found = training.run_all(SIDES[name].pair(), SIDES[name].batches(STEPS), lambda line: None)
        return {(row["framework"], row["mode"]): row for row in found}

    return trained


@sides
def test_every_form_trains_the_same_and_learns(name: str, rows: Any) -> None:
    found = rows(name)
    assert list(found) == FORMS
    plain = found["torch", "off"]["losses"]
    assert len(plain) == STEPS and plain[-1] < plain[0] * 0.9
    for (framework, mode), row in found.items():
        assert row["difference"] <= (0 if framework == "torch" else TOLERANCES["loss"].value), (framework, mode)
        assert row["difference"] == np.abs(np.array(row["losses"]) / plain - 1).max()


@sides
def test_what_they_keep(name: str, rows: Any) -> None:
    """A block's arguments go to the host: the streams of each layer; what all layers share, in PyTorch once."""
    found = rows(name)
    for framework in ("torch", "jax"):
        off, kept, away = (found[framework, mode] for mode in training.MODES)
        assert away["device"] < kept["device"] < off["device"] / 3
        assert off["host"] == kept["host"] == 0 < away["host"]
    faithful, kept = found["torch", "offload as in DiffSynth-Studio"], found["torch", "checkpoint"]
    assert faithful["host"] == 0 < faithful["offered"] and faithful["device"] == kept["device"]
    streams = {"qwen_image": 4 * (48 + 18) * 32, "wan": 4 * (72 + 18) * 32}[name] * 4
    assert 2 * streams <= found["torch", "offload"]["host"]


@sides
def test_the_command_prints_every_row(name: str, rows: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(training, "run_all", lambda *given: list(rows(name).values()))
    assert command.main(name, ["--steps", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(row["framework"], row["mode"]) for row in said["rows"]] == FORMS and said["steps"] == 1
    assert command.main(name, ["--steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("moved nothing: every argument goes by keyword") == 1 and printed.count("KiB") >= 6
    worse = [{**row, "difference": difference} for row, difference in zip(rows(name).values(), [0, 1, 0, 0, 0, 0, 0])]
    monkeypatch.setattr(training, "run_all", lambda *given: worse)
    assert command.main(name, ["--steps", "1", "--json"]) == 1
