"""BERT, with both heads of its pre-training, against `transformers`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from transformers import BertConfig, BertForPreTraining
from transformers.models.bert.modeling_bert import BertLayer

from examples.models import bert
from examples.models.rules.bert import rules
from parity_tests.third_party import checks, data
from parity_tests.third_party.ports import Port

SMALL = bert.BertConfig()
TOKENS, LABELS = data.text(SMALL.vocab_size)


def make_torch(config: bert.BertConfig) -> BertForPreTraining:
    return BertForPreTraining(
        BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.max_len,
            type_vocab_size=config.num_segments,
            layer_norm_eps=config.layer_norm_eps,
            pad_token_id=config.padding,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            use_cache=False,
            attn_implementation="eager",
        )
    )


PORT = Port(
    config=SMALL,
    make_torch=make_torch,
    make_flax=bert.Bert,
    torch_block=BertLayer,
    block=bert.BertBlock,
    rules=rules,
    inputs=TOKENS | {"token_type_ids": np.repeat([[0, 1]], [9, 10], axis=1).repeat(data.BATCH, axis=0)},
    targets={"prediction_logits": LABELS, "seq_relationship_logits": np.array([1, 0])},
    arguments=lambda x: (x["input_ids"], x["attention_mask"], x["token_type_ids"]),
    published={bert.BertConfig.bert_base(): 110_106_428, bert.BertConfig.bert_large(): 336_226_108},
)


@checks.each_check
def test_it_agrees(check: Callable[[Port], list[str]]) -> None:
    assert check(PORT) == []
