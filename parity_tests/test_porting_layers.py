"""Every layer that the weight maps name, with its rules: values and gradients of both frameworks, in float64."""

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

from parity_tests.small_pairs import Flax, Torch
from parity_tests.support import run
from remat_jax import porting
from remat_jax.parity import float64_error
from remat_jax.porting.variables import Variables

DTYPE = {"param_dtype": jnp.float64}


def channels_last(x: Any) -> Any:
    return jnp.moveaxis(x, 1, -1)


def channels_first(x: Any) -> Any:
    return jnp.moveaxis(x, -1, 1)


class Layer(NamedTuple):
    """A layer in both frameworks: modules, rules, and the shape of the input; `calls` computes PyTorch's result in JAX."""

    torch: Callable[[], torch.nn.Module]
    flax: Any
    rules: str
    shape: tuple[int, ...]
    flax_call: Callable[..., Any] = lambda model, x: model(x)
    torch_call: Callable[..., Any] = lambda model, x: model(x)
    tokens: int = 0


def image(model: Any, x: Any) -> Any:
    return channels_first(model(channels_last(x)))


class RMSNorm(torch.nn.RMSNorm):
    """Gemma's norm, which multiplies by 1 + weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], 1 + self.weight, 1e-6)


def tied() -> Torch:
    """An embedding that is also the head."""
    model = Torch(
        lambda m, x: m.head(m.embed(x).tanh()), embed=torch.nn.Embedding(7, 4), head=torch.nn.Linear(4, 7, bias=False)
    )
    model.head.weight = model.embed.weight
    return model


def tied_linen(module: nn.Module, tokens: Any) -> Any:
    embed = nn.Embed(7, 4, name="embed", **DTYPE)
    return embed.attend(jnp.tanh(embed(tokens)))


def scanned(module: nn.Module, x: Any) -> Any:
    def body(layer: nn.Module, carry: Any, _: None) -> Any:
        return nn.gelu(layer(carry), approximate=False), None

    scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    return scan(nn.Dense(5, name="layers", **DTYPE), x, None)[0]


def recurrent(cell: Any) -> Flax:
    """A recurrent cell over time."""
    return Flax(lambda m, x: nn.RNN(cell(4, name="cell", **DTYPE))(x))


def gpt2_attention() -> Torch:
    """GPT-2's attention: one weight for q, k and v, stored as (in, out), and an output stored the same way."""

    def run(module: Torch, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (x @ module.weight + module.bias).split(8, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return mixed @ module.out

    shapes = {"weight": (8, 24), "bias": (24,), "out": (8, 8)}
    return Torch(run, **{name: torch.nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()})


QKV = "params/{query,key,value}"
MHA = f"in_proj_weight -> {QKV}/kernel | in_proj\nin_proj_bias -> {QKV}/bias | in_proj_bias\n"
OUT = "out_proj.weight -> params/out/kernel | heads_out\nout_proj.bias -> params/out/bias"
NORM = "weight -> params/scale\nbias -> params/bias"
BATCH_NORM = NORM + "\nrunning_mean -> batch_stats/mean\nrunning_var -> batch_stats/var\nextra: num_batches_tracked"
KERNEL = "weight -> params/kernel | {}\nbias -> params/bias"
LSTM = """
    weight_ih_l0 -> params/cell/{ii,if,ig,io}/kernel | gates
    weight_hh_l0 -> params/cell/{hi,hf,hg,ho}/kernel | gates
    bias_ih_l0, bias_hh_l0 -> params/cell/{hi,hf,hg,ho}/bias | lstm_bias
"""
GRU = """
    weight_ih_l0 -> params/cell/{ir,iz,in}/kernel | gates
    weight_hh_l0 -> params/cell/{hr,hz,hn}/kernel | gates
    bias_ih_l0, bias_hh_l0 -> params/cell/{ir,iz,in,hn}/bias | gru_bias
"""
NORM_OPTIONS = {"epsilon": 1e-5, "use_fast_variance": False, **DTYPE}
MASK = torch.ones(5, 5).tril().bool()


def attend(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Attention in the dtype of its inputs: NNX's own computes the softmax in float32."""
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), value)


def batch_first(model: Any, x: Any) -> Any:
    """The outputs of a recurrent layer, without its states."""
    return model(x)[0]


def torch_lstm() -> torch.nn.Module:
    return torch.nn.LSTM(3, 4, batch_first=True)


def torch_attention() -> torch.nn.Module:
    return torch.nn.MultiheadAttention(8, 2, batch_first=True)


def self_attention(model: Any, x: Any) -> Any:
    return model(x, x, x, need_weights=False)[0]


LAYERS = {
    "linear": Layer(lambda: torch.nn.Linear(6, 6), nn.Dense(6, **DTYPE), KERNEL.format("linear"), (3, 6)),
    "conv1d": Layer(
        lambda: torch.nn.Conv1d(4, 6, 3, stride=2, padding=1),
        nn.Conv(6, (3,), strides=2, padding=[(1, 1)], **DTYPE),
        KERNEL.format("conv1d"),
        (2, 4, 8),
        image,
    ),
    "conv2d": Layer(
        lambda: torch.nn.Conv2d(4, 6, (3, 5), stride=2, padding=(1, 2), groups=2),
        nn.Conv(6, (3, 5), strides=2, padding=[(1, 1), (2, 2)], feature_group_count=2, **DTYPE),
        KERNEL.format("conv2d"),
        (2, 4, 8, 10),
        image,
    ),
    "conv2d-nnx": Layer(
        lambda: torch.nn.Conv2d(4, 6, 3, padding=1),
        lambda: nnx.Conv(4, 6, (3, 3), padding=[(1, 1)] * 2, rngs=nnx.Rngs(0), **DTYPE),
        KERNEL.format("conv2d"),
        (2, 4, 8, 8),
        image,
    ),
    "conv3d": Layer(
        lambda: torch.nn.Conv3d(2, 3, (1, 2, 3), dilation=2),
        nn.Conv(3, (1, 2, 3), padding="VALID", kernel_dilation=2, **DTYPE),
        KERNEL.format("conv3d"),
        (1, 2, 3, 6, 7),
        image,
    ),
    "conv_transpose1d": Layer(
        lambda: torch.nn.ConvTranspose1d(4, 3, 3, stride=2, padding=1),
        nn.ConvTranspose(3, (3,), strides=(2,), padding=[(1, 1)], transpose_kernel=True, **DTYPE),
        KERNEL.format("conv_transpose1d"),
        (2, 4, 5),
        image,
    ),
    # d(k-1)-p before, d(k-1)-p+output_padding after: for k = 3, p = 1 and k = 4, p = 1 with output padding 1.
    "conv_transpose2d": Layer(
        lambda: torch.nn.ConvTranspose2d(4, 3, (3, 4), stride=2, padding=1, output_padding=(0, 1)),
        nn.ConvTranspose(3, (3, 4), strides=(2, 2), padding=[(1, 1), (2, 3)], transpose_kernel=True, **DTYPE),
        KERNEL.format("conv_transpose2d"),
        (2, 4, 5, 6),
        image,
    ),
    "conv_transpose2d-flipped": Layer(
        lambda: torch.nn.ConvTranspose2d(4, 3, (3, 4), stride=2, padding=1),
        nn.ConvTranspose(3, (3, 4), strides=(2, 2), padding=[(1, 1), (2, 2)], **DTYPE),
        KERNEL.format("flip(2, 3) | i o h w -> h w i o"),
        (2, 4, 5, 6),
        image,
    ),
    "conv_transpose3d": Layer(
        lambda: torch.nn.ConvTranspose3d(2, 3, (1, 2, 3)),
        nn.ConvTranspose(3, (1, 2, 3), padding="VALID", transpose_kernel=True, **DTYPE),
        KERNEL.format("conv_transpose3d"),
        (1, 2, 3, 4, 5),
        image,
    ),
    "layer_norm": Layer(lambda: torch.nn.LayerNorm(6), nn.LayerNorm(**NORM_OPTIONS), NORM, (3, 6)),
    "group_norm": Layer(lambda: torch.nn.GroupNorm(2, 6), nn.GroupNorm(2, **NORM_OPTIONS), NORM, (3, 6, 4, 5), image),
    "rms_norm": Layer(
        lambda: torch.nn.RMSNorm(6, eps=1e-6),
        nn.RMSNorm(epsilon=1e-6, use_fast_variance=False, **DTYPE),
        "weight -> params/scale",
        (3, 6),
    ),
    "rms_norm-gemma": Layer(
        lambda: RMSNorm(6),
        nn.RMSNorm(epsilon=1e-6, use_fast_variance=False, **DTYPE),
        "weight -> params/scale | norm_plus_one",
        (3, 6),
    ),
    "batch_norm-eval": Layer(
        lambda: torch.nn.BatchNorm2d(6).eval(),
        nn.BatchNorm(use_running_average=True, **NORM_OPTIONS),
        BATCH_NORM,
        (3, 6, 4, 5),
        image,
    ),
    "embedding": Layer(
        lambda: torch.nn.Embedding(7, 4), nn.Embed(7, 4, **DTYPE), "weight -> params/embedding", (3, 5), tokens=7
    ),
    # PyTorch scales the looked-up rows, Flax stores the scaled table.
    "embedding-scaled": Layer(
        lambda: torch.nn.Embedding(7, 4),
        nn.Embed(7, 4, **DTYPE),
        "weight -> params/embedding | scale(sqrt(15))",
        (3, 5),
        torch_call=lambda model, x: model(x) * 15**0.5,
        tokens=7,
    ),
    "embedding-tied": Layer(
        tied, Flax(tied_linen), "embed.weight -> params/embed/embedding\ntie: embed.weight = head.weight", (3, 5), tokens=7
    ),
    "attention": Layer(
        torch_attention,
        nn.MultiHeadDotProductAttention(2, force_fp32_for_softmax=False, **DTYPE),
        MHA + OUT,
        (3, 5, 8),
        torch_call=self_attention,
    ),
    # PyTorch's boolean mask marks hidden entries, Flax's visible ones.
    "attention-masked": Layer(
        torch_attention,
        nn.MultiHeadDotProductAttention(2, **DTYPE),
        MHA + OUT,
        (3, 5, 8),
        lambda model, x: model(x, mask=jnp.asarray(MASK.numpy())),
        lambda model, x: model(x, x, x, attn_mask=~MASK, need_weights=False)[0],
    ),
    "attention-nnx": Layer(
        torch_attention,
        lambda: nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=attend, rngs=nnx.Rngs(0), **DTYPE),
        MHA + OUT,
        (3, 5, 8),
        torch_call=self_attention,
    ),
    "attention-gpt2": Layer(
        gpt2_attention,
        nn.MultiHeadDotProductAttention(2, **DTYPE),
        "weight -> params/{query,key,value}/kernel | gpt2_qkv\nbias -> params/{query,key,value}/bias | in_proj_bias\n"
        "out -> params/out/kernel | (h d) e -> h d e\nmissing: params/out/bias",
        (3, 5, 8),
    ),
    "lstm": Layer(torch_lstm, recurrent(nn.OptimizedLSTMCell), LSTM, (2, 5, 3), torch_call=batch_first),
    "lstm-nnx-fused": Layer(
        torch_lstm,
        lambda: nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0), **DTYPE),
        "weight_ih_l0 -> params/dense_i/kernel | linear\nweight_hh_l0 -> params/dense_h/kernel | linear\n"
        "bias_ih_l0, bias_hh_l0 -> params/dense_h/bias | sum",
        (2, 5, 3),
        lambda model, x: nnx.RNN(model)(x),
        batch_first,
    ),
    "gru": Layer(lambda: torch.nn.GRU(3, 4, batch_first=True), recurrent(nn.GRUCell), GRU, (2, 5, 3), torch_call=batch_first),
    "stack": Layer(
        lambda: torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.GELU()) for _ in range(3))),
        Flax(scanned),
        "{i}.0.weight -> params/layers/kernel[{i}] | linear\n{i}.0.bias -> params/layers/bias[{i}]",
        (2, 5),
    ),
}


# Values and gradients of both frameworks, in float64.


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


def test_a_scaled_weight_s_gradient_by_the_map_of_its_values_would_be_wrong() -> None:
    layer = LAYERS["embedding-scaled"]
    model = make_torch(layer)
    shapes, call = flax_model(layer)
    theirs = torch_answer(layer, model)
    ours = flax_answer(layer, porting.from_torch(model.state_dict(), shapes, layer.rules), call)
    by_values = porting.from_torch(theirs.gradients, shapes, layer.rules)
    gradient = flat(ours.gradients)["params/embedding"]
    assert np.linalg.norm(flat(by_values)["params/embedding"] - gradient) / np.linalg.norm(gradient) == pytest.approx(14)
