"""`DeepMLP` in both frameworks: the same numbers in every form, and a weight map that fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref
from examples import pytorch
from examples.models import deep_mlp_linen, deep_mlp_nnx
from examples.models import weights as w
from parity_tests.support import LIMIT, run
from remat_jax import checkpoint_blocks
from remat_jax.parity import float64_error

SIZES = {"num_layers": 6, "hidden_size": 7, "in_features": 5, "out_features": 3}
MODULES = {"linen": deep_mlp_linen, "nnx": deep_mlp_nnx}


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.normal(size=(4, 5)), random.normal(size=(4, 3))


@pytest.fixture(scope="module")
def model() -> pytorch.DeepMLP:
    torch.manual_seed(0)
    return pytorch.DeepMLP(**SIZES).double()


@pytest.fixture(scope="module")
def expected(model: pytorch.DeepMLP, data: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    return torch_gradients(model, data)


def torch_gradients(model: pytorch.DeepMLP, data: tuple[np.ndarray, np.ndarray], **how: Any) -> dict[str, np.ndarray]:
    x, weights = (torch.tensor(array) for array in data)
    model.zero_grad()
    (model(x, **how) * weights).sum().backward()
    return {name: w.as_numpy(parameter.grad) for name, parameter in model.named_parameters()}


def flax_gradients(api: str, tree: Any, data: tuple[np.ndarray, np.ndarray], *, scan: bool, policy: str = "off", **how: Any):
    """Gradients in PyTorch's form of the Flax model with the weights `tree`."""
    module = MODULES[api]
    x, weights = data
    if api == "linen":
        flax = module.DeepMLP(**SIZES, scan=scan)
        params, to_tree = tree, lambda grads: grads

        def apply(params: Any) -> jax.Array:
            return flax.apply({"params": params}, x, **how)
    else:
        made = nnx.eval_shape(lambda: module.DeepMLP(**SIZES, scan=scan, rngs=nnx.Rngs(0)))
        graph, params = nnx.split(w.load_nnx(made, tree))
        to_tree = w.nnx_tree

        def apply(params: Any) -> jax.Array:
            return nnx.merge(graph, params)(jnp.asarray(x), **how)

    def loss(params: Any) -> jax.Array:
        return jnp.sum(apply(params) * weights)

    loss = checkpoint_blocks(loss, {module.MlpLayer: policy}) if policy != "off" else loss
    return w.gradients_to_torch(to_tree(run(jax.grad(loss), params)), "DeepMLP")


@pytest.mark.parametrize("how", [{"segments": 3}, {"segments": (1, 4)}, {"use_gradient_checkpointing": True}])
def test_every_form_of_pytorch_has_the_plain_gradients(model, data, expected, how) -> None:
    assert float64_error(expected, torch_gradients(model, data, **how))[0] <= LIMIT
    assert min(np.linalg.norm(gradient) for gradient in expected.values()) > 1e-6


@pytest.mark.parametrize(
    ("api", "scan", "policy"),
    [
        ("linen", False, "off"),
        ("linen", True, "full"),
        ("linen", True, "offload: @dots, @inputs"),
        ("nnx", True, "offload_inputs"),
        ("nnx", False, "full"),
    ],
)
def test_the_twins_have_pytorch_s_gradients(model, data, expected, api, scan, policy) -> None:
    tree = w.from_torch(model.state_dict(), "DeepMLP", scan=scan)
    assert float64_error(expected, flax_gradients(api, tree, data, scan=scan, policy=policy))[0] <= LIMIT


@pytest.mark.parametrize(("api", "segments"), [("linen", 3), ("nnx", 6)])
def test_the_twins_in_segments_have_pytorch_s_gradients(model, data, expected, api, segments) -> None:
    tree = w.from_torch(model.state_dict(), "DeepMLP")
    assert float64_error(expected, flax_gradients(api, tree, data, scan=False, segments=segments))[0] <= LIMIT


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(torch_ref.InvalidArgumentError, match="num_layers is 1, expected at least 2"):
        pytorch.DeepMLP(1)
    with pytest.raises(ValueError, match="num_layers=2, expected at least 3"):
        deep_mlp_nnx.DeepMLP(2, rngs=nnx.Rngs(0))
    linen = deep_mlp_linen.DeepMLP(**SIZES)
    with pytest.raises(ValueError, match="x has 4 features, expected in_features=5"):
        linen.init(jax.random.key(0), jnp.ones((2, 4)))
