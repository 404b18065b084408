"""Every layer that the weight maps name: values and gradients of both frameworks, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity_tests.porting_layers import BATCH_NORM, LAYERS, NORM_OPTIONS, Layer
from parity_tests.support import run
from remat_jax import porting
from remat_jax.parity import float64_error
from remat_jax.porting.variables import Variables

LIMIT = 1e-12


pytestmark = pytest.mark.usefixtures("x64")


class Answer(NamedTuple):
    """A layer's output, and the gradients of its parameters and of its input."""

    output: Any
    gradients: Any
    of_input: Any


def make_torch(layer: Layer) -> torch.nn.Module:
    torch.manual_seed(0)
    model = layer.torch().double()
    with torch.no_grad():  # away from 0 and 1, where biases, scales and statistics would hide a wrong map
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn_like(tensor) * 0.5 if "var" not in name else torch.rand_like(tensor) + 0.5)
    return model


def make_input(layer: Layer) -> np.ndarray:
    random = np.random.default_rng(1)
    return random.integers(0, layer.tokens, layer.shape) if layer.tokens else random.normal(size=layer.shape)


def torch_answer(layer: Layer, model: torch.nn.Module) -> Answer:
    x = torch.tensor(make_input(layer))
    x.requires_grad_(not layer.tokens)
    output = layer.torch_call(model, x)
    (output * output.sin()).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Answer(output.detach().numpy(), gradients, None if x.grad is None else x.grad.numpy())


def flax_model(layer: Layer) -> tuple[Any, Callable[..., Any]]:
    """Its variables as shapes, and its call with them."""
    if isinstance(layer.flax, nn.Module):
        x = jnp.asarray(make_input(layer))
        shapes = jax.eval_shape(lambda: nn.init(layer.flax_call, layer.flax)(jax.random.key(0), x))
        return shapes, lambda variables, x: nn.apply(layer.flax_call, layer.flax)(variables, x)
    graph, shapes = nnx.split(nnx.eval_shape(layer.flax))
    return shapes, lambda state, x: layer.flax_call(nnx.merge(graph, state), x)


def flax_answer(layer: Layer, variables: Any, call: Callable[..., Any]) -> Answer:
    def loss(variables: Any, x: Any) -> Any:
        output = call(variables, x)
        return jnp.sum(output * jnp.sin(output)), output

    x = jnp.asarray(make_input(layer))
    wanted = 0 if layer.tokens else (0, 1)
    gradients, output = run(jax.grad(loss, wanted, has_aux=True), variables, x)
    of_variables, of_input = (gradients, None) if layer.tokens else gradients
    return Answer(np.asarray(output), of_variables, of_input)


def close(first: dict[str, Any], second: dict[str, Any]) -> bool:
    arrays = ({name: np.asarray(x) for name, x in tensors.items()} for tensors in (first, second))
    return float64_error(*arrays)[0] <= LIMIT


def flat(tree: Any) -> dict[str, Any]:
    return Variables(tree, trainable=True).leaves


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_those_of_pytorch(name: str) -> None:
    layer = LAYERS[name]
    model = make_torch(layer)
    shapes, call = flax_model(layer)
    lacks_bias = "missing:" in layer.rules
    if lacks_bias:
        shapes["params"]["out"]["bias"] = np.zeros(8)
    state = model.state_dict()
    variables = porting.from_torch(state, shapes, layer.rules)
    theirs, ours = torch_answer(layer, model), flax_answer(layer, variables, call)
    assert close({"output": theirs.output}, {"output": ours.output})
    if not layer.tokens:
        assert close({"input": theirs.of_input}, {"input": ours.of_input})
    expected, gradients = flat(porting.gradients_from_torch(theirs.gradients, shapes, layer.rules)), flat(ours.gradients)
    if lacks_bias:
        expected["params/out/bias"] = gradients["params/out/bias"]
    assert close(expected, gradients)
    back = porting.gradients_to_torch(ours.gradients, layer.rules, numpy=True)
    assert close({name: gradient.numpy() for name, gradient in theirs.gradients.items()}, back)
    again = porting.to_torch(variables, layer.rules, like=state)
    loses = ("scale(", "norm_plus_one", "sum", "lstm_bias", "gru_bias")
    assert again.keys() == state.keys()
    if not any(word in layer.rules for word in loses):
        assert all(torch.equal(again[name], state[name]) for name in state)


def test_batch_norm_in_training_and_what_its_running_variance_differs_by() -> None:
    """PyTorch's momentum is the share of the new value, Flax's of the old; PyTorch keeps the unbiased variance, Flax the
    biased.
    """
    layer = Layer(lambda: torch.nn.BatchNorm1d(6, momentum=0.2), None, BATCH_NORM, (5, 6))
    flax = nn.BatchNorm(use_running_average=False, momentum=0.8, **NORM_OPTIONS)
    model, x = make_torch(layer), jnp.asarray(make_input(layer))
    variables = porting.from_torch(model.state_dict(), flax.init(jax.random.key(0), x), BATCH_NORM)
    theirs = torch_answer(layer, model)

    def loss(params: Any, x: Any) -> Any:
        output, updates = flax.apply({**variables, **params}, x, mutable=["batch_stats"])
        return jnp.sum(output * jnp.sin(output)), (output, updates["batch_stats"])

    params = {"params": variables["params"]}
    (gradients, of_input), (output, stats) = run(jax.grad(loss, (0, 1), has_aux=True), params, x)
    back = porting.gradients_to_torch(gradients, BATCH_NORM, numpy=True)
    assert close({"output": theirs.output, "input": theirs.of_input}, {"output": output, "input": of_input})
    assert close({name: gradient.numpy() for name, gradient in theirs.gradients.items()}, back)
    assert close({"mean": model.running_mean.numpy()}, {"mean": stats["mean"]})
    old = np.asarray(variables["batch_stats"]["var"])
    biased = 0.8 * old + (np.asarray(stats["var"]) - 0.8 * old) * 5 / 4
    assert close({"var": model.running_var.numpy()}, {"var": biased})
    assert not close({"var": model.running_var.numpy()}, {"var": stats["var"]})


def test_a_scaled_weight_s_gradient_by_the_map_of_its_values_would_be_wrong() -> None:
    layer = LAYERS["embedding-scaled"]
    model = make_torch(layer)
    shapes, call = flax_model(layer)
    theirs = torch_answer(layer, model)
    ours = flax_answer(layer, porting.from_torch(model.state_dict(), shapes, layer.rules), call)
    by_values = porting.from_torch(theirs.gradients, shapes, layer.rules)
    gradient = flat(ours.gradients)["params/embedding"]
    assert np.linalg.norm(flat(by_values)["params/embedding"] - gradient) / np.linalg.norm(gradient) == pytest.approx(14)
