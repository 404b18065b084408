"""Ten common faults of ports, planted one at a time in the Flax side of six pairs; others in the other pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from parity_tests.mutants import planting as plant
from parity_tests.mutants.planting import DOUBLED, FLIPPED, Change, Plant, arguments, at, detached, fields, inside, output
from parity_tests.pairs.models import module_of

FORWARD, BACKWARD = "forward", "backward"


class Fault(NamedTuple):
    """A fault, the pass, and PyTorch's modules, one of which must be named.

    There are two modules if the fault is between a module and an inner module that gets a wrong input. A proposed map can make
    the models agree in spite of some faults: `unusual` is then the attribute of the report that must say so.
    """

    name: str
    plant: Plant
    where: str
    modules: tuple[str, ...]
    unusual: str = ""


def forward(name: str, torch: str, change: Change, unusual: str = "", flax: str | None = None) -> Fault:
    """A change of a Flax module, whose path is PyTorch's unless `flax` is given."""
    return Fault(name, at(torch if flax is None else flax, change), FORWARD, (torch,), unusual)


def backward(name: str, torch: str, change: Change, flax: str | None = None) -> Fault:
    return forward(name, torch, change, flax=flax)._replace(where=BACKWARD)


def inside_or_around(name: str, torch: str, change: Change, inner: str) -> Fault:
    """The fault is between a module and an inner module that gets a wrong input."""
    return forward(name, torch, change)._replace(modules=(torch, f"{torch}/{inner}"))


def swapped(right: Any) -> Any:
    return lambda query, key, **options: right(key, query, **options)


def unmasked(right: Any) -> Any:
    return lambda query, key, bias, **options: right(query, key, bias=jnp.zeros_like(bias), **options)


def unscaled(right: Any) -> Any:
    return lambda query, key, **options: right(query * query.shape[-1] ** 0.5, key, **options)


