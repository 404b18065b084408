"""The ports of models of `transformers`, with inputs that reveal faults.

Among these are padding on either side, a padding token among the words, distant positions, and omitted labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import transformers
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from examples.models import bert, gemma, gpt2, llama, siglip
from examples.models.rules.bert import rules as bert_rules
from examples.models.rules.gemma import rules as gemma_rules
from examples.models.rules.gpt2 import rules as gpt2_rules
from examples.models.rules.llama import rules as llama_rules
from examples.models.rules.siglip import rules as siglip_rules
from examples.models.transformer import RopeScaling
from parity_tests.third_party.ports import IGNORED, Port

BATCH, LENGTH = 2, 19


def text(vocab: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Tokens (B, T) with a mask of padding, at the end of the first sequence and at the start of the second; labels.

    Token 0, the padding token, also occurs among the words: there it is visible, but may not train its embedding.
    """
    random = np.random.default_rng(0)
    tokens = random.integers(1, vocab, (BATCH, LENGTH))
    mask = np.ones((BATCH, LENGTH), np.int64)
    mask[0, 15:] = mask[1, :3] = 0
    tokens[mask == 0] = tokens[0, 4] = tokens[1, 7] = 0
    labels = np.where(mask == 1, random.integers(0, vocab, (BATCH, LENGTH)), IGNORED)
    return {"input_ids": tokens, "attention_mask": mask}, labels


# The library's names for the ports' hyperparameters.
LIBRARY_NAMES = {
    **{"max_len": "max_position_embeddings", "layer_norm_eps": "layer_norm_eps", "padding": "pad_token_id"},
    **{"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"},
    **{"tie_embeddings": "tie_word_embeddings", "num_segments": "type_vocab_size"},
    **{name: name for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "attention_bias")},
    **{name: name for name in ("image_size", "patch_size", "num_channels")},
}


def original(name: str, model: str, **fixed: Any) -> Callable[[Any], Any]:
    """Makes the library's model for a configuration of the port; `fixed` are hyperparameters that the port does not have."""

    def make(config: Any) -> Any:
        options = {theirs: getattr(config, ours) for ours, theirs in LIBRARY_NAMES.items() if hasattr(config, ours)}
        made = getattr(transformers, f"{name}Config")(**options, **rope(config), **fixed, attn_implementation="eager")
        return getattr(transformers, f"{name}{model}")(made)

    return make


def rope(config: Any) -> dict[str, Any]:
    """The library's settings of rotations."""
    if not hasattr(config, "rope_theta"):
        return {}
    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := getattr(config, "rope_scaling", None):
        settings |= {"rope_type": "llama3", "factor": scaling.factor, "original_max_position_embeddings": scaling.length}
        settings |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    return {"rope_parameters": settings}


def of_text(config: Any, names: tuple[str, ...], more: dict[str, np.ndarray], **fields: Any) -> Port:
    """The port of a model of text, which takes tokens, a mask, and the arrays in `more`."""
    tokens, labels = text(config.vocab_size)
    targets = {names[0]: labels, **dict.fromkeys(names[1:], np.array([1, 0]))}
    inputs = tokens | more
    return Port(config=config, inputs=inputs, targets=targets, arguments=lambda x: tuple(x[name] for name in inputs), **fields)


def far_positions(step: int) -> dict[str, np.ndarray]:
    """Positions `step` apart: angles of many turns, where a wrong frequency or a rounded angle shows."""
    return {"position_ids": np.broadcast_to(np.arange(LENGTH) * step, (BATCH, LENGTH)).copy()}


# The epsilon of norms has another name in GPT-2.
GPT2_FIXED = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"use_cache": False}
GPT2_FIXED |= {"layer_norm_epsilon": gpt2.GPT2Config().layer_norm_eps, "bos_token_id": None, "eos_token_id": None}
LLAMA: dict[str, Any] = {"make_flax": llama.Llama, "block": llama.LlamaBlock, "rules": llama_rules}
SMALL_LLAMA = llama.LlamaConfig()
RANDOM = np.random.default_rng(0)

