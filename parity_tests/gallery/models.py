"""The models of `examples/others`, and the products that each policy must recompute in their small forms, counted by hand.

Under `full` a layer recomputes all products of its forward pass except the last ones, whose results are only added to the
stream. Under the `dots…` policies it recomputes the scores and the context of attention, which have batch dimensions.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

FULL, DOTS, OFFLOAD = POLICIES = ("full", "dots_with_no_batch_dims", "offload_dot_with_no_batch_dims")

DEVIATION = 0.2
"""The standard deviation of random parameters and inputs."""


@dataclass(frozen=True)
class Example:
    """One file of `examples/others`.

    Attributes:
      module: the file's name; the module has `small()`.
      package: the imported package that has the model.
      full: the number of products that `full` recomputes, in all layers together.
      dots: the number of products that the two `dots` policies recompute.
      deviation: the standard deviation of random parameters and inputs, small enough for right digits in bfloat16.
    """

    module: str
    package: str
    full: int
    dots: int
    deviation: float = DEVIATION

    @property
    def again(self) -> dict[str, int]:
        """The number of products that each policy recomputes."""
        return {FULL: self.full, DOTS: self.dots, OFFLOAD: self.dots}

    def workload(self) -> Any:
        """The small form."""
        return importlib.import_module(f"examples.others.{self.module}").small()


EXAMPLES: Mapping[str, Example] = MappingProxyType(
    {
        # 4 layers: query, key, value, scores, context, output, two of the perceptron.
        "equinox": Example("equinox_decoder", "equinox", 4 * 7, 4 * 2),
        # 2 layers: as above, with three in the gated perceptron.
        "easylm": Example("easylm_llama", "EasyLM", 2 * 8, 2 * 2),
        # Gemma's 4 layers: query, key-and-value and output of two experts, scores, context, three of each perceptron.
        # SigLIP's 2 layers, for each of three cameras: query, key, value, scores, context, output, two of the perceptron.
        "openpi": Example("openpi_pi0", "openpi", 4 * 12 + 3 * 2 * 7, 4 * 2 + 3 * 2 * 2, deviation=0.05),
        # 3 layers: as EasyLM's, and two norms whose `einsum` with the scale is a product with batch dimensions only.
        "maxtext": Example("maxtext_llama", "maxtext", 3 * 10, 3 * 4),
        # 2 layers: one product computes query, key and value.
        "transformers": Example("transformers_gpt2", "transformers", 2 * 5, 2 * 2),
        "bonsai": Example("bonsai_vit", "bonsai", 2 * 7, 2 * 2),
        "big_vision": Example("big_vision_vit", "big_vision", 3 * 7, 3 * 2),
        # 6 layers: query, key-and-value, scores, context, output, gate-and-up, down, whose result a norm reads.
        "gemma": Example("gemma3", "gemma", 6 * 7, 6 * 2),
        # 2 layers: query, key, value, scores, context, output of two attentions; two of the perceptron, whose result the
        # gradient of a gate reads.
        "maxdiffusion": Example("maxdiffusion_wan", "maxdiffusion", 2 * 14, 2 * 4),
        # 2 layers: as EasyLM's.
        "tunix": Example("tunix_qwen3", "tunix", 2 * 8, 2 * 2),
        # 4 blocks: 8 of row attention (bias, query, key, value, gate, scores, context, output), 7 of column attention, 2 of the
        # transition, 5 of the outer product (one counts rows), 7 of each triangle multiplication, 8 of each triangle attention,
        # 1 of the last transition. With batch dimensions: 8 of attention, one of each triangle multiplication, the row count.
        "alphafold": Example("alphafold_evoformer", "alphafold", 4 * 53, 4 * 11),
    }
)
