"""The benchmark of plans: its policies select MaxText's tensors, and a failed claim is the exit status."""

from __future__ import annotations

import fnmatch
import functools
import json
import math
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import remat_jax as rj
from benchmarks.plan import __main__ as command
from benchmarks.plan import claims, rivals, rows
from benchmarks.plan.rivals import INPUT, MAXTEXT, Rival
from benchmarks.plan.workloads import CASES, Case
from remat_jax.planning.blocks import calls
from remat_jax.planning.problem import Described, describe, kept_bytes, recompute_flops
from tests import plan_models
from tests.plan_by_hand import part, plan

LAYERS = 2


@functools.cache
def case(name: str) -> tuple[Case, Described]:
    case = CASES[name](LAYERS)
    return case, describe(case.workload, "h200")


# MaxText's policies, and the operations of each tensor's product in one layer, from the published sizes.


def transformer(
    rows: int, width: int, heads: int, queries: int, keys: int, hidden: int, length: int, *, gated: bool
) -> dict[str, int]:
    """The operations of each product of one layer for a number of rows; `queries` and `keys` are their widths."""
    product = lambda inner, outer: 2 * rows * inner * outer  # noqa: E731
    names = {"query_proj": product(width, queries), "key_proj": product(width, keys), "value_proj": product(width, keys)}
    names |= {"scores": product(length, queries), "context": product(length, queries), "out_proj": product(queries, width)}
    names |= (
        {"mlpwi_0": product(width, hidden), "mlpwi_1": product(width, hidden)} if gated else {"mlpwi": product(width, hidden)}
    )
    return names | {"mlpwo": product(hidden, width)}


LLAMA = transformer(4 * 1024, 2048, 32, 2048, 512, 8192, 1024, gated=True)
GPT2 = transformer(16 * 1024, 768, 12, 768, 768, 3072, 1024, gated=False)
GPT2["qkv_proj"] = sum(GPT2.pop(name) for name in ("query_proj", "key_proj", "value_proj"))
MLP = {"mlpwi": 2 * 8192 * 1024 * 4096, "mlpwo": 2 * 8192 * 4096 * 1024}


QKV, WIDER = ("query_proj", "key_proj", "value_proj"), ("mlpwi_0", "mlpwi_1")
# The products that backward recomputes. Nothing in the backward pass reads the layer's last product, and scores are never
# named.
AGAIN = {
    "minimal_with_context": ("scores",),
    "minimal": ("scores", "context"),
    "save_dot_with_context_except_mlp": ("scores", *WIDER),
    "save_dot_except_mlpwi": ("scores", "context", *WIDER),
    "save_dot_except_mlp": ("scores", "context", *WIDER),
    "save_qkv_proj": ("scores", "context", "out_proj", *WIDER),
    "save_out_proj": (*QKV, "scores", "context", *WIDER),
    "qkv_proj_offloaded": ("scores", "context", "out_proj", *WIDER),
    "minimal_offloaded": ("scores", "context"),
    "custom, Llama 70B": ("scores", "context", "out_proj", *WIDER),
    "custom, Llama 405B": ("scores", "context", *WIDER),
    "full": (*QKV, "scores", "context", "out_proj", *WIDER),
}
# MaxText names a fused projection differently, and its offloading policies do not list it.
AGAIN_FUSED = {
    "minimal_with_context": ("scores",),
    "save_qkv_proj": ("scores", "context", "out_proj", "mlpwi"),
    "qkv_proj_offloaded": ("qkv_proj", "scores", "context", "out_proj", "mlpwi"),
    "minimal_offloaded": ("scores", "context"),
}
AGAIN_MLP = {"minimal": (), "save_dot_except_mlpwi": ("mlpwi",), "full": ("mlpwi",)}


@pytest.mark.parametrize(
    ("name", "products", "again"), [("unrolled", LLAMA, AGAIN), ("scanned", GPT2, AGAIN_FUSED), ("mlp", MLP, AGAIN_MLP)]
)
def test_a_policy_of_maxtext_s_computes_the_products_again_that_it_does_not_name(
    name: str, products: dict[str, int], again: dict[str, tuple[str, ...]]
):
    model, described = case(name)
    texts = rivals.policies(model)
    flops = {policy: recompute_flops(described, texts[f"MaxText {policy}"]) for policy in again}
    assert flops == {policy: LAYERS * sum(map(products.__getitem__, tensors)) for policy, tensors in again.items()}
    assert set(AGAIN) == set(MAXTEXT)


def test_what_is_saved_and_offloaded_has_the_bytes_of_the_tensors():
    model, described = case("unrolled")
    texts, token = rivals.policies(model), 2 * 4 * 1024  # one number in bfloat16 per token
    least = kept_bytes(described, "full")[0]
    saved, away = kept_bytes(described, texts["MaxText save_qkv_proj"])
    assert (saved - least, away) == (LAYERS * token * (2048 + 512 + 512), 0)
    saved, away = kept_bytes(described, texts["MaxText qkv_proj_offloaded"])
    assert (saved - least, away) == (0, LAYERS * token * (2048 + 512 + 512))
    # The layers' inputs move too, but not shared arrays: tables of rotations and the causal mask.
    assert kept_bytes(described, texts["MaxText custom, Llama 70B"])[1] == away + LAYERS * token * 2048


