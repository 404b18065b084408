"""Common faults of ports, planted one at a time: each is found and named. Right pairs raise no alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from examples.models import gpt2, linen, llama, weights
from examples.models import nnx as nnx_models
from parity_tests import support as s
from parity_tests.mutants import models as m
from parity_tests.mutants import planting as plant
from parity_tests.mutants.planting import DOUBLED, FLIPPED, Plant, at, detached, fields, given, inside, mapped, output, skipped
from parity_tests.third_party.of_transformers import PORTS
from remat_jax.parity import compare
from remat_jax.parity.case import Case
from remat_jax.parity.runs import Runs
from remat_jax.porting import Rules


class Mutant(NamedTuple):
    """A fault in a model, and what the report must name: PyTorch's module, the array, the pass, words, a setting."""

    model: str
    plant: Plant
    module: str
    what: str = "output 0"
    where: str = "forward"
    note: str = ""
    setting: str = ""


def backward(model: str, planted: Plant, module: str, what: str = "gradient of input 0", note: str = "") -> Mutant:
    return Mutant(model, planted, module, what, "backward", note)


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


def padding_trained(right: Any) -> Any:
    return lambda table, tokens, padding: right(table, tokens, None)


def copied(right: Any) -> Any:
    """The head has a copy of the embeddings: the same values, and no gradient for the table."""
    return lambda table, x: x @ jax.lax.stop_gradient(table.embedding).T


def other_gelu(right: Any) -> Any:
    return lambda x, approximate: right(x, approximate=not approximate)


def mean_square(y: Any) -> Any:
    return (y**2).mean()


def per_example(y: Any) -> Any:
    """The sum over all but the first axis, as in a loss that divides by the batch and not by the tokens."""
    return (y**2).sum() / len(y)


def doubled_backwards(y: Any) -> Any:
    return plant.scaled_cotangent(2.0)(mean_square(y))


SHOWN = "a position where attention_mask is 1"
TIED = "gradient of weight, the same tensor as lm_head.weight"
NORM = "model.layers.1.self_attn.{}_norm.weight -> params/layers_1/self_attn/{}_norm/scale"
OUT = "decoder.layers.1.self_attn.out_proj.weight -> params/layers_1/self_attn/out_proj/kernel"

MUTANTS: dict[str, list[Mutant]] = {
    "a square kernel not transposed": [Mutant("decoder", mapped(OUT), "decoder/layers/1/self_attn/out_proj")],
    "another epsilon": [Mutant("decoder", at("layers_1/norm2", fields(epsilon=1e-6)), "decoder/layers/1/norm2")],
    "the other GELU": [
        Mutant(
            "gpt2",
            at("layers_1/mlp", inside(nn, "gelu", other_gelu)),
            "transformer/h/1/mlp",
            note="it passes a different input 0 to 'layers_1/mlp/c_proj'",
        )
    ],
    "wrong padding": [
        Mutant("conv", at("stem", fields(padding="SAME")), "stem"),
        backward("llama", at("", inside(llama, "embed", padding_trained)), "model/embed_tokens", TIED),
    ],
    "an inverted mask": [
        Mutant("decoder", at("layers_1/self_attn", inside(linen, "attention", only_the_future)), "decoder/layers/1/self_attn"),
        Mutant("gpt2", at("", inside(gpt2, "attention_bias", inverted)), "", "input 1 of 'layers_0'", setting=SHOWN),
    ],
    "a copy in the place of a tie": [backward("gpt2", at("", inside(gpt2, "unembed", copied)), "transformer/wte", TIED)],
    "rotary pairs permuted": [
        Mutant("llama", at("layers_1/self_attn", inside(llama, "rotate", interleaved)), "model/layers/1/self_attn")
    ],
    "a sign flipped": [backward("conv", at("blocks_0/conv2", FLIPPED), "blocks/0/conv2")],
    "a gradient doubled": [
        backward("conv", at("blocks_1/norm", DOUBLED), "blocks/1/norm"),
        backward("llama", at("layers_1/self_attn/k_norm", DOUBLED), "model/layers/1/self_attn/k_norm"),
    ],
    "a bias without a gradient": [
        backward(
            "decoder",
            at("layers_0/self_attn/in_proj", plant.without_bias_gradient),
            "decoder/layers/0/self_attn",
            "gradient of in_proj_bias",
        ),
        backward("conv", at("blocks_0/conv2", plant.without_bias_gradient), "blocks/0/conv2", "gradient of bias"),
    ],
    "queries and keys swapped": [
        Mutant(
            "decoder", at("layers_0/self_attn/in_proj", output(plant.swapped_queries_and_keys)), "decoder/layers/0/self_attn"
        ),
        Mutant("llama", mapped(NORM.format("q", "k"), NORM.format("k", "q")), "model/layers/1/self_attn/q_norm"),
    ],
    "statistics of a batch norm": [
        Mutant("conv", at("blocks_1/norm", fields(momentum=0.99)), "blocks/1/norm", "mean afterwards"),
        Mutant("conv", at("blocks_0/norm", fields(unbiased=False)), "blocks/0/norm", "var afterwards"),
        Mutant("conv", at("norm", fields(use_running_average=True)), "norm"),
    ],
    "a module in float32": [Mutant("decoder", at("layers_1/ffn/up", fields(dtype=jnp.float32)), "decoder/layers/1/ffn/0")],
    "noise drawn anew in recomputation": [
        backward(
            "conv",
            plant.noise_of_the_host("blocks.0.conv1", "blocks_0/conv1"),
            "blocks/0/conv1",
            "recomputed output",
            "only in checkpoint",
        ),
        backward(
            "llama",
            plant.noise_of_the_host("model.layers.0.mlp", "layers_0/mlp"),
            "model/layers/0/mlp",
            "gradient of input x",
            "only in checkpoint",
        ),
    ],
    "a loss normalised otherwise": [
        Mutant("decoder", given(loss=(mean_square, per_example)), "loss"),
        backward("conv", given(loss=(mean_square, doubled_backwards)), "loss"),
    ],
    "a layer left out": [Mutant("decoder", at("layers_1", skipped), "decoder/layers/1")],
    "an input detached": [backward("llama", at("layers_0/mlp", detached), "model/layers/0/mlp", "gradient of input x")],
}
CASES = [pytest.param(mutant, id=f"{fault}, {mutant.model}") for fault, several in MUTANTS.items() for mutant in several]


