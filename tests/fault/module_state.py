"""NNX blocks that change their module: attributes, lists, statistics and counts, with the state after the calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from hypothesis import strategies as st

import remat_jax as rj
from tests.fault.ops import ROWS, WIDTH
from tests.fault.tally import Tally, attempted, close


def _delete(module: Any, x: Any) -> Any:
    if hasattr(module, "extra"):
        x = x * 3
        del module.extra
    return x


def _swap(module: Any, x: Any) -> Any:
    module.a, module.b = module.b, module.a
    return x * module.a[...]


def _alias(module: Any, x: Any) -> Any:
    module.c = module.a
    return x * module.c[...]


def _new(module: Any, x: Any) -> Any:
    module.last = nnx.data(x.mean())
    return x


def _new_variable(module: Any, x: Any) -> Any:
    module.seen = nnx.Variable(x.sum())
    return x


def _rotate(module: Any, x: Any) -> Any:
    module.queue.append(module.queue.pop(0))
    return x + module.queue[0][...]


def _shorten(module: Any, x: Any) -> Any:
    if len(module.queue) > 1:
        module.queue.pop()
    return x * len(module.queue)


def _count(module: Any, x: Any) -> Any:
    module.calls[...] += 1
    return x * (1 + module.calls[...])


def _static(module: Any, x: Any) -> Any:
    module.label = module.label + "."
    return x * len(module.label)


CHANGES = {
    "delete": _delete,
    "swap": _swap,
    "alias": _alias,
    "new data": _new,
    "new variable": _new_variable,
    "rotate": _rotate,
    "shorten": _shorten,
    "count": _count,
    "static": _static,
    "dropout": lambda module, x: module.drop(x),
    "batch norm": lambda module, x: module.norm(x),
    "sow": lambda module, x: (module.sow(nnx.Intermediate, "h", x), x)[1],
}


class Changing(nnx.Module):
    """A block with everything that the changes need."""

    def __init__(self, changes: tuple[str, ...]) -> None:
        rngs = nnx.Rngs(0)
        self.changes = changes
        self.a, self.b, self.extra = (nnx.Param(jnp.asarray(value)) for value in (2.0, 3.0, 1.0))
        self.queue = nnx.List([nnx.BatchStat(jnp.asarray(float(index))) for index in range(3)])
        self.calls, self.label = nnx.Variable(jnp.asarray(0.0)), "."
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.drop, self.norm = nnx.Dropout(0.3, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(self.linear(x))
        for name in self.changes:
            x = CHANGES[name](self, x)
        return jnp.sin(x)


class Outer(nnx.Module):
    """Two such blocks, the second with a part of the changes."""

    def __init__(self, changes: tuple[str, ...]) -> None:
        self.first, self.second = Changing(changes), Changing(changes[:1])

    def __call__(self, x: Any) -> Any:
        return self.second(self.first(x) + x)


DRIVERS = ("eager", "nnx.jit", "jax.jit")
POLICIES = ("full", "everything", "offload_inputs", "dots", "off", "1 x full | 1 x everything")
APPLIED = ("checkpoint_blocks", "enable")


@dataclass(frozen=True)
class ModuleState:
    """The changes of a block, a policy and how it is applied, the driver and the number of calls."""

    changes: tuple[str, ...]
    policy: str
    applied: str
    driver: str
    calls: int
    leaks: bool

    def check(self, tally: Tally) -> None:
        """Raise AssertionError unless losses, gradients and the state after the calls are those of the plain calls."""
        with jax.enable_x64(True):
            if attempted(self._plain, self._plain, tally) is None:
                return
            found = attempted(self._ours, self._by_hand, tally)
            if found is None:
                return
            tally.compared("module state", self.driver, self.applied, *self.changes)
            wanted = self._plain()
            assert found[1] == wanted[1], f"the module is {found[1]}, not {wanted[1]}"
            close(wanted[0], found[0])

    def _plain(self) -> Any:
        return self._run(lambda model, x: model(x), Outer(self.changes))

    def _by_hand(self) -> Any:
        def call(model: Any, x: Any) -> Any:
            remat = nnx.remat(Changing.__call__)
            return remat(model.second, remat(model.first, x) + x)

        return self._run(call, Outer(self.changes))

    def _ours(self) -> Any:
        if self.applied == "enable":
            model = rj.enable_gradient_checkpointing(Outer(self.changes), self.policy, blocks=Changing)
            return self._run(lambda model, x: model(x), model)
        return self._run(lambda model, x: model(x), Outer(self.changes), self.policy)

    def _run(self, call: Any, model: Any, policy: str | None = None) -> Any:
        x = jnp.cos(jnp.arange(float(ROWS * WIDTH))).reshape(ROWS, WIDTH)

        def loss(model: Any, x: Any) -> Any:
            return jnp.sum(call(model, x) ** 2)

        loss = rj.checkpoint_blocks(loss, {Changing: policy}) if policy else loss
        with jax.checking_leaks() if self.leaks else jax.enable_x64(True):
            results = []
            for _ in range(self.calls):
                value, gradients, model = self._step(loss, model, x)
                results.append((value, gradients))
        graph, state = nnx.split(model)
        return (results, nnx.to_pure_dict(state)), _described(state, model)

    def _step(self, loss: Any, model: Any, x: Any) -> tuple[Any, Any, Any]:
        gradient = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.Param))
        if self.driver == "jax.jit":
            graph, state = nnx.split(model)
            after: list[Any] = []

            def pure(state: Any, x: Any) -> Any:
                merged = nnx.merge(graph, state)
                value, found = gradient(merged, x)
                changed, rest = nnx.split(merged)
                after.append(changed)
                return value, nnx.to_pure_dict(found), rest

            value, found, state = jax.jit(pure)(state, x)
            return value, found, nnx.merge(after[-1], state)
        value, found = (nnx.jit(gradient) if self.driver == "nnx.jit" else gradient)(model, x)
        return value, nnx.to_pure_dict(found), model


def _described(state: Any, model: Any) -> list[str]:
    names = [f"{'.'.join(map(str, path))}: {leaf.shape}" for path, leaf in nnx.to_flat_state(state)]
    blocks = {"first": model.first, "second": model.second}
    labels = [f"{name}.label {block.label!r}" for name, block in blocks.items()]
    aliases = [f"{name}.c is a" for name, block in blocks.items() if getattr(block, "c", None) is block.a]
    return sorted(names) + labels + aliases


module_states = st.builds(
    ModuleState,
    st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=3, unique=True).map(tuple),
    st.sampled_from(POLICIES),
    st.sampled_from(APPLIED),
    st.sampled_from(DRIVERS),
    st.sampled_from([1, 2]),
    st.integers(0, 3).map(lambda number: number == 0),
)
