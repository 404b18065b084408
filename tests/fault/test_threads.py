"""Several threads at once, each with its own policy: what they compute and count is what one after the other would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.apply import switch
from remat_jax.cost.count import matmuls
from remat_jax.hardware import target
from remat_jax.memory.compile import cache, compiler
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.step import TrainingStep
from tests.small_models import Mlp, NnxMlp, NnxStack, assert_bit_equal, assert_same, make_loss, to_host

POLICIES = ("full", "everything", "offload_inputs", "1 x full | 1 x dots")


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the calls give, all begun at the same time."""
    begin = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        begin.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def linen_loss() -> tuple[Callable[..., Any], Any, Any, Any]:
    loss, params, x = make_loss()
    # One `jit` for all threads: each must find its own trace.
    return jax.jit(loss), params, x, Mlp


def nnx_loss() -> tuple[Callable[..., Any], Any, Any, Any]:
    graphdef, state = nnx.split(NnxStack())

    def loss(state: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(nnx.merge(graphdef, state)(x)))

    return jax.jit(loss), state, jnp.ones((2, 4)), NnxMlp


@pytest.mark.parametrize("make", [linen_loss, nnx_loss])
def test_each_thread_traces_under_its_own_policy(make: Callable[..., Any]) -> None:
    loss, params, x, block = make()

    def facts(policy: str) -> Any:
        step = jax.value_and_grad(rj.checkpoint_blocks(loss, {block: policy}) if policy else loss)
        return matmuls(step, params, x), to_host(step, params, x), step(params, x)

    # None stands for the plain function, which must see nothing of the others' policies.
    every = [*POLICIES, "", *POLICIES, ""]
    outcomes = together([lambda policy=policy: facts(policy) for policy in every])
    for policy, (products, moved, results) in zip(every, outcomes, strict=True):
        again = facts(policy)
        assert (products, moved) == again[:2], policy
        assert_bit_equal(results, again[2])
    assert len({products for products, _, _ in outcomes}) > 2 and any(moved for _, moved, _ in outcomes)


def test_a_function_may_wait_for_a_thread_that_has_blocks_of_the_same_class() -> None:
    """And whichever of the two ends last, the class has its own call afterwards."""
    loss, state, x, block = nnx_loss()
    original, inside, results = NnxMlp.__call__, threading.Event(), []
    step = jax.grad(rj.checkpoint_blocks(loss, {block: "full"}))
    expected, products = step(state, x), matmuls(step, state, x)

    def longer() -> None:
        def waiting(state: Any, x: Any) -> Any:
            begun.set()
            assert inside.wait(60)
            return loss(state, x)

        results.append(jax.grad(rj.checkpoint_blocks(waiting, {block: "dots"}))(state, x))

    begun, threads = threading.Event(), [threading.Thread(target=longer, daemon=True)]

    def here() -> None:
        results.append(step(state, x))

    def outer(state: Any, x: Any) -> Any:
        threads[0].start()
        assert begun.wait(60)
        joined = threading.Thread(target=here, daemon=True)
        joined.start()
        joined.join(60)
        assert not joined.is_alive() and len(results) == 1
        return loss(state, x)

    assert matmuls(jax.grad(rj.checkpoint_blocks(outer, {block: "full"})), state, x) == products
    assert NnxMlp.__call__ is not original, "the other thread is inside"
    inside.set()
    threads[0].join(60)
    assert NnxMlp.__call__ is original and len(results) == 2
    for result in results:
        assert_same(result, expected, 1e-7)


def test_what_is_compiled_at_once_is_kept_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.forget()
    programs = [
        export_step(
            str(scale), TrainingStep(lambda x, s=scale: x * s, (jax.ShapeDtypeStruct((8,), jnp.float32),), ()), target("cpu")
        )
        for scale in range(6)
    ]

    def sizes(asked: Any, *_: Any) -> Iterator[tuple[str, Sizes]]:
        return ((program.key, Sizes(int(program.key), *range(2, 9))) for program in asked)

    monkeypatch.setattr(compiler, "_compiled", sizes)
    calls = [
        lambda program=program: compile_programs([program], target("cpu"), timeout=10)[program.key].temp
        for program in programs * 3
    ]
    assert together(calls) == list(range(6)) * 3
    cache.forget()


def test_threads_that_switch_checkpointing_on_get_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(nnx.Linear):
        pass

    def make() -> Any:
        return nnx.List([Layer(2, 2, rngs=nnx.Rngs(0)) for _ in range(2)])

    made, both, subclass = [], threading.Event(), switch.subclass

    def slow(*args: Any) -> Any:
        made.append(args)
        # Another thread has the time to come as far as here.
        both.wait(0.2)
        return subclass(*args)

    monkeypatch.setattr(switch, "subclass", slow)
    models = together([lambda: rj.enable_gradient_checkpointing(nnx.Sequential(*make()), "full") for _ in range(3)])
    classes = {type(model.layers[0]) for model in models}
    assert len(classes) == 1 and len(made) == 1 and Layer not in classes
