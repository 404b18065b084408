"""The benchmark of plans: its policies select MaxText's tensors, and a failed claim is the exit status."""

from __future__ import annotations

import fnmatch
import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import remat_jax as rj
from benchmarks.plan import __main__ as command
from benchmarks.plan import rivals, rows
from benchmarks.plan.rivals import MAXTEXT, Rival
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


# One more residual.


def slope(job: rj.Workload) -> str:
    """The name of the layer's other residual, 1 − tanh²: that of the operation in this version of JAX."""
    (name,) = {row.name for row in rj.residuals(job, "everything") if row.name.startswith("layers:")} - {"layers:tanh#0"}
    return name


def test_each_further_residual_is_the_plan_with_that_one_saved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows, "WORTH_COMPILING", -math.inf)
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
def test_a_claim_that_fails_is_the_exit_status(message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    made: dict[str, Any] = {}
    monkeypatch.setattr(command, "CASES", {"mlp": lambda layers: case("mlp")[0]})
    monkeypatch.setattr(command, "rivals", lambda *_: [Rival(("full",), "full", 1, 0, 0.002)])
    monkeypatch.setattr(command, "budgets", lambda *_: [3 * 2**20])
    monkeypatch.setattr(command, "row", lambda *_: ROW | made)
    arguments = ["--only", "mlp", "--output", str(tmp_path)]
    assert command.main(arguments) == 0 and "All claims hold." in capsys.readouterr().out
    made |= BROKEN[message]
    assert command.main(arguments) == 1 and message in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["failures"]
