"""Common faults of ports, planted one at a time: each is found, and named with its pass and module."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from examples.models import gpt2, linen, llama
from parity_tests.mutants import encdec
from parity_tests.mutants import models as m
from parity_tests.mutants import planting as plant
from parity_tests.mutants.planting import DOUBLED, FLIPPED, Plant, at, detached, fields, given, inside, mapped, output, skipped
from remat_jax.parity import ParityReport, compare


class Mutant(NamedTuple):
    """A fault in a model: how to plant it, and what the report must name: the pass, PyTorch's module, the array, and further
    words.
    """

    model: str
    plant: Plant
    where: str
    module: str
    what: str
    note: str = ""


def only_the_future(right: Any) -> Any:
    """An inverted causal mask, except for the diagonal, is a causal mask over the reversed text."""
    return lambda qkv, nhead, **options: jnp.flip(right(jnp.flip(qkv, 1), nhead, **options), 1)


def inverted(right: Any) -> Any:
    return lambda mask, *args, **kwargs: right(1 - mask, *args, **kwargs)


def interleaved(right: Any) -> Any:
    """The papers' rotation of neighbours, although the weights are for halves."""

    def rotate(x: jax.Array, rotation: Any) -> jax.Array:
        (cos, sin), first, second = rotation, x[..., 0::2], x[..., 1::2]
        return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)

    return rotate


