"""Module paths in a traced step under every policy, for modules that leave none there themselves.

Memory by module reads these paths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax import compat
from remat_jax.core.module_paths import module_path
from remat_jax.core.walk import equations

eqx = pytest.importorskip("equinox")
WIDTH = 8
X = jnp.ones((4, WIDTH))


class Own(eqx.Module):
    """A layer that is not one of Equinox's own, which name their scopes themselves."""

    w: jax.Array

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(x @ self.w)


class Layer(eqx.Module):
    up: Own
    down: Own
    act: Callable[..., Any]

    def __call__(self, x: Any) -> Any:
        return x + self.down(self.act(self.up(x)))

    def encode(self, x: Any) -> Any:
        return self(jnp.sin(x))


class Model(eqx.Module):
    layers: list[Layer]

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def layer(act: Callable[..., Any]) -> Layer:
    return Layer(Own(jnp.ones((WIDTH, 2 * WIDTH))), Own(jnp.ones((2 * WIDTH, WIDTH))), act)


MODEL = Model([layer(jnp.tanh), layer(jnp.cos)])
PARTS = {f"layers/{index}/{part}" for index in (0, 1) for part in ("up", "down")}


def paths_of(job: rj.Workload, policy: str) -> set[str]:
    step = job.step(policy)
    traced = jax.make_jaxpr(step.function)(*step.arguments)
    return {module_path(f"{eqn.source_info.name_stack}/tanh")[0] for eqn in equations(traced)}


def mean_square(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


def of_loss() -> rj.Workload:
    return rj.Workload(mean_square, MODEL, (X,), Layer, optimizer=optax.sgd(0.1))


def of_step() -> rj.Workload:
    @eqx.filter_jit
    def step(model: Any, x: Any) -> Any:
        gradients = eqx.filter_grad(mean_square)(model, x)
        return eqx.apply_updates(model, gradients)

    return rj.Workload.from_step(step, MODEL, X, blocks=Layer)


@pytest.mark.parametrize("policy", ["off", "full"])
@pytest.mark.parametrize("made", [of_loss, of_step])
def test_own_modules_of_equinox_have_their_paths(made: Callable[[], rj.Workload], policy: str) -> None:
    assert {f"Model/{part}" for part in PARTS} <= paths_of(made(), policy)


@pytest.mark.parametrize("policy", ["off", "full"])
def test_modules_that_the_loss_calls_itself_have_their_paths_in_the_arguments(policy: str) -> None:
    def loss(params: Any, x: Any) -> Any:
        for each in params["tower"].layers:
            x = each(x)
        return x.sum()

    job = rj.Workload(loss, {"tower": MODEL}, (X,), Layer)
    assert {f"tower/{part}" for part in PARTS} <= paths_of(job, policy)


@pytest.mark.parametrize("policy", ["off", "full"])
def test_a_method_and_a_marked_function_as_blocks_have_scopes(policy: str) -> None:
    def loss(model: Any, x: Any) -> Any:
        for each in model.layers:
            x = each.encode(x)
        return x.sum()

    encoding = rj.Workload(loss, MODEL, (X,), Layer.encode)
    assert {"layers/0", "layers/1", "layers/0/up"} <= paths_of(encoding, policy)

    @rj.block
    def feed(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w) @ w.T

    def of_arrays(params: Any, x: Any) -> Any:
        for w in params:
            x = feed(w, x)
        return x.sum()

    marked = rj.Workload(of_arrays, [jnp.ones((WIDTH, 3))] * 2, (X,), feed)
    assert "feed" in paths_of(marked, policy)
    assert {row.name for row in rj.residuals(marked, "dots").rows if row.action == "save"} >= {"feed:dot_general#0"}


class Coder(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def encode(self, x: Any) -> Any:
        return jnp.sin(self.dense(x))


@pytest.mark.parametrize("policy", ["off", "full"])
def test_a_method_of_an_nnx_module_as_a_block_has_a_scope(policy: str) -> None:
    job = rj.Workload.from_nnx(Coder(), lambda model, x: model.encode(x).sum(), (X,), Coder.encode)
    step = job.step(policy)
    named = {
        (module_path(f"{eqn.source_info.name_stack}/x")[0], eqn.primitive.name)
        for eqn in equations(jax.make_jaxpr(step.function)(*step.arguments))
    }
    assert {("Coder", "sin"), ("Coder/dense", "dot_general")} <= named


def test_calls_are_restored() -> None:
    before = vars(Layer)["__call__"]
    paths_of(of_loss(), "off")
    assert vars(Layer)["__call__"] is before


@pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="XLA's GPU compiler is not installed")
def test_memory_by_module_names_own_modules_of_equinox() -> None:
    big = Model([layer(jnp.tanh), layer(jnp.cos)])
    report = rj.measure(rj.Workload(mean_square, big, (jnp.ones((4096, WIDTH)),), Layer), "off", "h200")
    named = sum(size for path, size in report.live_bytes_by_module.items() if str(path).startswith(("Model", "('Model")))
    assert named > 0.5 * sum(report.live_bytes_by_module.values())
