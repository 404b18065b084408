"""The ports against their originals in `transformers` and `diffusers`."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import pytest

import remat_jax as rj
from examples.models import gpt2
from parity_tests.third_party import checks
from parity_tests.third_party import ports as p
from parity_tests.third_party.checks import PORTS
from parity_tests.third_party.ports import Case


@pytest.mark.parametrize("check", checks.CHECKS)
@pytest.mark.parametrize("name", PORTS)
def test_it_agrees(name: str, check: str) -> None:
    assert checks.CHECKS[check](PORTS[name]) == []


def test_wans_attention_in_chunks_agrees() -> None:
    chunked = dataclasses.replace(PORTS["wan"], config=dataclasses.replace(PORTS["wan"].config, query_chunk=5))
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
