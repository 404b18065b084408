"""The captures in numbers: each call once, also through checkpoints and loops, and its share of the loss."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.utils.checkpoint import checkpoint

import remat_jax as rj
from remat_jax.parity.capture_flax import capture_flax
from remat_jax.parity.capture_torch import _Recorder, capture_torch

X = np.array([[0.5, -2.0, 1.0]])


class Checkpointed(torch.nn.Module):
    """tanh(2x) in a checkpoint, and a shared module called twice."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner, self.scale = way, torch.nn.Tanh(), torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def twice(x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.scale * x)

        if self.way == "plain":
            return self.inner(twice(x))
        return self.inner(checkpoint(twice, x, use_reentrant=self.way == "reentrant"))


@pytest.mark.parametrize("way", ["plain", "checkpointed", "reentrant"])
def test_torch_calls_are_there_once_with_what_they_got_of_the_loss(way: str) -> None:
    model = Checkpointed(way)
    model.scale.grad = torch.tensor(7.0, dtype=torch.float64)
    trace = capture_torch(model, (X,), lambda output: output.sum())
    assert [call.name for call in trace.calls] == ["inner", "inner#1", ""]
    assert "inner#1" in trace and "inner#2" not in trace and trace["inner"].input_names == ("input",)
    first, second = trace["inner"], trace["inner#1"]
    inner = np.tanh(2 * X)
    assert np.allclose(first.outputs[0], inner, rtol=1e-14) and np.allclose(second.outputs[0], np.tanh(inner), rtol=1e-14)
    slope = 1 - np.tanh(inner) ** 2
    for cotangents, expected in ((second.output_cotangents, np.ones((1, 3))), (second.input_cotangents, slope)):
        assert cotangents[0] is not None and np.allclose(cotangents[0], expected, rtol=1e-14)
    for cotangents, expected in ((first.output_cotangents, slope), (first.input_cotangents, slope * (1 - inner**2))):
        assert cotangents[0] is not None and np.allclose(cotangents[0], expected, rtol=1e-14)
    assert np.allclose(trace[""].gradients["scale"], np.sum(slope * (1 - inner**2) * X))
    assert model.scale.grad.item() == 7.0 and trace.stale == ()
    assert not model.inner._forward_hooks and not model.inner._forward_pre_hooks


def test_a_recomputation_that_draws_other_numbers_is_told() -> None:
    class Noisy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand(3)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noisy = Noisy()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.noisy, x, use_reentrant=False, preserve_rng_state=False, early_stop=False)

    assert capture_torch(Model(), (X,)).stale == ("noisy",)


def test_a_cotangent_is_that_of_one_call_and_not_of_all_that_reads_the_array() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.idle = torch.nn.Tanh(), torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 3 * self.idle(x) + 5 * self.one(x) + 7 * x

    trace = capture_torch(Both(), (X,), lambda output: output.sum())
    for name, expected in (("idle", np.full((1, 3), 3.0)), ("one", 5 * (1 - np.tanh(X) ** 2))):
        cotangent = trace[name].input_cotangents[0]
        assert cotangent is not None and np.allclose(cotangent, expected, rtol=1e-14)


class Layer(nn.Module):
    """x · tanh(scale · x)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x * Slope(name="slope")(x)


class Slope(nn.Module):
    """tanh(scale · x), scale being a parameter."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.param("scale", nn.initializers.constant(2.0), (), x.dtype) * x)