def test_the_kernel_s_two_outputs_are_one_tensor():
    """Its output alone would not avoid the recomputation."""
    model, described = case("pallas")
    roles = next(iter(model.roles.values()))
    rows_, kept = 4 * 1024, [kept_bytes(described, text)[0] for text in (f"save: {roles['context']}", "full")]
    assert kept[0] - kept[1] == LAYERS * rows_ * (1024 * 2 + 16 * 4)
    program = described.kinds[0].program
    full = rivals.policies(model)["MaxText full"]
    without = program.price(rj.Policy.parse(f"save: {roles['context']}")).seconds
    first = program.price(rj.Policy.parse(f"save: {roles['context'].split(',')[0]}")).seconds
    assert without < first == pytest.approx(program.price(rj.Policy.parse(full)).seconds)


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_of_maxtext_s_is_one_array_of_a_layer(name: str):
    model = CASES[name](LAYERS)
    executions = calls(model.workload)
    assert {call.key for call in executions} == set(model.roles)
    for call in executions:
        names = call.block.linearised.candidates
        for tensor, selectors in model.roles[call.key].items():
            for selector in selectors.split(", "):
                matched = [residual for residual in names if fnmatch.fnmatchcase(residual, selector)]
                assert len(matched) == 1, (tensor, selector, matched)


def test_policies_that_are_equal_here_are_asked_once_and_keep_their_names(monkeypatch: pytest.MonkeyPatch):
    model, described = case("mlp")
    asked: list[Any] = []

    def measured(workload: Any, policies: list[Any], *_: Any, **__: Any) -> list[Any]:
        asked.append(policies)
        return [make_dataclass("Report", ["device_bytes", "host_bytes", "seconds"])(1, 0, 2.0)] * len(policies)

    monkeypatch.setattr(rivals, "measure_many", measured)
    by_policy = {rival.name: rival for rival in rivals.rivals(model, described, "h200")}
    assert "MaxText save_qkv_proj" in by_policy["full"].names and len(asked[0]) == len(set(asked[0]))
    # In this scan keeping costs more than recomputing.
    off, full, dots = (by_policy[name].extra_seconds for name in ("off", "full", "dots"))
    assert by_policy["off"].seconds == 2.0 and off > full > dots


def test_the_best_is_the_fastest_that_fits():
    off, small, slow = (
        Rival((name,), name, size, 0, time) for name, size, time in (("a", 9, 0.0), ("b", 5, 2.0), ("c", 4, 3.0))
    )
    refused = Rival(("d",), "d", remark="no")
    assert rivals.best_within([off, small, slow, refused], 8) is small
    assert rivals.best_within([off, small, slow], 4) is slow and rivals.best_within([off], 8) is None


# One more residual.


@pytest.fixture
def all_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "WORTH_COMPILING", -math.inf)


def slope(job: rj.Workload) -> str:
    """The name of the layer's other residual, 1 − tanh²: that of the operation in this version of JAX."""
    (name,) = {row.name for row in rj.residuals(job, "everything") if row.name.startswith("layers:")} - {"layers:tanh#0"}
    return name


def test_each_further_residual_is_the_plan_with_that_one_saved(all_are_worth_it: None):
    job = plan_models.job(scanned=True)
    described, derivative = describe(job, "h200"), slope(job)
    policies = {plan_models.MlpLayer: rj.LayerPolicies.parse("4 x full | 2 x save: layers:tanh#0")}
    parts = [replace(part(*run, ""), block="MlpLayer") for run in ((0, 4), (4, 2))]
    options = rows.further(described, plan(policies=policies, parts=tuple(parts)))
    size = 4 * 2048 * 4 * plan_models.WIDTH  # of each, in option layer
    assert [(option.where, option.residual, option.saved_bytes) for option in options] == [
        ("MlpLayer 0–3", "layers:tanh#0", 4 * size),
        ("MlpLayer 0–3", derivative, 4 * size),
        ("MlpLayer 4–5", derivative, 2 * size),
    ]
    texts = [str(option.policies[plan_models.MlpLayer]) for option in options]
    assert texts[0] == "4 × save: layers:tanh#0; recompute: * | 2 × save: layers:tanh#0"
    assert texts[2] == f"4 × full | 2 × save: {derivative}; save: layers:tanh#0"
    assert rows.further(described, plan(policies={plan_models.MlpLayer: rj.Policy.parse("off")}, parts=())) == []


