"""Llama 3 and Qwen 3 against `transformers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from examples.models import llama
from examples.models.rules.llama import rules
from examples.models.transformer import RopeScaling
from parity_tests.third_party import checks, data
from parity_tests.third_party.ports import Port

SMALL = llama.LlamaConfig()
TOKENS, LABELS = data.text(SMALL.vocab_size)


def common(config: llama.LlamaConfig) -> dict[str, Any]:
    """The library's names for the port's hyperparameters."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        low, high = config.rope_scaling.low, config.rope_scaling.high
        rope |= {"rope_type": "llama3", "factor": config.rope_scaling.factor, "low_freq_factor": low, "high_freq_factor": high}
        rope |= {"original_max_position_embeddings": config.rope_scaling.length}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": config.padding,
        "rope_parameters": rope,
        "max_position_embeddings": 131072,
        "use_cache": False,
        "attn_implementation": "eager",
    }


def port(config: llama.LlamaConfig, **fields: Any) -> Port:
    return Port(
        config=config,
        make_flax=llama.Llama,
        block=llama.LlamaBlock,
        rules=rules,
        inputs=TOKENS | {"position_ids": data.far_positions(61)},
        targets={"logits": LABELS},
        arguments=lambda x: (x["input_ids"], x["attention_mask"], x["position_ids"]),
        **fields,
    )


PORTS = {
    "llama": port(
        # Of 4 frequencies one is kept, one is mixed, two are slowed down.
        dataclasses.replace(SMALL, rope_theta=100.0, rope_scaling=RopeScaling(length=40), padding=0),
        make_torch=lambda config: LlamaForCausalLM(LlamaConfig(**common(config))),
        torch_block=LlamaDecoderLayer,
        published={
            llama.LlamaConfig.llama3_8b(): 8_030_261_248,
            llama.LlamaConfig.llama3_1_8b(): 8_030_261_248,
            llama.LlamaConfig.llama3_2_1b(): 1_235_814_400,
        },
    ),
    "qwen3": port(
        dataclasses.replace(SMALL, qk_norm=True, attention_bias=True, tie_embeddings=True, head_dim=12),
        make_torch=lambda config: Qwen3ForCausalLM(Qwen3Config(**common(config))),
        torch_block=Qwen3DecoderLayer,
        published={llama.LlamaConfig.qwen3_8b(): 8_190_735_360, llama.LlamaConfig.qwen3_0_6b(): 596_049_920},
    ),
}


@pytest.mark.parametrize("name", PORTS)
@checks.each_check
def test_it_agrees(name: str, check: Callable[[Port], list[str]]) -> None:
    assert check(PORTS[name]) == []
