"""Workloads on a mesh: each device's part, measured and planned; the gradients are those of one device."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from remat_jax.errors import ArgumentError, UnsupportedError
from remat_jax.hardware import target
from remat_jax.hardware.rates import Rates
from remat_jax.memory.measure import measure_many
from remat_jax.mesh import as_mesh
from remat_jax.planning import problem
from remat_jax.planning.division import residual_shares
from tests.mesh_models import BATCH, CONFIG, LAYERS, LENGTH, MESH, OF_SEQUENCE, POLICIES, X, mlp, small_llama
from tests.workloads import mean_square, struct

FLOAT, TOKEN = 4, 4


REFUSED = [
    ("does not say which arrays are partitioned over batch", {"batch": 8}, None),
    ("shardings without mesh", None, (P(), P())),
    ("mesh={'data': 0}: expected sizes by axis name", {"data": 0}, (P(),)),
    ("mesh=8: expected a jax.sharding.Mesh or AbstractMesh", 8, (P(),)),
    (r"expected a tuple with an entry for each of params, batch\[0\], such as", {"data": 8}, P("data")),
    (r"3 entries; expected a tuple with an entry for each of params, batch\[0\]", {"data": 8}, (P(), P(), P())),
    (r"for batch\[0\] names the axis 'fsdp', but the mesh has data", {"data": 8}, (P(), P("fsdp"))),
    (r"divides dimension 1 of \[16, 3\] into 8 parts, but 3 is not", {"data": 8}, (P(None, "data"),)),
    (r"has 3 entries, but the shape \[8, 16\] has 2 dimensions", {"data": 8}, (P(), P(None, None, "data"))),
    ("'data' for params/params/Linear_0/kernel: expected a PartitionSpec", {"data": 8}, (lambda *_: "data",)),
    ("shardings for params are not a pytree prefix of it", {"data": 8}, ({"weights": P()},)),
    (r"for batch\[0\] names an axis twice", {"data": 2}, (P(), P("data", "data"))),
    (r"'data'}.*\) for batch\[0\] has unreduced or reduced axes", {"data": 2}, (P(), P(None, unreduced={"data"}))),
    (r"'data'}.*\) for batch\[0\] has unreduced or reduced axes", {"data": 2}, (P(), P(None, reduced={"data"}))),
    (r"\[0\] leaves dimension 1 unconstrained.*or None", {"data": 2}, (P(), P(None, P.UNCONSTRAINED))),
    ("axes data do not have the type Auto", AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,)), (P(),)),
    ("in pinned_host; a w", {"data": 2}, (None, NamedSharding(as_mesh({"data": 2}), P(), memory_kind="pinned_host"))),
    ("different mesh than mesh={'data': 2};", {"data": 2}, (None, NamedSharding(as_mesh({"data": 4}), P("data")))),
]


@pytest.mark.parametrize(("message", "mesh", "shardings"), REFUSED)
def test_a_mesh_that_does_not_go_with_the_arguments_is_an_error(message, mesh, shardings):
    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        mlp(mesh=mesh, shardings=shardings)


def test_the_target_has_as_many_devices_as_the_mesh():
    divided = mlp(mesh={"data": 4, "fsdp": 2}, shardings=(P(),))
    for ask in (rj.measure, lambda job, policy, name: rj.plan(job, "1GiB", name)):
        with pytest.raises(ArgumentError, match=r"'4xcpu' has 4 devices, but .* \(data=4,fsdp=2\) has 8.*such as '8xcpu'"):
            ask(divided, "full", "4xcpu")
        with pytest.raises(UnsupportedError, match="'2xcpu' has 2 devices, but 'loss' has no mesh"):
            ask(mlp(), "full", "2xcpu")
    with pytest.raises(ArgumentError, match="'h200' has 1 device, but the mesh"):
        rj.doctor(divided, "full", "h200")


def test_the_state_of_an_optimizer_lies_as_its_parameters_do():
    rows = (lambda path, leaf: P("data") if "Linear_1" in path else None, P("data"))
    step = mlp(mesh={"data": 8}, shardings=rows, optimizer=optax.adam(1e-3), trainable="*Linear_1*").step("full")
    assert step.names == ("parameters", "optimizer state", "frozen parameters", "batch[0]")
    trained, state, frozen, batch = step.local_arguments
    of_state = {leaf.shape for leaf in jax.tree.leaves(state)}
    assert [leaf.shape for leaf in jax.tree.leaves(trained)] == [(2, 3)] and of_state == {(2, 3), ()}
    assert [leaf.shape for leaf in jax.tree.leaves(frozen)] == [(3, 16)] and batch.shape == (1, 16)
    # A factored second moment does not have its parameter's shape, and is replicated.
    factored = mlp(mesh={"data": 8}, shardings=(P(),), optimizer=optax.adafactor(1e-3, min_dim_size_to_factor=2)).step("full")
    assert {sharding.spec for sharding in jax.tree.leaves(factored.shardings[1])} == {P()}


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.masked(optax.adam(1e-3), lambda params: jax.tree.map(lambda leaf: len(leaf.shape) == 2, params)),
        optax.multi_transform({"all": optax.adam(1e-3)}, lambda params: jax.tree.map(lambda _: "all", params)),
        optax.adafactor(1e-3),
    ],
    ids=["masked", "multi_transform", "adafactor"],
)
def test_the_state_of_wrapped_optimizers_lies_as_the_parameters_it_is_for(optimizer):
    def spec(_, leaf):
        return P("data") if len(leaf.shape) == 2 and leaf.shape[0] % 2 == 0 else P()

    job = mlp(optimizer=optimizer, mesh={"data": 2}, shardings=(spec,))
    step = job.step("off")
    lies = jax.tree.leaves(step.shardings[1])
    assert len(lies) == len(jax.tree.leaves(step.arguments[1]))
    shapes = {leaf.shape for leaf in jax.tree.leaves(job.params)}
    for leaf, place in zip(jax.tree.leaves(step.arguments[1]), lies, strict=True):
        assert place.spec == (spec("", leaf) if leaf.shape in shapes else P()), leaf


def test_nothing_may_stand_in_a_batch():
    job = mlp(({"x": X, "mask": None},), mesh={"data": 2}, shardings=(None, P("data")))
    assert job.step("off").local_arguments[2]["x"].shape == (4, 16)


def test_an_nnx_model_and_a_mesh_given_in_other_forms():
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    shardings = (lambda path, leaf: P("data") if "kernel" in path else None, P("data"))
    for mesh in (as_mesh({"data": 8}), {"data": 8}):
        given = (shardings[0], NamedSharding(as_mesh({"data": 8}), P("data")))
        job = rj.Workload.from_nnx(model, lambda m, x: m(x).sum(), (X,), nnx.Linear, mesh=mesh, shardings=given)
        assert shapes_of(job) == [(1, 16), (2, 16), (16,)]
    mesh, abstract = as_mesh({"data": 8}), nnx.eval_shape(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    abstract.kernel.set_raw_value(jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P("data"))))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("data")))
    finished = rj.Workload.from_step(lambda model, x: model(x).sum(), abstract, x, blocks="*")
    assert shapes_of(finished) == [(1, 16), (2, 16), (16,)]


def shapes_of(job):
    """The shapes of a device's parts of the arguments."""
    return sorted(leaf.shape for leaf in jax.tree.leaves(job.step("off").local_arguments))


