"""The captures in numbers: each call once, also through checkpoints and loops, and its share of the loss.

Faults planted one at a time, each named with its module and its pass; and no alarm for right pairs.
"""

from __future__ import annotations

import json
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
from examples.models import linen, weights
from examples.models import nnx as nnx_models
from parity_tests import support as s
from parity_tests.small_pairs import Flax
from remat_jax.errors import ArgumentError
from remat_jax.parity.capture_flax import capture_flax
from remat_jax.parity.capture_torch import _Recorder, capture_torch
from remat_jax.parity.localise import Divergences, first_divergences

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


def normed(module: nn.Module, x: jax.Array) -> jax.Array:
    """Two batch norms in a loop."""
    norm = nn.BatchNorm(use_running_average=False, momentum=0.5, name="layers")
    axes = {"params": 0, "batch_stats": 0}
    scan = nn.scan(lambda norm, x: (norm(x) ** 2, None), variable_axes=axes, split_rngs={"params": True}, length=2)
    return scan(norm, x)[0]


@pytest.mark.parametrize("api", ["scan", "nnx"])
def test_what_a_batch_norm_writes_is_seen(api: str) -> None:
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    if api == "nnx":
        norm = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
        trace = capture_flax(nnx.Sequential(norm, lambda x: x**2), None, (x,), jnp.sum)
    else:
        model = Flax(normed)
        apply = lambda model, v, x: model.apply(v, x, mutable=["batch_stats"])[0]  # noqa: E731
        trace = capture_flax(model, model.init(jax.random.key(0), x), (x,), jnp.sum, call=apply)
    first, *others = [call for call in trace.calls if call.state]
    assert first.path == "layers/0"
    assert np.allclose(first.state["mean"], x.mean(0) / 2, rtol=1e-5, atol=1e-6)
    assert np.allclose(first.state["var"], 0.5 + x.var(0) / 2, rtol=1e-5)
    for second in others:
        given = second.inputs[0]
        assert second.path == "layers/1" and np.allclose(given, first.outputs[0] ** 2, rtol=1e-6)
        assert np.allclose(second.state["mean"], given.mean(0) / 2, rtol=1e-5)
    assert len(others) == (api == "scan")
    theirs = torch.nn.BatchNorm1d(3, momentum=0.5)
    assert np.allclose(capture_torch(theirs, (x,)).calls[0].state["running_mean"], x.mean(0) / 2, rtol=1e-5, atol=1e-6)


def test_a_computed_output_is_copied_although_an_input_is_gone() -> None:
    """It is not taken for an alias of an input whose identity it has."""
    recorder = _Recorder({})
    call = recorder._begin(torch.nn.ReLU(), "relu")
    for _ in range(20):
        x = 1 * torch.ones(2, requires_grad=True)
        recorder._tap([x], call, "input")
        [output] = recorder._tap([2 * x], call, "output")
        assert output._base is None  # a copy, and no view


# The first difference between two models.


def changed(tree: Any, path: str, change: Any) -> Any:
    """The tree with `change` applied to the item at `path`."""
    first, _, rest = path.partition("/")
    return {**tree, first: changed(tree[first], rest, change) if rest else change(tree[first])}


def of_decoder(*, scan: bool = False, change: Any = None, **options: Any) -> Divergences:
    """The divergences between the decoder of `torch_ref` and its Linen counterpart."""
    tree = s.parameters("ByteDecoder", scan)
    variables = {"params": change(tree) if change else tree}
    model = linen.ByteDecoder(**s.SIZES["ByteDecoder"], scan=scan)
    return first_divergences(s.torch_model("ByteDecoder"), model, variables, (tokens(),), **options)


def tokens() -> np.ndarray:
    return s.data("ByteDecoder").x.astype(np.int64)


def shown(divergences: Divergences) -> tuple[str | None, str | None]:
    """The named Flax modules, in the forward and in the backward pass."""
    return divergences.forward and divergences.forward.flax_path, divergences.backward and divergences.backward.flax_path


def test_a_right_pair_raises_no_alarm_where_errors_do_not_add_up() -> None:
    divergences = of_decoder(scan=True, single_step=True)
    assert divergences.none and divergences.alone == ()
    assert {"layers/0", "layers/1", "layers/1/ffn/up"} <= {*divergences.matched.values()}


