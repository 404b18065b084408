"""The Flax twins compute what the PyTorch models compute: outputs and every gradient, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref
from examples import text
from examples.models import linen
from examples.models import nnx as nnx_models
from examples.models import weights as w
from examples.models.functions import cross_entropy
from remat_jax.parity import TOLERANCES, float64_error, judge

LIMIT = TOLERANCES["float64"].value
LAYERS = 2
SIZES: dict[str, dict[str, int]] = {
    "ToyModel": {},
    "DecoderLayer": {"d_model": 16, "nhead": 4},
    "DecoderStack": {"num_layers": LAYERS, "d_model": 16, "nhead": 4},
    "ByteDecoder": {"d_model": 16, "nhead": 4, "num_layers": LAYERS, "max_len": 12},
}
FORMS = [(kind, api, scan) for kind in SIZES for api in ("linen", "nnx") for scan in (False, True)]
FORMS = [form for form in FORMS if not (form[2] and form[0] in ("ToyModel", "DecoderLayer"))]
forms = pytest.mark.parametrize(("kind", "api", "scan"), FORMS, ids=lambda value: str(value))


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Side(NamedTuple):
    """What one framework computed: the output, and the gradients in Linen's paths, the input's among them."""

    output: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


class Data(NamedTuple):
    """Inputs of a model and the weights that make a scalar of its output."""

    inputs: tuple[np.ndarray, ...]
    cotangent: np.ndarray | None


@functools.cache
def torch_model(kind: str, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = getattr(torch_ref, kind)(**SIZES[kind], **options).double()
    with torch.no_grad():  # at their initial 0 and 1, biases and scales would hide a wrong map
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def data(kind: str) -> Data:
    if kind == "ByteDecoder":
        return Data(text.batches(seed=0, batch=2, length=9, steps=1)[0], None)
    random = np.random.default_rng(1)
    return Data((random.normal(size=(2, 7, 16)),), random.normal(size=(2, 7, 16)))


@functools.cache
def torch_side(kind: str, scan: bool, dtype: str = "float64", **options: Any) -> Side:
    model = torch_model(kind, **options)
    working = getattr(torch_ref, kind)(**SIZES[kind], **options).to(getattr(torch, dtype))
    working.load_state_dict(model.state_dict())
    inputs, cotangent = data(kind)
    if cotangent is None:
        output = working(torch.tensor(inputs[0]))
        working.loss(*(torch.tensor(x).long() for x in inputs)).backward()
        gradients = {}
    else:
        x = torch.tensor(inputs[0].astype(dtype), requires_grad=True)
        output = working(x)
        (output * torch.tensor(cotangent.astype(dtype))).sum().backward()
        gradients = {"input": w.as_numpy(x.grad)}
    tree = w.gradients_from_torch({name: p.grad for name, p in working.named_parameters()}, kind, scan=scan)
    return Side({"output": w.as_numpy(output)}, w.flatten(tree) | gradients)


def parameters(kind: str, scan: bool, dtype: str = "float64", **options: Any) -> dict[str, Any]:
    tree = w.from_torch(torch_model(kind, **options).state_dict(), kind, scan=scan)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


class Twin(NamedTuple):
    """A Flax model as a function: `apply(parameters, *inputs, method=…)`; `tree` makes Linen's form of the former."""

    apply: Callable[..., jax.Array]
    parameters: Any
    tree: Callable[[Any], dict[str, Any]]


