"""Plans as files: the round trip, and that any malformed or hostile file raises only our error."""

from __future__ import annotations

import html
import json
import sys
import tracemalloc
import warnings

import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax.errors import NoEffectError, PlanningError, RematError
from remat_jax.memory.compile.options import GRAPHS, OPTION
from remat_jax.planning import files
from remat_jax.planning.model import Model, find_block
from remat_jax.planning.page import page
from remat_jax.planning.plan_data import Beyond
from tests.plan_by_hand import PlannedLayer, plan


def write(tmp_path, data):
    path = tmp_path / "plan.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_plan_comes_back_as_it_was(tmp_path):
    for saved in (
        plan(),
        plan(policies={PlannedLayer: rj.Policy.parse("off")}),
        plan(policies={"layers_*": rj.Policy.parse("full")}),
        plan(recompute_flops=2 * 405 * 10**9 * 16 * 2**20),  # more than 2⁶³: 405 billion parameters, 16 million tokens
    ):
        path = saved.save(tmp_path / "plan.json")
        again = rj.Plan.load(path)
        assert again == saved and again.to_dict() == saved.to_dict() and list(tmp_path.iterdir()) == [path]


def test_files_of_earlier_versions_are_read(tmp_path):
    """Their parts have their layers one after the other, they were compiled without a memory limit, and have no bound."""
    data = plan().to_dict()
    assert all(part.pop("every") == 1 for part in data["parts"])
    assert (data.pop("compiler_options"), data.pop("lower_bound")) == ({OPTION: 29}, 0.0124)
    old = rj.Plan.load(write(tmp_path, data))
    assert old == plan(compiler_options={}, lower_bound=None) != plan()
    sentence = "By the same estimate, no plan within the budget is more than 0.8 % faster."
    assert sentence in " ".join(str(plan()).split()) and sentence in plan().explain()
    assert "By the same estimate" not in old.explain()


def test_the_memory_limit_is_printed_and_on_the_page():
    sentence = (
        "Compiled with a memory limit: jax.jit(step, compiler_options={'xla_gpu_memory_limit_slop_factor': 29}). "
        "On a finished step that has a jit, plan.apply sets them."
    )
    limited, unlimited = plan(), plan(compiler_options={})
    assert all(sentence in " ".join(text.split()) for text in (str(limited), limited.explain(), html.unescape(page(limited))))
    assert not any("memory limit" in text for text in (str(unlimited), unlimited.explain(), page(unlimited)))


def test_a_short_file_of_many_layers_is_read_without_a_list_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 2**18)  # the room for reading it
    data = plan().to_dict()
    policy = data["policies"][0]["runs"][0][1]
    runs = [[99_000, policy], [1_000, policy]]
    data["policies"] = [{"block": ["glob", f"layers_{i}", ""], "runs": runs} for i in range(2)]
    path = write(tmp_path, data)
    tracemalloc.start()
    try:
        loaded = rj.Plan.load(path)
        # A list of this many runs of one layer is 6 MB.
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()
    assert loaded.policies["layers_1"] == rj.LayerPolicies(((10**5, rj.Policy.from_dict(policy)),), (99_000,))
    assert loaded.to_dict()["policies"] == data["policies"]


def test_more_runs_than_any_model_has_are_refused(tmp_path):
    data = plan().to_dict()
    policy = data["policies"][0]["runs"][0][1]
    data["policies"][0]["runs"] = [[1, policy]] * 10_001
    with pytest.raises(PlanningError, match="malformed: runs has 10001 items, expected at most 10000"):
        rj.Plan.load(write(tmp_path, data))


