"""`in_chunks`: values and gradients of the whole function, the logits of one chunk at a time, and its errors."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.core.walk import equations
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError

ROWS, LENGTH, WIDTH, WORDS = 3, 12, 5, 11


def head_loss(params: Any, hidden: Any, targets: Any, *, scale: float = 1.0) -> dict[str, Any]:
    """A sum of losses, their number, and how often each word is a target."""
    logits = hidden @ params["kernel"] * scale
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return {"total": losses.sum(), "count": targets.size, "words": jnp.zeros(WORDS).at[targets].add(losses)}


def example(dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    kernel, hidden, targets = jax.random.split(jax.random.key(0), 3)
    params = {"kernel": jax.random.normal(kernel, (WIDTH, WORDS), dtype)}
    hidden = jax.random.normal(hidden, (ROWS, LENGTH, WIDTH), dtype)
    return params, hidden, jax.random.randint(targets, (ROWS, LENGTH), 0, WORDS)


def error(result: Any, expected: Any) -> float:
    return max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True))


@pytest.mark.versions
@pytest.mark.parametrize(("n", "axis"), [(1, 1), (4, -1), (12, 1)])
def test_values_and_gradients_are_those_of_the_whole_in_float64(n: int, axis: int, x64: None) -> None:
    params, hidden, targets = example(jnp.float64)

    def of(fn: Any) -> Any:
        total = lambda params, hidden: fn(params, hidden, targets)["total"]  # noqa: E731
        derivative = jax.jvp(lambda p: total(p, hidden), (params,), (jax.tree.map(jnp.ones_like, params),))
        return fn(params, hidden, targets), jax.grad(total, argnums=(0, 1))(params, hidden), derivative

    chunked = rj.in_chunks(head_loss, n, axis=(None, 1, axis))
    assert error(*jax.jit(lambda: (of(chunked), of(head_loss)))()) < 1e-12


def test_each_chunk_has_its_own_positions_and_all_results_are_sums() -> None:
    summed = rj.in_chunks(lambda x: (x.sum(), jnp.prod(x)), 3)(jnp.arange(1.0, 7.0))
    assert summed[0] == 21 and summed[1] == 1 * 4 + 2 * 5 + 3 * 6


def test_under_vmap_and_by_keyword() -> None:
    params, hidden, targets = example()

    def one_row(hidden: Any, targets: Any) -> Any:
        chunked = rj.in_chunks(head_loss, 4, axis=(None, 0, 0))
        return chunked(params, targets=targets, hidden=hidden, scale=0.5)

    by_row = jax.jit(jax.vmap(one_row))(hidden, targets)
    assert error({k: v.sum(0) for k, v in by_row.items()}, head_loss(params, hidden, targets, scale=0.5)) < 1e-5
    everything = rj.in_chunks(lambda *, x, y: jnp.vdot(x, y), 2)
    assert everything(x=jnp.arange(4.0), y=jnp.arange(4.0)) == 14


def test_sums_of_low_precision_are_added_up_in_float32() -> None:
    x = jnp.full((512,), 1.0, jnp.bfloat16)
    total = rj.in_chunks(lambda x: x.sum(), 512)(x)
    assert total == 512 and total.dtype == jnp.bfloat16  # in bfloat16, 256 + 1 is 256


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_a_narrow_head_are_added_up_in_float32(dtype: Any) -> None:
    head, hidden = jnp.ones((2, 3), dtype), jnp.ones((512, 2), dtype)
    loss = rj.in_chunks(lambda head, x: jnp.sum((x @ head).astype(jnp.float32)), 512, axis=(None, 0))

    def by_closure(head: Any) -> Any:
        return rj.in_chunks(lambda x: jnp.sum((x @ head).astype(jnp.float32)), 512)(hidden)

    for total in (lambda head: loss(head, hidden), by_closure):
        squared = lambda head, total=total: (total(head) / 512) ** 2  # noqa: E731
        gradient, tangent, second = jax.jit(
            lambda head, total=total, squared=squared: (
                jax.grad(total)(head),
                jax.jvp(total, (head,), (head,))[1],
                jax.jvp(jax.grad(squared), (head,), (head,))[1],
            )
        )(head)
        assert gradient.dtype == dtype and bool((gradient == 512).all())  # in bfloat16, 256 + 1 is 256
        assert tangent == 512 * 6 and bool((second == 2 * 6).all())


def test_one_chunk_of_logits_exists_and_each_is_computed_once_more() -> None:
    params, hidden, targets = example()

    def loss(n: int) -> Any:
        return lambda params, hidden: rj.in_chunks(head_loss, n, axis=(None, 1, 1))(params, hidden, targets)["total"]

    counts = {n: matmuls(jax.value_and_grad(loss(n), argnums=(0, 1)), params, hidden) for n in (1, 4)}
    assert counts == {1: 3, 4: 16}  # three products, or four in each of four chunks
    whole = ROWS * LENGTH * WORDS
    for n, largest in ((1, whole), (4, whole // 4)):
        jaxpr = jax.make_jaxpr(jax.grad(loss(n), argnums=(0, 1)))(params, hidden)
        sizes = [var.aval.size for eqn in equations(jaxpr) for var in eqn.outvars if var.aval.shape[-1:] == (WORDS,)]
        assert max(sizes) == largest


def test_linen_and_nnx_modules() -> None:
    _, hidden, targets = example()
    layer = nn.Dense(WORDS)
    variables = jax.jit(layer.init)(jax.random.key(0), hidden)

    def linen_loss(variables: Any, n: int) -> Any:
        bound = layer.bind(variables)
        return rj.in_chunks(lambda hidden, targets: head(bound, hidden, targets), n, axis=1)(hidden, targets)

    def head(module: Any, hidden: Any, targets: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(module(hidden), targets).sum()

    assert error(*jax.jit(lambda: [jax.grad(linen_loss)(variables, n) for n in (1, 4)])()) < 1e-5
    model = nnx.Linear(WIDTH, WORDS, rngs=nnx.Rngs(0))
    losses = [rj.in_chunks(head, n, axis=(None, 1, 1)) for n in (1, 4)]
    assert error(*nnx.jit(lambda model: [nnx.grad(loss)(model, hidden, targets) for loss in losses])(model)) < 1e-5


def test_replan_and_policies_leave_the_chunks_as_they_are() -> None:
    params, hidden, targets = example()

    def loss(params: Any, hidden: Any) -> Any:
        hidden = jax.checkpoint(jnp.sin)(hidden)
        return rj.in_chunks(head_loss, 4, axis=(None, 1, 1))(params, hidden, targets)["total"]

    for policy in ("off", "everything"):
        assert matmuls(jax.value_and_grad(rj.replan(loss, policy), argnums=(0, 1)), params, hidden) == 16


def test_a_block_in_a_chunk_has_its_policy_and_the_chunk_its_checkpoint() -> None:
    _, hidden, targets = example()
    model = nn.Dense(WORDS)
    variables = jax.eval_shape(model.init, jax.random.key(0), hidden)

    def loss(variables: Any, hidden: Any, targets: Any) -> Any:
        chunked = rj.in_chunks(lambda hidden, targets: jnp.sin(model.apply(variables, hidden)).sum(), 4, axis=1)
        return chunked(hidden, targets)

    job = rj.Workload(loss, variables, (hidden, targets), nn.Dense)
    kept = rj.residuals(job, "everything").device_bytes
    assert kept < ROWS * LENGTH * WORDS * 4  # no logits


ERRORS: dict[str, tuple[Any, str]] = {
    "n": (lambda: rj.in_chunks(head_loss, 0), "n=0: expected the number of chunks, a positive int"),
    "fn": (lambda: rj.in_chunks(3, 2), "fn=3: expected a function whose results are sums"),  # type: ignore[arg-type]
    "axis": (lambda: rj.in_chunks(head_loss, 2, axis=None), "axis=None: expected an int"),  # type: ignore[arg-type]
    "nothing cut": (lambda: rj.in_chunks(head_loss, 2, axis=(None, None)), "axis=(None, None): expected an int"),
    "entries": (
        lambda: rj.in_chunks(head_loss, 2, axis=(None, 1))(*example()),
        "axis=(None, 1) has 2 entries, but the function is called with 3 positional arguments",
    ),
    "divides": (
        lambda: rj.in_chunks(head_loss, 5, axis=(None, 1, 1))(*example()),
        "n=5 does not divide axis 1 of argument 1, which has 12 positions; the nearest divisors: 4 and 6",
    ),
    "lengths": (
        lambda: rj.in_chunks(head_loss, 2, axis=(None, 2, 1))(*example()),
        "axis: expected the same length along it in all arrays, but argument 1 has 5, argument 2 has 12",
    ),
    "rank": (
        lambda: rj.in_chunks(head_loss, 2, axis=(None, 1, 2))(*example()),
        "axis=2: argument 2 is int32[3, 12], which has no such axis; give None for it",
    ),
    "no array": (lambda: rj.in_chunks(lambda x, flag: x.sum(), 2)(jnp.ones(4), True), "axis=0: argument 1 is True, which has"),
    "no sum": (
        lambda: rj.in_chunks(lambda x: x * 2, 2)(jnp.ones(4)),
        "fn: its result is float32[4] for all positions, but float32[2] for one of 2 chunks: expected a sum along the axis",
    ),
    "no number": (
        lambda: rj.in_chunks(lambda x: x.any(), 2)(jnp.ones(4)),
        "fn: its result is bool[] for all positions, but bool[] for one",
    ),
}


@pytest.mark.parametrize("wrong", ERRORS)
def test_errors_say_what_to_change(wrong: str) -> None:
    call, message = ERRORS[wrong]
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call()


def test_under_vmap_each_example_may_have_weights_of_its_own() -> None:
    """In bfloat16, where the gradients of what all chunks read are added up in float32, beside the weights."""
    params, hidden, targets = example(jnp.bfloat16)
    kernels = jnp.stack([params["kernel"] * scale for scale in (1, 2, 3)])

    def total(kernel: Any, hidden: Any, targets: Any) -> Any:
        return head_loss({"kernel": kernel}, hidden, targets)["total"].astype(jnp.float32)

    def gradients(function: Any) -> Any:
        of_examples = jax.jit(jax.vmap(function))
        return jax.grad(lambda *args: of_examples(*args, targets).sum(), (0, 1))(kernels, hidden)

    result, expected = gradients(rj.in_chunks(total, 2, axis=(None, 0, 0))), gradients(total)
    for got, wanted in zip(result, expected, strict=True):
        got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
        assert float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)) < 2**-7
