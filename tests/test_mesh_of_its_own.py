"""A step that names a mesh with devices, or runs under one, and is measured for another number of devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def told(on_eight_devices: Callable[..., Path]) -> dict[str, list[str]]:
    return dict(json.loads(on_eight_devices("tests.meshes_of_their_own", "told.json").read_text()))


@pytest.mark.parametrize(("case", "devices"), [("alone", "1 device,"), ("on another", "2 devices,")])
def test_a_mesh_of_its_own_is_refused_with_the_remedy(told: dict[str, list[str]], case: str, devices: str) -> None:
    kind, message = told[case]
    assert kind == "UnsupportedError"
    assert message.startswith(f"the step is compiled for {devices} but it contains a mesh of another size")
    assert "Write constraints as bare PartitionSpecs, and give their mesh to Workload(…, mesh=…, shardings=…)" in message


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    ("case", "traced"), [("alone", "a step for 1 device"), ("on another", "a workload on a mesh of 2 devices ({'data': 2})")]
)
def test_a_mesh_of_another_size_around_the_call_is_to_be_left(told, kind, case, traced):
    error, message = told[f"under {kind}, {case}"]
    assert error == "ArgumentError"
    assert message.startswith("jax.set_mesh: a mesh of 4 devices ({'data': 4}) is active")
    assert f"and {traced} cannot be traced under it: make this call outside jax.set_mesh" in message


def test_a_mesh_of_the_same_size_and_bare_specs_are_served(told: dict[str, list[str]]) -> None:
    assert told["on the same"] == told["under Auto, on the same"] == told["under Explicit, on the same"] == ["", "{'data': 4}"]
    assert told["by a spec"] == ["", "{'data': 2}"]
