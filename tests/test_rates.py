"""Rates that a target reaches: a share of nominal figures, measured figures unchanged, and errors."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from remat_jax.errors import TargetError
from remat_jax.hardware import target
from remat_jax.hardware.products import Product
from remat_jax.hardware.rates import HIDDEN_SHARE, LINK_SHARE, MATMUL_SHARE, MEMORY_SHARE, Rates

MEASURED = """
[mine]
kind = "gpu"
description = "a card"
hbm_bytes_per_s = 100.0
host_link_bytes_per_s = 10.0
peak_flops = { bfloat16 = 1000.0, float32 = 500.0 }

[mine.source]
hbm_bytes_per_s = "data sheet"
host_link_bytes_per_s = "data sheet"
peak_flops = "data sheet"

[mine.measured]
source = "timed here"
hbm_bytes_per_s = 91.0
out_bytes_per_s = 7.0
hidden_share = 0.5
flops = { bfloat16 = 700.0 }
"""


def write(tmp_path, text):
    path = tmp_path / "targets.toml"
    path.write_text(text)
    return f"{path}:mine"


def test_nominal_figures_are_taken_with_the_share_that_programs_reach():
    nominal = replace(target("l40s"), reached={})
    rates = Rates.of(nominal)
    assert rates.flops["bfloat16"] == MATMUL_SHARE * nominal.peak_flops["bfloat16"]
    assert rates.hbm_bytes_per_s == MEMORY_SHARE * nominal.hbm_bytes_per_s
    assert rates.out_bytes_per_s == rates.in_bytes_per_s == LINK_SHARE * nominal.host_link_bytes_per_s
    assert rates.hidden_share == HIDDEN_SHARE
    assert rates.links.device_bytes_per_s == LINK_SHARE * nominal.device_link_bytes_per_s and rates.cores == 142
    assert all("assumed" in said for said in rates.source.values()) and len(rates.source) == 10
    assert rates.assumed_dtypes == set(nominal.peak_flops)
    assert Rates.of(nominal) == rates == Rates.of(replace(nominal, devices=8))


def test_published_figures_are_taken_before_nominal_ones_and_measured_ones_before_both(tmp_path):
    rates, nominal = Rates.of("h200"), target("h200")
    assert rates.flops["bfloat16"] == 794.5e12 and rates.flops["tensorfloat32"] == MATMUL_SHARE * 494.5e12
    assert rates.hbm_bytes_per_s == 4.15e12 and "BabelStream" in rates.source["hbm_bytes_per_s"]
    assert "best found shape" in rates.source["flops"] and "tensorfloat32: nominal × 0.8, assumed" in rates.source["flops"]
    assert rates.assumed(["bfloat16"]) == ("hidden_share", "launch_seconds", "copy_seconds", "network_seconds")
    assert rates.assumed(["tensorfloat32"])[0] == "flops"
    measured = {"source": "timed here", "flops": {"bfloat16": 7e14}, "in_bytes_per_s": 3.0}
    changed = Rates.of(type(nominal)(**{**nominal.to_dict(), "measured": measured}))
    assert (changed.flops["bfloat16"], changed.in_bytes_per_s, changed.out_bytes_per_s) == (7e14, 3.0, 5.5e10)
    assert changed.source["flops"].startswith("timed here; ")


def test_at_half_the_rates_everything_takes_twice_as_long():
    rates = Rates({"float32": 16.0}, 4.0, 2.0, 8.0, products={"float32": {2: 4.0, 8: 16.0}})
    slow, product = rates.slower(2), Product("float32", 1, 4, 4, 4)
    assert slow.seconds({"float32": 30.0}, 4.0) == 2 * rates.seconds({"float32": 30.0}, 4.0)
    assert slow.product_seconds(product) == pytest.approx(2 * rates.product_seconds(product))
    assert (slow.hbm_bytes_per_s, slow.out_bytes_per_s, slow.in_bytes_per_s) == (2.0, 1.0, 4.0)


def test_measured_figures_are_taken_as_they_are(tmp_path):
    rates = Rates.of(write(tmp_path, MEASURED))
    assert (rates.hbm_bytes_per_s, rates.out_bytes_per_s, rates.hidden_share) == (91.0, 7.0, 0.5)
    assert rates.in_bytes_per_s == LINK_SHARE * 10.0, "what was not measured is nominal"
    assert dict(rates.flops) == {"bfloat16": 700.0, "float32": MATMUL_SHARE * 500.0}
    assert rates.source["hbm_bytes_per_s"] == "timed here" and "assumed" in rates.source["in_bytes_per_s"]
    cpu = Rates.of("cpu")
    assert cpu.out_bytes_per_s is None and cpu.in_bytes_per_s is None and "remat-jax calibrate" in cpu.source["flops"]
    described = target("h200")
    changed = type(described)(**{**described.to_dict(), "measured": {"hbm_bytes_per_s": 3.0, "source": "here"}})
    assert pickle.loads(pickle.dumps(changed)).measured == dict(changed.measured), "on the way to another process"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("hbm_bytes_per_s = 91.0|hbm_bytes_per_s = -1.0", "positive"),
        ("out_bytes_per_s = 7.0|out_bytes_per_s = inf", "positive"),
        ("bfloat16 = 700.0|bfloat16 = true", "flops.bfloat16"),
        ("hidden_share = 0.5|hidden_share = 1.5", "hidden_share"),
        ("out_bytes_per_s = 7.0|outward = 7.0", "unknown keys"),
        ('source = "timed here"|', "source a text"),
        ("flops = { bfloat16 = 700.0 }|flops = 3.0", "unknown keys"),
    ],
)
def test_a_file_with_wrong_measured_figures_is_refused(tmp_path, change, message):
    before, _, after = change.partition("|")
    with pytest.raises(TargetError, match=message):
        Rates.of(write(tmp_path, MEASURED.replace(before, after)))


def test_a_target_without_rates_says_what_is_missing(tmp_path):
    bare = 'kind = "gpu"\ndescription = "a card"\n'
    with pytest.raises(TargetError, match="has no hbm_bytes_per_s"):
        Rates.of(write(tmp_path, f"[mine]\n{bare}[mine.source]\n"))
    with pytest.raises(TargetError, match="has no peak_flops"):
        Rates.of(write(tmp_path, f'[mine]\n{bare}hbm_bytes_per_s = 1.0\n[mine.source]\nhbm_bytes_per_s = "x"\n'))


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), 10**400, True, "fast", None])
def test_rates_must_be_positive_numbers(wrong):
    with pytest.raises(TargetError, match=r"flops\['float32'\]"):
        Rates({"float32": wrong}, 1.0)
    with pytest.raises(TargetError, match="hbm_bytes_per_s"):
        Rates({"float32": 1.0}, wrong)
    if wrong is not None:
        with pytest.raises(TargetError, match="out_bytes_per_s"):
            Rates({"float32": 1.0}, 1.0, wrong, 1.0)


def test_other_wrong_arguments():
    with pytest.raises(TargetError, match="by dtype"):
        Rates({}, 1.0)
    with pytest.raises(TargetError, match="belong together"):
        Rates({"float32": 1.0}, 1.0, 2.0)
    for share in (-0.1, 1.1, float("nan"), True):
        with pytest.raises(TargetError, match="hidden_share"):
            Rates({"float32": 1.0}, 1.0, hidden_share=share)


@pytest.mark.parametrize(
    ("known", "dtype", "meant"),
    [
        ("float32", "tensorfloat32", "float32"),
        ("bfloat16", "float16", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("float32", "float64", "float32"),
        ("float64 float32", "complex128", "float64"),
        ("bfloat16", "float8_e4m3fn", "bfloat16"),
        ("float32", "float8_e4m3fn", "float32"),
        ("float32", "bool", "float32"),
    ],
)
def test_a_dtype_without_a_rate_falls_back_on_a_named_one(known, dtype, meant):
    rates = Rates(dict.fromkeys(known.split(), 2.0), 1.0)
    assert rates.fallback(dtype) == meant and rates.flops_per_s(dtype) == 2.0


def test_a_dtype_without_any_rate_is_an_error():
    with pytest.raises(TargetError, match=r"'float4' has no rate.*with a rate are bfloat16"):
        Rates({"bfloat16": 2.0}, 1.0).flops_per_s("float4")
    with pytest.raises(TargetError, match=r"neither have its fallbacks \(float32\)"):
        Rates({"float64": 2.0}, 1.0).flops_per_s("tensorfloat32")


def test_seconds():
    rates = Rates({"float32": 10.0, "bfloat16": 100.0}, 5.0)
    assert rates.seconds({"float32": 20.0, "bfloat16": 100.0}, 5.0) == 3.0, "operations take turns"
    assert rates.seconds({"float32": 20.0}, 50.0) == 10.0, "bytes run beside operations"
    assert rates.seconds({}, 0.0) == 0.0
    assert hash(rates) == hash(Rates({"bfloat16": 100.0, "float32": 10.0}, 5.0))