class Model(nn.Module):
    """Two layers, by name."""

    form: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if "scan" not in self.form:
            kind = nn.remat(Layer) if self.form == "remat" else Layer
            for index in range(2):
                x = kind(name=f"layers_{index}")(x)
            return x
        kind = nn.remat(Layer) if self.form == "scan of remat" else Layer
        scan = nn.scan(lambda layer, x: (layer(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return scan(kind(name="layers"), x)[0]


@pytest.mark.parametrize(
    ("form", "policy"),
    [("plain", None), ("remat", None), ("scan of remat", None), ("plain", "full"), ("scan", "full"), ("scan", "save: *slope*")],
)
def test_flax_layers_are_there_once_and_one_by_one(form: str, policy: str | None) -> None:
    model: Any = Model(form)
    with jax.enable_x64(True):
        x = jnp.asarray(X)
        variables = model.init(jax.random.key(0), x)
        transform = None if policy is None else (lambda f: rj.checkpoint_blocks(f, {Layer: policy}))
        trace = capture_flax(model, variables, (x,), jnp.sum, transform=transform)
    join = "/" if "scan" in form else "_"
    paths = [f"layers{join}{index}{end}" for index in range(2) for end in ("/slope", "")]
    assert [call.name for call in trace.calls] == [*paths, ""] and trace.stale == trace.hidden == ()
    slope = np.tanh(2 * X)
    middle = X * slope
    last = trace[paths[3]]
    expected = np.tanh(2 * middle) + 2 * middle * (1 - np.tanh(2 * middle) ** 2)
    assert np.allclose(last.inputs[0], middle, rtol=1e-14)
    assert last.input_cotangents[0] is not None and np.allclose(last.input_cotangents[0], expected, rtol=1e-13)
    first = trace[paths[0]]
    assert first.output_cotangents[0] is not None and np.allclose(first.output_cotangents[0], expected * X, rtol=1e-13)
    assert np.allclose(first.gradients["scale"], np.sum(expected * X * (1 - slope**2) * X), rtol=1e-13)
    assert trace.calls[first.parent or 0].name == paths[1]


def test_a_function_that_was_jitted_and_traced_before_is_seen_again() -> None:
    model = Model("plain")
    jitted = jax.jit(model.apply)
    x = jnp.asarray(X, jnp.float32)
    variables = model.init(jax.random.key(0), x)
    for _ in range(2):
        trace = capture_flax(model, variables, (x,), call=lambda _, variables, x: jitted(variables, x))
        assert len(trace.calls) == 5 and trace["layers_1"].input_cotangents[0] is not None
    assert "tap" not in str(jax.make_jaxpr(jitted)(variables, x))


class Looped(nn.Module):
    """x times a number from a loop over x that adds the slope until the sum is 9 or more; the loop has no gradient."""

    branches: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def add(module: nn.Module, carried: jax.Array) -> jax.Array:
            slope = Slope(name="slope")
            if not self.branches:
                return carried + slope(carried)
            return nn.cond(jnp.sum(carried) > 0, lambda slope, c: c + slope(c), lambda slope, c: c, slope, carried)

        return x * nn.while_loop(lambda _, carried: jnp.sum(carried) < 9, add, self, jax.lax.stop_gradient(x))


@pytest.mark.parametrize("branches", [False, True])
def test_what_runs_in_a_while_loop_or_in_a_branch_inside_is_said_to_be_hidden(branches: bool) -> None:
    x, scale = jnp.ones((1, 3)), {"params": {"slope": {"scale": jnp.ones(())}}}
    trace = capture_flax(
        Looped(branches), scale, (x,), jnp.sum, call=lambda model, v, x: model.apply(jax.lax.stop_gradient(v), x)
    )
    assert trace.hidden == ("slope",) and [call.name for call in trace.calls] == [""]
    carried = np.ones((1, 3))
    while carried.sum() < 9:
        carried = carried + np.tanh(carried)
    assert np.allclose(trace[""].outputs[0], carried, rtol=1e-6)
    assert trace[""].input_cotangents[0] is not None and np.allclose(trace[""].input_cotangents[0], carried, rtol=1e-6)


class Normed(nn.Module):
    """Two batch norms, one after the other or in a loop."""

    scan: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"use_running_average": False, "momentum": 0.5}
        if not self.scan:
            return nn.BatchNorm(**options, name="layers_1")(nn.BatchNorm(**options, name="layers_0")(x) ** 2)

        def body(norm: nn.Module, x: jax.Array) -> tuple[jax.Array, None]:
            return norm(x) ** 2, None

        axes = {"params": 0, "batch_stats": 0}
        return nn.scan(body, variable_axes=axes, split_rngs={"params": True}, length=2)(
            nn.BatchNorm(**options, name="layers"), x
        )[0]


@pytest.mark.parametrize("api", ["linen", "scan", "nnx"])
def test_what_a_batch_norm_writes_is_seen(api: str) -> None:
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    if api == "nnx":
        norm = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
        trace = capture_flax(nnx.Sequential(norm, lambda x: x**2), None, (x,), jnp.sum)
    else:
        model = Normed(api == "scan")
        variables = model.init(jax.random.key(0), x)
        apply = lambda model, v, x: model.apply(v, x, mutable=["batch_stats"])[0]  # noqa: E731
        trace = capture_flax(model, variables, (x,), jnp.sum, call=apply)
    first, *others = [call for call in trace.calls if call.state]
    assert first.path == {"linen": "layers_0", "scan": "layers/0", "nnx": "layers/0"}[api]
    assert np.allclose(first.state["mean"], x.mean(0) / 2, rtol=1e-5, atol=1e-6)
    assert np.allclose(first.state["var"], 0.5 + x.var(0) / 2, rtol=1e-5)
    for second in others:
        assert second.path == ("layers/1" if api == "scan" else "layers_1")
        given = second.inputs[0]
        assert np.allclose(given, first.outputs[0] ** 2, rtol=1e-6)
        assert np.allclose(second.state["mean"], given.mean(0) / 2, rtol=1e-5)
    assert len(others) == (api != "nnx")
    theirs = torch.nn.BatchNorm1d(3, momentum=0.5)
    assert np.allclose(capture_torch(theirs, (x,)).calls[0].state["running_mean"], x.mean(0) / 2, rtol=1e-5, atol=1e-6)


def test_the_loss_is_a_call_behind_the_model() -> None:
    ours, theirs = Model("plain"), torch.nn.Tanh()
    x = jnp.asarray(X, jnp.float32)
    flax = capture_flax(ours, ours.init(jax.random.key(0), x), (x,), lambda y: (y**2).sum()).loss
    for loss in (flax, capture_torch(theirs, (X,), lambda y: (y**2).sum()).loss):
        assert loss is not None and loss.path == "loss" and loss.outputs[0].shape == ()
        assert np.allclose(loss.outputs[0], (loss.inputs[0] ** 2).sum(), rtol=1e-6)
        assert loss.input_cotangents[0] is not None and np.allclose(loss.input_cotangents[0], 2 * loss.inputs[0], rtol=1e-6)


def test_a_computed_output_is_copied_although_an_input_is_gone() -> None:
    """It is not taken for an alias of an input whose identity it has."""
    recorder = _Recorder({})
    call = recorder._begin(torch.nn.ReLU(), "relu")
    for _ in range(20):
        x = 1 * torch.ones(2, requires_grad=True)
        recorder._tap([x], call, "input")
        [output] = recorder._tap([2 * x], call, "output")
        assert output._base is None  # a copy, and no view
