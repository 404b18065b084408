"""GPT-2 against `transformers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.linen as nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import remat_jax as rj
from examples.models import gpt2
from examples.models.rules.gpt2 import rules
from parity_tests.third_party import checks, data, ports
from parity_tests.third_party.ports import Port

SMALL = gpt2.GPT2Config()
TOKENS, LABELS = data.text(SMALL.vocab_size)


def make_torch(config: gpt2.GPT2Config) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_positions=config.max_len,
            layer_norm_epsilon=config.layer_norm_eps,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
            attn_implementation="eager",
        )
    )


PORT = Port(
    config=SMALL,
    make_torch=make_torch,
    make_flax=gpt2.GPT2,
    torch_block=GPT2Block,
    block=gpt2.GPT2Block,
    rules=rules,
    inputs=TOKENS | {"position_ids": data.far_positions(2)},
    targets={"logits": LABELS},
    arguments=lambda x: (x["input_ids"], x["attention_mask"], x["position_ids"]),
    published={gpt2.GPT2Config.gpt2(): 124_439_808, gpt2.GPT2Config.gpt2_xl(): 1_557_611_200},
)


@checks.each_check
def test_it_agrees(check: Callable[[Port], list[str]]) -> None:
    assert check(PORT) == []


def test_with_its_norms_checkpointed_too_the_whole_model_keeps_the_same_bytes() -> None:
    """PyTorch's layer norm keeps its input and two numbers per row; JAX keeps intermediate arrays, unless the norm is a
    block.
    """
    config = dataclasses.replace(SMALL, num_layers=6)
    inputs, targets = ports.batch(PORT, "float32")
    model = gpt2.GPT2(config)
    loss = rj.checkpoint_blocks(ports.loss_of(PORT, model), {gpt2.GPT2Block: "full", nn.LayerNorm: "full"})
    work = rj.Workload(loss, ports.shapes(PORT, model, inputs), (inputs, targets), gpt2.GPT2Block, has_aux=True)
    kept, expected = rj.residuals(work, "off").device_bytes, checks.kept(PORT, "torch", "checkpoint", 6).device
    assert abs(kept - expected) <= 0.02 * expected, (kept, expected)
