"""`examples/pi0.py`: photographs that show where to go, every form of both frameworks, the command."""

from __future__ import annotations

import json

import pytest

from examples.models.pi0_config import Pi0Config
from examples.robot import command, training
from examples.robot.data import batches

SMALL = Pi0Config(depth=1, vision_depth=1)


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], training.Row]:
    data = batches(SMALL, 0, 8, 12)
    results = training.run_all(SMALL, data, batches(SMALL, 1, 16, 1)[0], lambda line: None)
    return {(row.framework, row.form): row for row in results}


def test_every_form_trains_the_same(rows: dict[tuple[str, str], training.Row]) -> None:
    assert len(rows) == 7 and max(row.difference for row in rows.values()) <= command.TOLERANCES["float64_step"].value
    plain = rows["PyTorch", "off"]
    assert plain.held_out[1] < plain.held_out[0] * 0.9
    for row in rows.values():
        assert row.held_out == pytest.approx(plain.held_out, rel=1e-9)


def test_what_they_keep_and_execute(rows: dict[tuple[str, str], training.Row]) -> None:
    runs = {form: row.layer_runs for (framework, form), row in rows.items() if framework == "PyTorch"}
    assert runs == {"off": (1, 1), "checkpoint": (2, 2), "offload": (2, 2), training.FAITHFUL: (2, 6)}
    for framework in ("PyTorch", "Flax"):
        off, kept, away = (rows[framework, mode] for mode in ("off", "checkpoint", "offload"))
        assert away.device_bytes < kept.device_bytes < off.device_bytes
        assert off.host_bytes == kept.host_bytes == 0 < away.host_bytes
        assert off.matmuls < kept.matmuls == away.matmuls


def test_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, rows: dict) -> None:
    monkeypatch.setattr(training, "run_all", lambda *args: list(rows.values()))
    status = command.main(["--steps", "1", "--batch", "2", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert status == int(bool(said["failed"])) and [len(row["losses"]) for row in said["rows"]] == [12] * 7
    assert command.main(["--steps", "1", "--batch", "2"]) == status
    printed = capsys.readouterr().out
    assert "PyTorch" in printed and f"{training.FAITHFUL}: nested_container" in printed and "checkpoint: 6 checkp" in printed
