"""Training steps as people write them: with Flax, Equinox, Haiku and plain functions, unrolled and scanned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import remat_jax as rj

LAYERS, ROWS, WIDTH = 4, 8, 6
X = np.asarray(jax.random.normal(jax.random.key(1), (ROWS, WIDTH)))
Kind = tuple[Callable[..., Any], tuple[Any, ...], Any]
"""A training step, its arguments, and its blocks."""


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


def linen(tx: Any = None, **options: Any) -> tuple[nn.Module, TrainState]:
    model = Net(**options)
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(0)}, X)["params"]
    return model, TrainState.create(apply_fn=model.apply, params=params, tx=tx or optax.adam(1e-2))


def tutorial(scanned: bool) -> Kind:
    """Flax's tutorials: the loss is a closure over the batch, metrics are aux, dropout has a key for each step."""
    _, state = linen(scanned=scanned, dropout=0.3)

    @jax.jit
    def train_step(state: TrainState, x: jax.Array, key: jax.Array) -> Any:
        key = jax.random.fold_in(key, state.step)

        def loss_fn(params: Any) -> Any:
            y = state.apply_fn({"params": params}, x, rngs={"dropout": key})
            return (y**2).mean(), {"largest": y.max()}

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, **metrics}

    return train_step, (state, X, jax.random.key(2)), Layer


def accumulating(scanned: bool) -> Kind:
    """The gradient in a scan over micro-batches."""
    model, state = linen(scanned=scanned)

    def train_step(state: TrainState, x: jax.Array) -> Any:
        def add(total: Any, rows: jax.Array) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(state.params, rows)), None

        def loss(params: Any, rows: jax.Array) -> jax.Array:
            return (model.apply({"params": params}, rows) ** 2).sum()

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        return state.apply_gradients(grads=jax.lax.scan(add, zeros, x.reshape(4, 2, WIDTH))[0])

    return jax.jit(train_step), (state, X), Layer


def multi_steps(scanned: bool) -> Kind:
    """`optax.MultiSteps`, and a loss that is jitted itself."""
    model, state = linen(optax.MultiSteps(optax.sgd(0.1), 2), scanned=scanned)
    loss = jax.jit(lambda params, x: (model.apply({"params": params}, x) ** 2).mean())

    def train_step(state: TrainState, x: jax.Array) -> Any:
        return state.apply_gradients(grads=jax.grad(loss)(state.params, x))

    return train_step, (state, X), Layer


def pulled_back(scanned: bool) -> Kind:
    """`jax.vjp` with a cotangent that is computed from the outputs."""
    model, state = linen(scanned=scanned)

    def train_step(params: Any, x: jax.Array) -> Any:
        y, pull = jax.vjp(lambda params: model.apply({"params": params}, x), params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, pull(2 * y / y.size)[0]), y

    return train_step, (state.params, X), Layer


def lora(scanned: bool) -> Kind:
    """Only some parameters are trained, and the optimizer knows them by their labels."""
    model, state = linen(scanned=scanned)
    labels = jax.tree.map_with_path(lambda path, _: "on" if "down" in jax.tree_util.keystr(path) else "off", state.params)
    tx = optax.multi_transform({"on": optax.adam(1e-2), "off": optax.set_to_zero()}, labels)

    def train_step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda params: (model.apply({"params": params}, x) ** 2).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(train_step, donate_argnums=(0, 1)), (state.params, tx.init(state.params), X), Layer


