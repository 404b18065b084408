"""Faults planted one at a time, each named with its module and its pass; and no alarm for right pairs."""

from __future__ import annotations

import json
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
import torch
from flax import nnx

from examples.models import gpt2, linen, weights
from examples.models import nnx as nnx_models
from parity_tests import support as s
from parity_tests.mutants.planting import scaled_cotangent
from parity_tests.small_pairs import Flax
from parity_tests.third_party import ports as p
from parity_tests.third_party.of_transformers import PORTS
from parity_tests.third_party.ports import Port
from remat_jax.errors import ArgumentError
from remat_jax.parity.localise import Divergences, first_divergences

GPT2 = PORTS["gpt2"]


def changed(tree: Any, path: str, change: Any) -> Any:
    """The tree with `change` applied to the item at `path`."""
    first, _, rest = path.partition("/")
    return {**tree, first: changed(tree[first], rest, change) if rest else change(tree[first])}


def of_port(port: Port, *, scan: bool = False, variables: Any = None, **options: Any) -> Divergences:
    """The divergences between an original and its port as it is now, with the given weights or the right ones."""
    model = p.make_torch(port, "float64")
    with jax.enable_x64(True):
        variables = p.variables(port, scan, "float64") if variables is None else variables
        arguments = port.arguments(port.inputs)
    return first_divergences(
        model,
        port.make_flax(port.config, scan=scan),
        variables,
        dict(port.inputs),
        flax_inputs=arguments,
        torch_call=lambda module, **inputs: p.torch_outputs(port, module, inputs),
        **options,
    )


def of_decoder(*, scan: bool = False, change: Any = None, loss: Any = None, **options: Any) -> Divergences:
    """The divergences between the decoder of `torch_ref` and its Linen counterpart."""
    tree = s.parameters("ByteDecoder", scan)
    variables = {"params": change(tree) if change else tree}
    model = linen.ByteDecoder(**s.SIZES["ByteDecoder"], scan=scan)
    return first_divergences(s.torch_model("ByteDecoder"), model, variables, (tokens(),), loss=loss, **options)


def tokens() -> np.ndarray:
    return s.data("ByteDecoder").x.astype(np.int64)


def shown(divergences: Divergences) -> tuple[str | None, str | None]:
    """The named Flax modules, in the forward and in the backward pass."""
    return divergences.forward and divergences.forward.flax_path, divergences.backward and divergences.backward.flax_path


# No alarm.


def test_a_right_port_raises_no_alarm_where_errors_do_not_add_up() -> None:
    divergences = of_port(GPT2, scan=True, single_step=True)
    assert divergences.none and shown(divergences) == (None, None) and divergences.alone == ()
    layers = [path for path in divergences.matched.values() if path in ("layers/0", "layers/1")]
    assert len(layers) == 2, divergences.matched


def test_nnx() -> None:
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


# Wrong weights.


def test_each_of_two_faults_is_listed_where_errors_do_not_add_up() -> None:
    def two(tree: Any) -> Any:
        tree = changed(tree, "layers_0/ffn/up/bias", lambda x: x * 1.001)
        return changed(tree, "layers_1/norm1/scale", lambda x: x + 1e-6)

    divergences = of_decoder(change=two, single_step=True)
    assert [divergence.flax_path for divergence in divergences.alone] == ["layers_0/ffn/up", "layers_1/norm1"]
    assert shown(divergences) == ("layers_0/ffn/up", None)


# Right forwards, wrong backwards. The last layer is the first of the backward pass.


class DoubledNorm(nn.LayerNorm):
    def __call__(self, x: jax.Array) -> jax.Array:
        return scaled_cotangent(2.0)(super().__call__(x))


def test_a_gradient_doubled_in_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(config: Any, param_dtype: Any, name: str) -> nn.LayerNorm:
        kind = DoubledNorm if name == "ln_f" else nn.LayerNorm
        return kind(epsilon=config.layer_norm_eps, use_fast_variance=False, param_dtype=param_dtype, name=name)

    monkeypatch.setattr(gpt2, "layer_norm", doubled)
    divergences = of_port(GPT2, scan=True, single_step=True)
    assert shown(divergences) == (None, "ln_f") and [divergence.flax_path for divergence in divergences.alone] == ["ln_f"]
    assert divergences.backward is not None and divergences.backward.error == pytest.approx(divergences.backward.reference)


def test_a_cotangent_lost_between_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module has a wrong derivative: the model detaches its embedding's output."""
    right = linen.run_layers
    monkeypatch.setattr(linen, "run_layers", lambda n, x, **kwargs: right(n, jax.lax.stop_gradient(x), **kwargs))
    divergences = of_decoder()
    assert shown(divergences) == (None, "") and divergences.backward is not None and "'embed'" in divergences.backward.note


# Errors of use.


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
