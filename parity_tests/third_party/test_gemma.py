"""Gemma against `transformers`."""

from __future__ import annotations

from collections.abc import Callable

from transformers import GemmaConfig, GemmaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer

from examples.models import gemma
from examples.models.rules.gemma import rules
from parity_tests.third_party import checks, data
from parity_tests.third_party.ports import Port

SMALL = gemma.GemmaConfig()
TOKENS, LABELS = data.text(SMALL.vocab_size)


def make_torch(config: gemma.GemmaConfig) -> GemmaForCausalLM:
    return GemmaForCausalLM(
        GemmaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            pad_token_id=config.padding,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            use_cache=False,
            attn_implementation="eager",
        )
    )


PORT = Port(
    config=SMALL,
    make_torch=make_torch,
    make_flax=gemma.Gemma,
    torch_block=GemmaDecoderLayer,
    block=gemma.GemmaBlock,
    rules=rules,
    inputs=TOKENS | {"position_ids": data.far_positions(61)},
    targets={"logits": LABELS},
    arguments=lambda x: (x["input_ids"], x["attention_mask"], x["position_ids"]),
    published={gemma.GemmaConfig.gemma_2b(): 2_506_172_416, gemma.GemmaConfig.gemma_7b(): 8_537_680_896},
)


@checks.each_check
def test_it_agrees(check: Callable[[Port], list[str]]) -> None:
    assert check(PORT) == []
