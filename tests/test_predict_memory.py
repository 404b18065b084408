"""The benchmark of predicted memory: the errors' arithmetic, the models, and one small run."""

from __future__ import annotations

import json

import jax
import pytest

import remat_jax as rj
from benchmarks import predict_memory
from tests.workloads import needs_gpu_compiler

ROW = {"temp_bytes": 1000, "full + residuals": 1000, "two layers": 1010}


def test_the_errors_are_shares_of_the_compiled_bytes() -> None:
    rows = [ROW | {"predicted": 1000 + 10 * index} for index in range(21)]
    assert predict_memory.summary(rows, "predicted") == pytest.approx({"median": 0.10, "p95": 0.19, "worst": 0.20})
    assert predict_memory.summary([ROW | {"predicted": 900}], "predicted")["worst"] == pytest.approx(0.1)
    shown = predict_memory.table({"mlp": rows}).splitlines()
    figures = [line.split()[-4:] for line in shown[1:]]
    assert figures == [["21", "0.00", "0.00", "0.00"], ["21", "10.00", "19.00", "20.00"], ["21", "1.00", "1.00", "1.00"]]


@pytest.mark.parametrize("name", predict_memory.MODELS)
def test_a_model_has_the_residuals_that_policies_are_drawn_from(name: str) -> None:
    job = predict_memory.MODELS[name](2)
    table = rj.residuals(job, "save: @dots")
    rows, width = (8192, 4096) if name == "mlp" else (4096, 2688)
    kept = {row.name: row.bytes for row in table if row.action == "save"}
    assert kept["layers/up:dot_general#0"] == 2 * rows * width * 2, "two layers, two bytes a number"
    # Only XLA's attention keeps the weights of all pairs.
    pairs = [row for row in rj.residuals(job, "everything") if row.shape[-2:] == (1024, 1024) and row.shape[1:3] == (1, 4)]
    assert bool(pairs) == (name == "xla")


def test_a_run_prints_the_table_and_keeps_the_rows(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(predict_memory, "compare", lambda work, short, *given: [ROW | {"predicted": 1100, "given": given}])
    arguments = ["--only", "mlp", "--policies", "3", "--calibration", "2", "--layers", "4", "--output", str(tmp_path)]
    assert predict_memory.main(arguments) == 0
    shown = capsys.readouterr().out
    assert f"4 scanned layers, h200, JAX {jax.__version__}" in shown and "deep MLP: predicted" in shown
    kept = json.loads((tmp_path / "predict_memory.json").read_text())
    assert kept["rows"]["deep MLP"][0]["given"] == ["h200", 3, 2]
    assert kept["summaries"]["deep MLP"]["predicted"]["worst"] == pytest.approx(0.1)


@needs_gpu_compiler
def test_another_depth_predicts_the_compiled_memory() -> None:
    rows = predict_memory.compare(predict_memory.deep_mlp(3), predict_memory.deep_mlp(2), "h200", 1, 0)
    assert rows and all(row["host_bytes"] == row["residual_host_bytes"] for row in rows)
    assert all(row["temp_bytes"] > row["residual_device_bytes"] > 0 for row in rows)
    assert predict_memory.summary(rows, "two layers")["worst"] < 0.15


def test_bad_usage_says_what_is_expected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        predict_memory.parse(["--layers", "1"])
    assert "--layers 2 or more" in capsys.readouterr().err
