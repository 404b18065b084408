"""Policies on NNX modules: numbers, state and paths do not change under any transformation; what cannot be kept is an error."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.apply import nnx as nnx_blocks
from remat_jax.core.module_paths import module_path
from remat_jax.core.walk import equations
from remat_jax.cost.count import flops, matmuls
from remat_jax.errors import BlockError, UnsupportedError
from tests.fault.module_state import CHANGES, WAYS, ModuleState, Stateful
from tests.fault.ops import WIDTH
from tests.fault.tally import Tally


def float_type() -> Any:
    return jnp.float64 if jax.config.jax_enable_x64 else jnp.float32


class FeedForward(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        kinds: dict[str, Any] = {"rngs": rngs, "param_dtype": float_type()}
        self.up = nnx.Linear(width, 2 * width, **kinds)
        self.down = nnx.Linear(2 * width, width, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


class Center(nnx.Module):
    """Subtracts the batch's mean and keeps a running mean; `nnx.BatchNorm` keeps float32 statistics in any precision."""

    def __init__(self, width: int) -> None:
        self.mean = nnx.BatchStat(jnp.zeros(width, float_type()))
        self.use_running_average = False

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.use_running_average:
            return x - self.mean[...]
        mean = x.mean(0)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * mean
        return x - mean


class Layer(nnx.Module):
    """Feed-forward, dropout, batch statistics: every kind of state that a block writes."""

    def __init__(self, width: int, rngs: nnx.Rngs, *, rate: float = 0.0) -> None:
        self.ffn = FeedForward(width, rngs)
        self.norm = Center(width)
        self.dropout = nnx.Dropout(rate, rngs=rngs if rate else None)

    def __call__(self, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
        return x + scale * self.dropout(self.norm(self.ffn(x)))


class Model(nnx.Module):
    def __init__(self, layers: int = 2, width: int = 4, rate: float = 0.0, block: Any = Layer) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([block(width, rngs, rate=rate) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(model(x)))


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (3, 4), float_type())


def merged(graphdef: Any, *states: Any) -> Any:
    """The model of a state, with variables of the current trace level, which Flax lets it write."""
    return nnx.merge(graphdef, *jax.tree.map(lambda leaf: leaf, states))


def plain_values(tree: Any) -> list[np.ndarray]:
    keys = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf  # noqa: E731
    return [np.asarray(keys(leaf)) for leaf in jax.tree.leaves(tree)]


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    got, want = plain_values(actual), plain_values(expected)
    assert len(got) == len(want) > 0
    scale = max(float(np.abs(array).max()) for array in want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert np.abs(a - b).max() <= tolerance * scale if a.dtype.kind == "f" else (a == b).all()


@pytest.mark.versions
@pytest.mark.parametrize("policy", ["offload_dot_with_no_batch_dims", "save: *ffn/up*; offload: @inputs"])
def test_gradients_statistics_and_rng_counters_are_those_of_the_plain_model(x64, policy):
    plain, model, x = Model(rate=0.3), Model(rate=0.3), inputs()
    expected = nnx.value_and_grad(loss)(plain, x)
    actual = nnx.value_and_grad(rj.checkpoint_blocks(loss, {Layer: policy}))(model, x)
    assert_same(actual, expected)
    assert_same(nnx.state(model), nnx.state(plain))
    assert [int(layer.dropout.rngs.count[...]) for layer in model.layers] == [1, 1]
    assert float(model.layers[1].norm.mean[...].sum()) != 0.0


def test_only_what_was_written_leaves_the_block():
    """A parameter that was an output of its block would have a cotangent there, and a copy."""
    model, x = Model(layers=1), inputs()
    graphdef, state = nnx.split(model)
    model.eval()
    evaluated, _ = nnx.split(model)

    def outputs(graphdef):
        fn = rj.checkpoint_blocks(lambda state, x: merged(graphdef, state)(x), {Layer: "full"})
        jaxpr = jax.make_jaxpr(fn)(state, x).jaxpr
        return [len(eqn.outvars) for eqn in jaxpr.eqns if eqn.primitive.name == "custom_jvp_call"]

    assert outputs(graphdef) == [2]  # the output and the mean
    assert outputs(evaluated) == [1]


def test_remat_of_a_class_costs_the_flops_of_nnx_remat_and_gives_its_gradients(x64):
    class Hand(nnx.Module):
        def __init__(self, model):
            self.model = model

        def __call__(self, x):
            for layer in self.model.layers:
                x = nnx.remat(lambda layer, x: layer(x, scale=0.5))(layer, x)
            return x

    model, hand, x = Model(block=rj.remat(Layer)), Hand(Model()), inputs()
    assert isinstance(model.layers[0], Layer)

    def counted(model):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        fn = jax.value_and_grad(lambda params: loss(merged(graphdef, params, rest), x))
        return flops(fn, params), matmuls(fn, params)

    assert counted(model) == counted(hand)
    assert counted(model)[1] == counted(Model())[1] + 2  # the first matmul of each layer is recomputed
    assert_same(nnx.grad(loss)(model, x), nnx.grad(loss)(hand, x))


@pytest.mark.versions
def test_scanned_layers_keep_numbers_and_state(x64):
    class Scanned(nnx.Module):
        def __init__(self):
            @nnx.split_rngs(splits=3)
            @nnx.vmap
            def make(rngs):
                return Layer(4, rngs, rate=0.3)

            self.layers = make(nnx.Rngs(0))

        def __call__(self, x):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    plain, model, x = Scanned(), Scanned(), inputs()
    expected = nnx.value_and_grad(loss)(plain, x)
    policy = "save: *up:dot_general#0; offload: @inputs"
    assert_same(nnx.value_and_grad(rj.checkpoint_blocks(loss, {Layer: policy}))(model, x), expected)
    assert_same(nnx.state(model), nnx.state(plain))
    assert model.layers.norm.mean.shape == (3, 4)


class Cached(nnx.Module):
    """Random numbers and a cache are passed to each call."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0), param_dtype=float_type())

    def __call__(self, x: Any, rngs: nnx.Rngs, *, cache: nnx.Dict) -> Any:
        cache["seen"][...] = x["x"]
        h = self.linear(jnp.tanh(x["x"]))
        return {"h": h + jax.random.normal(rngs.noise(), h.shape)}


def test_what_is_passed_to_a_block_may_be_written_to(x64):
    def run(policy):
        model, rngs = Cached(), nnx.Rngs(noise=3)
        cache = nnx.Dict(seen=nnx.Cache(jnp.zeros((3, 4))))

        def loss(model, rngs, cache, x):
            for _ in range(2):
                x = model({"x": x}, rngs, cache=cache)["h"]
            return jnp.sum(x**2)

        fn = loss if policy is None else rj.checkpoint_blocks(loss, {Cached: policy})
        return nnx.grad(fn)(model, rngs, cache, inputs()), nnx.state(rngs), nnx.state(cache)

    assert_same(run("full"), run(None))


def test_module_paths_lead_the_names_where_the_model_is_an_argument():
    job = rj.Workload.from_nnx(Model(layers=3), loss, (inputs(),), Layer)
    names = {row.name for row in rj.residuals(job, "dots")}
    assert {f"layers/{index}/ffn/up:dot_general#0" for index in range(3)} <= names
    saved = {row.name for row in rj.residuals(job, "save: layers/1/ffn/up:dot_general*") if row.action == "save"}
    assert "layers/1/ffn/up:dot_general#0" in saved and "layers/0/ffn/up:dot_general#0" not in saved


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_modules_of_a_finished_step_have_their_paths_under_every_policy(jit):
    """NNX names nothing in a traced program, and `nnx.jit` runs copies of the modules."""
    step = jit(lambda model, x: nnx.value_and_grad(loss)(model, x))
    job = rj.Workload.from_step(step, Model(), inputs(), blocks=Layer)
    for policy in ("off", "full"):
        traced = job.step(policy)
        operators = {str(eqn.source_info.name_stack) for eqn in equations(jax.make_jaxpr(traced.function)(*traced.arguments))}
        paths = {module_path(f"{operator}/tanh")[0] for operator in operators}
        assert {f"Model/layers/{index}/ffn/{part}" for index in (0, 1) for part in ("up", "down")} <= paths
    unnamed = [row.name for row in rj.residuals(job, "off") if row.name.startswith(":")]
    assert unnamed == [":cos"]  # of the loss


class Pair(nnx.Module):
    """Two modules in a row: if both were checkpointed inside their checkpointed parent, the first would run once more."""

    def __init__(self, width: int, rngs: nnx.Rngs, *, rate: float) -> None:
        self.first, self.second = FeedForward(width, rngs), FeedForward(width, rngs)

    def __call__(self, x: jax.Array, *, scale: float) -> jax.Array:
        return self.second(self.first(x))


def test_a_glob_means_the_outermost_modules_and_nested_blocks_keep_their_paths():
    x = inputs()

    def count(policies):
        graphdef, state = nnx.split(Model(layers=3, block=Pair))
        fn = rj.checkpoint_blocks(loss, policies) if policies else loss
        return matmuls(lambda state: nnx.value_and_grad(fn)(merged(graphdef, state), x), state)

    assert count({"layers/*": "full"}) == count({Pair: "full"}) == count(None) + 3 * 3
    assert count({"layers/1": "full"}) == count(None) + 3
    assert count({Pair: "full", FeedForward: "full"}) > count({Pair: "full"})
    with pytest.raises(BlockError, match=r"layers/1/ffn: FeedForward"):
        rj.checkpoint_blocks(loss, {"layers/*": "full", "nowhere/*": "full"})(Model(), x)


def test_call_is_restored_also_after_an_exception():
    original, inherited = Layer.__dict__["__call__"], type("Inherits", (Layer,), {})

    def fails(model, x):
        assert vars(Layer)["__call__"] is not original
        raise ValueError("from the model")

    with pytest.raises(ValueError, match="from the model"):
        rj.checkpoint_blocks(fails, {Layer: "full"})(Model(), inputs())
    assert vars(Layer)["__call__"] is original and "__call__" not in vars(inherited)
    model = Model()
    rj.checkpoint_blocks(loss, {Layer: "full"})(model, inputs())
    assert vars(Layer)["__call__"] is original and "__call__" not in vars(inherited)
    assert nnx_blocks.path_of(model.layers[0]) == "Layer", "its path was known during the call only"


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
