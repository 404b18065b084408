"""Pairs of models: transformers' Flax modules and its PyTorch modules, tiny, with random weights, and those of `own`.

Releases of transformers from 5 on have no Flax classes: `make test-pairs` runs 4.56.2 in its own environment.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax.numpy as jnp
import numpy as np
import torch

from parity_tests.pairs import own

Arrays = dict[str, np.ndarray]

WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": 60, "max_position_embeddings": 16}
ENCODER_DECODER = {"d_model": 16} | {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
}
BATCH, LENGTH = 2, 7
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(3, 60, (BATCH, LENGTH))
MASK = np.ones((BATCH, LENGTH), np.int64)
MASK[1, 5:] = 0
PLACES = np.maximum(np.cumsum(MASK, 1) * MASK - 1, 0)
PIXELS = RANDOM.normal(size=(BATCH, 3, 32, 32)).astype(np.float32)
SOUND = RANDOM.normal(size=(BATCH, 8, 16)).astype(np.float32)

TOKENS_ONLY: Arrays = {"input_ids": TOKENS, "attention_mask": MASK}
WITH_PLACES = {**TOKENS_ONLY, "position_ids": PLACES}
TOKENS_AND_TYPES = {**TOKENS_ONLY, "token_type_ids": TOKENS % 2}
WITH_TYPES = {**WITH_PLACES, "token_type_ids": TOKENS % 2}
TWO_TEXTS = {**TOKENS_ONLY, "decoder_input_ids": TOKENS[:, :5]}
OF_IMAGES = WIDTHS | {"image_size": 32, "patch_size": 8}
IMAGES: Arrays = {"pixel_values": PIXELS}
STATES = ("last_hidden_state", "pooler_output")


class Pair(NamedTuple):
    """Two classes of transformers, with the configuration and the inputs of both.

    Attributes:
        torch: the name of PyTorch's class; Flax's is `Flax`, this name and `Module`.
        config: the arguments of the configuration's class.
        inputs: the arguments of both calls.
        outputs: the names of the compared outputs.
        torch_only: further keywords of PyTorch's call.
        flax_only: a function of the inputs to further keywords of Flax's call.
    """

    torch: str
    config: dict[str, Any]
    inputs: Arrays
    outputs: tuple[str, ...] = ("logits",)
    torch_only: dict[str, Any] = {}
    flax_only: Callable[..., dict[str, Any]] = lambda **inputs: {}


def both_places(**inputs: Any) -> dict[str, Any]:
    """Arguments without a default in Flax's encoder-decoders: positions from 0, and a mask that hides nothing."""
    read, written = inputs["input_ids"], inputs["decoder_input_ids"]
    positions = {"position_ids": places(read), "decoder_position_ids": places(written)}
    return positions | {"decoder_attention_mask": jnp.ones_like(written)}


def places(tokens: Any) -> Any:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def hides_nothing(**inputs: Any) -> dict[str, Any]:
    return {"decoder_attention_mask": jnp.ones_like(inputs["decoder_input_ids"])}


