"""Common faults of ports, planted one at a time: each must be found in float64, and some in float32 too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parity_tests.third_party import (
    checks,
    test_bert,
    test_gpt2,
    test_llama,
    test_qwen_image,
    test_siglip,
    test_wan,
)
from parity_tests.third_party import ports as p
from parity_tests.third_party.ports import Case, Port
from remat_jax.errors import PortingError

LLAMA, GPT2, BERT, SIGLIP = test_llama.PORTS["llama"], test_gpt2.PORT, test_bert.PORT, test_siglip.PORT
QWEN_IMAGE, WAN = test_qwen_image.PORT, test_wan.PORT


class Fault(NamedTuple):
    """A wrong configuration, wrong arguments or wrong weights of a port, and the tensors that must be named."""

    port: Port
    named: str
    config: dict[str, Any] = {}
    arguments: Callable[[Any], tuple[Any, ...]] | None = None
    weights: Callable[[Any], Any] | None = None


def changed(change: Callable[[Any], Any], *path: str) -> Callable[[Any], Any]:
    """Weights with another array or module at `path`."""

    def replace(tree: Any, path: tuple[str, ...]) -> Any:
        return {**tree, path[0]: replace(tree[path[0]], path[1:])} if path else change(tree)

    return lambda variables: replace(variables, ("params", *path))


def swapped(first: str, second: str, *path: str) -> Callable[[Any], Any]:
    """Weights with two modules of equal shapes exchanged."""
    return changed(lambda module: {**module, first: module[second], second: module[first]}, *path)


def llama_arguments(x: Any, **changes: Any) -> tuple[Any, ...]:
    x = {**x, **changes}
    return (x["input_ids"], x["attention_mask"], x["position_ids"])


FAULTS = {
    "rotary frequencies of another base": Fault(LLAMA, "logits", {"rope_theta": 101.0}),
    "rotary frequencies not slowed down": Fault(LLAMA, "logits", {"rope_scaling": None}),
    "positions counted from one": Fault(
        GPT2, "logits", arguments=lambda x: llama_arguments(x, position_ids=x["position_ids"] + 1)
    ),
    "no mask": Fault(BERT, "logits", arguments=lambda x: (x["input_ids"], None, x["token_type_ids"])),
    "the padding token trained": Fault(BERT, "word_embeddings", {"padding": None}),
    "query and key of the pooling swapped": Fault(
        SIGLIP, "pooler_output", weights=swapped("query", "key", "head", "attention")
    ),
    "two layers swapped": Fault(SIGLIP, "last_hidden_state", weights=swapped("layers_0", "layers_1")),
    "an image on its side": Fault(
        SIGLIP, "last_hidden_state", arguments=lambda x: (jnp.transpose(x["pixel_values"], (0, 3, 2, 1)),)
    ),
    "keys of text and image swapped": Fault(
        QWEN_IMAGE, "sample", weights=swapped("text_key", "image_key", "layers_0", "attention")
    ),
    "a padded prompt read to its end": Fault(QWEN_IMAGE, "sample", arguments=lambda x: QWEN_IMAGE.arguments(x)[:-1]),
    "a video back to front": Fault(
        WAN, "sample", arguments=lambda x: WAN.arguments({**x, "hidden_states": x["hidden_states"][:, :, ::-1]})
    ),
}


def found(fault: Fault, dtype: str) -> list[str]:
    port = fault.port if fault.arguments is None else dataclasses.replace(fault.port, arguments=fault.arguments)
    with jax.enable_x64(dtype == "float64"):
        given = p.variables(fault.port, False, dtype)
        given = fault.weights(given) if fault.weights else given
    model = port.make_flax(dataclasses.replace(port.config, **fault.config))
    return checks.differences(fault.port, p.jax_step(port, Case("unrolled", "off", dtype), model, given), dtype)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    problems = found(FAULTS[name], "float64")
    assert any(FAULTS[name].named in problem for problem in problems)
    assert not any("inf" in problem for problem in problems)  # another dtype or shape would be found too


@pytest.mark.parametrize("name", list(FAULTS)[::5])
def test_a_fault_is_found_in_float32_too(name: str) -> None:
    assert any(FAULTS[name].named in problem for problem in found(FAULTS[name], "float32"))


def test_a_lost_tensor_is_named() -> None:
    state = {name: tensor for name, tensor in p.weights(GPT2).items() if name != "transformer.h.1.ln_2.bias"}
    state["extra.weight"] = state["transformer.ln_f.bias"].clone()
    empty = p.shapes(GPT2, GPT2.make_flax(GPT2.config), GPT2.inputs)
    with pytest.raises(PortingError, match="2 problems") as raised:
        p.porting.from_torch(state, empty, GPT2.rules(GPT2.config), dtype=np.float32)
    lines = str(raised.value).splitlines()
    assert lines[1].startswith("  extra.weight: extra") and lines[2].startswith("  transformer.h.1.ln_2.bias: missing")
