"""With dropout, a block that runs twice must draw the same masks twice: within a framework all modes have the same gradient.

The frameworks draw different masks, so they are not compared with each other here.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from flax import nnx

import remat_jax as rj
import torch_ref
from examples.models import linen
from examples.models import nnx as nnx_models
from examples.models import weights as w
from parity_tests import support as s
from remat_jax.parity import float64_error

KIND, RATE = "DecoderStack", 0.3


class Outcome(NamedTuple):
    """Outputs and gradients, and the draws of each random stream (NNX counts them)."""

    tensors: dict[str, np.ndarray]
    draws: dict[str, Any]


@functools.cache
def in_torch(mode: str, seed: int = 0) -> Outcome:
    model = s.make_torch(KIND, dropout=RATE)
    x, weights = (torch.tensor(array) for array in s.data(KIND))
    x.requires_grad_()
    torch.manual_seed(seed)
    output = model(x, **torch_ref.mode_flags(mode))
    (output * weights).sum().backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    tensors = gradients | {"input": x.grad.numpy(), "output": output.detach().numpy()}
    return Outcome(tensors, {"next": torch.rand(1).item()})


@functools.cache
def linen_step(scan: bool, mode: str) -> Any:
    """The compiled gradient; arguments: parameters, input, key."""
    model = linen.DecoderStack(**s.SIZES[KIND], scan=scan, dropout=RATE)
    x, weights = s.data(KIND)

    def loss(params: Any, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = model.apply({"params": params}, x, deterministic=False, rngs={"dropout": key})
        return (output * weights).sum(), output

    gradient = jax.grad(rj.checkpoint_blocks(loss, {linen.DecoderLayer: mode}), (0, 1), has_aux=True)
    return s.quick(jax.jit(gradient), s.parameters(KIND, scan), x, jax.random.key(0))


@functools.cache
def in_linen(scan: bool, mode: str, seed: int = 0) -> Outcome:
    with jax.enable_x64(True):
        step = linen_step(scan, mode)
        (gradients, of_x), output = step(s.parameters(KIND, scan), s.data(KIND).x, jax.random.key(seed))
    return Outcome(_named(gradients, of_x, output), {})


@functools.cache
def nnx_states(seed: int) -> tuple[Any, Any, Any]:
    """The graph definition, the parameters, and the rest: the random streams of a model made with `seed`."""

    def make() -> Any:
        return nnx_models.DecoderStack(**s.SIZES[KIND], scan=True, dropout=RATE, rngs=nnx.Rngs(seed))

    graph, params, _ = nnx.split(w.load_nnx(nnx.eval_shape(make), s.parameters(KIND, True)), nnx.Param, ...)
    return graph, params, s.run(lambda: nnx.split(make(), nnx.Param, ...)[2])


@functools.cache
def nnx_step(mode: str) -> Any:
    """The compiled gradient; arguments: parameters, input, random streams."""
    (x, weights), (graph, params, rest) = s.data(KIND), nnx_states(0)

    def loss(params: Any, x: jax.Array, rest: Any) -> tuple[jax.Array, Any]:
        # A copy, because the counts in `rest` belong to the trace outside the gradient and cannot change here.
        model = nnx.merge(graph, params, rest, copy=True)
        output = model(x, deterministic=False)
        return (output * weights).sum(), (output, nnx.state(model, nnx.RngCount))

    gradient = jax.grad(rj.checkpoint_blocks(loss, {nnx_models.DecoderLayer: mode}), (0, 1), has_aux=True)
    return s.quick(jax.jit(gradient), params, x, rest)


@functools.cache
def in_nnx(mode: str, seed: int = 0) -> Outcome:
    with jax.enable_x64(True):
        _, params, rest = nnx_states(seed)
        (gradients, of_x), (output, counts) = nnx_step(mode)(params, s.data(KIND).x, rest)
    draws = {"/".join(map(str, path)): np.asarray(leaf[...]).tolist() for path, leaf in nnx.to_flat_state(counts)}
    return Outcome(_named(w.nnx_tree(gradients), of_x, output), draws)


def _named(gradients: Any, of_x: Any, output: Any) -> dict[str, np.ndarray]:
    return w.gradients_to_torch(gradients, KIND) | {"input": np.asarray(of_x), "output": np.asarray(output)}


FORMS = {
    "torch": in_torch,
    "linen-unrolled": functools.partial(in_linen, False),
    "linen-scan": functools.partial(in_linen, True),
    "nnx-scan": in_nnx,
}
forms = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize(
    ("form", "mode"), [*((form, "checkpoint") for form in FORMS), ("torch", "offload"), ("nnx-scan", "offload")]
)
def test_every_mode_draws_the_masks_of_the_plain_model(form: str, mode: str) -> None:
    plain, in_mode = FORMS[form]("off"), FORMS[form](mode)
    assert len(in_mode.tensors) == 12 * s.LAYERS + 2
    assert float64_error(plain.tensors, in_mode.tensors)[0] <= s.LIMIT
    assert in_mode.draws == plain.draws


@forms
def test_another_seed_gives_another_gradient(form: str) -> None:
    assert float64_error(FORMS[form]("off").tensors, FORMS[form]("off", seed=1).tensors)[0] > 1e-2


def test_nnx_counts_every_mask_once() -> None:
    """A layer has three dropouts, each with its own stream."""
    assert list(in_nnx("offload").draws.values()) == [[1] * s.LAYERS] * 3
