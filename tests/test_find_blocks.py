"""`blocks=None`: what in a model is repeated and taken as its blocks, and what else could be."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from typer.testing import CliRunner

import remat_jax as rj
from remat_jax.cli.app import app
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, BlockError

X = jax.ShapeDtypeStruct((4, 16, 8), jnp.float32)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(2)(x)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + Attention()(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))


class Wrapper(nn.Module):
    """Only wraps a layer, as the bodies of scans do."""

    @nn.compact
    def __call__(self, x, _):
        return nn.remat(Layer)()(x), None


class Tower(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = Layer()(x)
        return x


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Mixer()(Mixer()(x))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(jnp.sin(nn.Dense(64)(x)))


class Derived(Mixer):
    @nn.compact
    def __call__(self, x):
        return super().__call__(jnp.sin(x))


class Stage(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = x + nn.Dense(self.width)(jnp.sin(nn.Dense(4 * self.width)(x)))
        return nn.Dense(2 * self.width)(x)


def stack(*calls: Callable[[], Callable[..., Any]]) -> type[nn.Module]:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for make in calls:
                x = make()(x)
            return nn.Dense(100)(x)

    return Model


def scanned(x):
    scan = nn.scan(Wrapper, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    return scan()(x, None)[0]


LINEN = {
    "unrolled": (stack(*[Layer] * 3), {"Layer": 3}),
    "with checkpoints of its own": (stack(*[nn.remat(Layer)] * 3), {"Layer": 3}),
    "scanned, with a wrapper and a checkpoint": (stack(lambda: scanned), {"Layer": 3}),
    "two towers of one class": (stack(Tower, Tower), {"Layer": 8}),
    "two classes side by side": (stack(*[Mixer] * 3, *[Layer] * 3), {"Layer": 3, "Mixer": 3}),
    "a class that calls super": (stack(*[Derived] * 3), {"Derived": 3}),
    "different widths": (stack(lambda: Stage(8), lambda: Stage(16)), {"Stage": 2}),
}


def job_of(model: nn.Module, **options: Any) -> rj.Workload:
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    return rj.Workload(lambda params, x: (model.apply(params, x) ** 2).mean(), params, (X,), **options)


@pytest.mark.parametrize("name", LINEN)
def test_the_repeated_layer_is_found_in_linen(name: str) -> None:
    model, expected = LINEN[name]
    found = job_of(model()).found
    assert found is not None and {each.name: each.calls for each in found.taken} == expected
    assert "Model" in {each.name for each in found.others}


def test_bytes_are_those_of_the_residual_tables() -> None:
    """`full` keeps the inputs of the layers, and what it drops is what the search says."""
    job = job_of(stack(*[Layer] * 3)())
    kept = {policy: rj.residuals(job, policy).device_bytes for policy in ("off", "full")}
    (taken,) = job.find_blocks().taken
    assert job.find_blocks().residual_bytes == kept["off"]
    assert taken.bytes == pytest.approx(kept["off"] - kept["full"], abs=64)  # `full` keeps some scalars
    assert 3 * taken.largest == pytest.approx(taken.bytes, rel=0.05) and taken.saved == taken.bytes - taken.largest


class EqxLayer(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.up, self.down = eqx.nn.Linear(8, 32, key=key), eqx.nn.Linear(32, 8, key=key)

    def __call__(self, x):
        return x + self.down(jnp.sin(self.up(x)))


def test_equinox_unrolled_and_scanned() -> None:
    keys, x = jax.random.split(jax.random.key(0), 3), jnp.ones((4, 8))
    stacked = eqx.filter_vmap(EqxLayer)(keys)

    def scan_loss(layers, x):
        x, _ = jax.lax.scan(lambda x, layer: (jax.vmap(layer)(x), None), x, layers)
        return (x**2).mean()

    def loss(layers, x):
        for layer in layers:
            x = jax.vmap(layer)(x)
        return (x**2).mean()

    for each, params in ((scan_loss, stacked), (loss, [EqxLayer(key) for key in keys])):
        found = rj.Workload(each, params, (x,)).find_blocks()
        assert [(taken.block, taken.calls) for taken in found.taken] == [(EqxLayer, 3)]


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.sin(self.up(x)))


def test_nnx_vmapped_and_scanned() -> None:
    @nnx.vmap(in_axes=0)
    def make(key):
        return NnxLayer(nnx.Rngs(key))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return layer(x)

    layers = make(jax.random.split(jax.random.key(0), 3))
    found = rj.Workload.from_nnx(layers, lambda layers, x: (forward(x, layers) ** 2).mean(), (jnp.ones((4, 8)),)).found
    assert found is not None and [(taken.block, taken.calls) for taken in found.taken] == [(NnxLayer, 3)]


def layer(x, w):
    return x + jnp.tanh(x @ w["a"]) @ w["b"]


W = {"a": jnp.ones((4, 8, 32)), "b": jnp.ones((4, 32, 8))}
EACH_W = [jax.tree.map(lambda w, index=index: w[index], W) for index in range(4)]


def in_a_scan(each, ws, x):
    return jax.lax.scan(lambda x, w: (each(x, w), None), x, ws)[0].sum()


def unrolled_functions(ws, x):
    for w in ws:
        x = jax.checkpoint(layer)(x, w)
    return x.sum()


@pytest.mark.parametrize(
    ("loss", "block"),
    [
        (functools.partial(in_a_scan, layer), "scans"),
        (functools.partial(in_a_scan, jax.checkpoint(layer)), "checkpoints"),
        (unrolled_functions, "checkpoints"),
    ],
)
def test_functions_have_scans_and_checkpoints(loss: Any, block: str) -> None:
    """And both are blocks of a finished step too: the same residuals, by layer too."""

    def step(ws, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))

    ws, x = EACH_W if loss is unrolled_functions else W, jnp.ones((4, 8))
    jobs = rj.Workload(loss, ws, (x,)), rj.Workload.from_step(jax.jit(step), ws, x)
    for job in jobs:
        assert job.blocks == (block,) and job.found is not None and job.found.taken[0].calls == 4
        kept = {policy: rj.residuals(job, policy).device_bytes for policy in ("full", "dots", "2 x full | 2 x dots")}
        inputs = 3 if loss is unrolled_functions else 4  # the first layer's input is an argument
        expected = {"full": 8 * inputs, "dots": 8 * inputs + 4 * 32, "2 x full | 2 x dots": 8 * inputs + 2 * 32}
        assert kept == {policy: 4 * 4 * numbers for policy, numbers in expected.items()}


def test_a_policy_on_scans_replaces_their_checkpoints_and_its_inputs_are_the_carries() -> None:
    """The rows of the weights are parameters; only the four carries of 4 x 8 numbers are inputs."""
    for own, each in enumerate((layer, jax.checkpoint(layer))):
        job = rj.Workload(lambda ws, x, each=each: in_a_scan(each, ws, x), W, (jnp.ones((4, 8)),), blocks="scans")
        kept = [rj.residuals(job, policy) for policy in ("full", "dots", "offload_inputs")]
        assert [(table.device_bytes, table.host_bytes) for table in kept] == [(512, 0), (512 + 2048, 0), (0, 512)]
        assert job.replaced_checkpoints == own


def test_a_scan_is_split_by_layer_and_keeps_its_gradients() -> None:
    def loss(ws, x):
        return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2).sum()

    x = jax.random.normal(jax.random.key(0), (4, 8))
    expected = jax.grad(loss)(W, x)
    for policy in ("full", "1 x full | 3 x dots"):
        got = jax.grad(rj.checkpoint_blocks(loss, {"scans": policy}))(W, x)
        assert all(bool((one == other).all()) for one, other in zip(*map(jax.tree.leaves, (expected, got)), strict=True))
    with pytest.raises(BlockError, match="block='scans': the function has no scan of two or more iterations"):
        rj.checkpoint_blocks(lambda x: x.sum(), {"scans": "full"})(x)


def test_a_policy_without_a_block_is_one_for_the_blocks_found() -> None:
    """They are looked for once for arguments of one type, in a loss and in a step."""
    traces: list[int] = []

    def loss(ws, x):
        traces.append(len(x))
        return in_a_scan(layer, ws, x)

    def step(ws, x):
        return jax.grad(loss)(ws, x)

    x = jax.random.normal(jax.random.key(0), (4, 8))
    for given, run in [(loss, jax.grad), (step, lambda step: step)]:
        found, named = (run(rj.checkpoint_blocks(given, each)) for each in ("full", {"scans": "full"}))
        assert matmuls(found, W, x) == matmuls(named, W, x) > matmuls(run(given), W, x)
        traces.clear()
        for rows in (4, 4, 2):
            for one, other in zip(*map(jax.tree.leaves, (found(W, x[:rows]), run(given)(W, x[:rows]))), strict=True):
                assert bool((one == other).all())
        assert traces == [4, 4, 4, 4, 2, 2, 2]  # the third call searches too
    with pytest.raises(BlockError, match="blocks=None: no module, checkpoint or scan in 'sin' with much of its residuals"):
        rj.checkpoint_blocks(jnp.sin, "full")(x)


def test_blocks_are_found_again_where_an_integer_chooses_the_model_and_inside_other_policies() -> None:
    def loss(which, ws, x):
        return in_a_scan(layer, ws, x) if which else unrolled_functions([jax.tree.map(lambda w: w[0], ws)] * 4, x)

    def count(fn, which):
        return matmuls(jax.value_and_grad(functools.partial(fn, which)), W, x)

    found, x = rj.checkpoint_blocks(loss, "dots"), jnp.ones((4, 8))
    assert [count(each, which) for which in (1, 0) for each in (loss, found)] == [24, 24, 27, 23]
    job = job_of(stack(*[Mixer] * 3)())
    twice = rj.checkpoint_blocks(rj.checkpoint_blocks(job.loss, {Mixer: "full"}), "full")
    with pytest.raises(BlockError, match="block=Mixer: an inner checkpoint_blocks has a policy for this block too"):
        jax.eval_shape(twice, job.params, X)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return rj.checkpoint_blocks(lambda x: Mixer()(Mixer()(x)), "full")(x)

    with pytest.raises(BlockError, match="without blocks, inside a Linen module: .*Name the blocks, as in checkpoint_blocks"):
        Outer().init(jax.random.key(0), x)


def test_a_policy_on_scans_replaces_a_checkpoint_around_the_scan() -> None:
    job = rj.Workload(jax.checkpoint(functools.partial(in_a_scan, layer)), W, (jnp.ones((4, 8)),), blocks="scans")
    losses = {policy: jax.value_and_grad(job.with_policy(job.loss, policy)) for policy in ("full", "dots")}
    kept = {policy: rj.residuals(job, policy).device_bytes for policy in ("full", "dots")}
    assert (kept, job.replaced_checkpoints) == ({"full": 512, "dots": 512 + 2048}, 1)
    assert {policy: matmuls(each, W, *job.batch) for policy, each in losses.items()} == {"full": 28, "dots": 24}


def test_of_nested_scans_and_branches_the_outermost_is_taken() -> None:
    """And the same step with another loss or batch has the same blocks, whether they were looked for before or not."""

    def loss(ws, x):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0].sum()

    def in_parts(ws, x):
        return jax.lax.scan(lambda total, x: (total + loss(ws, x), None), 0.0, x.reshape(2, 2, 8))[0]

    def in_a_branch(ws, x):
        return jax.lax.cond(x[0, 0] > 0, loss, lambda ws, x: x.sum(), ws, x)

    jobs = {each: rj.Workload(each, W, (jnp.ones((4, 8)),)) for each in (loss, in_parts, in_a_branch)}
    taken = {each: [(found.name, found.calls) for found in job.find_blocks().taken] for each, job in jobs.items()}
    assert taken == {loss: [("scans", 4)], in_parts: [("scans", 2)], in_a_branch: [("scans", 4)]}
    job = rj.Workload(loss, W, (jnp.ones((4, 8)),))
    assert job.in_micro_batches(2).found is job.with_loss(in_parts).found is job.found


def test_without_a_choice_the_error_shows_the_candidates() -> None:
    with pytest.raises(BlockError, match=r"no module, .* in '<lambda>' with much of its.*: Model \(one call.*; Layer \("):
        _ = job_of(stack(Layer)()).blocks
    with pytest.raises(
        BlockError, match=r"two choices save equally much in .*: blocks=(Mixer or blocks=Pair|Pair or blocks=Mixer)"
    ):
        _ = job_of(stack(*[Pair] * 16)()).blocks
    with pytest.raises(BlockError, match="step='abs': it takes no gradient"):
        _ = rj.Workload.from_step(jnp.abs, jnp.ones(3), name="abs").blocks


def test_steps_and_arguments_on_the_command_line(tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def layer(x, w):\n    return jnp.tanh(x @ w), None\n"
        "def train_step(w, x):\n    return w - jax.grad(lambda w: (jax.lax.scan(layer, x, w)[0] ** 2).mean())(w)\n"
        "def args():\n    return jnp.ones((3, 8, 8)), jnp.ones((4, 8))\n",
        encoding="utf-8",
    )
    step, run = f"{tmp_path / 'train.py'}:train_step", CliRunner().invoke
    found = json.loads(run(app, ["blocks", step, "--args", f"{tmp_path / 'train.py'}:args", "--json"]).stdout)
    assert [(each["name"], each["calls"], each["bytes"]) for each in found["taken"]] == [("scans", 3, 3 * 4 * 8 * 4)]
    shown = run(app, ["measure", step, "--args", f"{tmp_path / 'train.py'}:args", "--policy", "full"]).stdout
    assert shown.startswith("Blocks found: scans (3 calls). Checkpoints around these calls drop 384 B of ")
    for given, message in [
        ([], "train_step' needs the arguments w, x.* name its arguments with --args FILE:NAME, or put them beside it as"),
        (
            ["--args", f"{tmp_path / 'train.py'}:layer"],
            "layer' needs the arguments x, w: expected a function without arguments",
        ),
        (["--args", f"{tmp_path / 'train.py'}:jnp"], "jnp' is a module: expected the tuple of the step's arguments"),
    ]:
        result = run(app, ["blocks", step, *given])
        assert result.exit_code == 2
        pytest.raises(ArgumentError, _fail, result.stderr).match(message)


def _fail(text: str) -> None:
    raise ArgumentError(" ".join(text.split()))


def test_a_plan_of_a_step_needs_its_arguments() -> None:
    for given, message in [((), "args is missing"), ((jnp.ones(3),), "args=.*: expected the tuple of the arguments of 'step'")]:
        with pytest.raises(ArgumentError, match=message):
            rj.plan(_step, *given, budget="1GiB", target="cpu")
    with pytest.raises(ArgumentError, match="workload=3: expected a remat_jax.Workload"):
        rj.plan(3, "1GiB", "cpu")


def _step(w):
    return jax.grad(lambda w: (w**2).sum())(w)


_step.__name__ = "step"


@pytest.mark.parametrize("part", ["scans", "checkpoints"])
def test_a_jitted_step_is_traced_once_under_policies_on_its_parts(part: str) -> None:
    """Later calls reuse JAX's trace, whose scans and checkpoints are those of the policies."""

    def layer(x, w):
        return x + jnp.sin(x @ w["up"]) @ w["down"], None

    def loss(ws, x):
        body = jax.checkpoint(layer) if part == "checkpoints" else layer
        return (jax.lax.scan(body, x, ws)[0] ** 2).sum()

    step = jax.jit(lambda ws, x: jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x)))
    ws, x = {"up": jnp.full((4, 8, 32), 0.1), "down": jnp.full((4, 32, 8), 0.1)}, jnp.ones((4, 8))
    policy = f"1 × full | 1 × save: {'layer:' if part == 'scans' else '*'}sin#0 | 2 × full"
    for _ in range(2):
        under = rj.checkpoint_blocks(step, {part: policy})
        for _ in range(2):
            updated = under(ws, x)
            assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-5), updated, step(ws, x)))
