"""The classes that a plan's file names, looked up without a workload."""

from __future__ import annotations

import json
import sys
import warnings

import pytest

import remat_jax as rj
from tests.plan_by_hand import PlannedLayer, plan


class TakenByName(PlannedLayer):
    """No other module has a class of this name."""


def saved(path, made, module):
    """Save the plan as if its first block were of this module."""
    data = json.loads(made.save(path).read_text())
    data["policies"][0]["block"][2] = module
    path.write_text(json.dumps(data))
    return path


def test_a_class_that_is_taken_by_its_name_only_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    path, made = tmp_path / "plan.json", plan(policies={TakenByName: rj.Policy.parse("full")})
    made.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rj.Plan.load(path)
    for module, why in (("gone", "'gone', which is not loaded"), ("__main__", "'train', which has none here")):
        match = f"'TakenByName' of the module {why}: the class of the same name"
        with pytest.warns(rj.RematWarning, match=match):
            assert rj.Plan.load(saved(path, made, module)).policies == made.policies


@pytest.mark.parametrize("is_program", [False, True])
def test_a_class_of_a_file_that_was_planned_on_the_command_line_is_found_without_a_warning(tmp_path, monkeypatch, is_program):
    """Both by a program that imports the file, and by the file itself as the program."""
    monkeypatch.setattr(TakenByName, "__module__", "__main__" if is_program else "train")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    made = plan(policies={TakenByName: rj.Policy.parse("full")})
    path = saved(tmp_path / "plan.json", made, "_workload_train")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rj.Plan.load(path).policies == made.policies
