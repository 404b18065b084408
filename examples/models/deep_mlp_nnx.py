"""The Flax NNX twin of `examples.pytorch.DeepMLP`: a deep perceptron of blocks `MlpLayer` and a linear head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from remat_jax import checkpoint_sequential

from .functions import check_depth


class MlpLayer(nnx.Module):
    """A linear layer with its ReLU, (B, in_features) → (B, features), one block.

    >>> MlpLayer(3, 5, rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
    (2, 5)
    """

    def __init__(self, in_features: int, features: int, *, param_dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(in_features, features, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.linear(x))


class DeepMLP(nnx.Module):
    """`num_layers` linear layers, a ReLU after each but the last: `first`, `num_layers - 2` hidden ones, and `head`.

    Shapes: (B, in_features) → (B, out_features). The hidden layers are the list `layers`, or for `scan` one `MlpLayer`
    with every array stacked on axis 0. `segments` cuts the list of layers for `remat_jax.checkpoint_sequential`, where a
    scan is one layer.

    >>> model = DeepMLP(num_layers=5, hidden_size=8, in_features=6, scan=True, rngs=nnx.Rngs(0))
    >>> model.layers.linear.kernel.shape, model(jnp.ones((2, 6))).shape
    ((3, 8, 8), (2, 10))
    """

    def __init__(
        self,
        num_layers: int = 10,
        hidden_size: int = 512,
        in_features: int = 1024,
        out_features: int = 10,
        *,
        scan: bool = False,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        check_depth(num_layers)
        self.scan = scan
        fields: dict[str, Any] = {"param_dtype": param_dtype}
        self.first = MlpLayer(in_features, hidden_size, **fields, rngs=rngs)
        self.layers = self._hidden(num_layers - 2, hidden_size, fields, rngs)
        self.head = nnx.Linear(hidden_size, out_features, **fields, rngs=rngs)

    def __call__(self, x: jax.Array, *, segments: int = 1) -> jax.Array:
        return checkpoint_sequential(self.parts(), segments, x)

    def parts(self) -> list[Any]:
        """The layers as functions of one argument each, in order: `num_layers` modules, or three functions if scanned."""
        if not self.scan:
            return [self.first, *self.layers, self.head]
        body = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return [self.first, lambda x: body(x, self.layers), self.head]

    def _hidden(self, count: int, size: int, fields: dict[str, Any], rngs: nnx.Rngs) -> Any:
        if not self.scan:
            return nnx.List([MlpLayer(size, size, **fields, rngs=rngs) for _ in range(count)])

        @nnx.split_rngs(splits=count)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> MlpLayer:
            return MlpLayer(size, size, **fields, rngs=rngs)

        return stacked(rngs)