def test_a_run_with_one_residual_more_stays_a_scan_of_its_own(all_are_worth_it: None):
    """Although it has the policy of its neighbour then, or had before."""
    job = plan_models.job(scanned=True)
    described, derivative = describe(job, "h200"), slope(job)
    policies = {plan_models.MlpLayer: rj.LayerPolicies.parse("3 x full || 1 x full | 2 x save: layers:tanh#0")}
    parts = [replace(part(*run, ""), block="MlpLayer") for run in ((0, 3), (3, 1), (4, 2))]
    options = rows.further(described, plan(policies=policies, parts=tuple(parts)))
    by_residual = {(option.where, option.residual): option.policies[plan_models.MlpLayer] for option in options}
    for place in (("MlpLayer 3", "layers:tanh#0"), ("MlpLayer 4–5", derivative), ("MlpLayer 0–2", derivative)):
        assert [run.start for run, _ in by_residual[place].ranges] == [0, 3, 4]


# Claims.

ROW: dict[str, Any] = {
    "workload": "w",
    "budget": 3 * 2**20,
    "device_bytes": 2**21,
    "host_bytes": 0,
    "seconds": 0.009,
    "best": "full",
    "best_seconds": 0.010,
    "further": {"where": "Layer 0", "residual": "up:add#0", "saved_bytes": 1, "device_bytes": 2**22, "seconds": 0.008},
}
BROKEN = {
    "the plan needs 4.0 MiB": {"device_bytes": 2**22},
    "up:add#0 of Layer 0 could be saved as well: 3.0 MiB": {"further": ROW["further"] | {"device_bytes": 3 * 2**20}},
    "full is faster: 8.60 ms against 9.00": {"best_seconds": 0.0086},
    "no plan was found that fits": {"infeasible": 2**20},
}


@pytest.mark.parametrize("message", BROKEN)
def test_each_claim_can_fail(message: str):
    assert claims.broken(ROW) == []
    failed = claims.broken(ROW | BROKEN[message])
    assert len(failed) == 1 and failed[0].startswith(message)
    assert claims.table([ROW | BROKEN[message]]).endswith("NO") and claims.table([ROW]).endswith("yes")


def test_times_that_cannot_be_told_apart_are_no_failure():
    near, alone = ROW | {"best_seconds": 0.0087}, ROW | {"best": None, "best_seconds": None}
    assert claims.failures([ROW, near, alone]) == []
    untimed = ROW | {"seconds": None, "best_seconds": None, "base_seconds": 0.008, "extra_seconds": 0.001}
    assert claims.failures([untimed | {"best_extra_seconds": 0.001}]) == []
    assert "full is faster" in claims.failures([untimed | {"best_extra_seconds": 0.0001}])[0]
    near_more = ROW | {"further": ROW["further"] | {"device_bytes": 3 * 2**20, "seconds": 0.0087}}
    assert claims.failures([near_more]) == []
    text = claims.summary([ROW, near, alone])
    assert "1 take at least 4% less time than every other policy that fits, in the median 10% less" in text
    assert "the slowest takes 1.034 of the time of the best other policy" in text and "at 1 no other policy fits" in text


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], *more: str) -> int:
    monkeypatch.setattr(command, "CASES", {"mlp": lambda layers: case("mlp")[0]})
    monkeypatch.setattr(command, "rivals", lambda *_: [Rival(("full",), "full", 1, 0, 0.002)])
    monkeypatch.setattr(command, "budgets", lambda *_: [2**21, 3 * 2**20])
    monkeypatch.setattr(command, "row", lambda model, described, budget, *_: ROW | {"budget": budget} | changed)
    return command.main(["--only", "mlp", "--output", str(tmp_path), *more])


def test_a_claim_that_fails_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    assert run(tmp_path, monkeypatch, {}) == 0 and "All claims hold." in capsys.readouterr().out
    message = "no plan was found that fits"
    assert run(tmp_path, monkeypatch, BROKEN[message]) == 1 and message in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["failures"]


def test_bad_shares_are_refused():
    with pytest.raises(SystemExit):
        command.parse(["--shares", "1.5"])
    assert command.parse(["--all"]).only == list(CASES) and len(command.parse(["--all"]).shares) == 6
    assert INPUT in MAXTEXT["custom, Llama 70B"]["offload"]


def test_a_rival_by_blocks_is_read_back_and_written_again() -> None:
    rival = Rival(("minimal",), {Case: "full"}, 10, 0, 1.0)
    read = Rival(**json.loads(json.dumps(rival.to_dict())) | {"names": ("minimal",)})
    assert read.to_dict() == rival.to_dict() and read.policy == {"Case": "full"}


def test_nothing_measured_is_no_claim_that_holds():
    assert claims.failures([]) == ["nothing was measured"]


@pytest.mark.parametrize(("commit", "flags", "kept"), [("abc", "", 1), ("abc+", "", 0), (None, "", 0), ("abc", "--more", 0)])
def test_rows_are_kept_of_the_same_code_and_environment_only(tmp_path, monkeypatch, commit, flags, kept):
    def record(flags, *arguments):
        made = {"commit": commit, "versions": {}, "environment": {"XLA_FLAGS": flags}}
        monkeypatch.setattr(command, "provenance", lambda: made)
        return command.Record(tmp_path / "plan.json", command.parse(["--only", "mlp", *arguments]))

    record("").add(ROW)
    assert len(record(flags, "--resume").rows) == kept