def twin(kind: str, api: str, scan: bool, tree: dict[str, Any], **options: Any) -> Twin:
    options = SIZES[kind] | ({"scan": scan} if "num_layers" in SIZES[kind] else {}) | options
    if api == "linen":
        model = getattr(linen, kind)(**options)
        return Twin(lambda p, *inputs, **kwargs: model.apply({"params": p}, *inputs, **kwargs), tree, lambda p: p)
    make = getattr(nnx_models, kind)
    # Abstract until it is loaded: a parameter that were not filled could not be computed with.
    model = nnx.eval_shape(lambda: make(**options) if kind == "ToyModel" else make(**options, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(w.load_nnx(model, tree))

    def apply(state: Any, *inputs: Any, method: str = "__call__") -> jax.Array:
        return getattr(type(model), method)(nnx.merge(graph, state), *inputs)

    return Twin(apply, state, w.nnx_tree)


def jax_side(kind: str, api: str, scan: bool, tree: dict[str, Any], dtype: str = "float64", **options: Any) -> Side:
    model = twin(kind, api, scan, tree, **options)
    inputs, cotangent = data(kind)

    def loss_and_output(p: Any, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = model.apply(p, inputs[0])
        if cotangent is None:
            return model.apply(p, *inputs, method="loss"), output
        return jnp.sum(output * cotangent.astype(dtype)), output

    arrays = inputs if cotangent is None else (inputs[0].astype(dtype),)
    argnums = (0,) if cotangent is None else (0, 1)
    gradients, output = jax.jit(jax.grad(loss_and_output, argnums, has_aux=True))(model.parameters, *arrays)
    input_gradient = {} if cotangent is None else {"input": np.asarray(gradients[1])}
    return Side({"output": np.asarray(output)}, w.flatten(model.tree(gradients[0])) | input_gradient)


def errors(kind: str, scan: bool, found: Side) -> tuple[float, float]:
    expected = torch_side(kind, scan)
    return float64_error(expected.output, found.output)[0], float64_error(expected.gradients, found.gradients)[0]


@forms
def test_outputs_and_gradients_agree_in_float64(kind: str, api: str, scan: bool) -> None:
    found = jax_side(kind, api, scan, parameters(kind, scan))
    expected = {"ToyModel": 1, "DecoderLayer": 13, "DecoderStack": 12 * (1 if scan else LAYERS) + 1}
    assert len(found.gradients) == expected.get(kind, 12 * (1 if scan else LAYERS) + 4)
    output, gradients = errors(kind, scan, found)
    assert output <= LIMIT and gradients <= LIMIT, (output, gradients)


@forms
def test_outputs_and_gradients_pass_the_parity_rule_in_float32(kind: str, api: str, scan: bool) -> None:
    exact, single = torch_side(kind, scan), torch_side(kind, scan, "float32")
    found = jax_side(kind, api, scan, parameters(kind, scan, "float32"), "float32")
    for what in ("output", "gradients"):
        rows = judge(getattr(exact, what), getattr(found, what), getattr(single, what), "float32")
        assert [row for row in rows if not row.passed] == []


def test_the_causal_layer_and_pytorch_s_own_attention_agree() -> None:
    expected = torch_side("DecoderLayer", scan=False, causal=True, explicit_attention=False)
    tree = parameters("DecoderLayer", scan=False, causal=True, explicit_attention=False)
    found = jax_side("DecoderLayer", "linen", False, tree, causal=True)
    assert float64_error(expected.gradients, found.gradients)[0] <= LIMIT
    assert float64_error(expected.gradients, jax_side("DecoderLayer", "linen", False, tree).gradients)[0] > 1e-3


# Negative controls: each planted fault must be seen.


@pytest.mark.parametrize("scan", [False, True])
def test_a_sign_flip_of_any_gradient_is_seen(scan: bool) -> None:
    expected = torch_side("ByteDecoder", scan).gradients
    for name, gradient in expected.items():
        error, where = float64_error(expected, expected | {name: -gradient})
        assert error > 1e-2 and where == name


@pytest.mark.parametrize("name", ["self_attn/out_proj/kernel"])
@pytest.mark.parametrize("kind", ["DecoderLayer", "DecoderStack"])
def test_a_missed_transpose_of_a_square_kernel_is_seen(kind: str, name: str) -> None:
    path = name if kind == "DecoderLayer" else f"layers_1/{name}"
    tree = parameters(kind, scan=False)
    flat = w.flatten(tree)
    assert flat[path].shape == (16, 16)
    wrong = w.unflatten_dict(flat | {path: flat[path].T}, sep="/")
    output, gradients = errors(kind, False, jax_side(kind, "linen", False, wrong))
    assert output > 1e-3 and gradients > 1e-3
    right = jax_side(kind, "linen", False, tree)
    untransposed = right._replace(gradients=right.gradients | {path: right.gradients[path].T})
    assert errors(kind, False, untransposed)[1] > 1e-3


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("scan", [False, True])
def test_a_forgotten_layer_is_seen(api: str, scan: bool) -> None:
    state = torch_model("DecoderStack").state_dict()
    full = w.from_torch(state, "DecoderStack", scan=scan)
    short = {name: tensor for name, tensor in state.items() if not name.startswith(f"layers.{LAYERS - 1}.")}
    with pytest.raises(ValueError, match="12 problems"):
        w.from_torch(short, "DecoderStack", scan=scan, like=full)
    gap = {name: tensor for name, tensor in state.items() if not name.startswith("layers.0.")}
    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.0\.bias: missing"):
        w.from_torch(gap, "DecoderStack", scan=scan)
    tree = w.from_torch(short, "DecoderStack", scan=scan)
    found = jax_side("DecoderStack", api, scan, tree, num_layers=LAYERS - 1)
    assert min(errors("DecoderStack", scan, found)) > 1e-3


# The weight map.


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("scan", [False, True])
def test_the_map_and_its_adjoint_are_adjoint_and_inverse(kind: str, scan: bool) -> None:
    state = {name: w.as_numpy(tensor) for name, tensor in torch_model(kind).state_dict().items()}
    random = np.random.default_rng(2)
    tree = w.from_torch(state, kind, scan=scan)
    cotangents = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), tree)
    back = w.gradients_to_torch(cotangents, kind)
    left = sum(float(np.vdot(a, b)) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(cotangents), strict=True))
    assert left == pytest.approx(sum(float(np.vdot(state[name], back[name])) for name in state), rel=1e-12)
    again = w.gradients_to_torch(tree, kind)
    assert again.keys() == state.keys() and all(np.array_equal(again[name], state[name]) for name in state)


