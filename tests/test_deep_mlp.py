"""`examples/deep_mlp.py`: its command, its JSON, its pictures, and its failure if a figure is wrong."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples import deep_mlp
from examples.segments import command, show
from examples.segments.setting import QUICK, Row, Setting, cuts

ROOT = Path(__file__).resolve().parents[1]
PICTURES = {f"{name}.svg" for name in ("memory", "time", "trade_off", "depth", "rules")}


@pytest.fixture(scope="module")
def outcome(
    tmp_path_factory: pytest.TempPathFactory, in_a_hurry: dict[str, str]
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The command as a user types it, from another folder."""
    folder = tmp_path_factory.mktemp("deep_mlp")
    arguments = [sys.executable, str(ROOT / "examples" / "deep_mlp.py"), "--quick", "--json", "--output", "pictures"]
    done = subprocess.run(arguments, cwd=folder, env=in_a_hurry, capture_output=True, text=True, timeout=240)
    return done, folder / "pictures"


def test_the_command_prints_one_json_object_and_nothing_else(outcome) -> None:
    done, folder = outcome
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert list(data) == ["rows", "depths", "rules", "setting", "pictures", "problems", "passed"]
    assert data["passed"] is True and data["problems"] == []
    assert {Path(picture).name for picture in data["pictures"]} == PICTURES
    assert all((folder / name).stat().st_size > 1000 for name in PICTURES)
    assert "PyTorch: by hand" in done.stderr and "done" in done.stderr
    rows = {(row["framework"], row["form"]): row for row in data["rows"]}
    activation = 32 * 16 * 4
    assert rows["PyTorch", "plain"]["saved_bytes"] == 13 * activation
    assert rows["PyTorch", "√L uniform, 3"]["saved_bytes"] == (2 + 5) * activation
    assert [row["executions"] for row in data["rows"]] == [14, 22, 22, 21, 25, 14, 22, 22, 21, 14, 26]
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
    class Stepper:
        def __init__(self, compiled: int | None) -> None:
            self.compiled = compiled

        def compiled_matmuls(self) -> int | None:
            return self.compiled

    times = {"off": 1.0, "√L uniform, 2": 1.3}
    uniform = row(form="√L uniform, 2", matmuls=12)
    assert [command._timed(uniform, times, Stepper(compiled)).relative_time for compiled in (12, None, 11)] == [1.3, 1.3, None]
    assert command._timed(row(), times, Stepper(11)).relative_time == 1.0


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


def test_the_cuts_of_the_table() -> None:
    assert list(cuts(62)) == ["plain", "checkpoint_sequential, 3", "√L uniform, 7", "best uniform, 6", "by hand, 9"]
    assert Setting().num_layers == 62
