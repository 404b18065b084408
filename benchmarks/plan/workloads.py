"""The models that plans are made for, with the proportions of published models, and MaxText's names for their tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import remat_jax as rj
from benchmarks import predict_memory
from examples.models.bert import BertBlock, BertConfig
from examples.models.gpt2 import GPT2, GPT2Block, GPT2Config
from examples.models.llama import Llama, LlamaBlock, LlamaConfig
from examples.models.siglip import SiglipBlock, SiglipConfig, SiglipVision
from examples.models.transformer import run_blocks

DTYPE = jnp.bfloat16
Roles = Mapping[str, str]
"""A tensor's name in MaxText → the selectors of the same tensor here."""


@dataclass(frozen=True)
class Case:
    """A model to plan for.

    Attributes:
      layers: the number of layers of each tower.
      roles: by block, the selectors of the tensors that have a name in MaxText.
    """

    workload: rj.Workload
    layers: int
    roles: Mapping[type, Roles]


def decoder_unrolled(layers: int) -> Case:
    """Llama 3.2 with 1B parameters, its layers unrolled: 4 texts of 1024 tokens. Attention is XLA's."""
    config = dataclasses.replace(LlamaConfig.llama3_2_1b(), num_layers=layers)
    job = language_model(Llama(config, param_dtype=DTYPE), LlamaBlock, 4, 1024, "decoder, unrolled")
    # MaxText names queries and keys after it has rotated them.
    roles = {
        "query_proj": "*self_attn:concatenate#0",
        "key_proj": "*self_attn:concatenate#1",
        "value_proj": "*self_attn/v_proj:dot_general#0",
        "context": "*self_attn/mixed/*:dot_general#0",
        "out_proj": "*self_attn/o_proj:dot_general#0",
        "mlpwi_0": "*mlp/gate_proj:dot_general#0",
        "mlpwi_1": "*mlp/up_proj:dot_general#0",
        "mlpwo": "*mlp/down_proj:dot_general#0",
    }
    return Case(job, layers, {LlamaBlock: roles})


def decoder_scanned(layers: int) -> Case:
    """GPT-2 with 124M parameters, its layers scanned: 16 texts of 1024 tokens. Attention is XLA's."""
    config = dataclasses.replace(GPT2Config.gpt2(), num_layers=layers)
    job = language_model(GPT2(config, scan=True, param_dtype=DTYPE), GPT2Block, 16, 1024, "decoder, scanned")
    roles = {
        "qkv_proj": "*attn/c_attn:add#0",
        "context": "*attn/mixed/*:dot_general#0",
        "out_proj": "*attn/c_proj:add#0",
        "mlpwi": "*mlp/c_fc:add#0",
        "mlpwo": "*mlp/c_proj:add#0",
    }
    return Case(job, layers, {GPT2Block: roles})


