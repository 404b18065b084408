"""Plans with changes beyond the blocks: what is allowed, what it gives, and what refuses it."""

from __future__ import annotations

import functools
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax import compat
from remat_jax.core.walk import equations
from remat_jax.errors import ArgumentError, InfeasibleBudget
from remat_jax.hardware import target
from remat_jax.memory.compile.options import Kernels
from remat_jax.planning import loop, make_plan
from remat_jax.planning.beyond import estimated, with_changes
from remat_jax.planning.changes import CHANGES
from remat_jax.planning.changes.change import Change
from remat_jax.planning.changes.head_in_chunks import HeadInChunks
from remat_jax.planning.problem import describe
from tests import plan_models
from tests.plan_by_hand import plan as plan_by_hand
from tests.plan_by_hand import plan_of
from tests.workloads import needs_gpu_compiler

WIDTH, WORDS = 16, 4096


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.tanh(nn.Dense(8 * WIDTH)(x)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(WORDS, WIDTH)(tokens)
        for _ in range(3):
            x = Layer()(x)
        return nn.Dense(WORDS, use_bias=False)(x)


def loss(params, tokens, labels):
    return optax.softmax_cross_entropy_with_integer_labels(Net().apply(params, tokens), labels).mean()


@functools.cache
def parameters():
    return jax.eval_shape(Net().init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32))


def job(rows=32, length=64, **options):
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return rj.Workload(loss, parameters(), (tokens, tokens), Layer, **options)


@pytest.fixture(scope="module")
def chunked():
    full = rj.measure(job(), "full", "cpu").device_bytes
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "MOST_COMPILED", 2)
        return rj.plan(job(), full // 2, "cpu", allow="head_in_chunks")


def test_a_head_in_chunks_makes_a_plan_possible(chunked):
    (row,) = chunked.beyond
    assert chunked.changes == ("head_in_chunks",) and chunked.device_bytes <= chunked.budget
    assert (row.device_bytes, row.seconds, row.compiled) == (chunked.device_bytes, chunked.seconds, True)
    assert "with head_in_chunks on cpu" in str(chunked) and "in this plan" in str(chunked)


def test_no_array_of_the_planned_loss_has_all_logits(chunked):
    def largest(fn):
        work = job()
        traced = jax.make_jaxpr(jax.grad(fn))(work.params, *work.batch)
        return max(var.aval.size for eqn in equations(traced) for var in eqn.outvars)

    assert largest(chunked.apply(loss)) < 32 * 64 * WORDS <= largest(loss)


def test_micro_batches_are_estimated_with_blocks_of_their_own():
    """The budget is less than the whole batch needs, and more than half of it does."""
    whole, half = (describe(job(rows=rows), "h200").stack for rows in (64, 32))
    budget = round(whole.fixed_bytes + half.fixed_bytes) // 2
    with Kernels.temporary() as kernels:
        planner = make_plan._Planner(job(rows=64), budget, target("h200"), None, 60.0, lambda *_: None, kernels)
    found = planner._predicted(CHANGES["micro_batches"].changed(job(rows=64)), None)
    assert found is not None and found.device_bytes <= budget < whole.fixed_bytes


def test_its_step_keeps_the_optimizers_state_in_host_memory():
    work = job(optimizer=optax.adam(1e-3))
    plan = plan_of(work, "full", changes=("optimizer_on_host",))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), work.params)
    step = plan.train_step(loss, optax.adam(1e-3))
    state = step.init(params)
    assert jax.typeof(state[0].mu["params"]["Dense_0"]["kernel"]).memory_space == jax.memory.Space.Host
    with pytest.raises(ArgumentError, match=r"state in host memory \(optimizer_on_host\); give nnx.Optimizer\(model, rj.off"):
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        plan.train_step(loss, nnx.Optimizer)(model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))


class Twice(Change):
    """Twice the loss, and six times the update."""

    def loss(self, loss):
        return lambda *args: 2 * loss(*args)

    def optimizer(self, optimizer):
        return optax.chain(optimizer, optax.scale(3.0))


