"""Another mesh for a workload, in code and by `--mesh`: shardings and errors; and steps that name a mesh of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import remat_jax as rj
from remat_jax import compat
from remat_jax.cli.app import app
from remat_jax.errors import ArgumentError, UnsupportedError
from remat_jax.mesh import as_mesh
from tests.mesh_models import BATCH, MESH, X, mlp, small_llama
from tests.workloads import needs_gpu_compiler, struct

MESH_OF_TWO = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
FILE = Path(__file__).with_name("cli_jobs.py")
PARAMETERS, ROWS = 4 * 2 * (8 * 32 + 32 + 32 * 8 + 8), 4 * 64 * 8


def sharded(*sizes):
    """A batch of `mlp`; each argument is on a mesh with the given number of devices."""
    meshes = [AbstractMesh((size,), ("data",), axis_types=(AxisType.Auto,)) for size in sizes]
    return tuple(jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("data"))) for mesh in meshes)


def test_arrays_that_are_on_a_mesh_say_which():
    """Otherwise the step would silently be that of one device."""
    job = mlp(sharded(2))
    asked = mlp(mesh={"data": 2}, shardings=(None, P("data")))
    assert job.mesh == asked.mesh and job.shardings == asked.shardings
    assert job.step("off").local_arguments[2].shape == (4, 16)
    with pytest.raises(ArgumentError, match=r"but the mesh of .* \(data=2\) has 2: ask for 2, such as '2xh200'"):
        rj.measure(job, "full", "h200")
    with pytest.raises(ArgumentError, match=r"on several meshes, \{'data': 2\} and \{'data': 4\}"):
        mlp(sharded(2, 4))


def test_a_shard_map_over_the_mesh_of_described_devices_is_traced():
    """JAX compares the devices of both meshes. MaxText's `train_compile` makes such a mesh."""
    device = jax.sharding.AbstractDevice(device_kind="TPU v5", num_cores=2, platform="tpu")
    mesh = MESH_OF_TWO.update(abstract_device=device)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("data")))

    def loss(w, x):
        return w * jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x).sum()

    job = rj.Workload(loss, jax.ShapeDtypeStruct((), jnp.float32), (x,), "*")
    assert job.mesh == mesh and job.step("off").local_arguments[2].shape == (4, 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data", "'data' is not an axis with its size"),
        ("data=8,", "'' is not an axis with its size"),
        ("data=0", "'data=0' is not an axis"),
        ("data=-1", "'data=-1' is not an axis"),
        ("da ta=8", "'da ta=8' is not an axis"),
        ("data=2,data=4", "has the axis 'data' twice"),
        ("data=²", "is not an axis with its size"),
        ("data=" + "9" * 5000, "is not an axis with its size"),
    ],
    ids=lambda text: text[:12],
)
def test_a_text_that_is_no_mesh_is_an_error(text, message):
    with pytest.raises(ArgumentError, match=message):
        as_mesh(text)


def test_the_sizes_change_and_the_shardings_stay():
    small, large = small_llama(MESH, optimizer=optax.adam(1e-3)), small_llama("fsdp=2,tensor=1", optimizer=optax.adam(1e-3))
    moved = large.on_mesh(MESH)
    for expected, actual in zip(small.step("full").shardings, moved.step("full").shardings, strict=True):
        assert jax.tree.all(jax.tree.map(lambda a, b: a.spec == b.spec and a.mesh.size == b.mesh.size == 8, expected, actual))
    assert small.mesh.shape == {"fsdp": 4, "tensor": 2} and large.mesh.shape == {"fsdp": 2, "tensor": 1}, "as they were"


def test_an_axis_too_few_or_too_many_is_an_error():
    job = small_llama(MESH)
    with pytest.raises(ArgumentError, match=r"shardings also use 'tensor'; .* axes \(fsdp, tensor\) a size"):
        job.on_mesh({"fsdp": 8})
    with pytest.raises(ArgumentError, match="no array is partitioned over 'data'; the workload's axes are fsdp, tensor"):
        job.on_mesh("data=2,fsdp=2,tensor=2")
    assert job.on_mesh("data=1,fsdp=4,tensor=2").mesh.size == 8, "nothing is divided by 1"
    with pytest.raises(ArgumentError, match=f"divides dimension 0 of \\[{BATCH}, 16\\] into 16 parts"):
        job.on_mesh("fsdp=16,tensor=1")
    step = rj.Workload.from_step(lambda x: x * 2, X, blocks="*")
    with pytest.raises(UnsupportedError, match="is a finished step; give the mesh to"):
        step.on_mesh("data=8")


