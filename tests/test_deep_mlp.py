"""`examples/deep_mlp.py`: its command, its JSON and its pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples import deep_mlp
from examples.segments import timing

PICTURES = {f"{name}.svg" for name in ("memory", "time", "trade_off", "depth", "rules")}


def test_the_command_prints_one_json_object_and_nothing_else(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "ENOUGH_SECONDS", 0.0)
    assert deep_mlp.main(["--quick", "--layers", "10", "--json", "--output", "pictures"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert list(data) == ["rows", "depths", "rules", "setting", "pictures", "problems", "passed"]
    assert data["passed"] is True and data["problems"] == []
    assert {Path(picture).name for picture in data["pictures"]} == PICTURES
    assert all((tmp_path / "pictures" / name).stat().st_size > 1000 for name in PICTURES)
    assert "PyTorch: by hand" in err and "done" in err
    rows = {(row["framework"], row["form"]): row for row in data["rows"]}
    activation = 32 * 16 * 4
    assert rows["PyTorch", "plain"]["saved_bytes"] == 9 * activation
    assert rows["PyTorch", "√L uniform, 3"]["saved_bytes"] == (2 + 3) * activation
    executions = [row["executions"] for row in data["rows"] if "by hand" not in row["form"]]
    assert executions == [10, 16, 16, 15, 10, 16, 16, 15, 10, 18]
    assert all(row["gradient_error"] <= 1e-12 and row["relative_time"] > 0 for row in data["rows"])
    assert data["rules"][1]["claimed_saving"] == 0.75 and data["rules"][1]["measured_saving"] == 0.6
