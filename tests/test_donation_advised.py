"""Which arguments of a finished step could be donated, and the text that says how: it is applied here as it is printed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.memory.advice import undonated_arguments

X = jnp.ones((4, 8))
W, B = jnp.ones((8, 8)), jnp.ones(8)


def update(w: Any, b: Any, x: Any) -> Any:
    gradients = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w + b) ** 2))(w)
    return {"weights": (w - gradients, b + 1), "loss": gradients.sum()}


class Trainer:
    def step(self, size: int, w: Any, b: Any, x: Any) -> Any:
        return update(size * w, b, x)


def advised(step: Callable[..., Any], *args: Any, **options: Any) -> tuple[tuple[int, ...], str]:
    """The numbers of the arguments that are advised to be donated, among those that vary, and how."""
    job = rj.Workload.from_step(step, *args, **options)
    numbers, finished = undonated_arguments(job), job.step("off")
    assert finished.own is not None
    return numbers, finished.own.donating([*numbers, *finished.donate_argnums]) if numbers else ""


def method_of(**options: Any) -> Any:
    jitted = jax.jit(Trainer.step, static_argnums=(0, 1), **options)
    return functools.partial(jitted, Trainer())


BY_JAX: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "plain": (lambda **options: jax.jit(update, **options), (W, B, X)),
    "static": (lambda **options: jax.jit(lambda k, w, b, x: update(w, b, x), static_argnums=0, **options), (3, W, B, X)),
    "partial": (lambda **options: functools.partial(jax.jit(lambda k, *a: update(*a), **options), jnp.ones(1)), (W, B, X)),
    "bound method, static by name": (
        lambda **options: functools.partial(jax.jit(Trainer.step, static_argnames=("self", "size"), **options), Trainer()),
        (3, W, B, X),
    ),
    "bound method": (method_of, (3, W, B, X)),
}


@pytest.mark.parametrize("kind", BY_JAX)
@pytest.mark.parametrize("given", [{}, {"donate_argnames": "b"}])
def test_the_advised_positions_are_those_that_the_steps_jit_counts(kind: str, given: Any) -> None:
    """Following the text donates the weights and the biases, and not the batch; what was donated before stays donated."""
    jitted, args = BY_JAX[kind]
    if given and kind == "partial":
        given = {"donate_argnums": 2}  # the biases have no name there
    numbers, how = advised(jitted(**given), *args)
    assert numbers == ((0,) if given else (0, 1))
    (text,) = re.findall(r"donate_argnums=(\(.*?\)) in the step's jax.jit: w and b", how.replace("a[0] and a[1]", "w and b"))
    followed = jitted(donate_argnums=eval(text))
    assert advised(followed, *args) == ((), "")
    own = [jnp.copy(arg) if isinstance(arg, jax.Array) else arg for arg in args]
    followed(*own)
    assert [arg.is_deleted() for arg in own if isinstance(arg, jax.Array)] == [True, True, False]


def test_a_step_without_a_jit_is_told_which_jit_it_needs() -> None:
    assert advised(update, W, B, X) == ((0, 1), "jax.jit(step, donate_argnums=(0, 1)): w and b")
    how = advised(functools.partial(Trainer().step, 3), W, B, X)[1]
    assert how == "jax.jit(step, donate_argnums=(0, 1)): w and b"
    assert advised(update, W, B, X, donate_argnums=1) == ((0,), "jax.jit(step, donate_argnums=(0, 1)): w and b")


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense, self.dropout = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.dropout(jnp.tanh(self.dense(x)))


def train(scale: int, teacher: Any, model: Any, optimizer: Any, x: Any) -> Any:
    wanted = teacher(x)
    loss, gradients = nnx.value_and_grad(lambda model: scale * jnp.mean((model(x) - wanted) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def objects() -> tuple[Any, ...]:
    model, teacher = Layer(nnx.Rngs(0)), Layer(nnx.Rngs(1))
    return 3, teacher, model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), X


def test_nnx_objects_are_donated_as_advised() -> None:
    """Under `nnx.jit` all arrays of the objects are results, also those that the step only reads, so all are advised."""
    numbers, how = advised(nnx.jit(train, static_argnums=0), *objects())
    assert numbers == (0, 1, 2)
    assert how == (
        "donate_argnums=(1, 2, 3) in the step's nnx.jit: teacher and model and optimizer, counted with static arguments"
    )
    followed = nnx.jit(train, static_argnums=0, donate_argnums=(1, 2, 3))
    assert advised(followed, *objects()) == ((), "")
    args = objects()
    before = [args[2].dense.kernel.get_value(), args[1].dense.kernel.get_value()]
    for _ in range(2):
        assert followed(*args) > 0
    assert all(each.is_deleted() for each in before)
    how = advised(functools.partial(train, 3), *objects()[1:])[1]
    assert how == "nnx.jit(step, donate_argnums=(0, 1, 2)): teacher and model and optimizer"


def test_a_state_of_nnx_under_jax_jit_is_an_argument_like_others() -> None:
    graphdef, state = nnx.split(Layer(nnx.Rngs(0)))

    @jax.jit
    def step(x: Any, state: Any) -> Any:
        def loss(state: Any) -> Any:
            return jnp.mean(nnx.merge(graphdef, state)(x) ** 2)

        gradients = jax.grad(loss, allow_int=True)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g if g.dtype == p.dtype == jnp.float32 else p, state, gradients)

    assert advised(step, X, state) == ((1,), "donate_argnums=(1,) in the step's jax.jit: state")
    job = rj.Workload.from_step(step, X, state, blocks=Layer)
    assert job.step("off").array_names[1:3] == ("argument state/dense/bias", "argument state/dense/kernel")
    assert rj.measure(job, "full", "cpu").argument_bytes >= X.nbytes + sum(
        leaf.nbytes for leaf in (state["dense"]["kernel"].get_value(), state["dense"]["bias"].get_value())
    )


def test_equinox_donates_all_or_all_but_the_first() -> None:
    equinox = pytest.importorskip("equinox")
    numbers, how = advised(equinox.filter_jit(update), W, B, X)
    assert numbers == (0, 1)
    assert how == 'donate="all" in the step\'s equinox.filter_jit, which also donates x: give it new arrays at each call'
    numbers, how = advised(equinox.filter_jit(lambda x, w, b: update(w, b, x)), X, W, B)
    assert (numbers, how) == ((1, 2), 'donate="all-except-first" in the step\'s equinox.filter_jit')
    followed = equinox.filter_jit(lambda x, w, b: update(w, b, x), donate="all-except-first")
    assert advised(followed, X, W, B) == ((), "")


def test_a_teacher_is_not_donated() -> None:
    """Two arguments are alike and the step returns one such result: which of them it replaces is not known."""

    def distilled(teacher: Any, w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean((x @ w - x @ teacher) ** 2))(w), x.sum()

    assert advised(jax.jit(distilled), W, W, X) == ((), "")
    assert advised(jax.jit(distilled), W.astype(jnp.bfloat16), W, X)[0] == (1,)
