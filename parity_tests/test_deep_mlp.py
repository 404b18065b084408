"""`DeepMLP` in NNX, which the experiment of `test_deep_mlp_segments.py` leaves out, against PyTorch."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("scan", "policy", "segments"), [(True, "offload: @dots, @inputs", None), (False, "full", None), (False, "off", 3)]
)
def test_its_gradients_are_pytorch_s(scan: bool, policy: str, segments: int | None, x64: None) -> None:
    torch.manual_seed(0)
    model, random = pytorch.DeepMLP(**SIZES).double(), np.random.default_rng(1)
    x, weights = random.normal(size=(4, 5)), random.normal(size=(4, 3))
    (model(torch.tensor(x), segments=segments) * torch.tensor(weights)).sum().backward()
    expected = {name: w.as_numpy(parameter.grad) for name, parameter in model.named_parameters()}
    twin = nnx.eval_shape(lambda: deep_mlp_nnx.DeepMLP(**SIZES, scan=scan, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(w.load_nnx(twin, w.from_torch(model.state_dict(), "DeepMLP", scan=scan)))
    how = {"segments": segments} if segments else {}

    def loss(params: nnx.State) -> jax.Array:
        return jnp.sum(nnx.merge(graph, params)(jnp.asarray(x), **how) * weights)

    applied = loss if policy == "off" else checkpoint_blocks(loss, {deep_mlp_nnx.MlpLayer: policy})
    gradients = w.gradients_to_torch(w.nnx_tree(run(jax.grad(applied), params)), "DeepMLP")
    assert float64_error(expected, gradients)[0] <= LIMIT


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(torch_ref.InvalidArgumentError, match="num_layers is 1, expected at least 2"):
        pytorch.DeepMLP(1)
    with pytest.raises(ValueError, match="num_layers=2, expected at least 3"):
        deep_mlp_nnx.DeepMLP(2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="x has 4 features, expected in_features=5"):
        deep_mlp_linen.DeepMLP(**SIZES).init(jax.random.key(0), jnp.ones((2, 4)))
