"""`DeepMLP` in segments, in JAX: kept bytes and executions against closed forms and against PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from examples import pytorch
from examples.models import deep_mlp_nnx
from examples.models import weights as w
from examples.segments import jax_forms
from examples.segments.setting import Setting
from parity_tests.support import LIMIT, run
from remat_jax import checkpoint_blocks
from remat_jax.parity import float64_error

SMALL = Setting(num_layers=16, hidden_size=12, in_features=7, out_features=3, batch=20, rounds=1, depths=(4,), target=None)
ACTIVATION, MASK = 20 * 12 * 4, 20 * 12


@pytest.mark.parametrize(("num_layers", "segments"), [(16, 4), (25, 5)])
def test_checkpoint_sequential_with_the_square_root(num_layers: int, segments: int) -> None:
    form = jax_forms.forms(SMALL, num_layers)[f"√L uniform, {segments}"]
    kept = jax_forms.saved_bytes(SMALL, form, num_layers)
    assert kept == (segments - 1) * ACTIVATION + (segments - 1) * (2 * ACTIVATION + MASK)
    executed = jax_forms.matmul_count(SMALL, form, num_layers)
    assert executed == 3 * num_layers - 1 + num_layers - segments
    # PyTorch executes the same, and of each layer of the last segment it keeps only the result: no mask, no zeros.
    boundaries = pytorch.uniform_boundaries(num_layers, segments)
    cost = pytorch.deep_mlp_cost(num_layers, boundaries, batch=20, **SMALL.widths)
    assert (kept - cost.saved_bytes, executed) == ((segments - 1) * (ACTIVATION + MASK), cost.matmuls)


@pytest.mark.parametrize(("hidden_layers", "segments"), [(16, 4), (64, 8)])
def test_a_nested_scan_with_the_square_root(hidden_layers: int, segments: int) -> None:
    num_layers = hidden_layers + 2
    form = next(form for name, form in jax_forms.forms(SMALL, num_layers).items() if name.startswith("nested scan"))
    # The segments' inputs, the last segment's output for the head, and the zeros and the mask of the first layer's ReLU.
    assert jax_forms.saved_bytes(SMALL, form, num_layers) == (segments + 2) * ACTIVATION + MASK
    # Every hidden layer runs twice, also those of the last segment.
    assert jax_forms.matmul_count(SMALL, form, num_layers) == 3 * num_layers - 1 + hidden_layers


@pytest.mark.parametrize("form", jax_forms.forms(SMALL))
def test_every_form_is_its_closed_form(form: str) -> None:
    jax_form = jax_forms.forms(SMALL)[form]
    assert jax_forms.saved_bytes(SMALL, jax_form) == jax_form.saved_bytes
    assert jax_forms.matmul_count(SMALL, jax_form) == 3 * 16 - 1 + jax_form.recomputed


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