def test_a_new_change_is_planned_and_made_by_the_plans_step(monkeypatch):
    monkeypatch.setitem(CHANGES, "twice", Twice())
    dense, x = nn.Dense(1, use_bias=False), jnp.ones((4, 2))
    params = jax.tree.map(jnp.ones_like, dense.init(jax.random.key(0), x))

    def total(params, x):
        return dense.apply(params, x).sum()

    work = rj.Workload(total, params, (x,), nn.Dense, optimizer=optax.sgd(0.5))
    plain = rj.plan(work, "1GiB", "cpu")
    for plan, times in ((plain, 1), (replace(plain, changes=("twice",)), 2)):
        step = plan.train_step(total, optax.sgd(0.5), donate=False)
        new, _, value = step(params, step.init(params), x)
        moved = jax.tree.leaves(jax.tree.map(jnp.subtract, params, new))[0]
        assert value == 8.0 * times and (moved == 0.5 * 4 * times * (3 if times == 2 else 1)).all()
        assert plan.apply(total)(params, x) == 8.0 * times
    changed = CHANGES["twice"].changed(work)
    assert changed.loss(params, x) == 16.0 and changed.optimizer is not work.optimizer


def test_a_change_that_the_workload_cannot_have_says_why():
    def mean(params, tokens, labels):
        return Net().apply(params, tokens).mean()

    work = job()
    no_head = rj.Workload(mean, work.params, work.batch, Layer)
    made = rj.plan(no_head, "1GiB", "cpu", allow=("head_in_chunks", "optimizer_on_host"))
    assert made.changes == () and [row.change for row in made.beyond] == ["head_in_chunks", "optimizer_on_host"]
    head, state = made.beyond
    assert head.remark and head.seconds is None and "has no optimizer" in state.remark


def test_micro_batches_are_a_sum_or_a_mean():
    with pytest.raises(ArgumentError, match="expected one of micro_batches=sum and micro_batches=mean"):
        rj.plan(job(), "1GiB", "cpu", allow=("micro_batches=sum", "micro_batches=mean"))


@pytest.mark.parametrize("word", ["head", ("head_in_chunks", "micro")])
def test_unknown_words_are_named(word):
    with pytest.raises(ArgumentError, match="is not a change; expected some of head_in_chunks, micro_batches, "):
        rj.plan(job(), "1GiB", "cpu", allow=word)


def test_no_failure_of_a_change_loses_the_plan(monkeypatch):
    def broken(change, workload):
        raise IndexError("no such axis")

    monkeypatch.setattr(HeadInChunks, "changed", broken)
    made = with_changes(lambda workload, share: plan_by_hand(), job(), ("head_in_chunks",))
    assert made.beyond[0].remark == "no such axis" and made.changes == ()
    assert estimated(lambda workload, freed: None, job(), {"head_in_chunks": 1})[0].remark == "no such axis"


def test_what_a_change_frees_in_the_blocks_is_not_counted_twice():
    """The problem of a micro-batch has smaller blocks, and the advice says what the whole step frees."""
    freed = []
    estimated(lambda workload, size: freed.append(size), job(), {"head_in_chunks": 7, "micro_batches": 7})
    assert freed == [7, None]


@pytest.mark.parametrize("seconds, changes", [([1.0, 0.9, 0.8, 0.85], 2), ([1.0, 0.9, 0.899], 1), ([None, None, 0.7, 0.8], 2)])
def test_micro_batches_are_doubled_while_that_helps(seconds, changes):
    """The seconds of plans with 1, 2, 4 and 8 micro-batches; None: nothing fits."""

    def plan_for(workload, share):
        if seconds[place := workload.micro_batches.bit_length() - 1] is None:
            raise InfeasibleBudget("too little memory")
        return plan_by_hand(seconds=seconds[place])

    made = with_changes(plan_for, job(), ("micro_batches",))
    assert made.changes == ("micro_batches",) * changes and made.seconds == seconds[changes]
    assert [row.times for row in made.beyond] == list(range(1, len(seconds)))


