"""Negative controls: each planted fault makes the comparison fail. A comparison that cannot fail proves nothing."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import torch_ref
from examples.models import weights as w
from examples.pytorch import decoder
from parity_tests import matrix
from parity_tests import support as s

FORMS = [(framework, layers) for framework in ("linen", "nnx") for layers in ("unrolled", "scan")]
forms = pytest.mark.parametrize(("framework", "layers"), FORMS)

# Numbers: one case per mode, so that a fault shows under every policy.
CASES = [
    matrix.Case("linen", "ByteDecoder", "scan", "off", "float64"),
    matrix.Case("linen", "ByteDecoder", "unrolled", "checkpoint", "float32"),
    matrix.Case("nnx", "DecoderStack", "scan", "checkpoint", "float64"),
    matrix.Case("nnx", "DecoderStack", "unrolled", "offload", "float32"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("group", ["gradients", "after_adam"])
def test_a_flipped_sign_of_any_tensor_and_a_missed_transpose_of_a_square_one_are_seen(group: str, case: matrix.Case) -> None:
    result = matrix.result(case)
    tensors = getattr(result, group)
    square = [name for name in tensors if name.endswith("out_proj.weight")]
    assert len(tensors) >= 24 and len(square) == s.LAYERS
    for name, wrong_tensor in [*((name, -tensors[name]) for name in tensors), *((name, tensors[name].T) for name in square)]:
        wrong = matrix.problems(case, result._replace(**{group: tensors | {name: wrong_tensor}}))
        assert len(wrong) == 1 and wrong[0].startswith(f"{group}: {name} "), wrong


@pytest.mark.parametrize(("mode", "dtype"), [("checkpoint", "float32"), ("offload", "float64")])
def test_a_missed_transpose_of_a_square_weight_is_seen(mode: str, dtype: str) -> None:
    case = matrix.Case("linen", "DecoderStack", "unrolled", mode, dtype)
    flat = w.flatten(s.parameters(case.model, scan=False, dtype=dtype))
    path = "layers_1/self_attn/out_proj/kernel"
    tree = w.unflatten_dict(flat | {path: flat[path].T}, sep="/")
    with matrix.precision(case):
        step = matrix.jax_step(case)
        step = step._replace(arguments=(tree, *step.arguments[1:]))
        wrong = matrix.problems(case, matrix.jax_result(case, step, matrix.compiled(case)))
    assert {problem.partition(":")[0] for problem in wrong} == set(matrix.Result._fields)


@pytest.mark.parametrize(("framework", "layers"), [("linen", "scan"), ("nnx", "unrolled")])
def test_a_forgotten_layer_is_seen(framework: str, layers: str) -> None:
    case = matrix.Case(framework, "DecoderStack", layers, "checkpoint", "float64")
    state = s.torch_model("DecoderStack").state_dict()
    short = {name: tensor for name, tensor in state.items() if not name.startswith(f"layers.{s.LAYERS - 1}.")}
    with matrix.precision(case):
        tree = w.from_torch(short, "DecoderStack", scan=layers == "scan")
        step = matrix.make_jax_step(case, tree, num_layers=s.LAYERS - 1)
        result = matrix.jax_result(case, step, s.quick(step.function, *step.arguments))
    wrong = matrix.problems(case, result)
    assert [problem.partition(":")[0] for problem in wrong] == list(matrix.Result._fields)
    # Not only because tensors are missing: the existing ones are wrong too.
    expected = matrix.result(case.reference)
    there = {name: expected.gradients[name] for name in result.gradients}
    distance = max(float(np.linalg.norm(result.gradients[name] - there[name])) for name in there)
    assert distance > 1e-3


def test_a_result_in_the_wrong_dtype_is_seen() -> None:
    single = matrix.result(matrix.Case("linen", "DecoderStack", "scan", "off", "float32"))
    case = matrix.Case("linen", "DecoderStack", "scan", "off", "float64")
    assert len(matrix.problems(case, single)) == 3
    widened = matrix.Result(*(jax.tree.map(lambda x: x.astype("float64"), group) for group in single))
    assert len(matrix.problems(case, widened)) == 3


# Costs: these faults leave the numbers right; only executions and copies show them.


@forms
@pytest.mark.parametrize(("policy", "executions"), [("everything", 1), ("dots", 2), ("off", 1)])
def test_a_checkpoint_that_recomputes_no_matmul_is_seen(framework: str, layers: str, policy: str, executions: int) -> None:
    case = matrix.Case(framework, "ByteDecoder", layers, "checkpoint", "float32")
    expected, cost = matrix.expected_cost(case), matrix.cost(case, policy)
    assert cost != expected and cost.matmuls == matrix.expected_cost(replace(case, mode="off")).matmuls
    assert cost.block_executions == executions * s.LAYERS


@forms
@pytest.mark.parametrize("policy", ["checkpoint", "off", "offload: *ffn/up*"])
def test_an_offload_that_moves_nothing_or_something_else_is_seen(framework: str, layers: str, policy: str) -> None:
    case = matrix.Case(framework, "DecoderStack", layers, "offload", "float32")
    expected, cost = matrix.expected_cost(case), matrix.cost(case, policy)
    assert cost.to_host != expected.to_host and cost.back != expected.back
    # The hidden activations are four times as wide as the layer's input.
    assert cost.to_host == cost.back == (4 * expected.to_host if "ffn" in policy else 0)


@pytest.mark.parametrize("mode", ["checkpoint", "offload"])
def test_a_pytorch_block_that_is_called_plainly_is_seen(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = matrix.Case("torch", "DecoderStack", "unrolled", mode, "float32")
    plain = lambda model, use_gradient_checkpointing, use_gradient_checkpointing_offload, x: model(x)  # noqa: E731
    monkeypatch.setattr(decoder, "gradient_checkpoint_forward", plain)
    assert matrix.cost(case) == matrix.expected_cost(replace(case, mode="off")) != matrix.expected_cost(case)


def test_the_faithful_offload_of_keyword_arguments_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = matrix.Case("torch", "DecoderStack", "unrolled", "offload", "float32")
    monkeypatch.setattr(decoder, "gradient_checkpoint_forward", torch_ref.faithful.gradient_checkpoint_forward)
    with torch_ref.receipt() as receipt:
        cost = matrix.cost(case)
    assert cost == matrix.expected_cost(case)._replace(to_host=0, back=0)
    assert receipt.bytes_offered == matrix.expected_cost(case).to_host and "moved 0 of the" in receipt.warnings[0]
