"""A GAN: two steps, each of which trains one of two networks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .network import Net, parameters, rows

generator, critic = Net(), Net()


@jax.jit
def generator_step(of_generator: Any, of_critic: Any, noise: jax.Array) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        made = generator.apply({"params": params}, noise)
        return jax.nn.softplus(-critic.apply({"params": of_critic}, made)[:, 0]).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, of_generator, jax.grad(loss_fn)(of_generator))


@jax.jit
def train_step(of_generator: Any, of_critic: Any, noise: jax.Array, real: jax.Array) -> Any:
    """The critic's step."""

    def loss_fn(params: Any) -> jax.Array:
        both = jnp.concatenate([generator.apply({"params": of_generator}, noise), real])
        signs = jnp.concatenate([jnp.ones(len(noise)), -jnp.ones(len(real))])
        return jax.nn.softplus(signs * critic.apply({"params": params}, both)[:, 0]).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, of_critic, jax.grad(loss_fn)(of_critic))


def generator_args() -> tuple[Any, ...]:
    return parameters(generator), parameters(critic), rows(2)


def example_args() -> tuple[Any, ...]:
    return *generator_args(), rows(3)
