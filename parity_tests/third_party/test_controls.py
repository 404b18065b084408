"""Faults of the ports, planted one at a time: a check that cannot fail proves nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import pytest

from parity_tests.third_party import checks, test_bert, test_llama, test_qwen_image, test_siglip, test_wan
from parity_tests.third_party import ports as p
from parity_tests.third_party.ports import Case, Port

LLAMA, BERT, SIGLIP = test_llama.PORTS["llama"], test_bert.PORT, test_siglip.PORT
QWEN_IMAGE, WAN = test_qwen_image.PORT, test_wan.PORT


class Fault(NamedTuple):
    """A wrong configuration, wrong arguments or wrong weights of a port, and the tensors that must be named."""

    port: Port
    named: str
    config: dict[str, Any] = {}
    arguments: Callable[[Any], tuple[Any, ...]] | None = None
    weights: Callable[[Any], Any] | None = None


def swapped(first: str, second: str, *path: str) -> Callable[[Any], Any]:
    """Weights with two modules of equal shapes, inside the module at `path`, exchanged."""

    def replace(tree: Any, path: tuple[str, ...]) -> Any:
        if path:
            return {**tree, path[0]: replace(tree[path[0]], path[1:])}
        return {**tree, first: tree[second], second: tree[first]}

    return lambda variables: replace(variables, ("params", *path))


FAULTS = {
    "rotary frequencies not slowed down": Fault(LLAMA, "logits", {"rope_scaling": None}),
    "the padding token trained": Fault(BERT, "word_embeddings", {"padding": None}),
    "query and key of the pooling swapped": Fault(
        SIGLIP, "pooler_output", weights=swapped("query", "key", "head", "attention")
    ),
    "a padded prompt read to its end": Fault(QWEN_IMAGE, "sample", arguments=lambda x: QWEN_IMAGE.arguments(x)[:-1]),
    "a video back to front": Fault(
        WAN, "sample", arguments=lambda x: WAN.arguments({**x, "hidden_states": x["hidden_states"][:, :, ::-1]})
    ),
}


def found(fault: Fault) -> list[str]:
    port = fault.port if fault.arguments is None else dataclasses.replace(fault.port, arguments=fault.arguments)
    with jax.enable_x64(True):
        given = p.variables(fault.port, False, "float64")
        given = fault.weights(given) if fault.weights else given
    model = port.make_flax(dataclasses.replace(port.config, **fault.config))
    return checks.differences(fault.port, p.jax_step(port, Case("unrolled", "off", "float64"), model, given), "float64")


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    problems = found(FAULTS[name])
    assert any(FAULTS[name].named in problem for problem in problems)
    assert not any("inf" in problem for problem in problems)  # another dtype or shape would be found too
