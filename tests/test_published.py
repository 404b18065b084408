"""Benchmarks of published models: a small one is compiled and planned, sizes and operations are the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

import remat_jax as rj
from benchmarks.published.__main__ import row
from benchmarks.published.cases import CASES, Case
from benchmarks.published.model import Shape, workload
from benchmarks.published.tpu_cases import GPT3_175B, LLAMA31_8B, LLAMA31_70B, maxtext_2023, operations
from benchmarks.true_shapes import __main__ as command
from benchmarks.true_shapes import cases
from tests import plan_models

SMALL = Shape(2, 256, 512, 2, 1024, kv_heads=1)


# The layers call JAX's attention kernel. JAX deprecates the backend of this kernel, and warns where the kernel is lowered.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_small_step_is_compiled_for_its_gpus() -> None:
    policy = CASES[0].policy
    divided = row(Case("small", SMALL, 2, 256, "8xh100", policy, 1.0, "", "", mesh={"data": 1, "fsdp": 8}))
    assert 1e-2 > divided.seconds > divided.compute > 0, "parameters are gathered"


@pytest.mark.parametrize(
    "shape, billions",
    [
        (maxtext_2023(48, 6144, 24576, 24), 21.94),
        (maxtext_2023(32, 5120, 32768, 32), 16.27),
        (maxtext_2023(64, 10240, 32768, 32), 64.76),
    ],
)
def test_maxtext_decoders_have_their_published_parameters(shape: Shape, billions: float) -> None:
    params = workload(shape, 1, 128).params
    norms = (shape.layers + 1) * shape.width + 3 * shape.layers * shape.size
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == shape.matrices + norms
    assert shape.matrices / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(
    "shape, batch, length, tera, seconds",
    [(LLAMA31_8B, 3, 8192, 413.433, 3.443), (LLAMA31_70B, 2, 8192, 422.091, 18.688), (GPT3_175B, 3, 2048, 384.891, 17.182)],
)
def test_operations_are_counted_like_maxtexts(shape: Shape, batch: int, length: int, tera: float, seconds: float) -> None:
    """Both the rate and the time of these steps are published, so their operations are known."""
    assert batch * length * operations(shape, length, 1.0) / (tera * 1e12) == pytest.approx(seconds, rel=2e-3)


# Plans of published models.


def test_a_small_model_through_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    job = plan_models.job(scanned=True)
    least, most = (rj.measure(job, policy).device_bytes for policy in ("full", "off"))
    budget = (least + most) // 2
    monkeypatch.setattr(command, "CASES", {"mlp": cases.Case(lambda: job, "all")})
    monkeypatch.setattr(command, "provenance", lambda: {"commit": "a", "versions": {"jax": "1"}})
    targets = ["--targets", f"cpu={budget}+0", "--output", str(tmp_path), "--only", "mlp"]
    status = command.main([*targets, "--policies", "full", "off", "plan"])
    by_policy = {row["policy"]: row for row in json.loads((tmp_path / "true_shapes.json").read_text())["rows"]}
    assert status == 0 and "All claims hold, of 1 plan among 3 rows." in capsys.readouterr().out
    assert (by_policy["full"]["device_bytes"], by_policy["off"]["device_bytes"]) == (least, most)
    assert least < by_policy["plan"]["device_bytes"] <= budget < most
    assert by_policy["plan"]["estimated_seconds"] < by_policy["plan"]["named_seconds"]["full"]
    assert by_policy["plan"]["trained"] == "all" and by_policy["plan"]["layers"]
