"""`chunk_head`: the same loss and gradients with the logits of one chunk at a time, for losses that are not edited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import remat_jax as rj
from remat_jax.core.walk import equations
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, PlanningError
from remat_jax.train.chunked_head import chunk_head, chunked_heads
from tests.workloads import Perceptron

ROWS, LENGTH, WIDTH, WORDS = 3, 12, 5, 23
CHUNKS = 4
integer = optax.softmax_cross_entropy_with_integer_labels


def example(dtype: Any = jnp.float64) -> tuple[Any, Any, Any]:
    kernel, hidden, targets = jax.random.split(jax.random.key(0), 3)
    drawn = [jax.random.normal(key, shape, dtype) for key, shape in ((kernel, (WIDTH, WORDS)), (hidden, (ROWS, LENGTH, WIDTH)))]
    return *drawn, jax.random.randint(targets, (ROWS, LENGTH), 0, WORDS)


def error(result: Any, expected: Any) -> float:
    """The largest difference of two trees."""
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.abs(jnp.subtract(a, b)).max()) for a, b in pairs)


def gradients(*losses: Any) -> Any:
    """One compiled function of the values, aux and gradients of the losses."""

    def of(loss: Any, *args: Any) -> Any:
        with_aux = lambda *args: out if isinstance(out := loss(*args), tuple) else (out, 0)  # noqa: E731
        return jax.value_and_grad(with_aux, argnums=(0, 1), has_aux=True)(*args)

    return jax.jit(lambda *args: [of(loss, *args) for loss in losses])


@jax.custom_vjp
def stable(logits: Any, one_hot: Any, scale: Any) -> tuple[Any, Any]:
    """As in T5X: a cross entropy whose derivative is written by hand and is not that of the function (scale has none)."""
    log_z = jax.nn.logsumexp(logits, -1)
    return log_z - (logits * one_hot).sum(-1) + scale * log_z**2, scale * log_z**2


def _stable_bwd(saved: Any, cotangents: Any) -> Any:
    logits, one_hot, scale, log_z = saved
    given = cotangents[0][..., None] * (jnp.exp(logits - log_z[..., None]) * (1 + 2 * scale * log_z[..., None]) - one_hot)
    return given, jnp.zeros_like(one_hot), jnp.zeros_like(scale)


stable.defvjp(lambda *args: (stable(*args), (*args, jax.nn.logsumexp(args[0], -1))), _stable_bwd)


def z_loss(kernel: Any, hidden: Any, y: Any) -> Any:
    """Soft caps, a mask, a z-loss; accuracy, a count and a loss per token beside it."""
    logits = 30 * jnp.tanh(hidden @ kernel / 30)
    log_z, mask = jax.nn.logsumexp(logits, -1), y > 2
    losses = log_z - jnp.take_along_axis(logits, y[..., None], -1)[..., 0] + 1e-2 * log_z**2
    right = (logits.argmax(-1) == y) & mask
    return (losses * mask).sum() / mask.sum(), (right.sum(), mask.sum(), losses)


def flat(kernel: Any, hidden: Any, y: Any) -> Any:
    logits = jax.nn.log_softmax((hidden @ kernel).reshape(-1, WORDS))
    return -logits[jnp.arange(y.size), y.reshape(-1)].mean()


def tied(kernel: Any, hidden: Any, y: Any) -> Any:
    states = kernel.T[y] + hidden
    return integer(states @ kernel, y).mean()


def distilled(kernel: Any, hidden: Any, y: Any) -> Any:
    teacher = jax.lax.stop_gradient(jnp.sin(hidden) @ kernel)
    return optax.kl_divergence(jax.nn.log_softmax(hidden @ kernel), jax.nn.softmax(teacher)).mean()


LOSSES: dict[str, Callable[..., Any]] = {
    "mean": lambda w, x, y: integer(x @ w, y).mean(),
    "jit": lambda w, x, y: jax.jit(lambda x: integer(jax.jit(jnp.dot)(x, w), y).mean())(x),
    "shifted": lambda w, x, y: integer((x @ w)[:, :-1], y[:, 1:]).mean(),
    "flat": flat,
    "one axis": lambda w, x, y: integer(x[0] @ w, y[0]).sum(),
    "classes first": lambda w, x, y: integer(jnp.einsum("dv,bld->vbl", w, x), y, axis=0).mean(),
    "one-hot": lambda w, x, y: -(jax.nn.log_softmax(x @ w) * jax.nn.one_hot(y, WORDS)).sum(),
    "smooth": lambda w, x, y: optax.softmax_cross_entropy(x @ w, optax.smooth_labels(jax.nn.one_hot(y, WORDS), 0.1)).mean(),
    "z-loss": z_loss,
    "tied": tied,
    "by row": lambda w, x, y: jnp.exp(integer(x @ w, y).mean(-1)).sum(),
    "vmap": lambda w, x, y: jax.vmap(jax.vmap(lambda x, y: -jax.nn.log_softmax(x @ w)[y]))(x, y).mean(),
    "custom vjp": lambda w, x, y: [(a.mean(), b) for a, b in [stable(x @ w, jax.nn.one_hot(y, WORDS), 1e-2)]][0],
    "custom jvp": lambda w, x, y: integer(jax.nn.relu(x @ w) + jax.nn.softplus(x @ w), y).mean(),
    "checkpoint": lambda w, x, y: integer(jax.checkpoint(lambda x: jnp.sin(x) @ w)(x), y).mean(),
    "checkpoint around all": lambda w, x, y: jax.checkpoint(lambda x: integer(jnp.sin(x) @ w, y).mean())(x),
    "two heads": lambda w, x, y: integer(x @ w, y).mean() + integer(jnp.sin(x) @ w, y).mean() + ((x @ w[:, :1]) ** 2).mean(),
    "distilled": distilled,
    "hardest tokens": lambda w, x, y: jax.lax.top_k(integer(x @ w, y).ravel(), 5)[0].mean(),
    "weights by a vector": lambda w, x, y: jnp.dot(integer(x @ w, y).ravel(), jnp.arange(y.size)),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_the_loss_in_float64(name: str, x64: None) -> None:
    args, loss = example(), LOSSES[name]
    # 5 chunks do not divide 12 tokens.
    expected, *results = gradients(loss, *(chunk_head(loss, chunks=chunks) for chunks in (CHUNKS, 5)))(*args)
    assert all(error(result, expected) < 1e-12 for result in results)
    assert sum(head.shape[-1] == WORDS for head in chunked_heads(loss, *args)) >= (name != "classes first")


def test_under_jit_vmap_and_in_forward_mode_and_for_second_derivatives(x64: None) -> None:
    def of(loss: Any) -> Any:
        rows = jax.vmap(loss, (None, 0, 0))(w, x[:, None], y[:, None])
        return gradients(loss)(w, x, y), rows, jax.jvp(jax.grad(lambda w: loss(w, x, y)), (w,), (w,))[1]

    w, x, y = example()
    loss = LOSSES["custom jvp"]
    assert error(*jax.jit(lambda: [of(chunk_head(loss, chunks=5)), of(loss)])()) < 1e-12


def clip(w: Any, x: Any, y: Any) -> Any:
    logits = x.reshape(-1, WIDTH) @ jnp.sin(x.reshape(-1, WIDTH)).T
    return integer(logits, jnp.arange(y.size)).mean() + integer(logits.T, jnp.arange(y.size)).mean()


def normalised(w: Any, x: Any, y: Any) -> Any:
    logits = x @ w
    return integer(logits / jnp.abs(logits).sum((0, 1)), y).mean()


def inside_a_loop(w: Any, x: Any, y: Any) -> Any:
    return jax.lax.scan(lambda total, each: (total + integer(each[0] @ w, each[1]).sum(), None), 0.0, (x, y))[0]


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "returned": (lambda w, x, y: (lambda z: (integer(z, y).mean(), z))(x @ w), r"the loss returns float32\[3, 12, 23\], an"),
    "normalised": (
        normalised,
        r"reduce_sum float32\[23\] at .*test_chunked_head.py:\d+ .*, and div float32\[3, 12, 23\] at .* reads",
    ),
    "sorted": (
        lambda w, x, y: integer(jnp.sort((x @ w).reshape(-1, WORDS), 0), y.ravel()).mean(),
        r"sort float32\[36, 23\] at .* combines tokens of float32\[36, 23\]",
    ),
    "contrastive": (clip, r"dot_general float32\[36, 36\] at .*\(clip\) cannot run in chunks: gather float32\[36, 1\] at"),
    "no softmax": (lambda w, x, y: ((x @ w) ** 2).mean(), "loss: it has no output head outside loops"),
    "in a loop": (inside_a_loop, "loss: it has no output head outside loops"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_in_which_tokens_meet_is_refused_by_the_operation(name: str) -> None:
    loss, message = REFUSED[name]
    with pytest.raises(PlanningError, match=message):
        chunk_head(loss, *example(jnp.float32))


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="loss=3: expected a function"):
        chunk_head(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="n=0: expected the number of chunks"):
        chunk_head(z_loss, chunks=0)


def test_one_chunk_of_logits_exists_and_each_is_computed_once_more() -> None:
    args = example(jnp.float32)
    counts = {}
    for name in ("mean", "shifted", "one-hot", "distilled"):
        for loss in (LOSSES[name], chunk_head(LOSSES[name], chunks=CHUNKS)):
            gradient = jax.value_and_grad(loss, argnums=(0, 1))
            counts.setdefault(name, []).append(matmuls(gradient, *args))
            sizes = [var.aval.size for eqn in equations(jax.make_jaxpr(gradient)(*args)) for var in eqn.outvars]
        assert max(sizes) <= ROWS * LENGTH * WORDS // CHUNKS
    # One product forward and two backward; in each chunk the forward product once more, and the teacher's.
    assert counts == {"mean": [3, 16], "shifted": [3, 16], "one-hot": [3, 16], "distilled": [4, 24]}


def test_gradients_of_a_narrow_head_are_added_up_in_float32() -> None:
    w, x, y = example(jnp.bfloat16)
    w, x, y = w, jnp.tile(x, (1, 64, 1)), jnp.tile(y, (1, 64))
    summed = lambda w, x, y: integer(x @ w, y).sum()  # noqa: E731
    by_hand = lambda w, x, y: rj.in_chunks(summed, 256, axis=(None, 1, 1))(w, x, y) / y.size  # noqa: E731
    losses = LOSSES["mean"], by_hand, chunk_head(LOSSES["mean"], chunks=256)
    exact, *rest = jax.jit(
        lambda: (
            [jax.grad(LOSSES["mean"])(w.astype(jnp.float32), x.astype(jnp.float32), y)]
            + [jax.grad(loss)(w, x, y).astype(jnp.float32) for loss in losses]
        )
    )()
    whole, hand, chunked = (error(each, exact) for each in rest)
    # In bfloat16, sums of 256 terms would be four times as wrong.
    assert chunked < 4 * whole and chunked == pytest.approx(hand, rel=0.1)


def test_facts_before_it_is_applied() -> None:
    structs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in example(jnp.bfloat16)]
    (head,) = chunked_heads(lambda w, x, y: integer((x @ w).astype(jnp.float32), y).mean(), *structs, chunks=CHUNKS)
    assert (head.shape, head.dtype, head.axis, head.chunks) == ((ROWS, LENGTH, WORDS), "bfloat16", 1, CHUNKS)
    assert head.logits_bytes == ROWS * LENGTH * WORDS * 4
    assert head.recomputed.flops >= 2 * ROWS * LENGTH * WIDTH * WORDS and "test_chunked_head.py" in head.source


def test_a_sharded_vocabulary_keeps_its_constraint_in_each_chunk() -> None:
    def loss(w: Any, x: Any, y: Any) -> Any:
        logits = jax.lax.with_sharding_constraint(x @ w, PartitionSpec("data", None, "model"))
        return integer(logits, y).mean()

    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((8, 64), "f4"), ((4, 16, 8), "f4"), ((4, 16), "i4"))]
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(jax.grad(chunk_head(loss, chunks=4)))(*args)
    shapes = [eqn.outvars[0].aval.shape for eqn in equations(jaxpr) if eqn.primitive.name == "sharding_constraint"]
    assert shapes and set(shapes) == {(4, 4, 64)}


def test_linen_and_nnx_models_under_policies() -> None:
    tokens = jnp.arange(32).reshape(2, 16)
    model = nn.Sequential([nn.Embed(64, 8), Perceptron(), Perceptron(), nn.Dense(64, use_bias=False)])
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    loss = lambda params, tokens: integer(model.apply(params, tokens), tokens).mean()  # noqa: E731
    chunked = rj.checkpoint_blocks(chunk_head(loss), {Perceptron: "1 × full | 1 × dots"})
    assert error(*jax.jit(lambda: [jax.grad(fn)(params, tokens) for fn in (chunked, loss)])()) < 1e-5
    of_nnx = nnx.Linear(WIDTH, WORDS, rngs=nnx.Rngs(0))
    _, x, y = example(jnp.float32)
    loss = lambda model, x, y: integer(model(x), y).mean()  # noqa: E731
    assert error(*nnx.jit(lambda model: [nnx.grad(fn)(model, x, y) for fn in (chunk_head(loss), loss)])(of_nnx)) < 1e-6
