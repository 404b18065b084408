"""`examples/deep_mlp.py`: its command, its JSON, its pictures, and its failure if a figure is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples import deep_mlp
from examples.segments import command, show, timing
from examples.segments.setting import QUICK, Row

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


def row(**changes: object) -> Row:
    made = Row("PyTorch", "plain", 1000, 5000, 4, 11, 0.0, 1.0, {"saved_bytes": 1000, "matmuls": 11})
    return dataclasses.replace(made, **changes)


def figures(*rows: Row) -> dict[str, object]:
    forms = {
        "PyTorch, plain": {"measured": 2048, "closed_form": 2048},
        "JAX, scan, plain": {"measured": 4096, "closed_form": 4096},
    }
    rule = {"num_layers": 4, "claimed_saving": 0.5, "measured_saving": 0.25, "claimed_increase": 1.0, "measured_increase": 0.2}
    return {"rows": list(rows), "depths": {4: forms}, "rules": [rule]}


def test_figures_that_are_not_the_closed_form_s_are_named_and_fail(monkeypatch, tmp_path, capsys) -> None:
    right = row(), row(form="√L uniform, 2"), row(framework="JAX Linen")
    assert command.problems(figures(*right)) == []
    wrong = [row(saved_bytes=1004), row(matmuls=12), row(gradient_error=1e-9), row(gradient_error=float("nan"))]
    for wrong_row, name in zip(wrong, ("saved_bytes", "matmuls", "gradients", "gradients"), strict=True):
        assert command.problems(figures(*right, wrong_row)) == [f"PyTorch, plain: {name}"]
    off = figures(*right)
    off["depths"][4]["PyTorch, plain"]["measured"] += 4
    assert command.problems(off) == ["4 layers, PyTorch, plain"]
    monkeypatch.setattr(command, "run", lambda setting, tell: off)
    assert command.main(["--quick", "--output", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "NOT EQUAL to the closed form: 4 layers, PyTorch, plain" in printed and "NOT PASSED" in printed


def test_shares_and_the_trade_off() -> None:
    plain = row()
    assert show.saved_share(row(saved_bytes=250), plain) == 0.75
    assert show.trade_off(row(saved_bytes=250, relative_time=1.25), plain) == 3.0
    assert show.trade_off(row(saved_bytes=250, relative_time=0.9), plain) is None
    assert show.trade_off(row(saved_bytes=250, relative_time=None), plain) is None
    assert show.trade_off(row(saved_bytes=1250, relative_time=1.25), plain) is None


def test_a_time_in_which_less_was_executed_is_left_out() -> None:
    times = {"off": 1.0, "√L uniform, 2": 1.3}

    def time(row: Row, compiled: int | None) -> float | None:
        return command._timed(row, times, SimpleNamespace(compiled_matmuls=lambda: compiled)).relative_time

    assert [time(row(form="√L uniform, 2", matmuls=12), compiled) for compiled in (12, None, 11)] == [1.3, 1.3, None]
    assert time(row(), 11) == 1.0


def test_wrong_use(capsys, tmp_path) -> None:
    assert command.main(["--quick", "--layers", "3", "--output", str(tmp_path)]) == 2
    assert "num_layers=3" in capsys.readouterr().err
    with pytest.raises(ValueError, match="batch=16: expected more than hidden_size"):
        dataclasses.replace(QUICK, batch=16)
    (tmp_path / "file").write_text("")
    assert command.main(["--quick", "--output", str(tmp_path / "file")]) == 2


def test_without_pytorch_it_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(deep_mlp.importlib.util, "find_spec", lambda name: None)
    assert deep_mlp.main([]) == 2
    assert "PyTorch, which is not installed: pip install 'remat_jax[torch]'" in capsys.readouterr().err
