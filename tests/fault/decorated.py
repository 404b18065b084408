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
APPLIED = ("checkpoint_blocks", "enable", "residuals")


@dataclass(frozen=True)
class Decorated:
    """Two layers with these decorators on `__call__`, the innermost first, under a policy.

    Attributes:
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

    def check(self, tally: Tally) -> None:
        """Raise AssertionError unless value and gradient are those of the model without a policy."""
        with jax.enable_x64(True), jax.checking_leaks() if self.leaks else jax.enable_x64(True):
            layer = self._layer(self.decorators)
            model = nn.Sequential([Flagging(layer, self._flag()) for _ in range(2)]) if layer else None
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
                return self._gradient(rj.checkpoint_blocks(loss, {layer: self.policy}), params)

            def plain() -> Any:
                return self._gradient(loss, params)

            found = attempted(ours, plain, tally)
            if found is not None:
                tally.compared("decorated", *self.decorators, self.applied)
                close(plain(), found)

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


class Flagging(nn.Module):
    """Calls a layer with a flag, if there is one."""

    layer: Any
    flag: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return self.layer()(x) if self.flag is None else self.layer()(x, self.flag)


@st.composite
def decorated(draw: st.DrawFn) -> Decorated:
    """Decorators, a flag where nothing traces it, a policy and a way to apply it."""
    names = tuple(
        draw(st.lists(st.sampled_from(["remat", "jit", "vmap"]), max_size=3).filter(lambda names: names.count("vmap") < 2))
    )
    flag = draw(st.one_of(st.none(), st.integers(0, 5))) if not names else None
    inside = True if names else draw(st.booleans())
    return Decorated(
        names,
        inside,
        flag,
        draw(st.sampled_from(POLICIES)),
        draw(st.sampled_from(APPLIED)),
        draw(st.booleans()),
        draw(st.integers(0, 3)) == 0,
    )
