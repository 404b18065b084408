"""Every layer that the weight maps name, with its rules: values and gradients of both frameworks, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity_tests.small_pairs import Flax, Torch
from parity_tests.support import run
from remat_jax import porting
from remat_jax.parity import float64_error
from remat_jax.porting.variables import Variables

DTYPE = {"param_dtype": jnp.float64}
"""For recurrent nets, whose carry has the dtype of the parameters."""


class Layer(NamedTuple):
    """A layer in both frameworks: modules, rules, and the shape of the input; `calls` computes PyTorch's result in JAX.

    A module of NNX is a function that makes it.
    """

    torch: torch.nn.Module
    flax: Any
    rules: str
    shape: tuple[int, ...]
    flax_call: Callable[..., Any] = lambda model, x: model(x)
    torch_call: Callable[..., Any] = lambda model, x: model(x)
    tokens: int = 0


def image(model: Any, x: Any) -> Any:
    """Channels are first in PyTorch and last in Flax."""
    return jnp.moveaxis(model(jnp.moveaxis(x, 1, -1)), -1, 1)


class RMSNorm(torch.nn.RMSNorm):
    """Gemma's norm, which multiplies by 1 + weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], 1 + self.weight, 1e-6)


def tied() -> Torch:
    """An embedding that is also the head."""
    embed, head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
    head.weight = embed.weight
    return Torch(lambda m, x: m.head(m.embed(x).tanh()), embed=embed, head=head)


def tied_linen(module: nn.Module, tokens: Any) -> Any:
    embed = nn.Embed(7, 4, name="embed")
    return embed.attend(jnp.tanh(embed(tokens)))


def scanned(module: nn.Module, x: Any) -> Any:
    def body(layer: nn.Module, carry: Any, _: None) -> Any:
        return nn.gelu(layer(carry), approximate=False), None

    scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    return scan(nn.Dense(5, name="layers"), x, None)[0]


def recurrent(cell: Any) -> Flax:
    """A recurrent cell over time."""
    return Flax(lambda m, x: nn.RNN(cell(4, name="cell", **DTYPE))(x))


def states_left_out(model: Any, x: Any) -> Any:
    """The outputs of a recurrent layer."""
    return model(x)[0]


def self_attention(model: Any, x: Any) -> Any:
    return model(x, x, x, need_weights=False)[0]


def attend(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Attention in the dtype of its inputs: NNX's own computes the softmax in float32."""
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), value)