def test_without_shardings_the_names_of_the_axes_say_what_lies_over_them():
    job = mlp(optimizer=optax.adam(1e-3)).on_mesh("data=2,fsdp=4")
    trained, state, _, batch = job.step("full").local_arguments
    # 16 → 3 → 16: the dimension that 4 divides.
    assert [leaf.shape for leaf in jax.tree.leaves(job.params)] == [(3, 16), (16, 3)]
    assert [leaf.shape for leaf in jax.tree.leaves(trained)] == [(3, 4), (4, 3)]
    assert batch.shape == (1, 16) and {leaf.shape for leaf in jax.tree.leaves(state)} == {(), (3, 4), (4, 3)}
    replicated = mlp().on_mesh("data=8").step("full")
    assert [leaf.shape for leaf in jax.tree.leaves(replicated.local_arguments[0])] == [(3, 16), (16, 3)]
    with pytest.raises(ArgumentError, match="does not say which arrays are partitioned over tensor"):
        mlp().on_mesh("data=4,tensor=2")
    with pytest.raises(ArgumentError, match="into 16 parts, but its first array has 8 rows"):
        mlp().on_mesh("data=16")
    # A key of the old style is no batch.
    plain, key = mlp(), struct(2, dtype=jnp.uint32)
    keyed = rj.Workload(lambda p, key, x: plain.loss(p, x), plain.params, (key, X), plain.blocks).on_mesh("data=8")
    assert [leaf.shape for leaf in keyed.step("off").local_arguments[-2:]] == [(2,), (1, 16)]


def test_the_state_of_an_nnx_model_is_everywhere():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.dropout = nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.dense(x))

    job = rj.Workload.from_nnx(Noisy(nnx.Rngs(0)), lambda m, x: m(x).sum(), (X,), nnx.Linear)
    moved = job.on_mesh("fsdp=8").on_mesh("fsdp=4")
    states, batch = moved.shardings[1:]
    assert {sharding.spec for sharding in jax.tree.leaves(states)} == {P()} and batch.spec == P(("fsdp",))
    assert moved.step("full").local_arguments[-1].shape == (2, 16)
    # Shardings refer to the caller's arguments, here too.
    given = job.on_mesh("data=8", (None, P("data")))
    assert given.shardings[-1].spec == P("data") and given.step("full").local_arguments[-1].shape == (1, 16)
    with pytest.raises(ArgumentError, match=r"3 entries; expected a tuple with an entry for each of params, batch\[0\]"):
        job.on_mesh("data=8", (None, None, P("data")))


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_measure_takes_a_mesh_in_place_of_the_one_in_the_file():
    for function, mesh, parts in (("by_batch", "batch=4", 1), ("job", "fsdp=4", 4)):
        result = run("measure", f"{FILE}:{function}", "--target", "4xcpu", "--mesh", mesh, "-p", "full", "--json")
        assert result.exit_code == 0, result.output
        (report,) = json.loads(result.stdout)["reports"]
        assert (report["devices"], report["argument_bytes"]) == (4, PARAMETERS // parts + ROWS // 4)


def test_without_a_mesh_a_bare_partition_spec_says_how_to_give_one():
    def loss(w, x):
        return jax.lax.with_sharding_constraint(x * w, P(None, None)).sum()

    def job(**mesh):
        return rj.Workload(loss, X, (X,), nnx.Linear, **mesh)

    with pytest.raises(RuntimeError) as caught:
        jax.make_jaxpr(job().step("off").function)(*job().step("off").arguments)
    assert ['mesh={"data": 1}' in note for note in caught.value.__notes__ if note.startswith("remat_jax")] == [True]
    traced = jax.make_jaxpr(job(mesh={"data": 1}).loss)(X, X)
    assert "sharding_constraint" in str(traced)


def test_a_model_with_bare_partition_specs_takes_a_mesh_as_it_is():
    command = ("measure", f"{FILE}:constrained", "--target", "4xcpu", "-p", "full", "--json")
    result = run(*command, "--mesh", "fsdp=4")
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.stdout)["reports"]
    assert report["argument_bytes"] == 2 * PARAMETERS // 4 + ROWS // 4
    without = run(*command)
    assert without.exit_code == 2
    assert "a bare PartitionSpec in a sharding constraint, which needs a mesh" in json.loads(without.stdout)["error"]


def test_a_mesh_alone_partitions_a_workload_by_the_names_of_its_axes():
    asked, job = mlp().on_mesh("data=2,fsdp=4"), mlp(mesh="data=2,fsdp=4")
    assert (job.mesh, job.shardings) == (asked.mesh, asked.shardings)

    def step(frozen, w, key, x):
        return jax.grad(lambda w: jnp.mean((x @ w @ frozen) ** 2))(w)

    w, x, key, frozen = struct(16, 8), struct(4, 16), jax.random.PRNGKey(0), struct(8, 32)
    job = rj.Workload.from_step(step, frozen, w, key, x, blocks="*", mesh="fsdp=4")
    assert [sharding.spec for sharding in job.shardings] == [P(None, "fsdp"), P("fsdp", None), P(), P(("fsdp",))]
    with pytest.raises(ArgumentError, match=r"unknown how args\[3\] is partitioned, which has not as many rows as args\[2\]"):
        rj.Workload.from_step(lambda key, w, x, frozen: step(frozen, w, key, x), key, w, x, frozen, blocks="*", mesh="fsdp=4")