def language_model(model: nn.Module, block: type, batch: int, length: int, name: str) -> rj.Workload:
    """A training step of a language model with Adam; nothing is allocated."""
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        logits = jnp.asarray(model.apply(params, tokens), jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return rj.Workload(loss, params, (tokens, tokens), block, optimizer=optax.adam(1e-4), name=name)


def decoder_pallas(layers: int) -> Case:
    """A decoder of width 1024 with JAX's Pallas kernel for attention, its layers scanned: 4 texts of 1024 tokens."""
    job = predict_memory.decoder("pallas", layers)
    # The kernel's backward pass reads the kernel's output and log-sum-exp; MaxText gives both the same name.
    roles = {
        "query_proj": "layers:reshape#0",
        "key_proj": "layers:reshape#1",
        "value_proj": "layers:reshape#2",
        "context": "layers:custom_vjp_call#0, layers:custom_vjp_call#1",
        "out_proj": "layers/out:dot_general#0",
        "mlpwi_0": "layers/gate:dot_general#0",
        "mlpwi_1": "layers/up:dot_general#0",
        "mlpwo": "layers/down:dot_general#0",
    }
    return Case(job, layers, {predict_memory.DecoderBlock: roles})


SIGLIP_ROLES = {
    "query_proj": "*self_attn/query:add#0",
    "key_proj": "*self_attn/key:add#0",
    "value_proj": "*self_attn/value:add#0",
    "context": "*self_attn/mixed/*:dot_general#0",
    "out_proj": "*self_attn/out:add#0",
    "mlpwi": "*mlp/fc1:add#0",
    "mlpwo": "*mlp/fc2:add#0",
}
BERT_ROLES = {
    "query_proj": "*attention/query:add#0",
    "key_proj": "*attention/key:add#0",
    "value_proj": "*attention/value:add#0",
    "context": "*attention/mixed/*:dot_general#0",
    "out_proj": "*attention/out:add#0",
    "mlpwi": "*/up:add#0",
    "mlpwo": "*/down:add#0",
}


def vision(layers: int) -> Case:
    """The vision tower of SigLIP so400m as a classifier of 1000 classes, unrolled: 16 images of 384² pixels."""
    config = dataclasses.replace(SiglipConfig.so400m_patch14_384(), num_layers=layers)
    model = SiglipVision(config, param_dtype=DTYPE)
    images = jax.ShapeDtypeStruct((16, config.image_size, config.image_size, 3), DTYPE)
    labels = jax.ShapeDtypeStruct((16,), jnp.int32)
    classes = jax.ShapeDtypeStruct((config.hidden_size, 1000), DTYPE)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        pooled = jnp.asarray(model.apply(params["vision"], images)[1])
        logits = (pooled @ params["classes"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    params = {"vision": jax.eval_shape(model.init, jax.random.key(0), images), "classes": classes}
    job = rj.Workload(loss, params, (images, labels), SiglipBlock, optimizer=optax.adam(1e-4), name="ViT")
    return Case(job, layers, {SiglipBlock: SIGLIP_ROLES})


def deep_mlp(layers: int) -> Case:
    """A deep perceptron of width 1024 over 8192 rows, scanned."""
    roles = {"mlpwi": "layers/up:add#0", "mlpwo": "layers/down:add#0"}
    return Case(predict_memory.deep_mlp(layers), layers, {predict_memory.MlpBlock: roles})


class TextTower(nn.Module):
    """Tokens (B, T) → the first token's state (B, E), which stands for the whole text: BERT's layers without its heads."""

    config: BertConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        words = nn.Embed(config.vocab_size, config.hidden_size, param_dtype=DTYPE, name="words")(tokens)
        places = nn.Embed(config.max_len, config.hidden_size, param_dtype=DTYPE, name="positions")
        x = words + places(jnp.arange(tokens.shape[-1])[None])
        return run_blocks(lambda name: BertBlock(config, DTYPE, name=name), config.num_layers, x, None, scan=True)[:, 0]


class TwoTowers(nn.Module):
    """Images and texts (B, …) → their directions (B, 512) in a common space, as in CLIP."""

    layers: int

    @nn.compact
    def __call__(self, images: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = dataclasses.replace(SiglipConfig.base_patch16_224(), num_layers=self.layers)
        seen = SiglipVision(config, scan=True, param_dtype=DTYPE)
        read = TextTower(dataclasses.replace(BertConfig.bert_base(), num_layers=self.layers))
        states = (seen(images)[1], read(tokens))
        made = (nn.Dense(512, use_bias=False, param_dtype=DTYPE)(state).astype(jnp.float32) for state in states)
        image, text = (state / jnp.linalg.norm(state, axis=-1, keepdims=True) for state in made)
        return image, text


def two_towers(layers: int) -> Case:
    """CLIP's contrastive loss over SigLIP base and BERT base, both scanned: 64 pairs of 224² pixels and 128 tokens."""
    model, pairs = TwoTowers(layers), 64
    images = jax.ShapeDtypeStruct((pairs, 224, 224, 3), DTYPE)
    tokens = jax.ShapeDtypeStruct((pairs, 128), jnp.int32)

    def loss(params: Any, images: jax.Array, tokens: jax.Array) -> jax.Array:
        image, text = model.apply(params, images, tokens)
        alike = jnp.asarray(image) @ jnp.asarray(text).T / 0.07
        matching = jnp.arange(pairs)
        either = (optax.softmax_cross_entropy_with_integer_labels(scores, matching).mean() for scores in (alike, alike.T))
        return sum(either) / 2

    params = jax.eval_shape(model.init, jax.random.key(0), images, tokens)
    blocks = (SiglipBlock, BertBlock)
    job = rj.Workload(loss, params, (images, tokens), blocks, optimizer=optax.adam(1e-4), name="two towers")
    return Case(job, layers, {SiglipBlock: SIGLIP_ROLES, BertBlock: BERT_ROLES})


CASES: dict[str, Callable[[int], Case]] = {
    "mlp": deep_mlp,
    "scanned": decoder_scanned,
    "pallas": decoder_pallas,
    "unrolled": decoder_unrolled,
    "vit": vision,
    "towers": two_towers,
}
