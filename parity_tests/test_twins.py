"""The Flax counterparts compute what plain PyTorch computes in every mode; and properties that the matrix does not test."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from examples.models import nnx as nnx_models
from examples.models import weights as w
from examples.models.functions import cross_entropy
from parity_tests import matrix
from parity_tests import support as s
from parity_tests.support import LAYERS, LIMIT, SIZES, data, is_matmul, make_torch, parameters, run, twin
from remat_jax.cost.count import count
from remat_jax.parity import float64_error

pytestmark = pytest.mark.usefixtures("x64")


def torch_gradients(**options: Any) -> dict[str, np.ndarray]:
    x, weights = (torch.tensor(array) for array in data("DecoderLayer"))
    model = make_torch("DecoderLayer", **options)
    (model(x) * weights).sum().backward()
    return {name: w.as_numpy(parameter.grad) for name, parameter in model.named_parameters()}


def test_the_causal_layer_and_pytorch_s_own_attention_agree() -> None:
    x, weights = data("DecoderLayer")
    layer = twin("DecoderLayer", "linen", False, parameters("DecoderLayer", False), causal=True)
    gradients = run(jax.grad(lambda p: jnp.sum(layer.apply(p, x) * weights)), layer.parameters)
    grads = w.gradients_to_torch(gradients, "DecoderLayer")
    assert float64_error(torch_gradients(causal=True, explicit_attention=False), grads)[0] <= LIMIT
    assert float64_error(torch_gradients(causal=False), grads)[0] > 1e-3


@pytest.mark.parametrize("scan", [False, True])
def test_linen_s_name_stack_tells_the_matmuls_apart(scan: bool) -> None:
    model = twin("DecoderStack", "linen", scan, parameters("DecoderStack", scan))
    jaxpr = jax.make_jaxpr(model.apply)(model.parameters, data("DecoderStack").x)
    names: list[str] = []
    count(jaxpr, lambda eqn: is_matmul(eqn) and not names.append(str(eqn.source_info.name_stack)))
    inside = ["self_attn/in_proj", "self_attn/scores", "self_attn/mixed", "self_attn/out_proj", "ffn/up", "ffn/down"]
    layers = ["layers"] if scan else [f"layers_{i}" for i in range(LAYERS)]
    ends = [f"{layer}/{name}" for layer in layers for name in inside]
    assert len(names) == len(ends) and all(name.endswith(end) for name, end in zip(names, ends, strict=True)), names


@pytest.mark.parametrize(("dtype", "result"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_cross_entropy_is_pytorch_s(dtype: str, result: str) -> None:
    random = np.random.default_rng(3)
    logits, targets = random.normal(size=(5, 7)) * 30, random.integers(0, 7, 5)
    loss = cross_entropy(jnp.asarray(logits, dtype), jnp.asarray(targets))
    exact = torch.tensor(np.asarray(jnp.asarray(logits, dtype).astype("float64")))
    expected = torch.nn.functional.cross_entropy(exact, torch.tensor(targets)).item()
    assert loss.dtype == result and abs(float(loss) - expected) <= 4 * jnp.finfo(result).eps * expected


def test_nnx_grad_and_a_second_call_of_one_model_work() -> None:
    expected = matrix.result(matrix.Case("torch", "ByteDecoder", "unrolled", "off", "float64")).gradients
    model = nnx.eval_shape(lambda: nnx_models.ByteDecoder(**SIZES["ByteDecoder"], scan=True, rngs=nnx.Rngs(0)))
    model = w.load_nnx(model, parameters("ByteDecoder", True))
    tokens, targets = map(jnp.asarray, data("ByteDecoder"))
    step = nnx.jit(nnx.value_and_grad(lambda model: model.loss(tokens, targets)))
    (first, gradients), (second, _) = step(model), step(model)
    grads = w.gradients_to_torch(w.nnx_tree(gradients), "ByteDecoder")
    assert first == second and float64_error(expected, grads)[0] <= LIMIT


@pytest.mark.parametrize("case", matrix.RUN, ids=str)
def test_outputs_gradients_and_an_adam_step_agree(case: matrix.Case) -> None:
    assert matrix.problems(case, matrix.result(case)) == []


# One case per mode, so that a fault shows under every policy.
CONTROLS = [
    matrix.Case("linen", "ByteDecoder", "scan", "off", "float64"),
    matrix.Case("linen", "ByteDecoder", "unrolled", "checkpoint", "float32"),
    matrix.Case("nnx", "DecoderStack", "unrolled", "offload", "float32"),
]


@pytest.mark.parametrize("case", CONTROLS, ids=str)
@pytest.mark.parametrize("group", ["gradients", "after_adam"])
def test_a_flipped_sign_of_any_tensor_and_a_missed_transpose_of_a_square_one_are_seen(group: str, case: matrix.Case) -> None:
    result = matrix.result(case)
    tensors = getattr(result, group)
    square = [name for name in tensors if name.endswith("out_proj.weight")]
    assert len(tensors) >= 24 and len(square) == s.LAYERS
    for name, wrong_tensor in [*((name, -tensors[name]) for name in tensors), *((name, tensors[name].T) for name in square)]:
        wrong = matrix.problems(case, result._replace(**{group: tensors | {name: wrong_tensor}}))
        assert len(wrong) == 1 and wrong[0].startswith(f"{group}: {name} "), wrong
