"""One stack of decoder layers, checkpointed with Flax's and JAX's own functions and with remat_jax's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import remat_jax as rj
from examples.models import linen as linen_models
from examples.models import nnx as nnx_models

LAYERS, WIDTH, HEADS = 3, 128, 4
INPUT = (4, 64, WIDTH)
FIELDS = {"d_model": WIDTH, "nhead": HEADS, "causal": True}
POLICIES: dict[str, Any] = {
    "full": None,
    "offload_dot_with_no_batch_dims": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One comparison: Flax's interface, the form of the layers, the policy."""

    interface: str
    form: str
    policy: str

    def __str__(self) -> str:
        return f"{self.interface} {self.form} {self.policy}"

    @property
    def scan(self) -> bool:
        return self.form == "scan"


@dataclasses.dataclass(frozen=True)
class Contender:
    """One implementation: `loss(params, x)` and the abstract parameters."""

    setting: Setting
    name: str
    loss: Callable[..., Any]
    params: Any

    @property
    def key(self) -> str:
        return f"{self.setting} {self.name}"

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("rj.")


SETTINGS = (
    Setting("linen", "unrolled", "full"),
    Setting("linen", "scan", "full"),
    Setting("linen", "unrolled", "offload_dot_with_no_batch_dims"),
    Setting("linen", "scan", "offload_dot_with_no_batch_dims"),
    Setting("nnx", "unrolled", "full"),
    Setting("nnx", "scan", "full"),
)


def contenders(setting: Setting) -> Iterator[Contender]:
    """The implementations of one setting. The first uses Flax's own wrapper; the others are compared with it, their peer."""
    yield from (_linen if setting.interface == "linen" else _nnx)(setting)


class Stack(nn.Module):
    """Layers of a class that may already be checkpointed, called positionally, because `nn.remat` drops keyword arguments."""

    layer: Any
    scan: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.scan:
            for index in range(LAYERS):
                x = self.layer(**FIELDS, name=f"layers_{index}")(x)
            return x

        def body(layer: Any, carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return layer(carry), None

        scanned = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return scanned(self.layer(**FIELDS, name="layers"), x, None)[0]


def _linen(setting: Setting) -> Iterator[Contender]:
    layer, hand_written = linen_models.DecoderLayer, POLICIES[setting.policy]
    x = jax.ShapeDtypeStruct(INPUT, jnp.float32)
    params = jax.eval_shape(Stack(layer, setting.scan).init, jax.random.key(0), x)["params"]

    def of(layer: Any) -> Callable[..., Any]:
        stack = Stack(layer, setting.scan)
        return lambda params, x: jnp.mean(stack.apply({"params": params}, x) ** 2)

    # In a scan XLA cannot merge the recomputation with the forward pass, so authors leave out the barriers.
    remat = nn.remat(layer, policy=hand_written, prevent_cse=not setting.scan)
    yield Contender(setting, "nn.remat", of(remat), params)
    yield Contender(setting, "jax.checkpoint", _functional(setting, hand_written), params)
    yield Contender(setting, "rj.remat", of(rj.remat(layer, setting.policy)), params)
    yield Contender(setting, "rj.checkpoint_blocks", rj.checkpoint_blocks(of(layer), {layer: setting.policy}), params)


def _functional(setting: Setting, policy: Any) -> Callable[..., Any]:
    layer = linen_models.DecoderLayer(**FIELDS)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return layer.apply({"params": params}, x)

    block = jax.checkpoint(apply, policy=policy, prevent_cse=not setting.scan)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if setting.scan:
            x = jax.lax.scan(lambda carry, layer: (block(layer, carry), None), x, params["layers"])[0]
        else:
            for index in range(LAYERS):
                x = block(params[f"layers_{index}"], x)
        return jnp.mean(x**2)

    return loss


def _nnx(setting: Setting) -> Iterator[Contender]:
    layer = nnx_models.DecoderLayer

    # `nnx.remat` of the method itself fails, because it cannot resolve the keyword-only argument.
    @nnx.remat(policy=POLICIES[setting.policy], prevent_cse=not setting.scan)
    def forward(self: Any, x: jax.Array) -> jax.Array:
        return layer.__call__(self, x)

    class ByHand(layer):  # type: ignore[valid-type,misc]
        def __call__(self, x: jax.Array) -> jax.Array:
            return forward(self, x)

    for name, kind in (("nnx.remat", ByHand), ("rj.remat", rj.remat(layer, setting.policy))):
        yield Contender(setting, name, *_nnx_stack(kind, setting.scan))
    loss, params = _nnx_stack(layer, setting.scan)
    yield Contender(setting, "rj.checkpoint_blocks", rj.checkpoint_blocks(loss, {layer: setting.policy}), params)


def _nnx_stack(layer: Any, scan: bool) -> tuple[Callable[..., Any], Any]:
    def unrolled() -> Any:
        return nnx.List([layer(**FIELDS, rngs=nnx.Rngs(0)) for _ in range(LAYERS)])

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def stacked(rngs: nnx.Rngs) -> Any:
        return layer(**FIELDS, rngs=rngs)

    graph, params = nnx.split(nnx.eval_shape((lambda: stacked(nnx.Rngs(0))) if scan else unrolled))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def body(carry: jax.Array, layer: Any) -> jax.Array:
        return layer(carry)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        layers = nnx.merge(graph, params)
        if scan:
            return jnp.mean(body(x, layers) ** 2)
        for each in layers:
            x = each(x)
        return jnp.mean(x**2)

    return loss, params
