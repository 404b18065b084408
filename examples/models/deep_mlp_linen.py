"""The Flax Linen twin of `examples.pytorch.DeepMLP`: a deep perceptron of blocks `MlpLayer` and a linear head."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_jax import checkpoint_sequential

from .functions import check_depth, check_width


class MlpLayer(nn.Module):
    """A linear layer with its ReLU, (B, …) → (B, features), one block.

    >>> layer = MlpLayer(5)
    >>> layer.apply(layer.init(jax.random.key(0), jnp.ones((2, 3))), jnp.ones((2, 3))).shape
    (2, 5)
    """

    features: int
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.relu(nn.Dense(self.features, param_dtype=self.param_dtype, name="linear")(x))


class DeepMLP(nn.Module):
    """`num_layers` linear layers, a ReLU after each but the last: `first`, `num_layers - 2` hidden ones, and `head`.

    Shapes: (B, in_features) → (B, out_features). Unrolled, the hidden layers are `layers_0/…`, `layers_1/…`; scanned,
    `layers/…` with the layers stacked on axis 0.

    >>> model = DeepMLP(num_layers=5, hidden_size=8, in_features=6, scan=True)
    >>> model.init(jax.random.key(0), jnp.ones((2, 6)))["params"]["layers"]["linear"]["kernel"].shape
    (3, 8, 8)
    """

    num_layers: int = 10
    hidden_size: int = 512
    in_features: int = 1024
    out_features: int = 10
    scan: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, segments: int = 1) -> jax.Array:
        check_width(x, self.in_features)
        return checkpoint_sequential(self.parts(), segments, x)

    @nn.nowrap
    def parts(self) -> list[Any]:
        """The layers in order as functions of one argument, bound inside a compact method.

        Unrolled, these are `num_layers` modules; scanned, these are three functions, of which one runs all hidden layers.
        """
        check_depth(self.num_layers)
        fields = {"features": self.hidden_size, "param_dtype": self.param_dtype}
        hidden = self.num_layers - 2
        first = MlpLayer(**fields, name="first")
        head = nn.Dense(self.out_features, param_dtype=self.param_dtype, name="head")
        if not self.scan:
            return [first, *(MlpLayer(**fields, name=f"layers_{index}") for index in range(hidden)), head]

        def body(layer: MlpLayer, carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return layer(carry), None

        # `nn.scan` drops captured intermediates unless they have an axis.
        axes = {"params": 0, "intermediates": 0}
        scanned = nn.scan(body, variable_axes=axes, split_rngs={"params": True}, length=hidden)
        return [first, lambda x: scanned(MlpLayer(**fields, name="layers"), x, None)[0], head]