@pytest.mark.parametrize("mutant", CASES)
def test_a_fault_is_found_and_named(mutant: Mutant) -> None:
    # `init` makes the variables in the test of right pairs.
    case = {**m.QUICK, "variables": m.variables(mutant.model), **mutant.plant(m.MODELS[mutant.model]())}
    report = compare(**case)
    assert not report.passed and report.proves, report.verdict()
    # A fault must be found by its value: another shape or dtype would be found without any arithmetic.
    assert all(" off in float64" in problem for row in report.failed_rows for problem in row.problems)
    shows_in_outputs = mutant.where == "forward" and "afterwards" not in mutant.what
    assert any(row.kind == "output" for row in report.failed_rows) == shows_in_outputs
    named = {way: divergence for way, divergence in report.divergences.items() if divergence}
    assert named.keys() == {mutant.where}
    divergence = named[mutant.where]
    assert (divergence["torch_path"], divergence["what"]) == (mutant.module, mutant.what), divergence
    assert mutant.note in divergence["note"] and mutant.setting in str(report.differences)
    assert f"first difference, {mutant.where}: {mutant.module or 'the whole model'} (" in str(report)


# Right pairs, also in train mode and through checkpoints.


SIZES = s.SIZES["ByteDecoder"]
UNUSED = dict.fromkeys(("variables", "loss", "torch_blocks", "flax_blocks", "optimizer", "torch_call", "flax_call"))


def decoder_scanned() -> dict[str, Any]:
    rules = Rules.parse(m.DECODER).stacked("layers_{i}", "layers")
    return m.decoder(flax_module=linen.ByteDecoder(**SIZES, scan=True), rules=rules)


def decoder_nnx() -> dict[str, Any]:
    model = nnx.eval_shape(lambda: nnx_models.ByteDecoder(**SIZES, rngs=nnx.Rngs(0)))
    return m.decoder(flax_module=weights.load_nnx(model, s.parameters("ByteDecoder", False, "float32")))


RIGHT: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "decoder-scan": (decoder_scanned, "checkpoint"),
    "decoder-nnx": (decoder_nnx, "off"),
    "conv-train-checkpoint": (m.conv, "checkpoint"),
    "conv-evaluation": (lambda: m.conv(train=False), "off"),
    "gpt2-scan": (lambda: m.transformer(PORTS["gpt2"], scan=True), "checkpoint"),
    "llama-train": (m.MODELS["llama"], "off"),
    "gemma-scan": (lambda: m.transformer(PORTS["gemma"], scan=True), "off"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_pair_raises_no_alarm(name: str) -> None:
    make, mode = RIGHT[name]
    options = {"modes": mode, "dtypes": "float64", "steps": 1, "excite": True, "keep_float64": False}
    runs = Runs(Case(**{**UNUSED, **make(), **options}), lambda *progress: None)
    report = runs.report(memory=False, target=None)
    assert report.passed and report.differences == (), str(report)
    # Where everything agrees nothing is searched; here a search runs, and must name no module.
    before = len(runs.checks)
    assert runs.explain(mode) == {"forward": None, "backward": None}
    assert runs.checks[before:] == []
