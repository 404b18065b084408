"""`rj.plan` in unusual cases: legal but rare workloads, failing compilers, timeouts."""

from __future__ import annotations

import math
from unittest.mock import Mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from remat_jax.cost.cost import flat_cost
from remat_jax.errors import CompileError, UnsupportedError
from remat_jax.hardware.rates import Rates
from remat_jax.memory.compile.process import NotDoneError
from remat_jax.memory.measure import measure_many
from remat_jax.planning import compile_candidates
from remat_jax.planning.blocks import calls
from remat_jax.planning.division import Shares, divided
from remat_jax.planning.explain import named_table
from remat_jax.planning.findings import PlanFinding
from remat_jax.planning.model import Model as PlannedModel
from remat_jax.planning.plan_data import Point
from remat_jax.planning.problem import describe
from remat_jax.planning.program import block_program
from remat_jax.planning.solved import Solved
from remat_jax.report.tables import render
from remat_jax.workload import Workload
from tests import shard_map_models
from tests.plan_by_hand import MIB, plan
from tests.plan_models import WIDTH, MlpLayer, job
from tests.planning_models import RATES, Layer, mlp
from tests.small_models import in_a_scan
from tests.workloads import mean_square, struct

BUDGET = 9 * MIB


class Rounds(nn.Module):
    """A scan of layers in a scan."""

    @nn.compact
    def __call__(self, x, _=None):
        return in_a_scan(MlpLayer(name="layers"), x, 3), None


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x):
        rounds = nn.scan(Rounds, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return rounds(name="rounds")(x, None)[0]


def nested():
    return mean_square(Nested(), struct(2048, WIDTH), MlpLayer, name="nested")


def test_layers_in_nested_scans_are_planned_alike():
    """They cannot have different policies, but the plan still chooses what each keeps."""
    work = nested()
    full, most = (report.device_bytes for report in measure_many(work, ("full", "off"), "cpu"))
    planned = rj.plan(work, (full + most) // 2, "cpu")
    assert planned.device_bytes <= (full + most) // 2
    assert isinstance(planned.policies[MlpLayer], rj.Policy)
    assert not planned.notes and planned.is_maximal


def test_a_compiler_that_compiles_nothing_is_no_lack_of_memory(monkeypatch):
    def failing(programs, *rest, **options):
        raise CompileError(f"the compiler crashed at {programs[0].key}")

    monkeypatch.setattr(compile_candidates, "compile_programs", failing)
    with pytest.raises(CompileError, match="crashed at "):
        rj.plan(job(scanned=True), BUDGET, "cpu")


def test_time_that_is_up_before_a_step_is_compiled_names_the_callers_timeout(monkeypatch):
    late = Mock(side_effect=NotDoneError("not done after timeout=1 s, stopped at policy='full'"))
    monkeypatch.setattr(compile_candidates, "compile_programs", late)
    with pytest.raises(CompileError, match=r"^timeout=30 s was over before a step of 'perceptrons' was compiled\. Give"):
        rj.plan(job(scanned=True), BUDGET, "cpu", timeout=30)


@pytest.fixture
def slow_compiler(monkeypatch) -> list[float]:
    """A compilation takes 40 s of the returned clock."""
    compile_programs, now = compile_candidates.compile_programs, [0.0]

    def slow(programs, *rest, **options):
        now[0] += 40.0
        return compile_programs(programs, *rest, **options)

    monkeypatch.setattr(compile_candidates, "compile_programs", slow)
    monkeypatch.setattr(compile_candidates.time, "monotonic", lambda: now[0])
    return now


def test_a_plan_that_fits_is_kept_when_time_is_up(slow_compiler):
    planned = rj.plan(job(2056, scanned=True), 10 * MIB, "cpu", timeout=30)  # no other test has compiled its steps
    assert planned.device_bytes <= 10 * MIB and slow_compiler == [80.0]  # one pair
    (note,) = planned.notes
    assert note.startswith("The search ended after timeout=30 s; a longer timeout may find a faster plan. Not shown: ")
    assert note.endswith("that no further residual can be saved in a run of layers")


def test_time_that_is_up_before_a_step_fits_is_no_lack_of_memory(slow_compiler):
    with pytest.raises(CompileError, match=r"timeout=30 s was over .* budget=4500000 .* needs 4\.[67] MiB"):
        rj.plan(job(2056, scanned=True), "4.5 MB", "cpu", timeout=30)
    assert slow_compiler[0] <= 120.0  # one pair, and what needs least


def test_tracing_is_within_the_timeout_too(monkeypatch):
    """A step takes 10 s to trace and 5 s to compile: after 25 s the next step, traced and counted, would end after 45 s."""
    compile_programs, export_step, now = compile_candidates.compile_programs, compile_candidates.export_step, [0.0]

    def after(seconds, function):
        def slow(*arguments, **options):
            now[0] += seconds
            return function(*arguments, **options)

        return slow

    monkeypatch.setattr(compile_candidates, "compile_programs", after(5.0, compile_programs))
    monkeypatch.setattr(compile_candidates, "export_step", after(10.0, export_step))
    monkeypatch.setattr(compile_candidates.time, "monotonic", lambda: now[0])
    planned = rj.plan(job(scanned=True), 10 * MIB, "cpu", timeout=40)
    assert planned.device_bytes <= 10 * MIB and now[0] == 30.0  # one pair, where two would end after 60
    assert planned.cut_short and planned.left_out
    assert any("The search ended after timeout=40 s" in note for note in planned.notes)


@pytest.mark.parametrize("solved", [0, 3])
def test_the_frontier_is_within_the_timeout_too(monkeypatch, solved):
    """The clock reaches the timeout while the frontier is computed: before the first solution, or after three budgets."""
    solve, asked, reading, now = Solved.plan, [], [], [0.0]

    def slow(self, stack, budget, *options):
        if reading:
            asked.append(now[0])
            now[0] += 10.0
        return solve(self, stack, budget, *options)

    def on_progress(message, done, of):
        if message == "reading the frontier":
            reading.append(message)
            now[0] = 30.5 - 10 * solved

    monkeypatch.setattr(Solved, "plan", slow)
    monkeypatch.setattr(compile_candidates.time, "monotonic", lambda: now[0])
    planned = rj.plan(job(scanned=True), BUDGET, "cpu", timeout=30, progress=on_progress)
    assert len(asked) == solved and all(moment <= 30 for moment in asked)
    assert planned.cut_short and sum("The search ended after timeout=30 s" in note for note in planned.notes) == 1
    # Stacking a kept array costs more than a product.
    assert planned.device_bytes <= BUDGET and planned.seconds < planned.base_seconds
    predicted = [point for point in planned.frontier if not point.compiled and point.name == ""]
    if solved:
        assert planned.lower_bound <= planned.seconds and planned.next_gib_seconds > 0 and len(predicted) <= solved
    else:
        assert planned.lower_bound is None and predicted == []
        assert "The search ended early: what" in planned.explain()


def test_what_could_not_be_compiled_stands_beside_what_was():
    """`off` and `everything` take the same time by the estimate; the size of one is unknown."""
    named = (
        Point("off", None, 0, 0.012, True),
        Point("everything", 120 * MIB, 0, 0.012, True),
        Point("dots", None, 0, None, False),
    )
    text = render(named_table(plan(named=named)))
    assert text.index("everything") < text.index("off ") < text.index("dots")
    assert "not compiled" in text


@pytest.mark.parametrize("is_pytree", [True, False])
def test_a_plan_is_applied_to_the_nnx_model_that_it_was_made_for(is_pytree):
    class Model(nnx.Module, pytree=is_pytree):
        def __init__(self):
            self.up = nnx.Linear(4, 8, rngs=nnx.Rngs(0))

    workload = Workload.from_nnx(Model(), lambda model, x: model.up(x).sum(), (jnp.ones((2, 4)),), nnx.Linear)
    made = plan(policies={nnx.Linear: rj.Policy.parse("off")}, model=PlannedModel.of(workload))
    loss = made.apply(lambda model, x: model.up(x).sum())
    assert float(loss(Model(), jnp.ones((2, 4)))) == pytest.approx(float(Model().up(jnp.ones((2, 4))).sum()))


def test_blocks_inside_a_kept_checkpoint_of_the_models_own_are_refused():
    alone = mlp()
    kept = rj.Workload(jax.checkpoint(alone.loss), alone.params, alone.batch, Layer, own_checkpoints="keep")
    with pytest.raises(UnsupportedError, match=r"inside one of the model's own checkpoints .*remove own_checkpoints='keep'"):
        describe(kept, "h200")


@pytest.mark.parametrize("check", [False, True])
def test_blocks_in_a_shard_map_are_those_of_one_device(check):
    alone = mlp()

    def of_part(params, x):
        return jax.lax.psum(alone.loss(params, x), "data")

    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    loss = jax.shard_map(of_part, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check)
    job = rj.Workload(loss, alone.params, alone.batch, Layer, mesh={"data": 4}, shardings=(None, P("data")))
    (whole,), (part,) = (
        describe(workload, target, rates=RATES).stack.blocks for workload, target in ((alone, "h200"), (job, "4xh200"))
    )
    assert [(residual.name, 4 * residual.bytes) for residual in part.residuals] == [
        (residual.name, residual.bytes) for residual in whole.residuals
    ]


def exchanging(case):
    """A job on eight devices whose blocks exchange in a `shard_map`."""
    mesh = AbstractMesh((2, 2, 2), shard_map_models.AXES, axis_types=(AxisType.Auto,) * 3)
    params, block, _, loss = shard_map_models.losses(case, mesh)
    x = jax.ShapeDtypeStruct((shard_map_models.BATCH, shard_map_models.LENGTH, shard_map_models.WIDTH), jnp.float32)
    shardings = (jax.tree.map_with_path(shard_map_models.spec, params), P("fsdp", "sequence"))
    return rj.Workload(loss, params, (x,), block, mesh=mesh, shardings=shardings)


def test_the_gradients_of_a_scan_in_a_shard_map_are_one_devices_part():
    (block,) = describe(exchanging("scanned"), "8xh200").stack.blocks
    assert block.late_bytes == sum(4 * math.prod(shard_map_models.local(name, True)) for name in shard_map_models.SHAPES)


def test_blocks_that_exchange_in_a_shard_map_are_planned():
    job = exchanging("linen")
    kept = {row.name: row.bytes for row in rj.residuals(job, "everything")}
    described = describe(job, "8xh200")
    assert sum(len(kind.layers) for kind in described.kinds) == shard_map_models.LAYERS
    sizes = {residual.name: residual.bytes for block in described.stack.blocks for residual in block.residuals}
    both = sizes.keys() & kept.keys()
    assert len(both) > 5 and {name: kept[name] / sizes[name] for name in both} == dict.fromkeys(both, 8.0)


def test_a_printed_plan_shows_its_notes():
    assert "Not shown: whether [dots] would fit" in str(
        plan(findings=(PlanFinding("not_shown", "info", "Not shown: whether [dots] would fit"),))
    )


# A block's program as one device of a mesh runs it.


class Experts(nn.Module):
    """A block that accumulates into zeros, as a dispatch to experts does."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        zeros = jnp.zeros((4, *x.shape))
        placed = zeros.at[1].add(nn.Dense(64, name="up")(x))
        return x + nn.Dense(x.shape[-1], name="down")(jnp.sin(placed).sum(0))


def test_a_constant_that_the_compiler_leaves_whole_does_not_make_its_block_slow() -> None:
    job = mean_square(Experts(), struct(32, 64), Experts)
    rates = Rates({"float32": 1e9, "tensorfloat32": 1e9}, 1e9)
    program = block_program(calls(job)[0], rates, stack_passes=3)
    before = flat_cost(program.flat.eqns, program.flat.outputs)
    names = {name for array in program.arrays for name in array.names}
    zeros = next(name for name in names if "broadcast_in_dim" in name and name not in program.inputs)
    everything = dict.fromkeys(names, 1 / 8)
    eighth, with_whole = (divided(program, Shares(shares, 1 / 8)) for shares in (everything, everything | {zeros: 1.0}))
    for cost in (eighth.forward, eighth.backward):
        assert cost.seconds(rates) < program.forward.seconds(rates) + program.backward.seconds(rates)
    assert with_whole.forward.seconds(rates) == pytest.approx(eighth.forward.seconds(rates))
    assert with_whole.backward.seconds(rates) == pytest.approx(eighth.backward.seconds(rates))
    assert flat_cost(program.flat.eqns, program.flat.outputs) == before, "the program that is given stays as it is"
    assert all(array.share == 1.0 for array in program.arrays)
