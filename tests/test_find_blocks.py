"""`blocks=None`: what in a model is repeated and taken as its blocks, and what else could be."""

from __future__ import annotations

import functools
import json
import re
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
from examples.steps.equinox_filter_jit import Layer as EqxLayer
from remat_jax.cli.app import app
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, BlockError
from tests.small_models import Attention, Linear, Mlp, NnxMlp

X = jax.ShapeDtypeStruct((4, 16, 4), jnp.float32)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Mlp()(Attention()(x))


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


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + Linear(x.shape[-1])(jnp.sin(Linear(8 * x.shape[-1])(x)))


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Mixer()(Mixer()(x))


class Derived(Mixer):
    @nn.compact
    def __call__(self, x):
        return super().__call__(jnp.sin(x))


class Stage(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = x + Linear(self.width)(jnp.sin(Linear(4 * self.width)(x)))
        return Linear(2 * self.width)(x)


def stack(*calls: Callable[[], Callable[..., Any]]) -> type[nn.Module]:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for make in calls:
                x = make()(x)
            return Linear(100)(x)

    return Model


def scanned(x):
    scan = nn.scan(Wrapper, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    return scan()(x, None)[0]


LINEN = {
    "with checkpoints of its own": (stack(*[nn.remat(Layer)] * 3), {"Layer": 3}),
    "scanned, with a wrapper and a checkpoint": (stack(lambda: scanned), {"Layer": 3}),
    "two towers of one class": (stack(Tower, Tower), {"Layer": 8}),
    "two classes side by side": (stack(*[Mixer] * 3, *[Layer] * 3), {"Layer": 3, "Mixer": 3}),
    "a class that calls super": (stack(*[Derived] * 3), {"Derived": 3}),
    "different widths": (stack(lambda: Stage(4), lambda: Stage(8)), {"Stage": 2}),
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
    assert (taken.name, taken.calls) == ("Layer", 3) and taken.bytes == pytest.approx(kept["off"] - kept["full"], abs=64)
    assert 3 * taken.largest == pytest.approx(taken.bytes, rel=0.05) and taken.saved == taken.bytes - taken.largest


def test_stacked_layers_of_equinox_and_nnx_are_found_in_scans() -> None:
    keys, x = jax.random.split(jax.random.key(0), 3), jnp.ones((4, 6))

    def of_equinox(layers, x):
        arrays, static = eqx.partition(layers, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, layer: (jax.vmap(eqx.combine(layer, static))(x), None), x, arrays)
        return (x**2).mean()

    forward = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    layers = nnx.vmap(NnxMlp)(nnx.Rngs(0).split(3))
    of_nnx = rj.Workload.from_nnx(layers, lambda layers, x: (forward(x, layers) ** 2).mean(), (x[:, :4],))
    for job, block in (rj.Workload(of_equinox, eqx.filter_vmap(EqxLayer)(keys), (x,)), EqxLayer), (of_nnx, NnxMlp):
        assert [(taken.block, taken.calls) for taken in job.find_blocks().taken] == [(block, 3)]


def layer(x, w):
    return x + jnp.tanh(x @ w["a"]) @ w["b"]


W = {"a": jnp.full((4, 8, 32), 0.1), "b": jnp.full((4, 32, 8), 0.1)}
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
    job, of_step = rj.Workload(loss, ws, (x,)), rj.Workload.from_step(jax.jit(step), ws, x)
    inputs = 3 if loss is unrolled_functions else 4  # the first layer's input is an argument
    expected = {"full": 8 * inputs, "dots": 8 * inputs + 4 * 32, "2 x full | 2 x dots": 8 * inputs + 2 * 32}
    assert {policy: rj.residuals(job, policy).device_bytes // 16 for policy in expected} == expected
    assert rj.residuals(of_step, "2 x full | 2 x dots").device_bytes // 16 == expected["2 x full | 2 x dots"]
    for each in (job, of_step):
        assert each.blocks == (block,) and each.found is not None and each.found.taken[0].calls == 4


@rj.block
def marked(x, w):
    return layer(x, w)


@pytest.mark.parametrize("scan", [False, True])
def test_a_marked_function_is_found(scan: bool) -> None:
    """It is preferred to the scan around it; a step that differentiates the loss has the same blocks."""

    def loss(ws, x):
        if scan:
            return in_a_scan(marked, ws, x)
        for w in ws:
            x = marked(x, w)
        return x.sum()

    ws, x = W if scan else EACH_W, jnp.ones((4, 8))
    job = rj.Workload(loss, ws, (x,))
    (taken,) = job.find_blocks().taken
    assert (taken.block, taken.name, taken.calls) == (marked, "marked", 4)
    named, found = rj.residuals(rj.Workload(loss, ws, (x,), marked), "full"), rj.residuals(job, "full")
    assert named.device_bytes == found.device_bytes < rj.residuals(job, "off").device_bytes
    step = rj.Workload.from_step(jax.jit(lambda ws, x: jax.grad(loss)(ws, x)), ws, x)
    assert step.blocks == (marked,) and "marked (4 calls)" in step.find_blocks().text


def test_a_policy_on_scans_replaces_checkpoints_in_and_around_them_and_its_inputs_are_the_carries() -> None:
    """The rows of the weights are parameters; only the four carries of 4 x 8 numbers are inputs."""
    plain, inside = (functools.partial(in_a_scan, each) for each in (layer, jax.checkpoint(layer)))
    for loss, own in ((plain, 0), (inside, 1), (jax.checkpoint(plain), 1)):
        job = rj.Workload(loss, W, (jnp.ones((4, 8)),), blocks="scans")
        kept = [rj.residuals(job, policy) for policy in ("full", "dots", "offload_inputs")]
        assert [(table.device_bytes, table.host_bytes) for table in kept] == [(512, 0), (512 + 2048, 0), (0, 512)]
        assert job.replaced_checkpoints == own
        losses = {policy: jax.value_and_grad(job.with_policy(job.loss, policy)) for policy in ("full", "dots")}
        assert {policy: matmuls(each, W, *job.batch) for policy, each in losses.items()} == {"full": 28, "dots": 24}


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
    with pytest.raises(BlockError, match="blocks=None: no module, marked function, checkpoint or scan in .sin. with much"):
        rj.checkpoint_blocks(jnp.sin, "full")(x)
    with pytest.raises(BlockError, match="block='scans': the function has no scan of two or more iterations"):
        rj.checkpoint_blocks(lambda x: x.sum(), {"scans": "full"})(x)


def test_blocks_are_found_again_where_an_integer_chooses_the_model() -> None:
    def loss(which, ws, x):
        return in_a_scan(layer, ws, x) if which else unrolled_functions([jax.tree.map(lambda w: w[0], ws)] * 4, x)

    def count(fn, which):
        return matmuls(jax.value_and_grad(functools.partial(fn, which)), W, x)

    found, x = rj.checkpoint_blocks(loss, "dots"), jnp.ones((4, 8))
    assert [count(each, which) for which in (1, 0) for each in (loss, found)] == [24, 24, 27, 23]

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return rj.checkpoint_blocks(lambda x: Mixer()(Mixer()(x)), "full")(x)

    with pytest.raises(BlockError, match="without blocks, inside a Linen module: .*Name the blocks, as in checkpoint_blocks"):
        Outer().init(jax.random.key(0), x)


def test_of_nested_scans_and_branches_the_outermost_is_taken() -> None:
    """And the same step with another loss or batch has the same blocks, whether they were looked for before or not."""

    loss = functools.partial(in_a_scan, layer)

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
    with pytest.raises(BlockError, match=r"two choices save equally much in .*: blocks=(Mixer or blocks=P|Pair or blocks=M)"):
        _ = job_of(stack(*[Pair] * 16)()).blocks
    with pytest.raises(BlockError, match="step='abs': it takes no gradient"):
        _ = rj.Workload.from_step(jnp.abs, jnp.ones(3), name="abs").blocks


def test_a_model_without_blocks_is_measured_and_diagnosed_as_it_is() -> None:
    w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
    job = rj.Workload(lambda w, x: jnp.sin(x @ w).sum(), w, (x,))
    step = rj.Workload.from_step(jax.jit(lambda w, x: w - jax.grad(job.loss)(w, x)), w, x)
    for each in (job, step):
        assert rj.measure(each, "off", "cpu").policy == "off" and rj.doctor(each, "off").ok
        with pytest.raises(BlockError, match="blocks=None"):
            rj.measure(each, "full", "cpu")


def test_steps_and_arguments_on_the_command_line(tmp_path: Any) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "import jax, jax.numpy as jnp\n"
        "def layer(x, w):\n    return jnp.tanh(x @ w), None\n"
        "def train_step(w, x):\n    return w - jax.grad(lambda w: (jax.lax.scan(layer, x, w)[0] ** 2).mean())(w)\n"
        "def args():\n    return jnp.ones((3, 8, 8)), jnp.ones((4, 8))\n",
        encoding="utf-8",
    )
    step, run = f"{file}:train_step", CliRunner().invoke
    found = json.loads(run(app, ["blocks", step, "--args", f"{file}:args", "--json"]).stdout)
    assert [(each["name"], each["calls"], each["bytes"]) for each in found["taken"]] == [("scans", 3, 3 * 4 * 8 * 4)]
    shown = run(app, ["measure", step, "--args", f"{file}:args", "--policy", "full"]).stdout
    assert shown.startswith("Blocks found: scans (3 calls). Checkpoints around these calls drop 384 B of ")
    for given, message in [
        ([], "train_step' needs the arguments w, x.* name its arguments with --args FILE:NAME, or put them beside it as"),
        (["--args", f"{file}:layer"], "layer' needs the arguments x, w: expected a function without arguments"),
        (["--args", f"{file}:jnp"], "jnp' is a module: expected the tuple of the step's arguments"),
    ]:
        result = run(app, ["blocks", step, *given])
        assert result.exit_code == 2 and re.search(message, " ".join(result.stderr.split()))


def test_a_plan_of_a_step_needs_its_arguments() -> None:
    def step(w):
        return jax.grad(lambda w: (w**2).sum())(w)

    for given, message in [((), "args is missing"), ((jnp.ones(3),), "args=.*: expected the tuple of the arguments of 'step'")]:
        with pytest.raises(ArgumentError, match=message):
            rj.plan(step, *given, budget="1GiB", target="cpu")
    with pytest.raises(ArgumentError, match="workload=3: expected a remat_jax.Workload"):
        rj.plan(3, "1GiB", "cpu")


def perceptron(x: Any) -> Any:
    return x + Linear(256)(nn.relu(Linear(1024)(nn.LayerNorm()(x))))


class EncoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return perceptron(x + nn.SelfAttention(8)(nn.LayerNorm()(x)))


class DecoderLayer(nn.Module):
    @nn.compact
    def __call__(self, y: Any, memory: Any) -> Any:
        h = nn.LayerNorm()(y)
        y = y + nn.SelfAttention(8)(h, mask=nn.make_causal_mask(h[..., 0]))
        return perceptron(y + nn.MultiHeadDotProductAttention(8)(nn.LayerNorm()(y), memory))


class Translator(nn.Module):
    @nn.compact
    def __call__(self, x: Any, y: Any) -> Any:
        for _ in range(2):
            x = EncoderLayer()(x)
        for _ in range(2):
            y = DecoderLayer()(y, x)
        return nn.LayerNorm()(y)


@pytest.mark.filterwarnings("ignore:SelfAttention")
def test_layers_are_taken_where_with_the_others_they_save_more_than_their_parts() -> None:
    """Alone, a part and the layer around it save almost equally much."""
    model, x = Translator(), jax.ShapeDtypeStruct((64, 256, 256), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x, x)
    found = rj.Workload(lambda p, x, y: jnp.mean(model.apply(p, x, y) ** 2), params, (x, x)).find_blocks()
    saved = {each.name: each.saved for each in (*found.taken, *found.others)}
    assert abs(saved["DecoderLayer"] - saved["SelfAttention"]) < 0.005 * found.residual_bytes
    assert [(each.name, each.calls) for each in found.taken] == [("DecoderLayer", 2), ("EncoderLayer", 2)]