PORTS = {
    "llama": of_text(
        # Of 4 frequencies one is kept, one is mixed, two are slowed down.
        dataclasses.replace(SMALL_LLAMA, rope_theta=100.0, rope_scaling=RopeScaling(length=40), padding=0),
        ("logits",),
        far_positions(61),
        make_torch=original("Llama", "ForCausalLM", max_position_embeddings=131072, use_cache=False),
        torch_block=LlamaDecoderLayer,
        published={
            llama.LlamaConfig.llama3_8b(): 8_030_261_248,
            llama.LlamaConfig.llama3_1_8b(): 8_030_261_248,
            llama.LlamaConfig.llama3_2_1b(): 1_235_814_400,
        },
        **LLAMA,
    ),
    "qwen3": of_text(
        dataclasses.replace(SMALL_LLAMA, qk_norm=True, attention_bias=True, tie_embeddings=True, head_dim=12),
        ("logits",),
        far_positions(61),
        make_torch=original("Qwen3", "ForCausalLM", max_position_embeddings=131072, use_cache=False),
        torch_block=Qwen3DecoderLayer,
        published={llama.LlamaConfig.qwen3_8b(): 8_190_735_360, llama.LlamaConfig.qwen3_0_6b(): 596_049_920},
        **LLAMA,
    ),
    "gpt2": of_text(
        gpt2.GPT2Config(),
        ("logits",),
        far_positions(2),
        make_torch=original("GPT2", "LMHeadModel", **GPT2_FIXED),
        make_flax=gpt2.GPT2,
        torch_block=GPT2Block,
        block=gpt2.GPT2Block,
        rules=gpt2_rules,
        published={gpt2.GPT2Config.gpt2(): 124_439_808, gpt2.GPT2Config.gpt2_xl(): 1_557_611_200},
    ),
    # With both heads of its pre-training.
    "bert": of_text(
        bert.BertConfig(),
        ("prediction_logits", "seq_relationship_logits"),
        {"token_type_ids": np.repeat([[0, 1]], [9, 10], axis=1).repeat(BATCH, axis=0)},
        make_torch=original(
            "Bert", "ForPreTraining", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, use_cache=False
        ),
        make_flax=bert.Bert,
        torch_block=BertLayer,
        block=bert.BertBlock,
        rules=bert_rules,
        published={bert.BertConfig.bert_base(): 110_106_428, bert.BertConfig.bert_large(): 336_226_108},
    ),
    "gemma": of_text(
        gemma.GemmaConfig(),
        ("logits",),
        far_positions(61),
        make_torch=original("Gemma", "ForCausalLM", use_cache=False),
        make_flax=gemma.Gemma,
        torch_block=GemmaDecoderLayer,
        block=gemma.GemmaBlock,
        rules=gemma_rules,
        published={gemma.GemmaConfig.gemma_2b(): 2_506_172_416, gemma.GemmaConfig.gemma_7b(): 8_537_680_896},
    ),
    # SigLIP's vision tower, of a size that the patches do not fill: the last two rows and columns of pixels are left out.
    "siglip": Port(
        config=siglip.SiglipConfig(image_size=22),
        make_torch=original("SiglipVision", "Model"),
        make_flax=siglip.SiglipVision,
        torch_block=SiglipEncoderLayer,
        block=siglip.SiglipBlock,
        rules=siglip_rules,
        inputs={"pixel_values": RANDOM.normal(size=(2, 3, 22, 22))},
        targets={"last_hidden_state": RANDOM.normal(size=(2, 16, 32)), "pooler_output": RANDOM.normal(size=(2, 32))},
        arguments=lambda x: (jnp.moveaxis(x["pixel_values"], 1, -1),),
        published={siglip.SiglipConfig.base_patch16_224(): 92_884_224, siglip.SiglipConfig.so400m_patch14_384(): 428_225_600},
    ),
}