def test_weights_that_do_not_fit_are_all_named() -> None:
    state = dict(torch_model("DecoderLayer").state_dict())
    del state["norm1.weight"], state["ffn.0.bias"]
    state["stray"] = torch.zeros(1)
    with pytest.raises(ValueError) as error:
        w.from_torch(state, "DecoderLayer")
    assert all(text in str(error.value) for text in ("3 problems", "norm1.weight: missing", "ffn.0.bias: missing"))
    assert "stray: fits no parameter of DecoderLayer" in str(error.value)
    with pytest.raises(ValueError, match="'Decoder' is unknown: choose one of ToyModel, DecoderLayer"):
        w.from_torch({}, "Decoder")


def test_a_gradient_that_never_arrived_is_missing() -> None:
    gradients = dict(torch_model("DecoderLayer").named_parameters()) | {"norm2.bias": None}
    with pytest.raises(ValueError, match=r"norm2\.bias: missing"):
        w.gradients_from_torch(gradients, "DecoderLayer")


def test_loading_nnx_checks_shapes_and_refuses_to_lose_precision() -> None:
    model = nnx_models.DecoderLayer(8, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"self_attn/in_proj/kernel: shape \(16, 48\), expected \(8, 24\)"):
        w.load_nnx(model, parameters("DecoderLayer", False))
    with jax.enable_x64(False), pytest.raises(ValueError, match="float32 of them: enable x64"):
        w.load_nnx(nnx_models.DecoderLayer(16, 4, rngs=nnx.Rngs(0)), parameters("DecoderLayer", False))


def test_bfloat16_tensors_keep_their_dtype_and_value() -> None:
    tensor = torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert w.as_numpy(tensor).dtype == jnp.bfloat16
    assert w.as_numpy(tensor).astype("float64").tolist() == tensor.double().tolist()