def test_what_cannot_be_saved_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanningError, match="folder' cannot be written"):
        plan().save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_keys_are_the_attribute_names():
    data = json.loads(json.dumps(plan().to_dict()))
    names = "device_bytes predicted_bytes host_bytes recompute_flops seconds frontier policies budget named".split()
    assert {*names, "version"} <= set(data) and data["device_bytes"] == plan().device_bytes
    assert data["texts"] == {"PlannedLayer": "3 × offload: *up:add#0 | 1 × full"} and data["best_named"] == "full"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data.update(version=5),
            "has version 5, but .* reads only versions 1, 2, 3 and 4",
        ),
        (lambda data: data.update(version="1"), "has version '1'"),
        (lambda data: data.update(version=True), "has version True"),
        (lambda data: data.pop("version"), "not an object with a version"),
        (lambda data: data.pop("budget"), r"lacks \['budget'\]"),
        (lambda data: data.update(extra=1), r"has \['extra'\]"),
        (lambda data: data.update(seconds=-1.0), "seconds=-1.0 is not a number of at least 0"),
        (lambda data: data.update(device_bytes=1.5), "device_bytes=1.5 is not an integer"),
        (lambda data: data.update(device_bytes=10**400), "device_bytes=1000.* is not an integer"),
        (lambda data: data.update(policies=[]), "policies is empty"),
        (lambda data: data["policies"][0]["block"].__setitem__(0, "module"), "neither a class, a function nor a glob"),
        (lambda data: data["policies"][0]["runs"].__setitem__(0, [10**9, data["policies"][0]["runs"][0][1]]), "runs"),
        (lambda data: data["policies"][0]["runs"][0][1].update(rules=[]), "policies: a policy"),
        (lambda data: data.update(workload="\x1b[2J"), "not a text of one line"),
        (lambda data: data.update(workload="\ud800"), "not a text of one line"),
        (lambda data: data["parts"][0]["rows"][0].update(action="delete"), "'delete' is none of save, offload, recompute"),
        (lambda data: data.update(compiler_options=None), "compiler_options=None: expected an object"),
        (lambda data: data.update(compiler_options={"xla_dump_to": "."}), "compiler_options={.xla_dump_to.: .*: expected"),
        (lambda data: data.update(compiler_options={OPTION: 29, "xla_dump_to": "."}), "no other keys than"),
        (lambda data: data.update(compiler_options={GRAPHS: "FUSION --xla_dump_to=."}), "must be a list of kinds"),
        (lambda data: data.update(compiler_options={GRAPHS: []}), "must be a list of kinds, such as 'FUSION,"),
        *(
            (
                lambda data, wrong=wrong: data.update(compiler_options={OPTION: wrong}),
                "xla_gpu_memory_limit_slop_factor is an integer from 1 to 100",
            )
            for wrong in (0, 101, "29", True)
        ),
        (lambda data: data.update(compiler_options={"xla_tpu_max_hbm_size_mib": 0}), "_mib is an integer from 1 to"),
        (lambda data: data["parts"][0].update(rows="all"), "rows=all is not a list"),
        (lambda data: data.update(changes=["head_in_chunks"] * 2), "changes: head_in_chunks is made 2 times; at most 1"),
        (lambda data: data.update(beyond=[Beyond("micro_batches", times=20_000).__dict__]), "made 20000 times; at most 3"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path, change, message):
    data = json.loads(json.dumps(plan().to_dict()))
    change(data)
    with pytest.raises(PlanningError, match=message) as caught:
        rj.Plan.load(write(tmp_path, data))
    assert "plan.json" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", "[" * 100_000, '{"version": NaN}', '{"version": 1}', "\x00", '"' * 3]
)
def test_what_is_no_plan_is_refused(tmp_path, text):
    with pytest.raises(PlanningError, match=r"plan\.json"):
        rj.Plan.load(write(tmp_path, text))


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(PlanningError, match="cannot be read"):
        rj.Plan.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanningError, match="cannot be read"):
        rj.Plan.load(tmp_path / "binary.json")
    with pytest.raises(PlanningError, match="cannot be written"):
        plan().save(tmp_path / "no" / "plan.json")


