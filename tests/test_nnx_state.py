"""A block under a policy leaves its NNX module as the plain call does; what cannot be kept is an error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.errors import UnsupportedError
from tests.fault.module_state import CHANGES, WAYS, ModuleState, Stateful
from tests.fault.ops import WIDTH
from tests.fault.tally import Tally
from tests.test_nnx import Layer, Model, assert_same, inputs, loss

# All changes at once under each way to apply a policy, and each change alone.
CASES = [
    *(ModuleState(("swap", "kinds", "lists", "new", "draws"), "full", way) for way in WAYS),
    *(ModuleState((change,), "full", "checkpoint_blocks") for change in CHANGES),
    ModuleState(("alias", "draws"), "1 x full | 1 x everything", "checkpoint_blocks", "eager"),
    ModuleState(("draws", "new"), "everything", "enable", "jax.jit"),
]


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.way} {case.driver} {','.join(case.changes)}")
def test_a_block_leaves_its_module_as_the_plain_call_does(case):
    tally = Tally.empty()
    case.check(tally)
    assert tally.checked == 1, tally


def test_a_list_and_a_dict_that_the_caller_holds_stay_the_same_objects(x64):
    model = Stateful(("lists",))
    log, notes = model.log, model.notes
    rj.checkpoint_blocks(lambda model, x: model(x), {Stateful: "full"})(model, jnp.ones((2, WIDTH)))
    assert model.log is log and model.notes is notes and (log, notes) == ([1], {"1": "xy"})


def test_a_block_returns_its_own_and_new_objects():
    class Gives(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.inner, nnx.Cache(2 * x)

    model = Gives()
    inner, cache = rj.checkpoint_blocks(lambda model, x: model(x), {Gives: "full"})(model, jnp.ones(4))
    assert inner is model.inner
    assert_same(cache[...], 2 * jnp.ones(4))


class Holder:
    def __init__(self) -> None:
        self.cache, self.last = nnx.Cache(jnp.zeros(3)), None


class Hides(nnx.Module):
    def __init__(self, writes: str) -> None:
        self.w, self.writes, self.holder = nnx.Param(jnp.ones(3)), writes, Holder()

    def __call__(self, x, given):
        if self.writes == "attribute":
            self.holder.last = 2 * x
        elif self.writes == "variable":
            given.cache[...] = x
        else:
            self.w[...] += x
            raise ValueError("from the block")
        return x * self.w[...]


@pytest.mark.parametrize(("writes", "named"), [("attribute", "Hides.holder.last"), ("variable", "perhaps Holder.cache")])
def test_what_cannot_leave_a_block_is_refused_and_named(writes, named):
    model = Hides(writes)
    with pytest.raises(UnsupportedError, match=named):
        rj.checkpoint_blocks(lambda model, x: model(x, Holder()), {Hides: "full"})(model, jnp.ones(3))
    assert model.holder.last is None


def test_a_block_that_fails_changes_nothing():
    model = Hides("neither")
    with pytest.raises(ValueError, match="from the block"):
        rj.checkpoint_blocks(lambda model, x: model(x, None), {Hides: "full"})(model, jnp.ones(3))
    assert_same(model.w[...], jnp.ones(3))


def test_no_tracer_of_a_block_is_kept():
    fn = rj.checkpoint_blocks(loss, {Layer: "1 x full | 1 x dots"})
    with jax.checking_leaks():
        nnx.jit(nnx.grad(fn))(Model(rate=0.3), inputs())