def test_arrays_do_not_change_with_the_parameter_they_came_from() -> None:
    parameter = torch.zeros(2)
    array = w.as_numpy(parameter)
    parameter.add_(1)
    assert array.tolist() == [0, 0]


# What is executed.


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Every equation of a jaxpr with the number of its executions; a scan's body runs `length` times."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                each = getattr(each, "jaxpr", each)
                if hasattr(each, "eqns"):
                    yield from equations(each, inner)


def matmuls(function: Callable, *args: Any) -> int:
    found = equations(jax.make_jaxpr(function)(*args).jaxpr)
    return sum(times for eqn, times in found if eqn.primitive.name == "dot_general")


@forms
def test_forward_and_backward_execute_the_matmuls_of_pytorch(kind: str, api: str, scan: bool) -> None:
    forward = 6 * {"ToyModel": 0, "DecoderLayer": 1}.get(kind, LAYERS) + (kind == "ByteDecoder")
    model, x = twin(kind, api, scan, parameters(kind, scan)), data(kind).inputs[0]
    wanted = 0 if kind == "ByteDecoder" else (0, 1)
    assert matmuls(model.apply, model.parameters, x) == forward
    assert matmuls(jax.grad(lambda *args: jnp.sum(model.apply(*args)), wanted), model.parameters, x) == 3 * forward
    torch_x = torch.tensor(x, requires_grad=kind != "ByteDecoder")
    with torch_ref.count_matmuls() as count:
        output = torch_model(kind)(torch_x)
    assert count.total == forward
    with torch_ref.count_matmuls() as count:
        output.sum().backward()
    assert count.total == 2 * forward


@pytest.mark.parametrize("scan", [False, True])
def test_linen_s_name_stack_tells_the_matmuls_apart(scan: bool) -> None:
    model = twin("DecoderStack", "linen", scan, parameters("DecoderStack", scan))
    jaxpr = jax.make_jaxpr(model.apply)(model.parameters, data("DecoderStack").inputs[0])
    names = [
        str(eqn.source_info.name_stack) for eqn, _ in equations(jaxpr.jaxpr) if eqn.primitive.name == "dot_general"
    ]
    inside = ["self_attn/in_proj", "self_attn/scores", "self_attn/mixed", "self_attn/out_proj", "ffn/up", "ffn/down"]
    layers = ["layers"] if scan else [f"layers_{i}" for i in range(LAYERS)]
    ends = [f"{layer}/{name}" for layer in layers for name in inside]
    assert len(names) == len(ends) and all(name.endswith(end) for name, end in zip(names, ends, strict=True)), names


@pytest.mark.parametrize(("dtype", "result"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_cross_entropy_is_pytorch_s(dtype: str, result: str) -> None:
    random = np.random.default_rng(3)
    logits, targets = random.normal(size=(5, 7)) * 30, random.integers(0, 7, 5)
    found = cross_entropy(jnp.asarray(logits, dtype), jnp.asarray(targets))
    exact = torch.tensor(np.asarray(jnp.asarray(logits, dtype).astype("float64")))
    expected = torch.nn.functional.cross_entropy(exact, torch.tensor(targets)).item()
    assert found.dtype == result and abs(float(found) - expected) <= 4 * jnp.finfo(result).eps * expected


def test_nnx_grad_and_a_second_call_of_one_model_work() -> None:
    expected = torch_side("ByteDecoder", scan=True)
    model = w.load_nnx(
        nnx_models.ByteDecoder(**SIZES["ByteDecoder"], scan=True, rngs=nnx.Rngs(0)), parameters("ByteDecoder", True)
    )
    tokens, targets = (jnp.asarray(x) for x in data("ByteDecoder").inputs)
    step = nnx.jit(nnx.value_and_grad(lambda model: model.loss(tokens, targets)))
    (first, gradients), (second, _) = step(model), step(model)
    assert first == second and float64_error(expected.gradients, w.flatten(w.nnx_tree(gradients)))[0] <= LIMIT