@pytest.mark.parametrize("refused", [False, True])
def test_changes_are_made_together_where_none_is_enough(refused, monkeypatch):
    """A change that the workload cannot have is left out, and no other change with it."""

    def plan_for(workload, share):
        if workload.micro_batches == 1 or workload.optimizer is work.optimizer:
            raise InfeasibleBudget("too little memory")
        return plan_by_hand()

    work = job(optimizer=optax.adam(1e-3))
    allow = ("head_in_chunks", "optimizer_on_host", "micro_batches")
    if refused:
        work = work.with_loss(lambda params, tokens, labels: Net().apply(params, tokens).mean())
    made = with_changes(plan_for, work, allow)
    assert made.changes == allow[refused:] and len(made.beyond) == 2 + CHANGES["micro_batches"].most


def test_a_change_is_kept_only_if_it_makes_the_plan_faster():
    """Each change is tried on top of those that were kept."""
    seconds = {(): 1.0, ("optimizer",): 1.2, ("head_in_chunks",): 0.9, ("head_in_chunks", "optimizer"): 0.8}
    work, tried = job(optimizer=optax.adam(1e-3)), []

    def plan_for(workload, share):
        what = (("head_in_chunks",) if workload.own_loss is not work.own_loss else ()) + (
            ("optimizer",) if workload.optimizer is not work.optimizer else ()
        )
        tried.append((what, share))
        return plan_by_hand(seconds=seconds[what], device_bytes=len(what))

    made = with_changes(plan_for, work, ("head_in_chunks", "optimizer_on_host"))
    assert made.changes == ("head_in_chunks", "optimizer_on_host") and made.seconds == 0.8
    assert tried == [((), 1 / 3), (("head_in_chunks",), 1 / 2), (("head_in_chunks", "optimizer"), 1.0)]
    seconds["head_in_chunks",] = 0.999
    made = with_changes(plan_for, work, ("optimizer_on_host", "head_in_chunks"))
    assert made.changes == () and [row.seconds for row in made.beyond] == [1.2, 0.999]


def test_an_estimate_does_not_displace_a_compiled_time():
    def plan_for(workload, share):
        return plan_by_hand(timed=workload is work, seconds=1.0 if workload is work else 0.5)

    work = job()
    made = with_changes(plan_for, work, ("head_in_chunks",))
    assert (made.changes, made.seconds) == ((), 1.0)


def test_the_estimate_has_the_copies_of_a_state_on_the_host():
    """Nothing is compiled: the state of Adam, two moments, goes to the host and back, and no compute hides that."""
    work, h200 = job(optimizer=optax.adam(1e-3)), target("h200")
    planner = make_plan._Planner(work, 10**9, h200, None, 300.0, lambda *_: None, None)
    moved = 2 * compat.tree_bytes(work.params)
    here, away = (planner._predicted(each, 0) for each in (work, CHANGES["optimizer_on_host"].changed(work)))
    link = planner.described.stack.link
    assert away.seconds - here.seconds >= 0.99 * moved * (1 / link.out_bytes_per_s + 1 / link.in_bytes_per_s) > 0


def test_promises_are_about_the_plans_step_and_not_about_a_faster_one(monkeypatch):
    def smallest(known):
        return known.fit.smallest, []

    monkeypatch.setattr(make_plan, "choose_fastest", smallest)
    made = rj.plan(plan_models.job(scanned=True), 9 * 2**20, "cpu")
    assert len(made.tried) > 1 and made.device_bytes == min(size for _, size in made.tried) and not made.is_maximal


@needs_gpu_compiler
def test_what_is_not_allowed_is_estimated(monkeypatch):
    monkeypatch.setattr(loop, "MOST_COMPILED", 2)
    work = job(rows=64, length=128)
    full = rj.measure(work, "full", "h200").device_bytes
    made = rj.plan(work, full, "h200")
    (row,) = (each for each in made.beyond if each.change == "head_in_chunks")
    compiled = rj.plan(work, full, "h200", allow="head_in_chunks").beyond[0]
    assert (row.change, row.compiled, made.changes) == ("head_in_chunks", False, ())
    assert row.device_bytes == pytest.approx(compiled.device_bytes, rel=0.5) and row.seconds > 0
    assert "Changes beyond the blocks" in made.explain()