def test_a_finished_step_on_a_mesh_has_the_bytes_of_the_workloads_step():
    work = small_llama(MESH, optimizer=optax.adam(1e-3))
    step, expected = work.step("off"), rj.measure(work, "off", "8xcpu")
    norms = (2 * LAYERS + 1) * CONFIG.hidden_size
    matrices = sum(leaf.size for leaf in jax.tree.leaves(work.params)) - norms
    # Parameters and two moments, Adam's count, tokens and targets. Nothing that is donated is lost.
    assert expected.alias_bytes == 3 * FLOAT * (matrices // 8 + norms) + 4
    assert expected.argument_bytes == expected.alias_bytes + 2 * TOKEN * BATCH * LENGTH // 4
    options = {"blocks": "*", "donate_argnums": (0, 1)}
    given = rj.Workload.from_step(step.function, *step.arguments, **options, mesh=MESH, shardings=step.shardings)
    placed = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), step.arguments, step.shardings
    )
    read = rj.Workload.from_step(step.function, *placed, **options)
    assert given.step("off").local_arguments == read.step("off").local_arguments
    report = rj.measure(read, "off", "8xcpu")
    assert (report.device_bytes, report.alias_bytes) == (expected.device_bytes, expected.alias_bytes)
    with pytest.raises(ArgumentError, match=r"4 entries; expected a tuple with an entry for each of args\[0\], args\[1\]"):
        rj.Workload.from_step(lambda w, x: w, X, X, blocks="*", mesh={"data": 8}, shardings=(None,) * 4)


@pytest.fixture(scope="module")
def shares():
    return residual_shares(small_llama(MESH), target("8xcpu"))


def test_residuals_are_divided_as_what_they_are_made_from(shares):
    by_batch = ("layers:add#0", "layers:add#1", "layers/input_norm:rsqrt#0", "layers/post_attention_norm:mul#3")
    by_features = ("layers/mlp/gate_proj:dot_general#0", "layers/mlp:mul#1", "layers/self_attn/softmax:exp#0")
    assert {shares.of(name) for name in by_batch} == {1 / 4}
    assert {shares.of(name) for name in by_features} == {1 / 8}
    assert shares.of("Llama:cos") == 1.0, "the rotations are everywhere"
    assert shares.of("unheard of") == shares.mean and 1 / 8 < shares.mean < 1 / 4


