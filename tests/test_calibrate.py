"""Calibration: the file has the measured rates, and a plan uses them."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from remat_jax.cli.app import app
from remat_jax.cost import calibrate as module
from remat_jax.cost.calibrate import Calibration, calibrate
from remat_jax.errors import TargetError
from remat_jax.hardware import target
from remat_jax.hardware.rates import Rates
from remat_jax.hardware.target import entry, target_text


def test_rates_are_operations_and_bytes_over_seconds(monkeypatch):
    """With a clock on which every run takes one second."""
    sizes = []

    def second(run):
        sizes.append(jax.tree.leaves(run())[0])
        return 1.0

    monkeypatch.setattr(module, "fastest", second)
    device = jax.devices()[0]
    assert module.product_rates(device, "float32", 9.0) == {128: 2 * 4 * 128**3}
    assert (sizes[-1].dtype, sizes[-1].shape) == (jnp.float32, (128, 128)) and float(sizes[-1][0, 0]) == 1.0
    module.product_rates(device, "float64", 9.0), module.product_rates(device, "bfloat16", 9.0)
    assert [array.dtype for array in sizes[-2:]] == ["float64", "bfloat16"]
    assert module.launch_seconds(device) == 1 / 64 and float(sizes[-1][0]) == 1 + 64
    monkeypatch.setattr(module, "_MANY_NUMBERS", 1000)
    assert module.memory_rate(device, 9.0) == 16 * 3 * 4 * 1000 and float(sizes[-1][0]) == 1 + 16 * 2


def test_copies_hide_as_far_as_both_take_less_than_one_after_the_other(monkeypatch):
    """Copies out take 4 s, copies back 2 s, compute 1 s; together they take 4.25 and 2.5 s, so 75 % and 50 % of the compute
    hide.
    """
    device = jax.devices()[0]
    monkeypatch.setattr(module, "_compute_of", lambda *_: (lambda: None, 1.0))
    took = iter([4.0, 2.0, 4.25, 2.5])
    monkeypatch.setattr(module, "fastest", lambda run: (run(), next(took))[1])
    size = 4 * 2**22
    assert module.link_rates(device, 0.1) == (size / 4, size / 2, 0.5)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The output and the file of the command, run once and quickly."""
    path = tmp_path_factory.mktemp("calibrated") / "here.toml"
    done = CliRunner().invoke(app, ["calibrate", "-o", str(path), "--name", "here", "--seconds", "0.2", "--json"])
    assert done.exit_code == 0, done.output
    return path, json.loads(done.stdout), done.stderr


def test_the_command_writes_a_target_whose_rates_are_the_measured_ones(quick):
    path, printed, progress = quick
    assert printed["target"] == f"{path}:here" and printed["out_bytes_per_s"] is None and printed["hidden_share"] is None
    assert list(printed["flops"]) == ["bfloat16", "float16", "float32", "float64"]
    described = target(printed["target"])
    assert described.kind == "cpu" and described.measured["source"] == printed["source"]
    rates = Rates.of(printed["target"])
    assert {dtype: list(curve)[0] for dtype, curve in rates.products.items()} == dict.fromkeys(printed["flops"], 128)
    assert rates.launch_seconds == printed["launch_seconds"] > 0
    assert dict(rates.flops) == printed["flops"] and rates.hbm_bytes_per_s == printed["hbm_bytes_per_s"] > 0
    assert rates.source["flops"] == printed["source"] and "calibrate" in printed["source"]
    assert rates.out_bytes_per_s is None
    assert re.search(r"\[1/5, \d+ s\] products in float16", progress) and "A CPU has one memory" in progress


def test_the_command_overwrites_nothing_unasked(quick):
    path, _, _ = quick
    before = path.read_text()
    done = CliRunner().invoke(app, ["calibrate", "-o", str(path), "--seconds", "0.2"])
    assert done.exit_code == 2 and "exists already" in done.stderr and path.read_text() == before
    calibration = Calibration("here", "cpu", {"float32": 1.0}, 2.0, source="x")
    assert Rates.of(calibration.save(path, overwrite=True)).hbm_bytes_per_s == 2.0
    with pytest.raises(TargetError, match="cannot be written"):
        calibration.save(path.parent / "no" / "folder.toml")


def test_a_gpu_of_the_table_keeps_what_is_known_of_it(tmp_path):
    calibration = Calibration("mine", "NVIDIA H200", {"bfloat16": 7.5e14}, 4.1e12, 5.5e10, 5.4e10, 0.75, "timed")
    name = calibration.save(tmp_path / "mine.toml")
    described, h200 = target(name), target("h200")
    assert (described.memory_bytes, described.compiler_description) == (h200.memory_bytes, h200.compiler_description)
    rates = Rates.of(name)
    assert (rates.flops["bfloat16"], rates.hbm_bytes_per_s) == (7.5e14, 4.1e12)
    assert (rates.out_bytes_per_s, rates.in_bytes_per_s, rates.hidden_share) == (5.5e10, 5.4e10, 0.75)
    assert rates.flops["float8_e4m3fn"] == Rates.of("h200").flops["float8_e4m3fn"], "not measured, so nominal"


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_a_table_s_entry_written_and_read_is_the_same_target(tmp_path, name):
    path = tmp_path / "one.toml"
    path.write_text(target_text(name, entry(name)), encoding="utf-8")
    assert target(f"{path}:{name}").to_dict() == target(name).to_dict()


@pytest.mark.parametrize(("name", "seconds"), [("My GPU", 1.0), ("", 1.0), ("a.b", 1.0), ("ok", 0.0), ("ok", float("nan"))])
def test_bad_arguments(name, seconds):
    with pytest.raises(TargetError, match="expected"):
        calibrate(name, seconds=seconds)
    with pytest.raises(TargetError, match="not in the table"):
        entry("h300")