def mixed_precision(scanned: bool) -> Kind:
    """Masters in float32, computation in bfloat16, and two losses in one."""
    model, state = linen(scanned=scanned)

    def train_step(state: TrainState, x: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            y = model.apply({"params": half}, x.astype(jnp.bfloat16)).astype(jnp.float32)
            losses = jnp.mean(y**2), jnp.mean(jnp.abs(y))
            return sum(losses), losses

        (_, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), losses

    return jax.jit(train_step), (state, X), Layer


def plain_function(scanned: bool) -> Kind:
    """A dict of parameters and a function, with a value head as in reinforcement learning."""

    @rj.block
    def layer(params: Any, x: jax.Array) -> jax.Array:
        return x + jnp.sin(x @ params["up"]) @ params["down"]

    def split(number: int, *shape: int) -> jax.Array:
        return 0.3 * jax.random.normal(jax.random.key(number), (LAYERS, *shape))

    params = {"layers": {"up": split(1, WIDTH, 24), "down": split(2, 24, WIDTH)}, "value": jnp.ones(WIDTH)}

    def forward(params: Any, x: jax.Array) -> Any:
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["layers"])
        else:
            for index in range(LAYERS):
                x = layer(jax.tree.map(lambda leaf, index=index: leaf[index], params["layers"]), x)
        return x, x @ params["value"]

    @jax.jit
    def train_step(params: Any, x: jax.Array, advantage: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits, value = forward(params, x)
            return -(jax.nn.log_softmax(logits)[:, 0] * advantage).mean() + ((value - advantage) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_fn)(params))

    return train_step, (params, X, jnp.ones(ROWS)), layer


class NnxLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, 24, rngs=rngs), nnx.Linear(24, WIDTH, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(jnp.sin(self.up(self.norm(x)))))


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def of_nnx(some: bool) -> Kind:
    """`nnx.jit` and `nnx.Optimizer`, with dropout and BatchNorm; with `some`, only a part of the parameters is trained."""
    model = NnxNet(nnx.Rngs(0))
    wrt = nnx.All(nnx.Param, nnx.PathContains("down")) if some else nnx.Param
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=wrt)

    @nnx.jit
    def train_step(model: NnxNet, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        def loss_fn(model: NnxNet) -> jax.Array:
            return (model(x) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, grads)
        return loss

    return train_step, (model, optimizer, X), NnxLayer


class EqxLayer(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(WIDTH, 24, key=first), eqx.nn.Linear(24, WIDTH, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.sin(self.up(x)))


def of_equinox(scanned: bool) -> Kind:
    """`eqx.filter_value_and_grad` of a vmapped model."""
    layers = [EqxLayer(key) for key in jax.random.split(jax.random.key(0), LAYERS)]
    tx = optax.adam(1e-2)

    def train_step(layers: Any, state: Any, x: jax.Array) -> Any:
        @eqx.filter_value_and_grad
        def loss_fn(layers: Any) -> jax.Array:
            y = x
            for layer in layers:
                y = jax.vmap(layer)(y)
            return (y**2).mean()

        loss, grads = loss_fn(layers)
        updates, state = tx.update(grads, state, layers)
        return eqx.apply_updates(layers, updates), state, loss

    return jax.jit(train_step), (layers, tx.init(layers), X), EqxLayer


class HaikuLayer(hk.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        y = hk.Linear(WIDTH, name="down")(jnp.sin(hk.Linear(24, name="up")(x)))
        return x + y * jax.random.bernoulli(hk.next_rng_key(), 0.8, y.shape)


def of_haiku(scanned: bool) -> Kind:
    """`hk.transform` with random keys."""

    def forward(x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = HaikuLayer()(x)
        return x

    model = hk.transform(forward)

    @jax.jit
    def train_step(params: Any, key: jax.Array, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda params: (model.apply(params, key, x) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return train_step, (model.init(jax.random.key(0), X), jax.random.key(3), X), HaikuLayer


KINDS: dict[str, Callable[[], Kind]] = {
    f"{make.__name__}, {form}": functools.partial(make, form != "unrolled")
    for make in (tutorial, accumulating, multi_steps, pulled_back, lora, mixed_precision, plain_function)
    for form in ("unrolled", "scanned")
}
KINDS |= {"nnx": lambda: of_nnx(False), "nnx, some": lambda: of_nnx(True)}
KINDS |= {"equinox": lambda: of_equinox(False), "haiku": lambda: of_haiku(False)}