T5 = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
GPT = {"vocab_size": 60, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
WHISPER = {"vocab_size": 60, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
NO_CACHE = {"use_cache": False}


def decoder(torch: str, config: dict[str, Any], inputs: Arrays = WITH_PLACES) -> Pair:
    """A language model, without PyTorch's cache."""
    return Pair(torch, config, inputs, torch_only=NO_CACHE)


def of_two_texts(torch: str, config: dict[str, Any], flax_only: Any, outputs: tuple[str, ...] = ("logits",)) -> Pair:
    """An encoder-decoder, without PyTorch's cache."""
    return Pair(torch, config, TWO_TEXTS, outputs, NO_CACHE, flax_only)


PAIRS: dict[str, Pair] = {
    "bert": Pair("BertModel", WIDTHS | TEXT, WITH_TYPES, STATES),
    "gpt2": decoder("GPT2LMHeadModel", GPT),
    "clip": Pair(
        "CLIPModel",
        {"text_config": WIDTHS | TEXT | {"eos_token_id": 2}, "vision_config": OF_IMAGES, "projection_dim": 12},
        {"input_ids": TOKENS, "attention_mask": MASK, "position_ids": PLACES, "pixel_values": PIXELS},
        ("logits_per_text", "text_embeds", "image_embeds"),
    ),
    "vit": Pair("ViTModel", OF_IMAGES, IMAGES, STATES),
    "gpt_neo": decoder(
        "GPTNeoForCausalLM",
        TEXT
        | {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 3},
    ),
    "electra": Pair("ElectraModel", WIDTHS | TEXT | {"embedding_size": 8}, WITH_TYPES, STATES[:1]),
    # Its positions begin after the padding position.
    "roberta": Pair("RobertaModel", WIDTHS | TEXT, WITH_TYPES | {"position_ids": PLACES + 2}, STATES),
    "albert": Pair("AlbertModel", WIDTHS | TEXT | {"embedding_size": 8}, WITH_TYPES, STATES),
    "bloom": decoder("BloomForCausalLM", {"vocab_size": 60, "hidden_size": 16, "n_layer": 2, "n_head": 2}, TOKENS_ONLY),
    "llama": decoder("LlamaForCausalLM", WIDTHS | TEXT | {"num_key_value_heads": 2}),
    # A real fault of the library: Flax's sliding window is one token too long.
    "mistral": decoder(
        "MistralForCausalLM", WIDTHS | TEXT | {"num_key_value_heads": 1, "sliding_window": 3, "attn_implementation": "eager"}
    ),
    "bart": of_two_texts("BartModel", TEXT | ENCODER_DECODER, both_places, STATES[:1]),
    "opt": decoder("OPTForCausalLM", WIDTHS | TEXT | {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    "resnet": Pair(
        "ResNetModel", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}, IMAGES, STATES
    ),
    "t5": of_two_texts("T5ForConditionalGeneration", T5, hides_nothing),
    "whisper": Pair(
        "WhisperForConditionalGeneration",
        ENCODER_DECODER | WHISPER,
        {"input_features": SOUND, "decoder_input_ids": TOKENS[:, :5]},
        torch_only=NO_CACHE,
        flax_only=lambda **inputs: {"decoder_position_ids": places(inputs["decoder_input_ids"])},
    ),
    "distilbert": Pair(
        "DistilBertModel", TEXT | {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}, TOKENS_ONLY, STATES[:1]
    ),
    "gptj": decoder("GPTJForCausalLM", GPT | {"rotary_dim": 4}),
    "gemma": decoder("GemmaForCausalLM", WIDTHS | TEXT | {"num_key_value_heads": 1, "head_dim": 8}),
    "longt5": of_two_texts("LongT5Model", T5 | {"local_radius": 3, "global_block_size": 2}, hides_nothing, STATES[:1]),
    # Neither model uses its mask token: no patch is masked.
    "dinov2": Pair("Dinov2Model", OF_IMAGES, IMAGES, STATES),
}


QUESTION = ("start_logits", "end_logits")
HEADS = {"QuestionAnswering": QUESTION, "SequenceClassification": ("logits",), "TokenClassification": ("logits",)}
# The family, its pair above, and the names of its heads.
FAMILIES = {
    "bert": (*HEADS, "MaskedLM"),
    "roberta": (*HEADS, "MaskedLM"),
    "albert": (*HEADS, "MaskedLM"),
    "electra": (*HEADS, "MaskedLM"),
    "distilbert": (*HEADS, "MaskedLM"),
    "bart": ("QuestionAnswering", "ConditionalGeneration"),
    "vit": ("ImageClassification",),
    "resnet": ("ImageClassification",),
    "dinov2": ("ImageClassification",),
}


def with_head(family: str, head: str) -> Pair:
    """A family's pair with a task's head instead of the bare model."""
    pair = PAIRS[family]
    return pair._replace(
        torch=f"{pair.torch.removesuffix('Model')}For{head}",
        config=pair.config | {"num_labels": 3} if head.endswith("Classification") else pair.config,
        outputs=HEADS.get(head, ("logits",)),
    )


PAIRS |= {f"{family}:{head}": with_head(family, head) for family, heads in FAMILIES.items() for head in heads}
SEQUENCES = {"mbart": "MBart", "marian": "Marian", "pegasus": "Pegasus", "blenderbot": "Blenderbot"}
PAIRS |= {
    f"{family}:ConditionalGeneration": of_two_texts(
        f"{name}MTModel" if family == "marian" else f"{name}ForConditionalGeneration",
        TEXT | ENCODER_DECODER | {"pad_token_id": 0, "decoder_start_token_id": 1},
        both_places,
    )
    for family, name in SEQUENCES.items()
}
PAIRS |= {
    "xlm_roberta": PAIRS["roberta"]._replace(torch="XLMRobertaModel"),
    "roberta_prelayernorm": PAIRS["roberta"]._replace(torch="RobertaPreLayerNormModel"),
    "roformer": Pair("RoFormerModel", WIDTHS | TEXT | {"embedding_size": 16}, TOKENS_AND_TYPES, STATES[:1]),
    "regnet": Pair(
        "RegNetModel", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "groups_width": 4}, IMAGES, STATES
    ),
    "beit": Pair("BeitModel", OF_IMAGES, IMAGES, STATES),
    "blenderbot_small:ConditionalGeneration": PAIRS["blenderbot:ConditionalGeneration"]._replace(
        torch="BlenderbotSmallForConditionalGeneration"
    ),
    "xglm": decoder("XGLMForCausalLM", TEXT | {"d_model": 16, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2}),
    "clip:TextModel": Pair("CLIPTextModel", WIDTHS | TEXT | {"eos_token_id": 2}, WITH_PLACES, STATES),
    "clip:VisionModel": Pair("CLIPVisionModel", OF_IMAGES, IMAGES, STATES),
    "gemma:MoreHeads": PAIRS["gemma"]._replace(config=PAIRS["gemma"].config | {"num_key_value_heads": 2}),
    "llama:Grouped": PAIRS["llama"]._replace(config=PAIRS["llama"].config | {"num_key_value_heads": 1}),
}


NAMES = (*PAIRS, *own.OWN)


def has_flax_classes() -> bool:
    """Whether the installed release of transformers has Flax classes."""
    try:
        return importlib.util.find_spec("transformers.modeling_flax_utils") is not None
    except ModuleNotFoundError:
        return False


def module_of(name: str) -> Any:
    """The module of transformers that has the Flax classes of a pair."""
    family = name.partition(":")[0]
    return importlib.import_module(f"transformers.models.{family}.modeling_flax_{family}")


def make(name: str) -> dict[str, Any]:
    """The arguments of `compare` for a pair."""
    if name in own.OWN:
        return own.make(name)
    import transformers

    pair = PAIRS[name]
    classes = module_of(name), getattr(transformers, pair.torch)
    flax = getattr(classes[0], f"Flax{pair.torch.removesuffix('Model')}Module")
    config = classes[1].config_class(**pair.config)
    # An argument without a default in some of Flax's classes.
    optional = {"head_mask": None} if "head_mask" in inspect.signature(flax.__call__).parameters else {}

    def torch_call(model: Any, **inputs: Any) -> dict[str, Any]:
        made = model(**inputs, **pair.torch_only)
        return {key: made[key] for key in pair.outputs}

    def flax_call(model: Any, **inputs: Any) -> dict[str, Any]:
        given = {**optional, **inputs}
        if "pixel_values" in given:
            given["pixel_values"] = jnp.transpose(given["pixel_values"], (0, 2, 3, 1))
        made = model(**given, **pair.flax_only(**inputs))
        return {key: made[key] for key in pair.outputs}

    def torch_module() -> torch.nn.Module:
        torch.manual_seed(0)
        return classes[1](config).eval()

    return {
        "torch_module": torch_module,
        "flax_module": lambda dtype: flax(config, dtype=jnp.dtype(dtype)),
        "inputs": dict(pair.inputs),
        "torch_call": torch_call,
        "flax_call": flax_call,
    }


def old_jax() -> Any:
    """The arguments of `jnp.clip` that JAX 0.10 no longer has and transformers 4.56 uses."""
    clip = jnp.clip

    @functools.wraps(clip)
    def old(x: Any, a_min: Any = None, a_max: Any = None, **options: Any) -> Any:
        return clip(x, a_min, a_max, **options)

    return mock.patch.object(jnp, "clip", old)