RATES = Rates({"tensorfloat32": 1e9, "float32": 1e30}, 1e30, 1e9, 1e9)


def test_a_problem_is_that_of_one_device(shares, monkeypatch):
    inside = {name for name in shares.by_name if name.startswith("layers") and not name.endswith("input#0")}
    monkeypatch.setattr(problem, "residual_shares", lambda *_, **__: shares)
    on_eight = problem.describe(small_llama(MESH), "8xcpu", rates=RATES)
    on_one = problem.describe(small_llama(), "cpu", rates=RATES)
    (block,), (whole,) = on_eight.stack.blocks, on_one.stack.blocks
    # Every product is partitioned by batch and by features: attention's by heads, the others by output or contracted features.
    assert block.forward_seconds == pytest.approx(whole.forward_seconds / 8, rel=1e-6)
    assert block.backward_seconds == pytest.approx(whole.backward_seconds / 8, rel=1e-6)
    sizes, before = ({residual.name: residual.bytes for residual in of.residuals} for of in (block, whole))
    assert sizes.keys() <= before.keys() and len(sizes) > 20 and 0 < len(inside & sizes.keys())
    assert sizes["layers:input#0"] == before["layers:input#0"] / 4 == BATCH * LENGTH * CONFIG.hidden_size * FLOAT / 4
    gate = next(name for name in sizes if "gate_proj" in name)
    assert sizes[gate] == before[gate] / 8
    seconds = problem.extra_seconds(on_eight, "full")
    assert seconds == pytest.approx(problem.extra_seconds(on_one, "full") / 8, rel=1e-6)


@pytest.fixture(scope="module")
def results(on_eight_devices):
    return dict(np.load(on_eight_devices("tests.mesh_models", "results.npz", JAX_ENABLE_X64="1")))


ON_EIGHT = dict.fromkeys((*POLICIES, *(f"sequence {policy}" for policy in OF_SEQUENCE)), "alone")
ON_EIGHT["adam offloaded"] = "adam alone"  # the state is on the hosts


@pytest.mark.parametrize("case", ON_EIGHT)
def test_a_step_on_eight_devices_is_that_on_one(results, case):
    of_case = {name: value for name, value in results.items() if name.startswith(f"{case}/")}
    assert len(of_case) > (30 if "adam" in case else 10)
    for name, value in of_case.items():
        expected = results[f"{ON_EIGHT[case]}/{name.partition('/')[2]}"]
        assert value.dtype == expected.dtype
        np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12 * max(np.abs(expected).max(), 1e-300))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jax.lax.with_sharding_constraint(x, P("data"))
        return x + nn.Dense(128, use_bias=False)(nn.gelu(nn.Dense(512, use_bias=False)(x)))


def test_a_plan_fits_on_each_device_and_keeps_what_it_may():
    placed = {"mesh": {"data": 2}, "shardings": (P(None, "data"), P("data"))}
    with jax.sharding.use_abstract_mesh(as_mesh({"data": 2})):
        model = nn.Sequential([Layer(), Layer()])
        job = mean_square(model, struct(65536, 128), Layer, optimizer=optax.adam(1e-3), **placed)
    full, off = (report.device_bytes for report in measure_many(job, ("full", "off"), "2xh200"))
    budget = (full + off) // 2
    plan = rj.plan(job, budget, "2xh200", host_budget=0)
    assert full < plan.device_bytes <= budget < off
    assert not [finding for finding in plan.findings if finding.severity == "warning"], "it fits with cuBLAS's matmuls too"
    assert rj.measure(job, dict(plan.policies), "2xh200").device_bytes == plan.device_bytes


def test_an_array_is_kept_in_its_place_on_the_mesh():
    class Placed(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = jax.lax.with_sharding_constraint(x, P("data"))
            made = jax.lax.with_sharding_constraint(nn.Dense(32, name="up")(x), P(None, "data"))
            return x + nn.Dense(8, name="down")(jnp.sin(jax.lax.with_sharding_constraint(made, P("data"))))

    with jax.sharding.use_abstract_mesh(as_mesh("data=2")):
        model = nn.Sequential([nn.Dense(8), Placed()])
        job = mean_square(model, struct(16, 8), Placed, mesh="data=2", shardings=(P(), P("data")))
    (kind,) = problem.describe(job, "2xh200").kinds
    # The input as it is, and the product as it is read: the product first had one sharding, then another.
    assert kind.residuals[:2] == ("layers_1:input#0", "layers_1:sharding_constraint#2")