@pytest.mark.parametrize("command", ["measure", "plan", "report", "doctor"])
def test_a_mesh_of_another_size_than_the_target_is_bad_usage(command, tmp_path):
    more = {"plan": ["-b", "1GiB"], "report": ["-o", tmp_path / "page.html"]}.get(command, [])
    result = run(command, f"{FILE}:job", "--target", "8xh200", "--mesh", "data=2,fsdp=2", *more)
    assert result.exit_code == 2
    assert "'8xh200' has 8 devices, but mesh='data=2,fsdp=2' has 4" in " ".join(result.stderr.replace("│", " ").split())
    wrong = run(command, f"{FILE}:by_batch", "--target", "8xh200", "--mesh", "data=8", *more)
    assert wrong.exit_code == 2
    assert "the workload's shardings also use 'batch'" in " ".join(wrong.stderr.replace("│", " ").split())


def on_two_devices(loss):
    """The loss of an array with two rows, one on each of two devices."""
    x = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    return rj.Workload(loss, x, (), "*", mesh=MESH_OF_TWO, shardings=(P("data"),))


@needs_gpu_compiler
# JAX deprecates the backend of its own attention kernel, and warns where the kernel is lowered.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_pallas_kernel_in_a_shard_map_is_compiled_without_a_gpu():
    """A kernel reads the device's name from the mesh of the `shard_map`, which must name the target. A device has one row."""

    def attention(x):
        return compat.attention_kernel()(x, x, x, segment_ids=None, causal=True)

    def alone(rows):
        x = struct(rows, 512, 4, 64, dtype=jnp.bfloat16)
        return rj.measure(rj.Workload(lambda x: attention(x).astype(jnp.float32).sum(), x, (), "*"), "off", "h200")

    def loss(x):
        return jax.shard_map(attention, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x).astype(jnp.float32).sum()

    report, one, two = rj.measure(on_two_devices(loss), "off", "2xh200"), alone(1), alone(2)
    assert report.argument_bytes == one.argument_bytes and one.device_bytes <= report.device_bytes < two.device_bytes


def test_a_shard_map_with_a_mesh_of_its_own_cannot_name_the_gpu_for_a_kernel():
    """JAX's error for a kernel comes from the loss here, so that every version of JAX raises it."""
    lowered = []

    def loss(x):
        if lowered and jax.sharding.get_abstract_mesh().abstract_device is None:
            raise RuntimeError("No supported GPU devices found, please specify an abstract GPU device using AbstractDevice.")
        return jax.shard_map(jnp.sin, mesh=MESH_OF_TWO, in_specs=P("data"), out_specs=P("data"))(x).sum()

    work = on_two_devices(loss)
    lowered.append(True)
    with pytest.raises(UnsupportedError, match="leave out mesh="):
        rj.measure(work, "off", "2xh200")


@pytest.fixture(scope="module")
def told(on_eight_devices: Callable[..., Path]) -> dict[str, list[str]]:
    return dict(json.loads(on_eight_devices("tests.meshes_of_their_own", "told.json").read_text()))


@pytest.mark.parametrize(("case", "devices"), [("alone", "1 device,"), ("on another", "2 devices,")])
def test_a_mesh_of_its_own_is_refused_with_the_remedy(told: dict[str, list[str]], case: str, devices: str) -> None:
    kind, message = told[case]
    assert kind == "UnsupportedError"
    assert message.startswith(f"the step is compiled for {devices} but it contains a mesh of another size")
    assert "Write constraints as bare PartitionSpecs, and give their mesh to Workload(…, mesh=…, shardings=…)" in message


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    ("case", "traced"), [("alone", "a step for 1 device"), ("on another", "a workload on a mesh of 2 devices ({'data': 2})")]
)
def test_a_mesh_of_another_size_around_the_call_is_to_be_left(told, kind, case, traced):
    error, message = told[f"under {kind}, {case}"]
    assert error == "ArgumentError"
    assert message.startswith("jax.set_mesh: a mesh of 4 devices ({'data': 4}) is active")
    assert f"and {traced} cannot be traced under it: make this call outside jax.set_mesh" in message


def test_a_mesh_of_the_same_size_and_bare_specs_are_served(told: dict[str, list[str]]) -> None:
    assert told["on the same"] == told["under Auto, on the same"] == told["under Explicit, on the same"] == ["", "{'data': 4}"]
    assert told["by a spec"] == ["", "{'data': 2}"]
