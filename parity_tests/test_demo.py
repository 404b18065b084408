"""The demo: its rows hold on a small model, and every planted fault makes it fail."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from examples import demo
from examples.demo import checks, driver, jax_rows, setting
from examples.demo.outcome import Evidence, Outcome
from remat_jax.cli.app import app
from remat_jax.report.tables import render

SMALL = demo.Setting(num_layers=2, length=16, batch=4, steps=4, models=("ByteDecoder",), target=None)
COMPOSED = setting.POLICIES[-1]
FORMS = {"ByteDecoder": (dataclasses.replace(setting.LINEN, asked=(*setting.THREE_MODES, COMPOSED)),)}
BLOCK_INPUTS = 2 * 4 * 16 * 128 * 4
ROW_KEYS = ["framework", "model", "mode", "loss", "grad_error", "block_executions"]
ROW_KEYS += ["residual_device_bytes", "residual_host_bytes", "peak_bytes"]


@pytest.fixture(scope="module")
def evidence() -> list[Evidence]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setting, "FORMS", FORMS)
        return driver.collect(SMALL)[0]


@pytest.fixture(scope="module")
def outcome(evidence: list[Evidence]) -> Outcome:
    return Outcome(driver.rows_of(evidence), checks.judged(evidence), ("A remark.",))


def row(evidence: list[Evidence], framework: str, mode: str) -> Evidence:
    return next(entry for entry in evidence if (entry.framework, entry.mode) == (framework, mode))


def test_the_rows_are_those_that_were_asked_for_and_hold(evidence: list[Evidence], outcome: Outcome) -> None:
    modes = ["off", "checkpoint", "offload"]
    assert [(r.framework, r.mode) for r in outcome.rows] == [
        *(("PyTorch", mode) for mode in modes),
        *(("JAX Linen", mode) for mode in [*modes, setting.COMPOSED]),
    ]
    assert outcome.passed, [check for check in outcome.checks if not check.holds]
    assert [r.block_executions for r in outcome.rows] == [2, 4, 4, 2, 4, 4, 2]
    assert [r.residual_host_bytes for r in outcome.rows] == [0, 0, BLOCK_INPUTS, 0, 0, BLOCK_INPUTS, 4 * BLOCK_INPUTS]
    for r in outcome.rows:
        assert r.grad_error <= 1e-12
        assert set(r.peak_bytes) == {"torch", "cpu", "h200"} and r.peak_bytes["h200"] is None
        assert (r.peak_bytes["torch"] is None) == (r.framework != "PyTorch") == (r.peak_bytes["cpu"] is not None)


def test_json_and_tables_say_the_same(outcome: Outcome) -> None:
    data = outcome.to_dict()
    assert list(data) == ["passed", "rows", "checks"] and data["passed"] is True
    assert all(list(record) == ROW_KEYS for record in data["rows"])
    shown = "\n".join(render(table, width=120) for table in demo.tables(outcome))
    assert "…" not in shown and setting.COMPOSED.split("; ")[0] in shown and "FAILS" not in shown
    text = " ".join(demo.reading(outcome))
    assert "checkpoint runs blocks 4 times in a step instead of 2" in text and "All 7 rows compute the same" in text


def test_planted_faults_end_the_command_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    faulty = (
        setting.THREE_MODES[0],
        dataclasses.replace(setting.THREE_MODES[1], policy="everything"),  # recomputes nothing
        dataclasses.replace(setting.THREE_MODES[2], policy="full"),  # moves nothing
    )
    monkeypatch.setattr(setting, "FORMS", {"ByteDecoder": (dataclasses.replace(setting.LINEN, asked=faulty),)})
    monkeypatch.setattr(demo, "QUICK", dataclasses.asdict(SMALL))
    right = jax_rows.gradients

    def flipped(case: object, form: object, policy: str, dtype: str) -> dict[str, np.ndarray]:
        gradients = right(case, form, policy, dtype)
        return {**gradients, "head.bias": -gradients["head.bias"]} if policy == "off" else gradients

    monkeypatch.setattr(jax_rows, "gradients", flipped)
    result = CliRunner().invoke(
        app, ["demo", "--quick", "--json", "--target", "none", "--output", str(tmp_path / "new" / "demo")]
    )
    assert result.exit_code == 1, result.stderr
    data = json.loads(result.stdout)
    assert list(data) == ["passed", "rows", "checks", "pictures"] and data["passed"] is False
    worst = {check["name"].split(":")[0]: check for check in data["checks"] if not check["holds"]}
    assert worst["gradients in float64"]["detail"] == "ByteDecoder, JAX Linen, off"
    assert worst["gradients in float32"]["detail"] == "ByteDecoder, JAX Linen, off"
    assert worst["block executions"]["detail"] == "ByteDecoder, JAX Linen, checkpoint"
    assert worst["residual bytes, checkpoint and offload"]["detail"] == "ByteDecoder, JAX Linen, checkpoint"
    assert worst["offload"]["figure"] == 1 and worst["offload"]["detail"] == "ByteDecoder, JAX Linen, offload"
    assert [Path(picture).name for picture in data["pictures"]] == ["memory.svg"]
    assert Path(data["pictures"][0]).stat().st_size > 1000
    assert "[6/6, " in result.stderr


def test_the_other_models_hold_and_the_gpu_keeps_what_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(SMALL, models=("ToyModel",), target="h200")
    evidence, notes = driver.collect(small)
    assert all(check.holds for check in checks.judged(evidence))
    # A single sigmoid reads only its own input, which must then be on the device: the receipt says that offloading it frees
    # nothing.
    assert len(notes) == 1 and "frees no device memory" in notes[0] and "ToyModel, JAX Linen, offload" in notes[0]
    jax_row = row(evidence, "JAX Linen", "offload")
    assert jax_row.host_bytes == jax_row.residual_host_bytes == 4 * 16 * 128 * 4
    assert [entry.block_executions for entry in evidence] == [1, 2, 2, 1, 2, 2]
    assert row(evidence, "JAX Linen", "off").peak_bytes["h200"] > 0
