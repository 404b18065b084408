"""The ports against their originals in `transformers` and `diffusers`; and each check can fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import pytest

import remat_jax as rj
from examples.models import gpt2
from parity_tests.third_party import checks, of_diffusers, of_transformers
from parity_tests.third_party import ports as p
from parity_tests.third_party.ports import Case, Port

PORTS = {**of_transformers.PORTS, **of_diffusers.PORTS}
QWEN_IMAGE, WAN = of_diffusers.PORTS["qwen_image"], of_diffusers.PORTS["wan"]


@pytest.mark.parametrize("check", checks.CHECKS)
@pytest.mark.parametrize("name", PORTS)
def test_it_agrees(name: str, check: str) -> None:
    assert checks.CHECKS[check](PORTS[name]) == []


def test_wans_attention_in_chunks_agrees() -> None:
    chunked = dataclasses.replace(WAN, config=dataclasses.replace(WAN.config, query_chunk=5))
    assert checks.step_differs(chunked, Case("scan", "checkpoint", "float64")) == []


def test_with_its_norms_checkpointed_too_the_whole_of_gpt2_keeps_the_same_bytes() -> None:
    """PyTorch's layer norm keeps its input and two numbers per row; JAX keeps intermediate arrays, unless the norm is a
    block.
    """
    port = PORTS["gpt2"]
    inputs, targets = p.batch(port, "float32")
    model = gpt2.GPT2(dataclasses.replace(port.config, num_layers=6))
    loss = rj.checkpoint_blocks(p.loss_of(port, model), {gpt2.GPT2Block: "full", nn.LayerNorm: "full"})
    work = rj.Workload(loss, p.shapes(port, model, inputs), (inputs, targets), gpt2.GPT2Block, has_aux=True)
    kept, expected = rj.residuals(work, "off").device_bytes, checks.kept(port, "torch", "checkpoint", 6).device
    assert abs(kept - expected) <= 0.02 * expected, (kept, expected)


class Fault(NamedTuple):
    """A wrong configuration, wrong arguments or wrong weights of a port, and the tensors that must be named."""

    port: Port
    named: str
    config: dict[str, Any] = {}
    arguments: Callable[[Any], tuple[Any, ...]] | None = None
    weights: Callable[[Any], Any] | None = None


def queries_and_keys_swapped(variables: Any) -> Any:
    params = variables["params"]
    head, attention = params["head"], params["head"]["attention"]
    attention = {**attention, "query": attention["key"], "key": attention["query"]}
    return {**variables, "params": {**params, "head": {**head, "attention": attention}}}


FAULTS = {
    "rotary frequencies not slowed down": Fault(PORTS["llama"], "logits", {"rope_scaling": None}),
    "the padding token trained": Fault(PORTS["bert"], "word_embeddings", {"padding": None}),
    "query and key of the pooling swapped": Fault(PORTS["siglip"], "pooler_output", weights=queries_and_keys_swapped),
    "a padded prompt read to its end": Fault(QWEN_IMAGE, "sample", arguments=lambda x: QWEN_IMAGE.arguments(x)[:-1]),
    "a video back to front": Fault(
        WAN, "sample", arguments=lambda x: WAN.arguments({**x, "hidden_states": x["hidden_states"][:, :, ::-1]})
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    port = fault.port if fault.arguments is None else dataclasses.replace(fault.port, arguments=fault.arguments)
    with jax.enable_x64(True):
        given = p.variables(fault.port, False, "float64")
        given = fault.weights(given) if fault.weights else given
    model = port.make_flax(dataclasses.replace(port.config, **fault.config))
    problems = checks.differences(fault.port, p.jax_step(port, Case("unrolled", "off", "float64"), model, given), "float64")
    assert any(fault.named in problem for problem in problems)
    assert not any("inf" in problem for problem in problems)  # another dtype or shape would be found too
