"""Donated arguments in programs with arrays in host memory: a result reuses only a buffer in its own memory.

JAX alone gives a donated buffer to the first result of the same shape, in whatever memory, and a CPU process that runs such a
step aborts. So a step runs here only after its signature is right.
"""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import remat_jax as rj
from tests.small_models import assert_bit_equal

HOST = jax.memory.Space.Host
ADAM = optax.adam(0.1)
OFFLOADED = rj.offload_optimizer(ADAM)
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)


def exchanges(lowered: Any) -> int:
    """The number of arguments whose buffers JAX gives to results in another memory."""
    given, made = re.search(r"@main\((.*)\) -> \((.*)\) \{", lowered.as_text()).groups()
    results = ["pinned_host" in result for result in re.findall(r"tensor<[^>]*>(?: \{[^}]*\})?", made)]
    arguments = re.findall(r"%arg\d+: tensor<[^>]*>(?: \{.*?\}(?=, %|$))?", given)
    aliases = [(re.search(r"tf.aliasing_output = (\d+)", each), "pinned_host" in each) for each in arguments]
    return sum(results[int(alias[1])] != on_host for alias, on_host in aliases if alias)


def step(tx: Any, state_first: bool) -> Any:
    def run(params: Any, state: Any) -> Any:
        gradients = jax.grad(lambda params: jnp.sum(jnp.tanh(X @ params["kernel"] + params["bias"]) ** 2))(params)
        updates, state = tx.update(gradients, state, params)
        results = optax.apply_updates(params, updates), state
        return results[::-1] if state_first else results

    return run


@pytest.mark.parametrize(
    ("state_first", "donated", "state_from"),
    [(False, (0, 1), ADAM), (False, (1,), OFFLOADED), (True, (0, 1), OFFLOADED), (True, (1,), ADAM)],
)
def test_a_state_may_be_donated_in_any_order_and_from_any_memory(state_first: bool, donated: Any, state_from: Any) -> None:
    params = expected = {"kernel": X, "bias": jnp.ones(8)}
    state, plain_state = state_from.init(params), ADAM.init(params)
    compiled, plain = (jax.jit(step(tx, state_first), donate_argnums=donated) for tx in (OFFLOADED, ADAM))
    params, expected = (jax.tree.map(jnp.copy, params) for _ in range(2))
    for _ in range(3):
        assert exchanges(compiled.lower(params, state)) == 0
        before = state
        params, state = compiled(params, state)[:: -1 if state_first else 1]
        expected, plain_state = plain(expected, plain_state)[:: -1 if state_first else 1]
    assert_bit_equal((params, state), (expected, plain_state))
    assert [jax.typeof(leaf).memory_space is HOST for leaf in jax.tree.leaves(state)] == [False, True, True, True, True]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before)), "the host buffers are reused"


def test_jax_alone_gives_a_buffer_to_a_result_in_another_memory() -> None:
    by_hand = jax.jit(lambda state: jax.device_put(2 * state, HOST), donate_argnums=0)
    assert exchanges(by_hand.lower(X)) == 1, "JAX looks at the memory now: compat/donation.py can go"


def test_residuals_that_a_program_returns_do_not_take_a_donated_buffer() -> None:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return jnp.sin(nn.Dense(8)(jnp.tanh(nn.Dense(8)(x))))

    model = nn.Sequential([Layer(), Layer()])
    params = model.init(jax.random.key(0), X)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(model.apply(params, x) ** 2)

    offloading = rj.checkpoint_blocks(loss, {Layer: "offload_dot_with_no_batch_dims"})
    forward = jax.jit(lambda params, x: jax.vjp(lambda params: offloading(params, x), params), donate_argnums=1)
    assert exchanges(forward.lower(params, X)) == 0
    value, pull = forward(params, jnp.copy(X))
    assert any(getattr(jax.typeof(leaf), "memory_space", None) is HOST for leaf in jax.tree.leaves(pull))
    (gradients,) = pull(jnp.ones_like(value))
    for leaf, expected in zip(*map(jax.tree.leaves, (gradients, jax.grad(loss)(params, X))), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-5)