def test_faults_of_nnx_are_named() -> None:
    options = {**s.SIZES["ByteDecoder"], "scan": True}
    model = nnx.eval_shape(lambda: nnx_models.ByteDecoder(**options, rngs=nnx.Rngs(0)))
    with jax.enable_x64(True):
        model = weights.load_nnx(model, s.parameters("ByteDecoder", True))
    divergences = first_divergences(s.torch_model("ByteDecoder"), model, None, (tokens(),))
    assert divergences.none and {"layers/0/ffn/up", "layers/1/norm2", "head"} <= {*divergences.matched.values()}
    with jax.enable_x64(True):
        bias = model.layers.norm2.bias
        bias.set_value(bias.get_value() + np.array([[0.0], [1e-6]]))
    divergences = first_divergences(s.torch_model("ByteDecoder"), model, None, (tokens(),))
    assert shown(divergences) == ("layers/1/norm2", None)


def test_each_of_two_faults_is_listed_where_errors_do_not_add_up() -> None:
    def two(tree: Any) -> Any:
        tree = changed(tree, "layers_0/ffn/up/bias", lambda x: x * 1.001)
        return changed(tree, "layers_1/norm1/scale", lambda x: x + 1e-6)

    divergences = of_decoder(change=two, single_step=True)
    assert [divergence.flax_path for divergence in divergences.alone] == ["layers_0/ffn/up", "layers_1/norm1"]
    assert shown(divergences) == ("layers_0/ffn/up", None)


def test_a_cotangent_lost_between_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module has a wrong derivative: the model detaches its embedding's output."""
    right = linen.run_layers
    monkeypatch.setattr(linen, "run_layers", lambda n, x, **kwargs: right(n, jax.lax.stop_gradient(x), **kwargs))
    divergences = of_decoder()
    assert shown(divergences) == (None, "") and divergences.backward is not None and "'embed'" in divergences.backward.note


def test_a_mapping_wins(tmp_path: Any) -> None:
    file = tmp_path / "mapping.json"
    file.write_text(json.dumps({"decoder/layers/0/ffn/0": "layers_1/ffn/up", "head": None}))
    divergences = of_decoder(mapping=file)
    assert divergences.matched["decoder/layers/0/ffn/0"] == "layers_1/ffn/up"
    assert "head" in divergences.unmatched_torch and "head" in divergences.unmatched_flax


@pytest.mark.parametrize("fault", ["", "first", "second"])
def test_a_torch_call_may_call_submodules_alone(fault: str) -> None:
    layers = {"first": torch.nn.Linear(3, 4), "second": torch.nn.Linear(4, 3)}
    model = torch.nn.ModuleDict(layers)
    ours = Flax(lambda m, x: nn.Dense(3, name="second")(nn.Dense(4, name="first")(x)))
    params = {
        name: {"kernel": layer.weight.detach().numpy().T.copy(), "bias": layer.bias.detach().numpy() + (name == fault)}
        for name, layer in layers.items()
    }
    through = lambda module, x: module["second"](module["first"](x))  # noqa: E731
    divergences = first_divergences(model, ours, {"params": params}, (np.ones((2, 3)),), torch_call=through)
    assert (divergences.forward.torch_path if divergences.forward else "") == fault and set(divergences.matched) >= set(layers)
    with pytest.raises(ArgumentError, match=r"outputs of shapes \[\(2, 4\)\] .PyTorch. and \[\(2, 3\)\]"):
        first_divergences(model, ours, {"params": params}, (np.ones((2, 3)),), torch_call=lambda m, x: m["first"](x))


def test_wrong_use_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"'layers_9' is not a called module of the Flax model.*Did you mean 'layers_"):
        of_decoder(mapping={"head": "layers_9"})
    with pytest.raises(ArgumentError, match=r"mapping=3: expected a dict"):
        of_decoder(mapping=3)
    with pytest.raises(ArgumentError, match=r"which cannot be compared"):
        of_decoder(torch_call=lambda module, x: module(x)[..., :5])
    dropping = torch.nn.Sequential(torch.nn.Dropout(0.1)).train()
    with pytest.raises(ArgumentError, match=r"is in train mode with dropout in 0: "):
        first_divergences(dropping, nn.Sequential([]), {}, (np.ones((2, 3)),))
