"""A loss in micro-batches, found from its trace: which losses it takes, that they stay the same, and what it refuses."""

from __future__ import annotations

import functools
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.compat import tree_bytes
from remat_jax.errors import ArgumentError, PlanningError
from remat_jax.planning import loop
from remat_jax.planning.problem import describe, recompute_flops
from remat_jax.train.chunked_head import chunk_head
from remat_jax.train.micro_batches import micro_batched

ROWS, LENGTH, WIDTH, WORDS = 8, 6, 4, 10
entropy = optax.softmax_cross_entropy_with_integer_labels


def assert_close(got, wanted, rtol=1e-12):
    """Within `rtol` of the largest number in each array."""
    for actual, expected in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * float(jnp.abs(expected).max()))


def arrays():
    """Parameters, inputs, labels and a mask with fewer targets in some rows than in others, in float64."""
    draw = np.random.default_rng(0)
    params = {"layers": draw.normal(size=(3, WIDTH, WIDTH)), "head": draw.normal(size=(WIDTH, WORDS))}
    x, labels = draw.normal(size=(ROWS, LENGTH, WIDTH)), draw.integers(0, WORDS, (ROWS, LENGTH))
    return jax.tree.map(jnp.asarray, (params, x, labels, np.tri(ROWS, LENGTH)))


def layer(x, kernel):
    return x + jnp.tanh(x @ kernel), None


def logits(params, x):
    return jax.lax.scan(layer, x, params["layers"])[0] @ params["head"]


def unrolled(params, x):
    for kernel in params["layers"]:
        x = jax.checkpoint(lambda x, kernel: nn.gelu(x @ kernel))(x, kernel)
    return x @ params["head"]


def causal(params, x):
    scores = jnp.einsum("bld,bmd->blm", x @ params["layers"][0], x)
    return jax.nn.softmax(jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -1e9)) @ x @ params["head"]


def added_in_a_loop(params, x, labels, mask, start=0.0):
    """A sum over the rows that a scan over the words of each row adds up."""

    def add(total, parts):
        x, labels = parts
        return total + entropy(x @ params["head"], labels).sum(), None

    return jax.lax.scan(add, jnp.full((), start), (x.swapaxes(0, 1), labels.T))[0] / labels.size


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clipped(x, axis=None):
    """The identity, whose gradient has a norm below 1 along this axis."""
    return x


clipped.defvjp(lambda x, axis: (x, None), lambda axis, _, g: (g / (1 + jnp.sqrt(jnp.sum(g**2, axis, keepdims=True))),))


@jax.custom_jvp
def divided(x):
    """The identity, whose derivative is divided by the number of rows."""
    return x


divided.defjvp(lambda primals, tangents: (primals[0], tangents[0] / primals[0].shape[0]))


def counted(params, x, labels, mask):
    """A loop that carries the rows, and beside them a count of the layers."""

    def body(carry, kernel):
        return (layer(carry[0], kernel)[0], carry[1] + params["head"][0, 0]), None

    (x, count), _ = jax.lax.scan(body, (x, 1.0), params["layers"])
    return count * entropy(x @ params["head"], labels).mean()


SUMS = {
    "a count beside the rows": counted,
    "mean": lambda p, x, y, m: entropy(logits(p, x), y).mean(),
    "sum": lambda p, x, y, m: entropy(unrolled(p, x), y).sum(),
    "mean over a mask": lambda p, x, y, m: (entropy(causal(p, x), y) * m).sum() / jnp.maximum(m.sum(), 1),
    "where": lambda p, x, y, m: jnp.mean(entropy(logits(p, x), y), where=m > 0),
    "flat": lambda p, x, y, m: entropy(logits(p, x).reshape(-1, WORDS), y.reshape(-1)).mean(),
    "next word": lambda p, x, y, m: entropy(logits(p, x)[:, :-1], y[:, 1:]).mean(),
    "each row": lambda p, x, y, m: jax.vmap(lambda x, y: entropy(logits(p, x), y).mean())(x, y).mean(),
    "decay": lambda p, x, y, m: entropy(logits(p, x), y).mean() + 0.1 * jnp.sum(p["head"] ** 2),
    "scale": lambda p, x, y, m: p["head"][0, 0] * entropy(logits(p, x), y).mean(),
    "two means": lambda p, x, y, m: (
        entropy(logits(p, x), y).mean() + (jax.nn.logsumexp(logits(p, x), -1) ** 2).mean() / m.sum()
    ),
    "one-hot": lambda p, x, y, m: -(jax.nn.one_hot(y, WORDS) * jax.nn.log_softmax(logits(p, x))).sum(-1).mean(),
    "branch": lambda p, x, y, m: jax.lax.cond(p["head"][0, 0] > 0, jnp.sin, jnp.cos, logits(p, x)).mean(),
    "loop": added_in_a_loop,
    "complex": lambda p, x, y, m: logits(p, x).mean() + ((2 + 3j) * (1j * logits(p, x)).mean()).real,
    "clipped rows": lambda p, x, y, m: entropy(clipped(logits(p, x), axis=-1), y).mean(),
    "clipped loss": lambda p, x, y, m: clipped(entropy(logits(p, x), y).mean()),
    "head in chunks": chunk_head(lambda p, x, y, m: entropy(logits(p, x), y).mean(), chunks=2),
}


