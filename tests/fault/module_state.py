"""NNX blocks that change their module: attributes, lists, kinds, statistics and keys, and all that it holds after the calls."""

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


def _linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)


def _swap(module: Any, x: Any) -> Any:
    module.a, module.b = module.b, module.a
    module.parts.one, module.parts.two = module.parts.two, module.parts.one
    module.stats[0][...], module.stats[1][...] = module.stats[1][...], module.stats[0][...]
    return x * module.a[...] + module.parts.one(x)


def _delete(module: Any, x: Any) -> Any:
    if hasattr(module, "b"):
        gone = module.b
        del module.b
        gone[...] = gone[...] * 7
        module.stats.append(gone)
        module.parts.two = None
    return x * module.a[...] + len(module.stats)


def _alias(module: Any, x: Any) -> Any:
    module.c, module.other = module.a, module.parts.one
    module.parts.two.bias = module.parts.one.bias
    return x * module.c[...] + module.other(x)


def _lists(module: Any, x: Any) -> Any:
    module.calls, module.text = module.calls + 1, module.text + "y"
    module.log.append(module.calls)
    module.notes[str(module.calls)] = module.text
    module.arrays.append(x.mean() * module.calls)
    module.stats.append(module.stats.pop(0))
    module.parts[f"stat{module.calls}"] = nnx.BatchStat(x)
    return x * module.stats[0][...] + module.arrays[0] * len(module.text)


def _new(module: Any, x: Any) -> Any:
    if not hasattr(module, "made"):
        module.made = _linear(nnx.Rngs(3))
    module.made.kernel[...] += 1
    module.last, module.none = nnx.data(x * 2), nnx.data(x) if module.none is None else None
    return module.made(x) + module.a[...]


def _kinds(module: Any, x: Any) -> Any:
    kind = nnx.BatchStat if isinstance(module.b, nnx.Param) else nnx.Param
    module.b = kind(module.b[...] * x.mean())
    module.a.set_metadata("calls", module.a.get_metadata("calls", 0) + 1)
    return x * module.a[...] * module.a.get_metadata("calls") + module.b[...]


def _draws(module: Any, x: Any) -> Any:
    noise = jax.random.uniform(module.rngs.fork().dropout())
    module.sow(nnx.Intermediate, "noise", noise)
    return module.drop(x) * module.a[...] + noise


CHANGES = {"swap": _swap, "delete": _delete, "alias": _alias, "lists": _lists, "new": _new, "kinds": _kinds, "draws": _draws}


class Stateful(nnx.Module):
    """A block with every kind of attribute, and the names of its changes."""

    def __init__(self, changes: tuple[str, ...]) -> None:
        rngs = nnx.Rngs(0)
        self.changes = changes
        self.a, self.b = nnx.Param(jnp.asarray(2.0)), nnx.Param(jnp.asarray(3.0))
        self.stats = nnx.List([nnx.BatchStat(jnp.asarray(float(value))) for value in range(3)])
        self.parts = nnx.Dict(one=_linear(rngs), two=_linear(rngs))
        self.rngs, self.none, self.arrays = nnx.Rngs(5), nnx.data(None), nnx.data([jnp.asarray(1.0)])
        self.calls, self.log, self.notes, self.text = 0, [], {}, "x"
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for name in self.changes:
            x = CHANGES[name](self, x)
        return jnp.sin(x)


DRIVERS = ("eager", "nnx.jit", "jax.jit")
POLICIES = ("full", "everything", "offload_inputs", "off", "1 x full | 1 x everything")
WAYS = ("checkpoint_blocks", "enable", "class", "function")


def _twice(module: Any, x: Any) -> Any:
    return jnp.sum(module(x) ** 2) + jnp.sum(module(2 * x))


def _by_hand(module: Any, x: Any) -> Any:
    remat = nnx.remat(Stateful.__call__)
    return jnp.sum(remat(module, x) ** 2) + jnp.sum(remat(module, 2 * x))


@dataclass(frozen=True)
class ModuleState:
    """The changes of a block that each call runs twice, a policy and how it is applied, the driver, the number of calls."""

    changes: tuple[str, ...]
    policy: str
    way: str
    driver: str = "nnx.jit"
    calls: int = 2
    leaks: bool = False

    def check(self, tally: Tally) -> None:
        """Raise AssertionError unless losses, gradients and the module after the calls are those of the plain calls."""
        with jax.enable_x64(True):
            wanted = attempted(lambda: self.left("plain"), lambda: self.left("plain"), tally)
            found = wanted and attempted(lambda: self.left(self.way), lambda: self.left("by hand"), tally)
            if found is None:
                return
            tally.compared("module state", self.driver, self.way, *self.changes)
            assert found[1] == wanted[1], f"the module is {found[1]}, not {wanted[1]}"
            close(wanted[0], found[0])

    def left(self, way: str) -> tuple[Any, Any]:
        """Results and state after the calls, and all that the module then holds."""
        loss, model = self._applied(way)
        x, results = jnp.cos(jnp.arange(float(ROWS * WIDTH))).reshape(ROWS, WIDTH), []
        with jax.checking_leaks() if self.leaks else jax.enable_x64(True):
            for _ in range(self.calls):
                value, gradients, model = self._step(loss, model, x)
                results.append((value, gradients))
        return (results, nnx.to_pure_dict(nnx.state(model))), held(model)

    def _applied(self, way: str) -> tuple[Any, Any]:
        if way == "class":
            return _twice, rj.remat(Stateful, self.policy)(self.changes)
        model = Stateful(self.changes)
        if way == "enable":
            return _twice, rj.enable_gradient_checkpointing(model, self.policy, blocks=Stateful)
        if way == "function":
            return rj.remat(_twice, self.policy), model
        if way == "checkpoint_blocks":
            return rj.checkpoint_blocks(_twice, {Stateful: self.policy}), model
        return {"plain": _twice, "by hand": _by_hand}[way], model

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


def held(model: Any) -> Any:
    """The kinds, metadata and plain values that a module holds, and which of its paths are the same object."""
    parts = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            parts[path] = type(node).__name__, {key: str(value) for key, value in node.get_metadata().items()}
        elif not str(path[-1:]).startswith("('_pytree__"):
            parts[path] = str(node) if isinstance(node, int | str | None | list | dict) else type(node).__name__
    return parts, sorted(map(sorted, nnx.find_duplicates(model)))


module_states = st.builds(
    ModuleState,
    st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=3, unique=True).map(tuple),
    st.sampled_from(POLICIES),
    st.sampled_from(WAYS),
    st.sampled_from(DRIVERS),
    st.sampled_from([1, 2]),
    st.integers(0, 3).map(lambda number: number == 0),
)
