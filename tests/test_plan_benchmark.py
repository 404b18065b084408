"""The benchmark of plans: its policies select MaxText's tensors, and a failed claim is the exit status."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import __main__ as command
from benchmarks.plan import rivals
from benchmarks.plan.rivals import MAXTEXT, Rival
from benchmarks.plan.workloads import CASES, Case
from remat_jax.planning.problem import Described, describe, recompute_flops

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


@pytest.mark.parametrize(("name", "products", "again"), [("unrolled", LLAMA, AGAIN), ("scanned", GPT2, AGAIN_FUSED)])
def test_a_policy_of_maxtext_s_computes_the_products_again_that_it_does_not_name(
    name: str, products: dict[str, int], again: dict[str, tuple[str, ...]]
):
    model, described = case(name)
    texts = rivals.policies(model)
    flops = {policy: recompute_flops(described, texts[f"MaxText {policy}"]) for policy in again}
    assert flops == {policy: LAYERS * sum(map(products.__getitem__, tensors)) for policy, tensors in again.items()}
    assert set(AGAIN) == set(MAXTEXT)


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