def test_nothing_that_a_file_names_is_imported(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    data = json.loads(json.dumps(plan().to_dict()))
    data["policies"][0]["block"] = ["class", "Planted", "planted"]
    with pytest.raises(PlanningError, match="'Planted' of 'planted', and no class of that name is loaded"):
        rj.Plan.load(write(tmp_path, data))


def test_a_class_is_found_under_another_module_name_unless_there_are_several():
    assert find_block(("class", "PlannedLayer", "__main__"), None, "it") is PlannedLayer
    assert find_block(("glob", "layers_*", ""), None, "it") == "layers_*"
    with pytest.raises(PlanningError, match=r"several modules define a class of that name \(.*linen.*nnx"):
        find_block(("class", "BatchNorm", "nowhere"), None, "it")


def workload(width=8, rows=2, block=PlannedLayer):
    model, x = PlannedLayer(), jax.ShapeDtypeStruct((rows, 4), jnp.float32)
    params = {"params": {"up": {"kernel": (4, width), "bias": (width,)}}}
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), params, is_leaf=lambda node: isinstance(node, tuple))
    return rj.Workload(
        lambda p, x: sum(map(jnp.sum, jax.tree.leaves(p))) + x.sum(), params, (x,), block, name=model.name or "mine"
    )


def test_another_model_is_refused_when_it_is_loaded(tmp_path):
    mine = workload()
    made = plan(model=Model.of(mine))
    path = made.save(tmp_path / "plan.json")
    assert rj.Plan.load(path, mine) == made
    with pytest.raises(PlanningError, match=r"another model than 'mine': parameters: the plan has params/up/bias float32\[8\]"):
        rj.Plan.load(path, workload(width=16))
    with pytest.raises(PlanningError, match=r"the plan has 0 float32\[2, 4\], the workload has 0 float32\[3, 4\]"):
        rj.Plan.load(path, workload(rows=3))
    with pytest.raises(PlanningError, match=r"for the blocks \['PlannedLayer'\], and 'mine' has \['Planned\*'\]"):
        rj.Plan.load(path, workload(block="Planned*"))


def test_classes_of_one_name_keep_their_own_policies(tmp_path):
    namesake = type("PlannedLayer", (PlannedLayer,), {"__module__": "elsewhere", "__qualname__": "PlannedLayer"})
    mine = workload(block=(PlannedLayer, namesake))
    policies = {PlannedLayer: rj.Policy.parse("full"), namesake: rj.Policy.parse("dots")}
    path = plan(model=Model.of(mine), policies=policies).save(tmp_path / "plan.json")
    assert rj.Plan.load(path, mine).policies == policies
    data = json.loads(path.read_text())
    data["policies"][1]["block"] = data["policies"][0]["block"]
    with pytest.raises(PlanningError, match="policies lists a block twice"):
        rj.Plan.load(write(tmp_path, data), mine)


def test_wrong_arguments_are_named(tmp_path):
    path = plan().save(tmp_path / "plan.json")
    with pytest.raises(RematError, match="workload=3: expected a remat_jax.Workload"):
        rj.Plan.load(path, 3)
    with pytest.raises(PlanningError, match="path='None' cannot be written"):
        plan().save(None)


def test_another_model_is_refused_when_it_is_applied():
    made = plan(policies={PlannedLayer: rj.Policy.parse("off")})
    loss = made.apply(lambda params, x: jnp.sum(params["kernel"]) + jnp.sum(params["bias"]))
    params = {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}
    assert float(loss(params, jnp.ones((2, 4)))) == 40.0
    wrong = r"'by hand' was made for a model with the parameter params/up/bias of shape \[8\].* apply the plan to the loss or"
    with pytest.raises(PlanningError, match=wrong):
        loss({"kernel": jnp.ones((4, 8))}, jnp.ones((2, 4)))
    with pytest.raises(rj.RematError, match="fn=3: expected a function"):
        made.apply(3)


def test_a_plan_whose_residuals_are_not_there_is_to_be_made_again():
    model = PlannedLayer()
    made = plan(policies={PlannedLayer: rj.Policy.parse("save: *none_such#3")}, jax_version="0.9.9")
    params = model.init(jax.random.key(0), jnp.ones((2, 4)))
    planned = made.apply(lambda params, x: jnp.sum(model.apply(params, x)))
    with pytest.raises(NoEffectError, match=r"^the plan for 'by hand' .* made with JAX 0\.9\.9, .* \(policy=.*matches no res"):
        jax.grad(planned)(params, jnp.ones((2, 4)))


# The classes that a plan's file names, looked up without a workload.


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