def gpt2_attention() -> Torch:
    """GPT-2's attention: one weight for q, k and v, stored as (in, out), and an output stored the same way."""

    def run(module: Torch, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (x @ module.weight + module.bias).split(8, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return mixed @ module.out

    shapes = {"weight": (8, 24), "bias": (24,), "out": (8, 8)}
    return Torch(run, **{name: torch.nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()})


QKV = "params/{query,key,value}"
MHA = f"""
    in_proj_weight -> {QKV}/kernel | in_proj
    in_proj_bias -> {QKV}/bias | in_proj_bias
    out_proj.weight -> params/out/kernel | heads_out
    out_proj.bias -> params/out/bias
"""
GPT2 = f"""
    weight -> {QKV}/kernel | gpt2_qkv
    bias -> {QKV}/bias | in_proj_bias
    out -> params/out/kernel | (h d) e -> h d e
    missing: params/out/bias
"""
NORM = "weight -> params/scale\nbias -> params/bias"
BATCH_NORM = NORM + "\nrunning_mean -> batch_stats/mean\nrunning_var -> batch_stats/var\nextra: num_batches_tracked"
LSTM = """
    weight_ih_l0 -> params/cell/{ii,if,ig,io}/kernel | gates
    weight_hh_l0 -> params/cell/{hi,hf,hg,ho}/kernel | gates
    bias_ih_l0, bias_hh_l0 -> params/cell/{hi,hf,hg,ho}/bias | lstm_bias
"""
FUSED_LSTM = """
    weight_{k}h_l0 -> params/dense_{k}/kernel | linear
    bias_ih_l0, bias_hh_l0 -> params/dense_h/bias | sum
"""
GRU = """
    weight_ih_l0 -> params/cell/{ir,iz,in}/kernel | gates
    weight_hh_l0 -> params/cell/{hr,hz,hn}/kernel | gates
    bias_ih_l0, bias_hh_l0 -> params/cell/{ir,iz,in,hn}/bias | gru_bias
"""
STACK = "{i}.0.weight -> params/layers/kernel[{i}] | linear\n{i}.0.bias -> params/layers/bias[{i}]"
TIED = "embed.weight -> params/embed/embedding\ntie: embed.weight = head.weight"
NORM_OPTIONS = {"epsilon": 1e-5, "use_fast_variance": False}
RMS_NORM = nn.RMSNorm(epsilon=1e-6, use_fast_variance=False)
LSTM_LAYER, GRU_LAYER = (kind(3, 4, batch_first=True) for kind in (torch.nn.LSTM, torch.nn.GRU))
ATTENTION = torch.nn.MultiheadAttention(8, 2, batch_first=True)
SERIES = (2, 5, 3)


def kernel(transform: str, theirs: torch.nn.Module, ours: Any, shape: tuple[int, ...]) -> Layer:
    """A layer with a kernel and a bias; more than two axes are those of images."""
    rules = f"weight -> params/kernel | {transform}\nbias -> params/bias"
    return Layer(theirs, ours, rules, shape, *[image] * (len(shape) > 2))


T = torch.nn
LAYERS = {
    "linear": kernel("linear", T.Linear(6, 6), nn.Dense(6), (3, 6)),
    "conv1d": kernel("conv1d", T.Conv1d(4, 6, 3, stride=2, padding=1), nn.Conv(6, (3,), 2, [(1, 1)]), (2, 4, 8)),
    "conv2d": kernel(
        "conv2d",
        T.Conv2d(4, 6, (3, 5), stride=2, padding=(1, 2), groups=2),
        nn.Conv(6, (3, 5), strides=2, padding=[(1, 1), (2, 2)], feature_group_count=2),
        (2, 4, 8, 10),
    ),
    "conv3d": kernel(
        "conv3d", T.Conv3d(2, 3, (1, 2, 3), dilation=2), nn.Conv(3, (1, 2, 3), 1, "VALID", kernel_dilation=2), (1, 2, 3, 6, 7)
    ),
    "conv_transpose1d": kernel(
        "conv_transpose1d",
        T.ConvTranspose1d(4, 3, 3, stride=2, padding=1),
        nn.ConvTranspose(3, (3,), strides=(2,), padding=[(1, 1)], transpose_kernel=True),
        (2, 4, 5),
    ),
    # d(k-1)-p before, d(k-1)-p+output_padding after: for k = 3, p = 1 and k = 4, p = 1 with output padding 1.
    "conv_transpose2d": kernel(
        "conv_transpose2d",
        T.ConvTranspose2d(4, 3, (3, 4), stride=2, padding=1, output_padding=(0, 1)),
        nn.ConvTranspose(3, (3, 4), strides=(2, 2), padding=[(1, 1), (2, 3)], transpose_kernel=True),
        (2, 4, 5, 6),
    ),
    "conv_transpose2d-flipped": kernel(
        "flip(2, 3) | i o h w -> h w i o",
        T.ConvTranspose2d(4, 3, (3, 4), stride=2, padding=1),
        nn.ConvTranspose(3, (3, 4), strides=(2, 2), padding=[(1, 1), (2, 2)]),
        (2, 4, 5, 6),
    ),
    "conv_transpose3d": kernel(
        "conv_transpose3d",
        T.ConvTranspose3d(2, 3, (1, 2, 3)),
        nn.ConvTranspose(3, (1, 2, 3), padding="VALID", transpose_kernel=True),
        (1, 2, 3, 4, 5),
    ),
    "layer_norm": Layer(T.LayerNorm(6), nn.LayerNorm(**NORM_OPTIONS), NORM, (3, 6)),
    "group_norm": Layer(T.GroupNorm(2, 6), nn.GroupNorm(2, **NORM_OPTIONS), NORM, (3, 6, 4, 5), image),
    "rms_norm": Layer(T.RMSNorm(6, eps=1e-6), RMS_NORM, "weight -> params/scale", (3, 6)),
    "rms_norm-gemma": Layer(RMSNorm(6), RMS_NORM, "weight -> params/scale | norm_plus_one", (3, 6)),
    "batch_norm-eval": Layer(T.BatchNorm2d(6).eval(), nn.BatchNorm(True, **NORM_OPTIONS), BATCH_NORM, (3, 6, 4, 5), image),
    # PyTorch scales the looked-up rows, Flax stores the scaled table.
    "embedding-scaled": Layer(
        T.Embedding(7, 4),
        nn.Embed(7, 4),
        "weight -> params/embedding | scale(sqrt(15))",
        (3, 5),
        torch_call=lambda model, x: model(x) * 15**0.5,
        tokens=7,
    ),
    "embedding-tied": Layer(tied(), Flax(tied_linen), TIED, (3, 5), tokens=7),
    "attention": Layer(
        ATTENTION, nn.MultiHeadDotProductAttention(2, force_fp32_for_softmax=False), MHA, (3, 5, 8), torch_call=self_attention
    ),
    "attention-nnx": Layer(
        ATTENTION,
        lambda: nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=attend, rngs=nnx.Rngs(0)),
        MHA,
        (3, 5, 8),
        torch_call=self_attention,
    ),
    "attention-gpt2": Layer(gpt2_attention(), nn.MultiHeadDotProductAttention(2), GPT2, (3, 5, 8)),
    "lstm": Layer(LSTM_LAYER, recurrent(nn.OptimizedLSTMCell), LSTM, SERIES, torch_call=states_left_out),
    "lstm-nnx-fused": Layer(
        LSTM_LAYER,
        lambda: nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0), **DTYPE),
        FUSED_LSTM,
        SERIES,
        lambda model, x: nnx.RNN(model)(x),
        states_left_out,
    ),
    "gru": Layer(GRU_LAYER, recurrent(nn.GRUCell), GRU, SERIES, torch_call=states_left_out),
    "stack": Layer(T.Sequential(*(T.Sequential(T.Linear(5, 5), T.GELU()) for _ in range(3))), Flax(scanned), STACK, (2, 5)),
}


LIMIT = 1e-12


pytestmark = pytest.mark.usefixtures("x64")


class Answer(NamedTuple):
    """A layer's output, and the gradients of its parameters and of its input."""

    output: Any
    gradients: Any
    of_input: Any


def make_torch(layer: Layer) -> torch.nn.Module:
    torch.manual_seed(0)
    model = copy.deepcopy(layer.torch).double()
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
