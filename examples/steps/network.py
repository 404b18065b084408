"""The small Linen network of these steps: four residual layers, unrolled or in a scan."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

LAYERS, ROWS, WIDTH = 4, 8, 6


class Layer(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.Dense(WIDTH, name="down")(jnp.sin(nn.Dense(4 * WIDTH, name="up")(x)))
        return nn.Dropout(self.dropout, deterministic=not self.dropout)(x)


class Net(nn.Module):
    scanned: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.scanned:
            axes: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}}
            scan = nn.scan(lambda layer, x, _: (layer(x), None), length=LAYERS, **axes)
            return scan(Layer(self.dropout, name="layers"), x, None)[0]
        for index in range(LAYERS):
            x = Layer(self.dropout, name=f"layer_{index}")(x)
        return x


def rows(seed: int = 1) -> jax.Array:
    """A batch of rows."""
    return jax.random.normal(jax.random.key(seed), (ROWS, WIDTH))


def parameters(model: nn.Module) -> Any:
    """The parameters of a model."""
    return model.init({"params": jax.random.key(0), "dropout": jax.random.key(0)}, rows())["params"]
