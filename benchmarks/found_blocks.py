"""The blocks that are found in models that others wrote: `python -m benchmarks.found_blocks [NAME …]`.

The models of transformers 4.56.2 and diffusers 0.32.2 are small and have their own classes; put both packages on PYTHONPATH. A
NAME of `examples/others` (`levanter_llama`) takes its full size; its file says what has to be on PYTHONPATH. Each line has the
classes that were found, how often they are called, the bytes, and the seconds of the search. Exits 1 if a model's blocks are
other than expected.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import remat_jax as rj
from remat_jax.planning.model import block_name
from remat_jax.report import format_bytes

IDS = jax.ShapeDtypeStruct((2, 32), jnp.int32)
IMAGES = jax.ShapeDtypeStruct((2, 3, 32, 32), jnp.float32)
_BERT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
_TEXT = {**_BERT, "vocab_size": 200, "max_position_embeddings": 64}
_GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 200, "n_positions": 64}
_PIXELS = {**_BERT, "image_size": 32, "patch_size": 8}
_STAGES = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [2, 3, 4, 2]}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4, "vocab_size": 200}
_BART = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("layers", 3), ("attention_heads", 4))}
_BART |= {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 200, "max_position_embeddings": 64}
_OPT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 128, "vocab_size": 200}

# The model's name in transformers, its sizes, the names of its repeated classes, and its inputs.
TEXTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "BertForMaskedLM": (_TEXT, ("BertLayer",)),
    "RobertaForMaskedLM": (_TEXT, ("RobertaLayer",)),
    "ElectraForMaskedLM": ({**_TEXT, "embedding_size": 64}, ("ElectraLayer",)),
    "AlbertForMaskedLM": ({**_TEXT, "embedding_size": 64}, ("AlbertLayer",)),
    "RoFormerForMaskedLM": ({**_TEXT, "embedding_size": 64}, ("RoFormerLayer",)),
    "BigBirdForMaskedLM": ({**_TEXT, "attention_type": "original_full"}, ("BigBirdLayer",)),
    "GPT2LMHeadModel": (_GPT, ("GPT2Block",)),
    "GPTJForCausalLM": ({**_GPT, "rotary_dim": 8}, ("GPTJBlock",)),
    "LlamaForCausalLM": (_TEXT, ("LlamaDecoderLayer",)),
    "MistralForCausalLM": ({**_TEXT, "num_key_value_heads": 2}, ("MistralDecoderLayer",)),
    "GemmaForCausalLM": ({**_TEXT, "num_key_value_heads": 2, "head_dim": 16}, ("GemmaDecoderLayer",)),
    "BloomForCausalLM": ({"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 200}, ("BloomBlock",)),
    "OPTForCausalLM": ({**_OPT, "max_position_embeddings": 64, "word_embed_proj_dim": 64}, ("OPTDecoderLayer",)),
}
PAIRS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "T5ForConditionalGeneration": (_T5, ("T5Block",)),
    "LongT5ForConditionalGeneration": ({**_T5, "encoder_attention_type": "local", "local_radius": 8}, ("LongT5Block",)),
    "BartForConditionalGeneration": (_BART, ("BartDecoderLayer", "BartEncoderLayer")),
    "MBartForConditionalGeneration": (_BART, ("MBartDecoderLayer", "MBartEncoderLayer")),
    "PegasusForConditionalGeneration": (_BART, ("PegasusDecoderLayer", "PegasusEncoderLayer")),
}
PICTURES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ViTForImageClassification": (_PIXELS, ("ViTLayer",)),
    "BeitForImageClassification": (_PIXELS, ("BeitLayer",)),
    "Dinov2ForImageClassification": (_PIXELS, ("Dinov2Layer",)),
    "ResNetForImageClassification": (_STAGES, ("ResNetBottleNeckLayer",)),
    "RegNetForImageClassification": ({**_STAGES, "groups_width": 8}, ("RegNetYLayer",)),
}


def transformers_jobs() -> Iterator[tuple[str, tuple[str, ...], Callable[[], rj.Workload]]]:
    """The name, the expected classes and the workload of each model of transformers."""
    clip = jnp.clip  # transformers gives the bounds the names that JAX had
    jnp.clip = lambda x, a_min=None, a_max=None, **names: clip(x, a_min, a_max, **names)
    mask = jnp.ones(IDS.shape, jnp.int32)
    for table, batch, options in (
        (TEXTS, (IDS,), {"attention_mask": mask}),
        (PAIRS, (IDS, IDS), {}),
        (PICTURES, (IMAGES,), {}),
    ):
        for name, (sizes, expected) in table.items():
            yield (
                name,
                tuple(f"Flax{each}" for each in expected),
                lambda name=name, sizes=sizes, batch=batch, options=options: _transformers(name, sizes, batch, options),
            )


def _transformers(name: str, sizes: dict[str, Any], batch: tuple[Any, ...], options: dict[str, Any]) -> rj.Workload:
    cls = getattr(importlib.import_module("transformers"), f"Flax{name}")
    shape = {"input_shape": (1, 32, 32, 3)} if batch[0] is IMAGES else {}
    model = cls(cls.config_class(**sizes), _do_init=False, **shape)
    names = {"decoder_input_ids": 1} if len(batch) == 2 else {}

    def loss(params: Any, *batch: Any) -> jax.Array:
        out = model(batch[0], params=params, **options, **{key: batch[place] for key, place in names.items()})
        return jnp.mean(jnp.square(out.logits.astype(jnp.float32)))

    return rj.Workload(loss, model.params_shape_tree, batch, name=name)


def unet() -> rj.Workload:
    """The UNet of diffusers, narrow."""
    made = importlib.import_module("diffusers").FlaxUNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64, 64, 64), cross_attention_dim=32, attention_head_dim=4
    )
    shapes = ((2, 4, 16, 16), jnp.float32), ((2,), jnp.int32), ((2, 8, 32), jnp.float32)
    batch = tuple(jax.ShapeDtypeStruct(*each) for each in shapes)
    params = jax.eval_shape(
        lambda key: made.init(key, *(jnp.ones(each.shape, each.dtype) for each in batch)), jax.random.key(0)
    )
    return rj.Workload(lambda params, *batch: jnp.mean(made.apply(params, *batch).sample ** 2), params, batch, name="UNet")


def example(name: str) -> rj.Workload:
    """The workload of an example of `examples/others`."""
    job: rj.Workload = importlib.import_module(f"examples.others.{name}").job()
    return job


def main(names: list[str]) -> int:
    """Print a line for each model; return 1 if blocks are other than expected."""
    jobs = list(transformers_jobs()) if not names else []
    jobs += [("UNet", ("FlaxResnetBlock2D", "FlaxTransformer2DModel"), unet)] if not names else []
    for name in names:
        given = example(name)
        jobs.append((name, tuple(sorted(map(block_name, given.blocks))), lambda given=given: given))
    wrong = 0
    print("| model | blocks found | calls | residuals | dropped | needed again | search |\n" + "| --- " * 7 + "|")
    for name, expected, make in jobs:
        job, began = make(), time.perf_counter()
        found = job.find_blocks()
        seconds, taken = time.perf_counter() - began, found.taken
        right = tuple(sorted(each.name for each in taken)) == expected
        wrong += not right
        cells = (
            name,
            ", ".join(each.name for each in taken) + ("" if right else f" (expected {', '.join(expected)})"),
            ", ".join(str(each.calls) for each in taken),
            format_bytes(found.residual_bytes),
            format_bytes(sum(each.bytes for each in taken)),
            format_bytes(max(each.largest for each in taken)),
            f"{seconds:.1f} s",
        )
        print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\n{len(jobs)} models, {wrong} with other blocks than expected")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