def left_out(method: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A layer that returns its first argument, besides its other outputs."""
    made = method(*args, **kwargs)
    return (args[0], *made[1:]) if isinstance(made, tuple) else args[0]


def untransposed(method: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A layer with its square kernel transposed."""
    made, kernel = method(*args, **kwargs), module.variables["params"]["kernel"]
    # The kernel of GPT-2's class is already transposed.
    change = kernel - kernel.T if type(module).__name__ == "FlaxConv1D" else kernel.T - kernel
    return made + args[0] @ change


def with_weights_of(sibling: str) -> Any:
    """A dense layer with the weights of another layer of the same module."""

    def change(method: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        made, own = method(*args, **kwargs), module.variables["params"]
        other = module.parent.variables["params"].get(sibling)
        if other is None:  # during `init`
            return made
        made += args[0] @ (other["kernel"] - own["kernel"])
        return made + other["bias"] - own["bias"] if "bias" in own and "bias" in other else made

    return change


def of_the_batch(method: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A batch norm that uses its input's statistics."""
    if "params" not in module.variables:
        return method(*args, **kwargs)
    x = args[0]
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    scale, bias = (module.variables["params"][name] for name in ("scale", "bias"))
    return (x - mean) / jnp.sqrt(variance + module.epsilon) * scale + bias


def both_masks_alike(right: Any) -> Any:
    """The causal mask is not used."""
    return lambda mask, causal: right(mask, mask)


def height_and_width_exchanged(x: jax.Array) -> tuple[jax.Array]:
    return (x.transpose(0, 2, 1, 3),)


SCALED = output(lambda x: x * 1.001)
SQUARE = "a square kernel not transposed"


def attention_of(name: str, change: Any) -> Change:
    """A change of the scores of a pair's attention."""
    return inside(module_of(name), "dot_product_attention_weights", change)


def causal_of(name: str) -> Change:
    return inside(module_of(name), "combine_masks", both_masks_alike)


def bert() -> list[Fault]:
    first, second = "encoder/layer/0", "encoder/layer/1"
    later = arguments(lambda ids, kinds, at, *rest: (ids, kinds, at + 1, *rest))
    return [
        forward("another epsilon", f"{second}/output/LayerNorm", fields(epsilon=1e-3)),
        forward("another activation", f"{first}/intermediate", fields(activation=jax.nn.silu)),
        forward("queries and keys swapped", f"{second}/attention/self", attention_of("bert", swapped)),
        forward("what pads is seen", f"{first}/attention/self", attention_of("bert", unmasked)),
        forward(SQUARE, f"{first}/attention/self/query", untransposed, "unlike"),
        forward("positions off by one", "embeddings", later),
        forward("another token pooled", "pooler", arguments(lambda states: (states[:, ::-1],))),
        forward("a layer left out", second, left_out),
        backward("a sign flipped", f"{first}/output/dense", FLIPPED),
        backward("an input detached", f"{second}/intermediate", detached),
    ]


def gpt2() -> list[Fault]:
    first, second = "transformer/h/0", "transformer/h/1"
    later = arguments(lambda ids, mask, at, *rest: (ids, mask, at + 1, *rest))
    return [
        forward("another epsilon", f"{first}/ln_2", fields(epsilon=1e-6)),
        forward("the other GELU", f"{second}/mlp", fields(act=lambda x: jax.nn.gelu(x, approximate=False))),
        forward("queries and keys swapped", f"{second}/attn", attention_of("gpt2", swapped)),
        forward("the future is seen", f"{first}/attn", causal_of("gpt2")),
        forward(SQUARE, f"{second}/attn/c_proj", untransposed, "unlike"),
        forward("positions off by one", "transformer", later),
        forward("a layer left out", second, left_out),
        forward("logits scaled", "", output(lambda made: made.replace(logits=made.logits * 1.001))),
        backward("a gradient doubled", f"{second}/ln_1", DOUBLED),
        backward("a bias without a gradient", f"{first}/mlp/c_fc", plant.without_bias_gradient),
    ]


def vit() -> list[Fault]:
    first, second, patches = "encoder/layer/0", "encoder/layer/1", "embeddings/patch_embeddings"
    return [
        forward("another epsilon", f"{first}/layernorm_after", fields(epsilon=1e-5)),
        forward("the other GELU", f"{second}/intermediate", fields(activation=jax.nn.gelu)),
        forward("scores not scaled", f"{first}/attention/attention", attention_of("vit", unscaled)),
        forward(SQUARE, f"{second}/attention/output/dense", untransposed, "unlike"),
        inside_or_around("height and width exchanged", patches, arguments(height_and_width_exchanged), "projection"),
        forward("the class behind the patches", "embeddings", output(lambda x: jnp.roll(x, -1, 1))),
        forward("a layer left out", first, left_out),
        forward("a norm in float32", f"{second}/layernorm_after", fields(dtype=jnp.float32)),
        backward("a sign flipped", f"{second}/layernorm_before", FLIPPED),
        backward("an input detached", f"{first}/attention", detached),
    ]


def bart() -> list[Fault]:
    encoder, decoder = "encoder/layers/1", "decoder/layers/0"
    return [
        forward("another epsilon", f"{decoder}/encoder_attn_layer_norm", fields(epsilon=1e-6)),
        forward("another activation", encoder, fields(activation_fn=jax.nn.silu)),
        forward("queries and keys swapped", f"{encoder}/self_attn", attention_of("bart", swapped)),
        forward("what pads is seen", f"{decoder}/encoder_attn", attention_of("bart", unmasked)),
        forward("the future is seen", f"{decoder}/self_attn", causal_of("bart")),
        forward(SQUARE, f"{decoder}/encoder_attn/k_proj", untransposed, "unlike"),
        inside_or_around("positions off by one", "encoder", fields(offset=1), "embed_positions"),
        forward("a layer left out", "decoder/layers/1", left_out),
        backward("a gradient doubled", f"{encoder}/final_layer_norm", DOUBLED),
        backward("the encoder detached", f"{decoder}/encoder_attn", detached),
    ]


def resnet() -> list[Fault]:
    first, second, embedder = "encoder/stages/0/layers/1", "encoder/stages/1/layers/0", "embedder/embedder"

    def part(layer: str, index: int, name: str) -> tuple[str, str]:
        """The path of a layer's part in PyTorch and in Flax."""
        return f"{layer}/layer/{index}{name}", f"{layer}/layer/layer_{index}{name}"

    def mean_pool(x: jax.Array) -> jax.Array:
        return nn.avg_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))

    norm, norm_flax = part(first, 1, "/normalization")
    other_norm, other_norm_flax = part(second, 0, "/normalization")
    conv, conv_flax = part(second, 0, "/convolution")
    last_conv, last_conv_flax = part(second, 1, "/convolution")
    inner, inner_flax = part(first, 0, "")
    return [
        forward("another epsilon", norm, fields(epsilon=1e-3), flax=norm_flax),
        forward("statistics of the batch", other_norm, of_the_batch, flax=other_norm_flax),
        forward("padding as TensorFlow's", conv, fields(padding="SAME"), flax=conv_flax),
        forward("another activation", inner, fields(activation_func=jax.nn.silu), flax=inner_flax),
        inside_or_around("height and width exchanged", embedder, arguments(height_and_width_exchanged), "convolution"),
        forward("a residual twice", first, output(lambda x: 2 * x)),
        forward("a norm left out", f"{second}/shortcut/normalization", plant.skipped),
        forward("the mean pooled", "embedder", fields(max_pool=mean_pool)),
        backward("a sign flipped", last_conv, FLIPPED, last_conv_flax),
        backward("an input detached", inner, detached, inner_flax),
    ]


def t5() -> list[Fault]:
    encoder, decoder = "encoder/block/1/layer", "decoder/block/0/layer"
    attention = module_of("t5").FlaxT5Attention

    def other_buckets(right: Any) -> Any:
        return staticmethod(lambda *args, **options: right(*args, **{**options, "num_buckets": 16}))

    buckets = inside(attention, "_relative_position_bucket", other_buckets)
    return [
        forward("another epsilon", f"{encoder}/1/layer_norm", fields(eps=1e-3)),
        forward("another activation", f"{decoder}/2/DenseReluDense", fields(act=jax.nn.silu)),
        forward("queries and keys swapped", f"{encoder}/0/SelfAttention", attention_of("t5", swapped)),
        forward("the future is seen", f"{decoder}/0/SelfAttention", causal_of("t5")),
        forward("other buckets", "encoder/block/0/layer/0/SelfAttention", buckets),
        forward(SQUARE, f"{encoder}/0/SelfAttention/q", untransposed, "unlike"),
        forward("a layer left out", f"{decoder}/1", left_out),
        forward("a norm left out", "decoder/final_layer_norm", plant.skipped),
        backward("a sign flipped", f"{decoder}/1/EncDecAttention/v", FLIPPED),
        backward("an input detached", f"{encoder}/1/DenseReluDense", detached),
    ]


class Weight(NamedTuple):
    """A weight's name in PyTorch, its path in Flax, and its shape in PyTorch."""

    name: str
    path: str
    shape: tuple[int, ...]

    @property
    def modules(self) -> tuple[str, str]:
        """The paths of its module in PyTorch and in Flax."""
        return self.name.rpartition(".")[0].replace(".", "/"), self.path.partition("/")[2].rpartition("/")[0]


def of_dense_layers(weights: Iterable[Weight]) -> list[Fault]:
    """Four faults of dense layers of any pair, and one of two dense layers of equal shapes in one module."""
    kernels = [weight for weight in weights if weight.path.endswith("/kernel") and weight.name.endswith(".weight")]
    paths = [weight.modules for weight in kernels]
    if not paths:
        return []
    first, second, third, fourth = (paths[len(paths) * part // 5] for part in (1, 2, 3, 4))
    return [
        forward("an output scaled", first[0], SCALED, flax=first[1]),
        forward("features rolled", second[0], output(lambda x: jnp.roll(x, 1, -1)), flax=second[1]),
        backward("a sign flipped", third[0], FLIPPED, third[1]),
        backward("an input detached", fourth[0], detached, fourth[1]),
        *exchanged(kernels),
    ]


def exchanged(kernels: Sequence[Weight]) -> list[Fault]:
    """The weights of two dense layers exchanged, in the first module that has two of equal shapes."""
    for one, other in itertools.combinations(kernels, 2):
        torch, flax = zip(one.modules, other.modules, strict=True)
        parents = [{path.rpartition("/")[0] for path in paths} for paths in (torch, flax)]
        if one.shape == other.shape and len(one.shape) == 2 and [len(each) for each in parents] == [1, 1]:
            first, second = (path.rpartition("/")[2] for path in flax)
            planted = both(at(flax[0], with_weights_of(second)), at(flax[1], with_weights_of(first)))
            return [Fault("weights exchanged", planted, FORWARD, torch, "crossed")]
    return []


def both(first: Plant, second: Plant) -> Plant:
    return lambda case: second(first(case))


FIRST, SECOND = ("layers/0/mixer", "layers_0/mixer"), ("layers/1/mixer", "layers_1/mixer")
"""The paths in PyTorch and in Flax."""


def lora(weights: Iterable[Weight]) -> list[Fault]:
    return [
        forward("an adapter not scaled", f"{SECOND[0]}/q_proj", fields(scale=1.0), flax=f"{SECOND[1]}/q_proj"),
        forward("an adapter left out", f"{FIRST[0]}/v_proj", fields(scale=0.0), flax=f"{FIRST[1]}/v_proj"),
        forward("a layer left out", SECOND[0], left_out, flax=SECOND[1]),
        backward("a sign flipped", f"{FIRST[0]}/q_proj", FLIPPED, f"{FIRST[1]}/q_proj"),
        backward("an input detached", f"{SECOND[0]}/v_proj", detached, f"{SECOND[1]}/v_proj"),
    ]


def experts(weights: Iterable[Weight]) -> list[Fault]:
    """A fault inside the experts is between the layers that both models call: Flax's experts are one module, PyTorch's four."""
    inside_first, inside_second = f"{FIRST[1]}/experts", f"{SECOND[1]}/experts"
    ways = (at(f"{inside_first}/{one}", with_weights_of(other)) for one, other in (("w1", "w3"), ("w3", "w1")))
    return [
        *of_dense_layers(weight for weight in weights if "experts" not in weight.name),
        forward("one expert for each token", FIRST[0], fields(chosen=1), flax=FIRST[1]),
        forward("shares not normalised", SECOND[0], fields(normalises=False), flax=SECOND[1]),
        forward("experts scaled", FIRST[0], SCALED, flax=f"{inside_first}/w2"),
        backward("a sign flipped in experts", SECOND[0], FLIPPED, f"{inside_second}/w1"),
        Fault("weights of experts exchanged", both(*ways), FORWARD, FIRST[:1], "crossed"),
    ]


def mamba(weights: Iterable[Weight]) -> list[Fault]:
    conv, conv_flax = (f"{path}/conv1d" for path in FIRST)
    return [
        *of_dense_layers(weights),
        forward("the next tokens convolved", conv, fields(padding="SAME"), flax=conv_flax),
        forward("steps by another function", SECOND[0], fields(positive=jnp.square), flax=SECOND[1]),
        backward("a gradient doubled", conv, DOUBLED, conv_flax),
    ]


def unet(weights: Iterable[Weight]) -> list[Fault]:
    return [
        *of_dense_layers(weights),
        forward("another skip connection", "", fields(skips=False)),
        forward("other groups", "mid_block/norm2", fields(num_groups=4)),
        forward("padding as TensorFlow's", "downsample", fields(padding="SAME")),
        backward("an input detached", "mid_block", detached),
    ]


FAULTS = {"bert": bert, "gpt2": gpt2, "vit": vit, "bart": bart, "resnet": resnet, "t5": t5}
OF_OWN = {"lora": lora, "experts": experts, "mamba": mamba, "unet": unet}


def faults_of(name: str, weights: Iterable[Weight]) -> list[Fault]:
    """The faults that are planted in a pair with these weights."""
    return FAULTS[name]() if name in FAULTS else OF_OWN.get(name, of_dense_layers)(weights)
