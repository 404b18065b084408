"""Ten common faults of ports, planted one at a time in the Flax side of six pairs; others in the other pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from parity_tests.mutants import planting as plant
from parity_tests.mutants.planting import DOUBLED, FLIPPED, Plant, arguments, at, detached, fields, inside, output
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


def forward(name: str, torch: str, planted: Plant, unusual: str = "") -> Fault:
    return Fault(name, planted, FORWARD, (torch,), unusual)


def backward(name: str, torch: str, planted: Plant) -> Fault:
    return Fault(name, planted, BACKWARD, (torch,))


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


def bert() -> list[Fault]:
    torch, flax = "encoder/layer/{}", "encoder/layer/{}"
    first, second = torch.format(0), flax.format(1)
    theirs = module_of("bert")
    attention = inside(theirs, "dot_product_attention_weights", swapped)
    without = inside(theirs, "dot_product_attention_weights", unmasked)
    return [
        forward("another epsilon", f"{second}/output/LayerNorm", at(f"{second}/output/LayerNorm", fields(epsilon=1e-3))),
        forward("another activation", f"{first}/intermediate", at(f"{first}/intermediate", fields(activation=jax.nn.silu))),
        forward("queries and keys swapped", f"{second}/attention/self", at(f"{second}/attention/self", attention)),
        forward("what pads is seen", f"{first}/attention/self", at(f"{first}/attention/self", without)),
        forward(
            "a square kernel not transposed",
            f"{first}/attention/self/query",
            at(f"{first}/attention/self/query", untransposed),
            "unlike",
        ),
        forward(
            "positions off by one",
            "embeddings",
            at("embeddings", arguments(lambda ids, kinds, at, *rest: (ids, kinds, at + 1, *rest))),
        ),
        forward("another token pooled", "pooler", at("pooler", arguments(lambda states: (states[:, ::-1],)))),
        forward("a layer left out", second, at(second, left_out)),
        backward("a sign flipped", f"{first}/output/dense", at(f"{first}/output/dense", FLIPPED)),
        backward("an input detached", f"{second}/intermediate", at(f"{second}/intermediate", detached)),
    ]


def gpt2() -> list[Fault]:
    theirs = module_of("gpt2")
    first, second = "transformer/h/0", "transformer/h/1"
    attention = inside(theirs, "dot_product_attention_weights", swapped)
    causal = inside(theirs, "combine_masks", lambda right: lambda mask, causal: right(mask, mask))
    return [
        forward("another epsilon", f"{first}/ln_2", at(f"{first}/ln_2", fields(epsilon=1e-6))),
        forward(
            "the other GELU", f"{second}/mlp", at(f"{second}/mlp", fields(act=lambda x: jax.nn.gelu(x, approximate=False)))
        ),
        forward("queries and keys swapped", f"{second}/attn", at(f"{second}/attn", attention)),
        forward("the future is seen", f"{first}/attn", at(f"{first}/attn", causal)),
        forward(
            "a square kernel not transposed",
            f"{second}/attn/c_proj",
            at(f"{second}/attn/c_proj", untransposed),
            "unlike",
        ),
        forward(
            "positions off by one",
            "transformer",
            at("transformer", arguments(lambda ids, mask, at, *rest: (ids, mask, at + 1, *rest))),
        ),
        forward("a layer left out", second, at(second, left_out)),
        forward("logits scaled", "", at("", output(lambda made: made.replace(logits=made.logits * 1.001)))),
        backward("a gradient doubled", f"{second}/ln_1", at(f"{second}/ln_1", DOUBLED)),
        backward("a bias without a gradient", f"{first}/mlp/c_fc", at(f"{first}/mlp/c_fc", plant.without_bias_gradient)),
    ]


def vit() -> list[Fault]:
    theirs = module_of("vit")
    first, second = "encoder/layer/0", "encoder/layer/1"
    return [
        forward("another epsilon", f"{first}/layernorm_after", at(f"{first}/layernorm_after", fields(epsilon=1e-5))),
        forward("the other GELU", f"{second}/intermediate", at(f"{second}/intermediate", fields(activation=jax.nn.gelu))),
        forward(
            "scores not scaled",
            f"{first}/attention/attention",
            at(f"{first}/attention/attention", inside(theirs, "dot_product_attention_weights", unscaled)),
        ),
        forward(
            "a square kernel not transposed",
            f"{second}/attention/output/dense",
            at(f"{second}/attention/output/dense", untransposed),
            "unlike",
        ),
        Fault(
            "height and width exchanged",
            at("embeddings/patch_embeddings", arguments(lambda x: (x.transpose(0, 2, 1, 3),))),
            FORWARD,
            ("embeddings/patch_embeddings", "embeddings/patch_embeddings/projection"),
        ),
        forward("the class behind the patches", "embeddings", at("embeddings", output(lambda x: jnp.roll(x, -1, 1)))),
        forward("a layer left out", first, at(first, left_out)),
        forward("a norm in float32", f"{second}/layernorm_after", at(f"{second}/layernorm_after", fields(dtype=jnp.float32))),
        backward("a sign flipped", f"{second}/layernorm_before", at(f"{second}/layernorm_before", FLIPPED)),
        backward("an input detached", f"{first}/attention", at(f"{first}/attention", detached)),
    ]


def bart() -> list[Fault]:
    theirs = module_of("bart")
    encoder, decoder = "encoder/layers/1", "decoder/layers/0"
    attention = inside(theirs, "dot_product_attention_weights", swapped)
    without = inside(theirs, "dot_product_attention_weights", unmasked)
    causal = inside(theirs, "combine_masks", lambda right: lambda mask, causal: right(mask, mask))
    return [
        forward(
            "another epsilon",
            f"{decoder}/encoder_attn_layer_norm",
            at(f"{decoder}/encoder_attn_layer_norm", fields(epsilon=1e-6)),
        ),
        forward("another activation", encoder, at(encoder, fields(activation_fn=jax.nn.silu))),
        forward("queries and keys swapped", f"{encoder}/self_attn", at(f"{encoder}/self_attn", attention)),
        forward("what pads is seen", f"{decoder}/encoder_attn", at(f"{decoder}/encoder_attn", without)),
        forward("the future is seen", f"{decoder}/self_attn", at(f"{decoder}/self_attn", causal)),
        forward(
            "a square kernel not transposed",
            f"{decoder}/encoder_attn/k_proj",
            at(f"{decoder}/encoder_attn/k_proj", untransposed),
            "unlike",
        ),
        Fault(
            "positions off by one",
            at("encoder", fields(offset=1)),
            FORWARD,
            ("encoder", "encoder/embed_positions"),
        ),
        forward("a layer left out", "decoder/layers/1", at("decoder/layers/1", left_out)),
        backward("a gradient doubled", f"{encoder}/final_layer_norm", at(f"{encoder}/final_layer_norm", DOUBLED)),
        backward("the encoder detached", f"{decoder}/encoder_attn", at(f"{decoder}/encoder_attn", detached)),
    ]


def resnet() -> list[Fault]:
    first, second = "encoder/stages/0/layers/1", "encoder/stages/1/layers/0"
    conv = "layer/{}/convolution", "layer/layer_{}/convolution"
    norm = "layer/{}/normalization", "layer/layer_{}/normalization"

    def mean_pool(x: jax.Array) -> jax.Array:
        return nn.avg_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))

    return [
        forward("another epsilon", f"{first}/{norm[0]}".format(1), at(f"{first}/{norm[1]}".format(1), fields(epsilon=1e-3))),
        forward("statistics of the batch", f"{second}/{norm[0]}".format(0), at(f"{second}/{norm[1]}".format(0), of_the_batch)),
        forward(
            "padding as TensorFlow's",
            f"{second}/{conv[0]}".format(0),
            at(f"{second}/{conv[1]}".format(0), fields(padding="SAME")),
        ),
        forward("another activation", f"{first}/layer/0", at(f"{first}/layer/layer_0", fields(activation_func=jax.nn.silu))),
        Fault(
            "height and width exchanged",
            at("embedder/embedder", arguments(lambda x: (x.transpose(0, 2, 1, 3),))),
            FORWARD,
            ("embedder/embedder", "embedder/embedder/convolution"),
        ),
        forward("a residual twice", first, at(first, output(lambda x: 2 * x))),
        forward("a norm left out", f"{second}/shortcut/normalization", at(f"{second}/shortcut/normalization", plant.skipped)),
        forward("the mean pooled", "embedder", at("embedder", fields(max_pool=mean_pool))),
        backward("a sign flipped", f"{second}/{conv[0]}".format(1), at(f"{second}/{conv[1]}".format(1), FLIPPED)),
        backward("an input detached", f"{first}/layer/0", at(f"{first}/layer/layer_0", detached)),
    ]


def t5() -> list[Fault]:
    theirs = module_of("t5")
    encoder, decoder = "encoder/block/1/layer", "decoder/block/0/layer"
    attention = inside(theirs, "dot_product_attention_weights", swapped)
    causal = inside(theirs, "combine_masks", lambda right: lambda mask, causal: right(mask, mask))

    def other_buckets(right: Any) -> Any:
        return staticmethod(lambda *args, **options: right(*args, **{**options, "num_buckets": 16}))

    first = "encoder/block/0/layer/0/SelfAttention"
    return [
        forward("another epsilon", f"{encoder}/1/layer_norm", at(f"{encoder}/1/layer_norm", fields(eps=1e-3))),
        forward(
            "another activation", f"{decoder}/2/DenseReluDense", at(f"{decoder}/2/DenseReluDense", fields(act=jax.nn.silu))
        ),
        forward("queries and keys swapped", f"{encoder}/0/SelfAttention", at(f"{encoder}/0/SelfAttention", attention)),
        forward("the future is seen", f"{decoder}/0/SelfAttention", at(f"{decoder}/0/SelfAttention", causal)),
        forward("other buckets", first, at(first, inside(theirs.FlaxT5Attention, "_relative_position_bucket", other_buckets))),
        forward(
            "a square kernel not transposed",
            f"{encoder}/0/SelfAttention/q",
            at(f"{encoder}/0/SelfAttention/q", untransposed),
            "unlike",
        ),
        forward("a layer left out", f"{decoder}/1", at(f"{decoder}/1", left_out)),
        forward("a norm left out", "decoder/final_layer_norm", at("decoder/final_layer_norm", plant.skipped)),
        backward("a sign flipped", f"{decoder}/1/EncDecAttention/v", at(f"{decoder}/1/EncDecAttention/v", FLIPPED)),
        backward("an input detached", f"{encoder}/1/DenseReluDense", at(f"{encoder}/1/DenseReluDense", detached)),
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
        forward("an output scaled", first[0], at(first[1], output(lambda x: x * 1.001))),
        forward("features rolled", second[0], at(second[1], output(lambda x: jnp.roll(x, 1, -1)))),
        backward("a sign flipped", third[0], at(third[1], FLIPPED)),
        backward("an input detached", fourth[0], at(fourth[1], detached)),
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


def lora(weights: Iterable[Weight]) -> list[Fault]:
    first, second = "layers/0/mixer", "layers/1/mixer"
    return [
        forward("an adapter not scaled", f"{second}/q_proj", at("layers_1/mixer/q_proj", fields(scale=1.0))),
        forward("an adapter left out", f"{first}/v_proj", at("layers_0/mixer/v_proj", fields(scale=0.0))),
        forward("a layer left out", second, at("layers_1/mixer", left_out)),
        backward("a sign flipped", f"{first}/q_proj", at("layers_0/mixer/q_proj", FLIPPED)),
        backward("an input detached", f"{second}/v_proj", at("layers_1/mixer/v_proj", detached)),
    ]


def experts(weights: Iterable[Weight]) -> list[Fault]:
    """A fault inside the experts is between the layers that both models call: Flax's experts are one module, PyTorch's four."""
    first, second = "layers/0/mixer", "layers/1/mixer"
    ways = (at(f"layers_0/mixer/experts/{one}", with_weights_of(other)) for one, other in (("w1", "w3"), ("w3", "w1")))
    return [
        *of_dense_layers(weight for weight in weights if "experts" not in weight.name),
        forward("one expert for each token", first, at("layers_0/mixer", fields(chosen=1))),
        forward("shares not normalised", second, at("layers_1/mixer", fields(normalises=False))),
        forward("experts scaled", first, at("layers_0/mixer/experts/w2", output(lambda x: x * 1.001))),
        backward("a sign flipped in experts", second, at("layers_1/mixer/experts/w1", FLIPPED)),
        forward("weights of experts exchanged", first, both(*ways), "crossed"),
    ]


def mamba(weights: Iterable[Weight]) -> list[Fault]:
    first, second = "layers/0/mixer", "layers/1/mixer"
    return [
        *of_dense_layers(weights),
        forward("the next tokens convolved", f"{first}/conv1d", at("layers_0/mixer/conv1d", fields(padding="SAME"))),
        forward("steps by another function", second, at("layers_1/mixer", fields(positive=jnp.square))),
        backward("a gradient doubled", f"{first}/conv1d", at("layers_0/mixer/conv1d", DOUBLED)),
    ]


def unet(weights: Iterable[Weight]) -> list[Fault]:
    return [
        *of_dense_layers(weights),
        forward("another skip connection", "", at("", fields(skips=False))),
        forward("other groups", "mid_block/norm2", at("mid_block/norm2", fields(num_groups=4))),
        forward("padding as TensorFlow's", "downsample", at("downsample", fields(padding="SAME"))),
        backward("an input detached", "mid_block", at("mid_block", detached)),
    ]


FAULTS = {"bert": bert, "gpt2": gpt2, "vit": vit, "bart": bart, "resnet": resnet, "t5": t5}
OF_OWN = {"lora": lora, "experts": experts, "mamba": mamba, "unet": unet}


def faults_of(name: str, weights: Iterable[Weight]) -> list[Fault]:
    """The faults that are planted in a pair with these weights."""
    return FAULTS[name]() if name in FAULTS else OF_OWN.get(name, of_dense_layers)(weights)
