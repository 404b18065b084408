"""Tests without a checkout: the activation against PyTorch, and the comparison itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from examples.models.diffusion import ACTIVATIONS
from parity_tests.upstream import comparing

# DiffSynth-Studio's formula, verbatim.
IN_TORCH = {
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_slopes_are_pytorchs(name: str, x64: None) -> None:
    x = np.linspace(-6, 6, 97)
    given = torch.tensor(x, requires_grad=True)
    expected = IN_TORCH[name](given)
    expected.sum().backward()
    value, slope = jax.vmap(jax.value_and_grad(ACTIVATIONS[name]))(jnp.asarray(x))
    np.testing.assert_allclose(value, expected.detach(), rtol=0, atol=1e-14)
    np.testing.assert_allclose(slope, given.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("spoilt", [None, "output", "w", "b"])
def test_a_difference_in_any_tensor_is_seen(spoilt: str | None) -> None:
    gradients = {"w": np.ones(1000), "b": np.full(1, 1e-3)}
    original = comparing.Step(np.ones(3), gradients)
    changed = {name: value * (1 + 1e-9 * (name == spoilt)) for name, value in gradients.items()}
    port = comparing.Step(np.ones(3) * (1 + 1e-9 * (spoilt == "output")), changed)

    class Same(comparing.Pair):
        def port(self, *_: object) -> comparing.Step:
            return port

    pair = Same("a", None, (), ("float64",), {}, None, (), None, (), None)  # type: ignore[arg-type]  # not run
    row = comparing._row(pair, "float64", "off", True, original, original)
    assert row.passed == (spoilt is None) and (spoilt in (None, "output") or row.name == spoilt)
    with pytest.raises(AssertionError, match="a: only one side has a gradient of b"):
        comparing._row(pair, "float64", "off", True, original._replace(gradients={"w": np.ones(1000)}), original)
