"""EasyLM's LLaMA 7B with Adam, 4 × 2048 tokens, one H200.

    git clone https://github.com/young-geng/EasyLM && git -C EasyLM checkout fe5b2c3
    pip install ml_collections einops absl-py
    PYTHONPATH=.:EasyLM python -m examples.others.easylm_llama
    PYTHONPATH=.:EasyLM remat-jax measure examples/others/easylm_llama.py:job --target h200

EasyLM puts `nn.remat` around its blocks by its own `remat_block`; the policy given here takes that checkpoint's place. EasyLM
was written for older versions of transformers and JAX: this file defines the few names that its model needs from them.
Printed by commit fe5b2c3 (12 August 2024) with JAX 0.10.2 on two idle cores:

    as written: 90.9 GiB, 947 ms
    full: 90.9 GiB, 949 ms
    dots_with_no_batch_dims: 101.5 GiB, 836 ms
    plan within 75%: 101.5 GiB, estimated 836 ms, FlaxLLaMABlock in one run of 32
      found in 245 s, the first answer that fits after 24 s
      best named policy that fits: dots_with_no_batch_dims, 101.5 GiB, estimated 836 ms
      as written: 90.9 GiB, estimated 947 ms
    a step of a small one as written: loss 10.374083, parameters changed by 0.203429
    a step of a small one under full: loss 10.374083, parameters changed by 0.203429
    a step of a small one under its plan, FlaxLLaMABlock in one run of 2: loss 10.374083, parameters changed by 0.203430

The layers are not scanned, so every compilation of the search contains 32 of them.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.interpreters import pxla
from ml_collections import ConfigDict, config_dict

import remat_jax as rj

from .shared import show


class PretrainedConfig:
    """The options of transformers that EasyLM's model reads."""

    output_attentions = output_hidden_states = tie_word_embeddings = False
    use_return_dict = True

    @classmethod
    def from_dict(cls, options: Any) -> PretrainedConfig:
        made = cls()
        made.__dict__.update(dict(options))
        return made


@struct.dataclass
class Output:
    """The output of EasyLM's modules."""

    last_hidden_state: Any = None
    hidden_states: Any = None
    attentions: Any = None
    logits: Any = None

    def __getitem__(self, index: int) -> Any:
        return [one for one in (self.last_hidden_state, self.logits, self.hidden_states, self.attentions) if one is not None][
            index
        ]


def updated(config: Any, updates: Any) -> Any:
    """The options, with some replaced."""
    config.update(ConfigDict(updates or {}).copy_and_resolve_references())
    return config


def module(name: str, **contents: Any) -> None:
    """Let `import` find a module with these contents."""
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(contents)


module("transformers", FlaxLogitsWarper=object, PretrainedConfig=PretrainedConfig)
module("transformers.configuration_utils", PretrainedConfig=PretrainedConfig)
module("transformers.modeling_flax_outputs", FlaxBaseModelOutput=Output, FlaxCausalLMOutput=Output)
module("transformers.modeling_flax_utils", FlaxPreTrainedModel=object)
module("mlxu", config_dict=lambda **k: ConfigDict(k), config_placeholder=config_dict.placeholder, update_config_dict=updated)
# JAX has removed `thread_resources`, from which EasyLM reads the axes of its mesh; here there are none.
pxla.thread_resources = types.SimpleNamespace(env=types.SimpleNamespace(physical_mesh=types.SimpleNamespace(axis_names=())))

from EasyLM.models.llama import llama_model  # noqa: E402


def job(size: str = "llama_7b", rows: int = 4, length: int = 2048) -> rj.Workload:
    """A training step."""
    finalize, default = llama_model.LLaMAConfigurator.finalize_config, llama_model.LLaMAConfigurator.get_default_config
    model = llama_model.FlaxLLaMAForCausalLMModule(
        finalize(default({"base_model": size})), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
    )
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def run(params: Any, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        return model.apply(params, tokens, jnp.ones_like(tokens), positions, deterministic=True).logits

    def init(key: jax.Array, tokens: jax.Array) -> Any:
        return model.init(key, tokens, jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(length), tokens.shape))

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        logits = run(params, tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    params = jax.eval_shape(init, jax.random.key(0), tokens)
    return rj.Workload(loss, params, (tokens, tokens), llama_model.FlaxLLaMABlock, optimizer=optax.adam(1e-4), name="EasyLM")


def small() -> rj.Workload:
    """EasyLM's own small size: two layers of width 128."""
    return job("debug", rows=2, length=64)


if __name__ == "__main__":
    show(job, small, "75%")
