"""The ports of well-known transformers: dtypes, masks, rotations, tied embeddings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from examples.models import bert, gemma, gpt2, llama, siglip
from examples.models.transformer import attention, attention_bias, rotations

TOKENS = jax.ShapeDtypeStruct((2, 5), jnp.int32)
MODELS = {
    "llama": (llama.Llama, llama.LlamaConfig(), llama.LlamaBlock),
    "qwen3": (llama.Llama, llama.LlamaConfig(qk_norm=True, attention_bias=True, tie_embeddings=True), llama.LlamaBlock),
    "gpt2": (gpt2.GPT2, gpt2.GPT2Config(), gpt2.GPT2Block),
    "bert": (bert.Bert, bert.BertConfig(), bert.BertBlock),
    "siglip": (siglip.SiglipVision, siglip.SiglipConfig(), siglip.SiglipBlock),
    "gemma": (gemma.Gemma, gemma.GemmaConfig(), gemma.GemmaBlock),
}
models = pytest.mark.parametrize("name", MODELS)


def inputs(name: str, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2, 20, 20, 3), dtype) if name == "siglip" else TOKENS


@models
@pytest.mark.parametrize(("scan", "dtype"), [(True, "bfloat16"), (False, "float64")], ids=["scanned", "unrolled"])
def test_outputs_and_gradients_have_the_parameters_dtype(name: str, dtype: str, scan: bool, x64: None) -> None:
    make, config, block = MODELS[name]
    model, x = make(config, scan=scan, param_dtype=jnp.dtype(dtype)), inputs(name, jnp.dtype(dtype))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    outputs = jax.eval_shape(model.apply, variables, x)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((variables, outputs))} == {dtype}
    loss = rj.checkpoint_blocks(lambda v, x: sum(jnp.mean(y) for y in jax.tree.leaves(model.apply(v, x))), {block: "full"})
    gradients = jax.eval_shape(jax.grad(loss), variables, x)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), gradients) == jax.tree.map(lambda x: (x.shape, x.dtype), variables)


def test_a_query_that_may_look_nowhere_is_no_nan() -> None:
    bias = attention_bias(jnp.array([[0, 0, 1]]), 3, jnp.float32, causal=True)
    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.normal(size=(1, 3, 2, 4)), jnp.float32) for _ in range(3))
    mixed = attention(query, key, value, bias)
    everywhere, last = np.mean(value[0], axis=0).ravel(), np.ravel(value[0, 2])
    assert np.allclose(mixed[0], [everywhere, everywhere, last], atol=1e-6)
    assert attention_bias(None, 3, jnp.float32, causal=False) is None


def test_angles_of_bfloat16_are_not_rounded_to_it() -> None:
    """In bfloat16 the positions 256 and 257 are equal; their sines differ."""
    _, sin = rotations(jnp.array([[256, 257]]), 2, 10000.0, jnp.bfloat16)
    assert np.allclose(np.ravel(sin).astype(float), np.sin([256, 257]), atol=2**-8)


def test_tied_embeddings_keep_no_copy_of_the_table() -> None:
    model, config = gpt2.GPT2(gpt2.GPT2Config()), gpt2.GPT2Config()
    variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    work = rj.Workload(lambda v, x: jnp.mean(model.apply(v, x)), variables, (TOKENS,), gpt2.GPT2Block)
    table = {(config.vocab_size, config.hidden_size), (config.hidden_size, config.vocab_size)}
    assert not [row for row in rj.residuals(work, "full").rows if row.shape in table]
