"""Malformed texts and files, a part of `python -m tests.fault`; and its former finds, by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remat_jax import porting
from remat_jax.errors import PolicyError, PortingError, RematError, TargetError
from remat_jax.hardware import target
from remat_jax.hardware.target import read_table
from remat_jax.policy import LayerPolicies, Policy
from tests.fault.files import check_files
from tests.fault.texts import _TABLE, check_texts, in_time

LONG, DEEP = "9" * 5000, "[" * 100_000


def test_malformed_texts_are_refused_in_words_or_mean_what_they_say() -> None:
    said: list[str] = []
    assert check_texts(900, 7, said.append) == 0, "\n".join(said)
    # Of each kind some are taken and some refused.
    assert said[-1].count("'mesh': ") == 2 and ": 0" not in said[-1], said


def test_malformed_files_are_refused_in_words_or_read_as_they_say(tmp_path: Path) -> None:
    said: list[str] = []
    with_torch = importlib.util.find_spec("torch") is not None
    assert check_files(400, 7, tmp_path, said.append, torch=with_torch) == 0, "\n".join(said)
    # Of each kind some are taken and some refused.
    assert said[-1].count("'mapping': ") == 2 and ": 0" not in said[-1], said


@pytest.mark.parametrize(
    ("read", "text", "error", "message"),
    [
        (Policy.from_json, DEEP, PolicyError, "is not JSON"),
        (LayerPolicies.from_json, DEEP, PolicyError, "is not JSON"),
        (porting.Rules.from_json, DEEP, PortingError, "is not JSON"),
        (LayerPolicies.parse, f"{LONG} x full", PolicyError, "a run of 999999999999… layers: .* at most 1000000"),
        (LayerPolicies.parse, "1000001 x full", PolicyError, "a run of 1000001 layers: expected 1 or more, at most 1000000"),
        (target, f"{LONG}xh200", TargetError, "is not a known target"),
        (target, "8x8x8xh200", TargetError, "is not a known target"),
        (target, "1x" * 3000 + "h200", TargetError, "is not a known target"),
        (target, "a\0b.toml:mine", TargetError, "cannot be read: embedded null byte"),
        (target, "/dev/zero:mine", TargetError, "it is not a regular file"),
        (read_table, "x = " + DEEP.replace("[", "[\n"), TargetError, "the TOML cannot be read"),
        (read_table, f"x = {LONG}", TargetError, "a line has 5004 characters"),
        (read_table, "x = ", TargetError, "the TOML cannot be read: Invalid value"),
        (read_table, _TABLE.replace('"a GPU, of mine"', "3"), TargetError, "description: write a text of one line"),
        (read_table, _TABLE.replace("of mine", r"of\nmine"), TargetError, "description: write a text of one line"),
        (read_table, _TABLE.replace("132", r'"132\nclock_rate_ghz: 9"'), TargetError, r"no positive number \['core_count'\]"),
        (read_table, _TABLE.replace("80_000_000_000", "8e10"), TargetError, "memory_bytes.*8.*positive numbers of bytes"),
        (read_table, _TABLE.replace("80_000_000_000", "1" + "0" * 400), TargetError, "memory_bytes"),
        (porting.Rules.parse, "a.{a,b}" + ".{a,b}" * 40 + " -> params/b", PortingError, "more than 10000 names"),
        (porting.Rules.parse, f"a.{{i}} -> params/b[{LONG}]", PortingError, "is not an index"),
        (porting.Rules.parse, f"a -> params/b | split({LONG})", PortingError, "is not a transform"),
        (porting.Rules.from_json, '{"version":1,"rules":[],"ties":3,"extra":[],"missing":[]}', PortingError, "pairs of texts"),
        (porting.Rules.from_json, '{"version":1,"rules":3,"ties":[],"extra":[],"missing":[]}', PortingError, "rules: expected"),
    ],
)
def test_what_was_an_error_of_pythons_is_one_of_ours(
    read: Callable[[str], Any], text: str, error: type[RematError], message: str
) -> None:
    with in_time(), pytest.raises(error, match=message):
        read(text)


def test_a_number_of_thousands_of_digits_in_a_tensors_name_is_no_layer() -> None:
    rules = porting.Rules.parse("layers.{i+1}.w -> params/layers_{i}/w")
    assert rules.rules[0].torch[0].match("layers.3.w") == {"i": "2"}
    assert rules.rules[0].torch[0].match(f"layers.{LONG}.w") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected JSON with a weight_map"),
        ('{"weight_map": {"a": 3}}', "expected JSON with a weight_map"),
        ('{"weight_map": {"a": ""}}', "expected names of shards"),
        ('{"weight_map": {"a": "model.safetensors.index.json"}}', "expected names of shards"),
        ('{"weight_map": {"a": "folder.safetensors"}}', "expected names of shards"),
        ('{"weight_map": {"a": "%s.safetensors"}}' % ("x" * 5000), "cannot be read .File name too long"),
        (r'{"weight_map": {"a": "b\u0000.safetensors"}}', "expected JSON with a weight_map"),
        ('{"weight_map": {"a": "/etc/x.safetensors"}}', "must be in its folder"),
        ('{"weight_map": {"a": "../x.safetensors"}}', r"must be in its folder, unlike \.\./x"),
        ('{"weight_map": ' + DEEP, "expected JSON with a weight_map"),
    ],
)
def test_an_index_leads_to_shards_beside_it_and_nowhere_else(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(PortingError, match=message):
        porting.load(index)
