"""Linen blocks whose `__call__` is decorated by lifted transforms in any order, with flags as they come from configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import remat_jax as rj
from tests.fault.ops import ROWS, WIDTH
from tests.fault.tally import Tally, attempted, close

DECORATORS: dict[str, Any] = {
    "remat": nn.remat,
    "jit": nn.jit,
    "vmap": lambda call: nn.vmap(
        call, variable_axes={"params": None}, split_rngs={"params": False, "dropout": False}, in_axes=0, out_axes=0
    ),
    "named": nn.nowrap,
}
FLAGS = (True, 1, np.bool_(True), np.int64(1), np.array(True), np.False_)
POLICIES = ("full", "everything", "offload_inputs", "dots", "offload: *dot_general*", "1 x full | 1 x dots", "off")
OUTER = ("none", "full", "everything", "offload_inputs", "offload: *sin*", "dots")
"""Policies of a module around a layer with its own policy."""
APPLIED = ("checkpoint_blocks", "enable", "residuals")


@dataclass(frozen=True)
class Decorated:
    """Two layers with these decorators on `__call__`, the innermost first, under a policy.

    Attributes:
      outer: the decorators of a module around each layer, and its policy; None if there is no such module.
      scanned: whether the modules around the layers are the steps of an `nn.scan`.
      compact_inside: whether `nn.compact` is the innermost decorator, otherwise the outermost; without any, `setup` is used.
      flag: an argument that the layer branches on, or None where a decorator would trace it.
      leaks: whether JAX checks for leaked tracers.
    """

    decorators: tuple[str, ...]
    compact_inside: bool
    flag: int | None
    policy: str
    applied: str
    jitted: bool
    leaks: bool
    outer: tuple[tuple[str, ...], str] | None = None
    scanned: bool = False

    def check(self, tally: Tally) -> None:
        """Raise AssertionError unless value and gradient are those of the model without a policy."""
        with jax.enable_x64(True), jax.checking_leaks() if self.leaks else jax.enable_x64(True):
            layer = self._layer(self.decorators)
            model, policies = self._model(layer)
            x = jnp.sin(jnp.arange(float(ROWS * WIDTH))).reshape(ROWS, WIDTH)
            params = model.init(jax.random.key(0), x)

            def loss(params: Any) -> Any:
                return jnp.sum(jnp.sin(model.apply(params, x)))

            def ours() -> Any:
                if self.applied == "residuals":
                    rj.residuals(rj.Workload(loss, params, (), blocks=layer), self.policy)
                if self.applied == "enable":
                    switched = rj.enable_gradient_checkpointing(model, self.policy, blocks=layer)
                    return self._gradient(lambda params: jnp.sum(jnp.sin(switched.apply(params, x))), params)
                return self._gradient(rj.checkpoint_blocks(loss, policies), params)

            def plain() -> Any:
                return self._gradient(loss, params)

            found = attempted(ours, plain, tally)
            if found is not None:
                tally.compared("decorated", *self.decorators, self.applied, *(self._around() if self.outer else ()))
                close(plain(), found)

    def _model(self, layer: Any) -> tuple[Any, dict[Any, str]]:
        """Two layers, and the policies of the modules."""
        policies = {layer: self.policy}
        if self.outer is None:
            return nn.Sequential([Flagging(layer, self._flag()) for _ in range(2)]), policies
        decorators, policy = self.outer

        def __call__(self: Any, x: Any) -> Any:
            return layer()(jnp.sin(x)) * jnp.cos(x)

        holder = _decorated("Holder", __call__, decorators)
        if policy != "none":
            policies[holder] = policy
        return Scanned(holder) if self.scanned else nn.Sequential([holder() for _ in range(2)]), policies

    def _around(self) -> tuple[str, ...]:
        decorators, policy = self.outer or ((), "none")
        return (*(f"outer {name}" for name in decorators), f"outer {policy}", *["nn.scan"] * self.scanned)

    def _gradient(self, loss: Any, params: Any) -> Any:
        gradient = jax.value_and_grad(loss)
        return (jax.jit(gradient) if self.jitted else gradient)(params)

    def _flag(self) -> Any:
        return None if self.flag is None else FLAGS[self.flag % len(FLAGS)]

    def _layer(self, decorators: tuple[str, ...]) -> Any:
        def __call__(self: Any, x: Any, *flags: Any) -> Any:
            y = jnp.tanh(nn.Dense(WIDTH, param_dtype=jnp.float64)(x))
            return y * 2 if flags and flags[0] else y

        wrapped = nn.compact(__call__) if self.compact_inside else __call__
        for name in decorators:
            wrapped = DECORATORS[name](wrapped)
        wrapped = wrapped if self.compact_inside else nn.compact(wrapped)
        return type("Layer", (nn.Module,), {"__call__": wrapped, "__module__": __name__, "__annotations__": {}})


def _decorated(name: str, call: Any, decorators: tuple[str, ...]) -> Any:
    wrapped = nn.compact(call)
    for decorator in decorators:
        wrapped = DECORATORS[decorator](wrapped)
    return type(name, (nn.Module,), {"__call__": wrapped, "__module__": __name__, "__annotations__": {}})


class Scanned(nn.Module):
    """Two steps of one module, each with its own parameters."""

    step: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        scan = nn.scan(lambda step, x, _: (step(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return scan(self.step(), x, None)[0]


class Flagging(nn.Module):
    """Calls a layer with a flag, if there is one."""

    layer: Any
    flag: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return self.layer()(x) if self.flag is None else self.layer()(x, self.flag)


@st.composite
def decorated(draw: st.DrawFn) -> Decorated:
    """Decorators, a flag where nothing traces it, a policy and a way to apply it, maybe with a module around each layer."""
    once = st.lists(st.sampled_from(["remat", "jit", "vmap"]), max_size=3).filter(lambda names: names.count("vmap") < 2)
    names = tuple(draw(once))
    nested = draw(st.booleans())
    # Two `vmap`s would need one axis more.
    around = once.map(lambda outer: tuple(name for name in outer if name != "vmap" or "vmap" not in names))
    outer = draw(st.tuples(around, st.sampled_from(OUTER))) if nested else None
    return Decorated(
        names,
        True if names or nested else draw(st.booleans()),
        draw(st.one_of(st.none(), st.integers(0, 5))) if not names and not nested else None,
        draw(st.sampled_from(POLICIES)),
        "checkpoint_blocks" if nested else draw(st.sampled_from(APPLIED)),
        draw(st.booleans()),
        draw(st.integers(0, 3)) == 0,
        outer,
        nested and draw(st.booleans()),
    )