@pytest.mark.parametrize("name", SUMS)
def test_the_function_stays_the_same(name, x64):
    params, *batch = arrays()
    loss = SUMS[name]
    parts = micro_batched(lambda params, _, *batch: loss(params, *batch), 4)
    both = jax.jit(lambda params, *batch: (parts(params, (), *batch), jax.value_and_grad(loss)(params, *batch)))
    assert_close(*both(params, *batch))


def test_auxiliary_sums_and_counts_are_those_of_the_whole_batch(x64):
    def loss(params, _, x, labels, mask):
        made = logits(params, x)
        right = (made.argmax(-1) == labels) & (mask > 0)
        return entropy(made, labels).mean(), {"right": right.sum(), "norm": jnp.sum(params["head"])}

    params, *batch = arrays()
    parts = micro_batched(loss, 2, has_aux=True)
    aux, wanted = jax.jit(lambda: (parts(params, (), *batch)[0][1], loss(params, (), *batch)[1]))()
    assert (int(aux["right"]), float(aux["norm"])) == (int(wanted["right"]), float(wanted["norm"])) and int(aux["right"]) > 0


def normalised(params, x, labels, mask):
    made = logits(params, x)
    return entropy((made - made.mean(0)) / made.std(0), labels).mean()


REFUSED = {
    "a start": (lambda p, x, y, m: added_in_a_loop(p, x, y, m, start=1.0), "scan .* adds a sum over examples to another value"),
    "a branch on rows": (
        lambda p, x, y, m: jax.lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, logits(p, x)).mean(),
        "slice .* combines",
    ),
    "a loop over rows": (lambda p, x, y, m: jax.lax.map(lambda x: logits(p, x).sum(), x).mean(), "loop over examples"),
    "an effect": (lambda p, x, y, m: (jax.debug.print("x"), logits(p, x).mean())[1], "has an effect"),
    "statistics of the batch": (normalised, "reduce_sum .* combines the examples, and sub .* reads its result"),
    "pairs": (
        lambda p, x, y, m: entropy((h := logits(p, x).mean(1)) @ h.T, jnp.arange(ROWS)).mean(),
        "dot_general .* combines",
    ),
    "perplexity": (
        lambda p, x, y, m: jnp.exp(entropy(logits(p, x), y).mean()),
        "not linear in the sum over examples reduce_sum",
    ),
    "places": (lambda p, x, y, m: (logits(p, x)[..., 0] * jnp.arange(x.shape[0])[:, None]).sum(), "iota .* has a row for each"),
    "size": (lambda p, x, y, m: (logits(p, x) / x.shape[0]).sum(), "div .* depends on the number of examples"),
    "size of a sum": (lambda p, x, y, m: (logits(p, x) / jnp.ones(len(x)).sum()).sum(), "reduce_sum .* number of examples"),
    "size of a constant": (lambda p, x, y, m: (logits(p, x) * np.arange(len(x)).max()).sum(), "mul .* number of examples"),
    "size as a power": (lambda p, x, y, m: (logits(p, x) ** len(x)).sum(), "integer_pow .* depends on the number"),
    "size as a length": (
        lambda p, x, y, m: jax.lax.fori_loop(0, len(x), lambda _, x: layer(x, p["layers"][0])[0], x).sum(),
        "scan .* depends on the number",
    ),
    "size as a place": (lambda p, x, y, m: logits(p, x)[..., len(x) - 1].sum(), "slice .* depends on the number"),
    "size in a call": (
        lambda p, x, y, m: jax.checkpoint(lambda x: logits(p, x) * jnp.full((WORDS,), 1 / len(x)))(x).sum(),
        "mul .* depends on the number",
    ),
    "size chooses": (
        lambda p, x, y, m: jax.checkpoint(lambda x: x @ p["layers"][0] + x @ p["layers"][1 + len(x) // ROWS])(x).sum(),
        "depends on the number",
    ),
    "parameters of rows": (
        lambda p, x, y, m: (logits(p, x) * jnp.tile(p["head"].T.ravel(), 2)[: 10 * ROWS].reshape(ROWS, 1, 10)).sum(),
        "is not computed from the batch",
    ),
    "derivative of all rows": (lambda p, x, y, m: entropy(clipped(logits(p, x)), y).mean(), "rule"),
    "derivative of parameters": (lambda p, x, y, m: (x @ clipped(p["head"])).sum(), "has a derivative rule"),
    "derivative with a size": (lambda p, x, y, m: divided(logits(p, x)).sum(), "div .* depends on the number"),
    "while": (
        lambda p, x, y, m: (
            logits(p, x).sum()
            + jax.lax.while_loop(lambda c: c[1] < 2, lambda c: (c[0] - c[0].mean(0), c[1] + 1), (x @ p["head"], 0))[0].sum()
        ),
        "while .* may combine",
    ),
    "neighbours": (lambda p, x, y, m: logits(p, jnp.roll(x, 1, 0)).mean(), "slice .* combines examples"),
    "draws": (lambda p, x, y, m: (logits(p, x)[..., 0] * jax.random.normal(jax.random.key(0), m.shape)).sum(), "has no key"),
    "no rows": (lambda p, x, y, m: jnp.sum(p["head"] ** 2), "no sum over examples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_loss_is_refused_by_operation(name, x64):
    loss, why = REFUSED[name]
    params, *batch = arrays()
    with pytest.raises(PlanningError, match=why):
        micro_batched(lambda params, _, *batch: loss(params, *batch), 2)(params, (), *batch)


def test_micro_batches_of_one_example(x64):
    params, x, labels, mask = arrays()
    loss = SUMS["mean over a mask"]
    parts = micro_batched(lambda params, _, *batch: loss(params, *batch), ROWS)
    assert_close(
        *jax.jit(lambda *args: (parts(args[0], (), *args[1:]), jax.value_and_grad(loss)(*args)))(params, x, labels, mask)
    )

    def of_rows(params, _, x):  # would broadcast with a single row
        return jnp.sum(params * x)

    with pytest.raises(PlanningError, match="is not computed from the batch"):
        micro_batched(of_rows, ROWS)(jnp.ones((ROWS, 1)), (), mask)


def test_a_row_for_each_example_is_not_returned(x64):
    params, *batch = arrays()
    with pytest.raises(PlanningError, match=r"returns float64\[8, 6, 10\], an array with a row for each example"):
        micro_batched(lambda p, _, x, y, m: ((h := logits(p, x)).mean(), h), 2, has_aux=True)(params, (), *batch)


def test_a_key_is_folded_for_each_micro_batch(x64):
    def loss(params, _, x, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape[:2])[..., None], logits(params, x), 0).mean()

    params, x, *_ = arrays()
    key = jax.random.key(0)
    of_part = jax.jit(jax.value_and_grad(loss))
    wanted = [of_part(params, (), x[part::2], jax.random.fold_in(key, part)) for part in range(2)]
    wanted = jax.tree.map(lambda one, other: (one + other) / 2, *wanted)
    assert_close(jax.jit(micro_batched(loss, 2))(params, (), x, key), wanted)


@pytest.mark.parametrize("declared", ["sum", "mean"])
def test_a_declared_loss_is_believed(declared, x64):
    def loss(params, _, x):
        return getattr(jnp, declared)(jax.pure_callback(lambda x: x, jax.typeof(x), x) @ params["head"])

    params, x, *_ = arrays()
    with pytest.raises(PlanningError):
        micro_batched(loss, 2)(params, (), x)
    assert_close(micro_batched(loss, 2, declared=declared)(params, (), x), jax.value_and_grad(loss)(params, (), x))


# --- as a change of a plan -----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(32)(nn.tanh(nn.Dense(512)(x)))


def squares(params, x):
    return jnp.mean(nn.Sequential([Layer(), Layer()]).apply(params, x) ** 2)


def job(rows=4096):
    x = jax.ShapeDtypeStruct((rows, 32), jnp.float32)
    params = jax.eval_shape(nn.Sequential([Layer(), Layer()]).init, jax.random.key(0), x)
    return rj.Workload(squares, params, (x,), Layer, optimizer=optax.sgd(0.1))


@pytest.fixture(scope="module")
def plan():
    least = rj.measure(job(), "full", "cpu").device_bytes
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "MOST_COMPILED", 2)
        return rj.plan(job(), round(0.4 * least), "cpu", allow="micro_batches")


def test_micro_batches_make_a_plan_possible(plan, tmp_path):
    assert plan.micro_batches in (4, 8) and set(plan.changes) == {"micro_batches"} and plan.device_bytes <= plan.budget
    assert f"with micro_batches ({plan.micro_batches}) on cpu" in str(plan)
    assert [row.times for row in plan.beyond][:2] == [1, 2] and plan.beyond[0].remark == "nothing fits with it"
    assert rj.Plan.load(plan.save(tmp_path / "plan.json"), job()) == plan


def test_the_planned_step_is_the_step_of_the_whole_batch(plan):
    draw, optimizer = np.random.default_rng(0), optax.sgd(0.1)
    params = jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape) / 8, leaf.dtype), job().params)
    x = jnp.asarray(draw.normal(size=(4096, 32)), jnp.float32)
    step = plan.train_step(squares, optimizer, donate=False)
    updated, _, value = step(params, step.init(params), x)
    wanted, gradients = jax.jit(jax.value_and_grad(squares))(params, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert_close(updated, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), rtol=1e-6)
    with pytest.raises(PlanningError, match="8192"):
        step(params, step.init(params), jnp.concatenate([x, x]))
    part = x[:: plan.micro_batches]
    np.testing.assert_allclose(plan.apply(squares)(params, part), squares(params, part), rtol=1e-6)
    with pytest.raises(PlanningError, match=f"has {plan.micro_batches} micro-batches, but is called with the whole batch"):
        plan.apply(squares)(params, x)