def inverted_bias(right: Any) -> Any:
    """Masked entries become visible, and visible entries masked."""

    def attention(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
        return right(query, key, value, bias.min() - bias)

    return attention


def padding_trained(right: Any) -> Any:
    return lambda table, tokens, padding: right(table, tokens, None)


def copied(right: Any) -> Any:
    """The head has a copy of the embeddings: the same values, and no gradient for the table."""
    return lambda table, x: x @ jax.lax.stop_gradient(table.embedding).T


def other_gelu(right: Any) -> Any:
    return lambda x, approximate: right(x, approximate=not approximate)


def keys_for_queries(right: Any) -> Any:
    return lambda query, key, value, bias: right(key, query, value, bias)


def fewer_buckets(right: Any) -> Any:
    return lambda distance: right(distance, encdec.BUCKETS // 2)


def all_seen(right: Any) -> Any:
    """Padding is a token like any other."""
    return lambda mask, dtype: right(jnp.ones_like(mask), dtype)


def memory_detached(method: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The decoder's gradient does not reach the encoder."""
    x, bias, memory, seen = args
    return method(x, bias, jax.lax.stop_gradient(memory), seen)


def scaled_logits(made: Any) -> Any:
    return {**made, "logits": made["logits"] * 1.001}


def mean_square(y: Any) -> Any:
    y = y["logits"] if isinstance(y, dict) else y
    return (y**2).mean()


def per_example(y: Any) -> Any:
    """The sum over all but the first axis, as in a loss that divides by the batch and not by the tokens."""
    y = y["logits"] if isinstance(y, dict) else y
    return (y**2).sum() / len(y)


def doubled_backwards(y: Any) -> Any:
    return plant.scaled_cotangent(2.0)(mean_square(y))


FORWARD, BACKWARD = "forward", "backward"
OUT, IN, IN_X, TIED = "output 0", "gradient of input 0", "gradient of input x", ", the same tensor as lm_head.weight"
NORM = "model.layers.1.self_attn.{}_norm.weight -> params/layers_1/self_attn/{}_norm/scale"

MUTANTS: dict[str, list[Mutant]] = {
    "a square kernel not transposed": [
        Mutant(
            "decoder",
            mapped("decoder.layers.1.self_attn.out_proj.weight -> params/layers_1/self_attn/out_proj/kernel"),
            FORWARD,
            "decoder/layers/1/self_attn/out_proj",
            OUT,
        ),
        Mutant("conv", mapped("head.weight -> params/head/kernel"), FORWARD, "head", OUT),
        Mutant(
            "llama",
            mapped("model.layers.1.self_attn.o_proj.weight -> params/layers_1/self_attn/o_proj/kernel"),
            FORWARD,
            "model/layers/1/self_attn/o_proj",
            OUT,
        ),
        Mutant(
            "encoder-decoder",
            mapped("decoder.layers.0.cross_attn.k.weight -> params/decoder/layers_0/cross_attn/k/kernel"),
            FORWARD,
            "decoder/layers/0/cross_attn/k",
            OUT,
        ),
    ],
    "another epsilon": [
        Mutant("decoder", at("layers_1/norm2", fields(epsilon=1e-6)), FORWARD, "decoder/layers/1/norm2", OUT),
        Mutant("conv", at("blocks_0/norm", fields(epsilon=1e-3)), FORWARD, "blocks/0/norm", OUT),
        Mutant("encoder-decoder", at("decoder/layers_1/norm3", fields(epsilon=1e-3)), FORWARD, "decoder/layers/1/norm3", OUT),
    ],
    "the other GELU": [
        Mutant(
            "conv",
            at("blocks_1", inside(nn, "gelu", other_gelu)),
            FORWARD,
            "blocks/1",
            OUT,
            "it passes a different input 0 to 'blocks_1/conv2'",
        ),
        Mutant(
            "gpt2",
            at("layers_1/mlp", inside(nn, "gelu", other_gelu)),
            FORWARD,
            "transformer/h/1/mlp",
            OUT,
            "it passes a different input 0 to 'layers_1/mlp/c_proj'",
        ),
    ],
    "wrong padding": [
        Mutant("conv", at("stem", fields(padding="SAME")), FORWARD, "stem", OUT),
        Mutant(
            "llama",
            at("", inside(llama, "embed", padding_trained)),
            BACKWARD,
            "model/embed_tokens",
            "gradient of weight, the same tensor as lm_head.weight",
        ),
    ],
    "an inverted mask": [
        Mutant(
            "decoder",
            at("layers_1/self_attn", inside(linen, "attention", only_the_future)),
            FORWARD,
            "decoder/layers/1/self_attn",
            OUT,
        ),
        Mutant("gpt2", at("", inside(gpt2, "attention_bias", inverted)), FORWARD, "", "input 1 of 'layers_0'"),
        Mutant("llama", at("layers_1", inside(llama, "attention", inverted_bias)), FORWARD, "model/layers/1/self_attn", OUT),
        Mutant("encoder-decoder", at("", inside(encdec, "padding_bias", all_seen)), FORWARD, "", "input bias of 'encoder'"),
        Mutant(
            "encoder-decoder",
            at("", inside(encdec, "causal_bias", lambda right: lambda near: near)),
            FORWARD,
            "",
            "input bias of 'decoder'",
        ),
    ],
    "a copy in the place of a tie": [
        Mutant("gpt2", at("", inside(gpt2, "unembed", copied)), BACKWARD, "transformer/wte", f"gradient of weight{TIED}"),
        Mutant("llama", at("", inside(llama, "unembed", copied)), BACKWARD, "model/embed_tokens", f"gradient of weight{TIED}"),
    ],
    "rotary pairs permuted": [
        Mutant(
            "llama", at("layers_1/self_attn", inside(llama, "rotate", interleaved)), FORWARD, "model/layers/1/self_attn", OUT
        ),
    ],
    "other buckets": [
        Mutant("encoder-decoder", at("relative", inside(encdec, "buckets", fewer_buckets)), FORWARD, "relative", OUT),
    ],
    "a fault at the root": [
        Mutant("encoder-decoder", at("", fields(first_place=1)), FORWARD, "", "input 0 of 'positions'"),
        Mutant("encoder-decoder", at("", fields(pooled=1)), FORWARD, "", "input 0 of 'pooler'"),
        Mutant("encoder-decoder", at("", output(scaled_logits)), FORWARD, "", "output logits"),
    ],
    "a sign flipped": [
        Mutant("encoder-decoder", at("encoder/layers_0/self_attn/v", FLIPPED), BACKWARD, "encoder/layers/0/self_attn/v", IN),
        Mutant("decoder", at("layers_0/ffn/up", FLIPPED), BACKWARD, "decoder/layers/0/ffn/0", IN),
        Mutant("conv", at("blocks_0/conv2", FLIPPED), BACKWARD, "blocks/0/conv2", IN),
    ],
    "a gradient doubled": [
        Mutant("decoder", at("layers_1/ffn/down", DOUBLED), BACKWARD, "decoder/layers/1/ffn/2", IN),
        Mutant("conv", at("blocks_1/norm", DOUBLED), BACKWARD, "blocks/1/norm", IN),
        Mutant("llama", at("layers_1/self_attn/k_norm", DOUBLED), BACKWARD, "model/layers/1/self_attn/k_norm", IN),
    ],
    "a bias without a gradient": [
        Mutant(
            "decoder",
            at("layers_0/self_attn/in_proj", plant.without_bias_gradient),
            BACKWARD,
            "decoder/layers/0/self_attn",
            "gradient of in_proj_bias",
        ),
        Mutant("conv", at("blocks_0/conv2", plant.without_bias_gradient), BACKWARD, "blocks/0/conv2", "gradient of bias"),
        Mutant(
            "llama",
            at("layers_0/self_attn/q_proj", plant.without_bias_gradient),
            BACKWARD,
            "model/layers/0/self_attn/q_proj",
            "gradient of bias",
        ),
    ],
    "queries and keys swapped": [
        Mutant(
            "decoder",
            at("layers_0/self_attn/in_proj", output(plant.swapped_queries_and_keys)),
            FORWARD,
            "decoder/layers/0/self_attn",
            OUT,
        ),
        Mutant("gpt2", at("layers_1/attn", inside(gpt2, "attention", keys_for_queries)), FORWARD, "transformer/h/1/attn", OUT),
        Mutant("llama", mapped(NORM.format("q", "k"), NORM.format("k", "q")), FORWARD, "model/layers/1/self_attn/q_norm", OUT),
    ],
    "statistics of a batch norm": [
        Mutant("conv", at("blocks_1/norm", fields(momentum=0.99)), FORWARD, "blocks/1/norm", "mean afterwards"),
        Mutant("conv", at("blocks_0/norm", fields(unbiased=False)), FORWARD, "blocks/0/norm", "var afterwards"),
        Mutant("conv", at("norm", fields(use_running_average=True)), FORWARD, "norm", OUT),
    ],
    "a module in float32": [
        Mutant("decoder", at("layers_1/ffn/up", fields(dtype=jnp.float32)), FORWARD, "decoder/layers/1/ffn/0", OUT),
        Mutant("conv", at("blocks_1/conv1", fields(dtype=jnp.float32)), FORWARD, "blocks/1/conv1", OUT),
    ],
    "noise drawn anew in recomputation": [
        Mutant(
            "decoder",
            plant.noise_of_the_host("decoder.layers.1.ffn", "layers_1/ffn"),
            BACKWARD,
            "decoder/layers/1/ffn",
            "recomputed output",
            "only in checkpoint",
        ),
        Mutant(
            "conv",
            plant.noise_of_the_host("blocks.0.conv1", "blocks_0/conv1"),
            BACKWARD,
            "blocks/0/conv1",
            "recomputed output",
            "only in checkpoint",
        ),
        Mutant(
            "llama",
            plant.noise_of_the_host("model.layers.0.mlp", "layers_0/mlp"),
            BACKWARD,
            "model/layers/0/mlp",
            IN_X,
            "only in checkpoint",
        ),
    ],
    "a loss normalised otherwise": [
        Mutant("decoder", given(loss=(mean_square, per_example)), FORWARD, "loss", OUT),
        Mutant("conv", given(loss=(mean_square, doubled_backwards)), BACKWARD, "loss", IN),
    ],
    "a layer left out": [
        Mutant("decoder", at("layers_1", skipped), FORWARD, "decoder/layers/1", OUT),
        Mutant("conv", at("blocks_0", skipped), FORWARD, "blocks/0", OUT),
    ],
    "an input detached": [
        Mutant("decoder", at("layers_0/ffn", detached), BACKWARD, "decoder/layers/0/ffn", IN),
        Mutant("conv", at("blocks_1/conv1", detached), BACKWARD, "blocks/1/conv1", IN),
        Mutant("llama", at("layers_0/mlp", detached), BACKWARD, "model/layers/0/mlp", IN_X),
        Mutant("encoder-decoder", at("decoder", memory_detached), BACKWARD, "decoder", "gradient of input memory"),
    ],
}
CASES = [pytest.param(fault, mutant, id=f"{fault}, {mutant.model}") for fault, several in MUTANTS.items() for mutant in several]


def report_of(mutant: Mutant) -> ParityReport:
    # `init` makes the variables in `test_right_pairs`.
    return compare(**{**m.QUICK, "variables": m.variables(mutant.model), **mutant.plant(m.MODELS[mutant.model]())})


@pytest.mark.parametrize(("fault", "mutant"), CASES)
def test_a_fault_is_found_and_named(fault: str, mutant: Mutant) -> None:
    report = report_of(mutant)
    assert not report.passed and report.proves, report.verdict()
    # A fault must be found by its value: another shape or dtype would be found without any arithmetic.
    assert all(" off in float64" in problem for row in report.failed_rows for problem in row.problems)
    assert any(row.kind == "output" for row in report.failed_rows) == (
        mutant.where == FORWARD and "afterwards" not in mutant.what
    )
    divergence, in_other_pass = (
        report.divergences[mutant.where],
        report.divergences[BACKWARD if mutant.where == FORWARD else FORWARD],
    )
    assert divergence is not None and in_other_pass is None, report.divergences
    assert (divergence["torch_path"], divergence["what"]) == (mutant.module, mutant.what), divergence
    assert mutant.note in divergence["note"]
    assert f"first difference, {mutant.where}: {mutant.module or 'the whole model'} (" in str(report)


def test_the_table_is_as_large_as_it_is_said_to_be() -> None:
    models = Counter(mutant.model for several in MUTANTS.values() for mutant in several)
    assert len(MUTANTS) == 19 and set(models) == set(m.MODELS) and sum(models.values()) == 51
    assert min(models[name] for name in ("decoder", "conv", "llama", "encoder-decoder")) >= 10