def test_the_problem_is_that_of_one_micro_batch():
    """Its blocks have the bytes of a micro-batch, and the times of all; a step has one more tree of gradients."""
    whole, half, parts = (describe(work, "h200") for work in (job(), job(rows=2048), job().in_micro_batches(2)))
    of_half, of_parts = half.stack.blocks[0], parts.stack.blocks[0]
    assert of_parts.forward_seconds == 2 * of_half.forward_seconds and of_parts.backward_seconds == 2 * of_half.backward_seconds
    assert [each.bytes for each in of_parts.residuals] == [each.bytes for each in of_half.residuals]
    assert recompute_flops(parts, "full") == recompute_flops(whole, "full") == 2 * recompute_flops(half, "full") > 0
    assert parts.stack.link.out_bytes_per_s == half.stack.link.out_bytes_per_s / 2
    assert parts.stack.fixed_bytes - half.stack.fixed_bytes == tree_bytes(job().params) + 2048 * 32 * 4


def test_an_nnx_step_updates_counts_once(plan):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(32, 32, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.linear(x))

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    model = Model(nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 32)), jnp.float32)
    work = rj.Workload.from_nnx(model, loss, (x,), nnx.Linear).in_micro_batches(2)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(work.batch[1:])} == {4}
    made = rj.plan(rj.Workload.from_nnx(model, loss, (x,), nnx.Linear), "1GiB", "cpu")
    step = replace(made, changes=("micro_batches",)).train_step(loss, nnx.Optimizer)
    before = np.array(model.linear.kernel[...])
    values = [float(step(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), x)) for _ in range(2)]
    assert int(model.dropout.rngs.count[...]) == 2 and values[0] != values[1]
    assert not np.allclose(before, model.linear.kernel[...])


def test_a_batch_that_does_not_divide_is_named():
    with pytest.raises(ArgumentError, match="n=3 does not divide"):
        micro_batched(lambda params, _, x: jnp.sum(params * x), 3)(jnp.ones(()), (), jnp.ones((8,)))
    made = rj.plan(job(rows=9), "1GiB", "cpu", allow="micro_batches")
    assert made.changes == () and "n=2 does not divide" in made.beyond[0].remark
