"""Copies in loops overlap compute only with a compiler option that leaves them outside CUDA graphs."""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.memory.compile.options import GRAPHS, KINDS, OPTION, overlapping_options
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.hlo.copies import starts_slice_copies
from remat_jax.memory.hlo.text import parse
from tests.gpu_text import compile_for_h200
from tests.plan_by_hand import plan as plan_by_hand
from tests.small_models import Mlp, Stack
from tests.workloads import mean_square, struct


@pytest.mark.versions
def test_the_option_is_xlas_default_without_the_copies_of_slices_and_dumps_are_read(tmp_path: pathlib.Path) -> None:
    dump = {"xla_dump_to": str(tmp_path / "dump"), "xla_dump_hlo_as_proto": True, "xla_dump_hlo_as_text": True}
    sort = "lambda x: jnp.cumsum(jax.lax.sort((x, jnp.sin(x)), num_keys=1)[1])"
    compile_for_h200(tmp_path, f'options |= {dump!r}\nkeep("sort", {sort}, struct((4096,)))')
    configs = [path.read_text() for path in (tmp_path / "dump").glob("*config.pbtxt")]
    default = set(re.findall(rf"{GRAPHS}: (\w+)", "\n".join(configs)))
    assert default - {"DYNAMIC_SLICE_FUSION"} == set(overlapping_options()[GRAPHS].split(",")) != default
    # Every operand of the dumped module is known.
    dumped = parse(max((tmp_path / "dump").glob("*gpu_after_optimizations.txt")).read_text())
    instructions = [each for computation in dumped.computations.values() for each in computation]
    assert any(each.opcode == "get-tuple-element" for each in instructions)
    assert all(each.opcode in ("parameter", "constant", "iota") for each in instructions if None in each.inputs)


def workload(*, scanned: bool) -> rj.Workload:
    """Eight blocks on 64 MB each, of which `full` keeps the inputs."""
    return mean_square(Stack(Mlp, 8, scanned), struct(2**14, 2**10), Mlp, optimizer=optax.sgd(1e-3))


CASES = [(True, "offload_inputs", True), (True, "full", False), (False, "offload_inputs", False)]


@pytest.mark.versions
@pytest.mark.parametrize(("scanned", "policy", "needed"), CASES)
def test_only_a_scan_that_offloads_needs_the_option(scanned: bool, policy: str, needed: bool) -> None:
    report = rj.measure(workload(scanned=scanned), policy, "h200")
    assert report.compiler_options == (overlapping_options() if needed else {})
    assert ("overlap compute only with jax.jit" in " ".join(str(report).split())) == needed
    assert report.to_dict()["compiler_options"] == report.compiler_options


def test_a_users_own_graphs_stay_and_a_memory_limit_is_beside_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    report = rj.measure(workload(scanned=True), "offload_inputs", "h200", memory_limit="1GiB")
    assert report.compiler_options == {OPTION: 1, **overlapping_options()}
    # A CPU accepts the options of a GPU and ignores them.
    assert float(jax.jit(jnp.sin, compiler_options=overlapping_options())(0.0)) == 0.0
    monkeypatch.setenv("XLA_FLAGS", f"--{GRAPHS}=")
    assert rj.measure(workload(scanned=True), "offload_inputs", "h200").compiler_options == {}


def test_a_plan_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # JAX 0.10.2 miscompiles the step, but nothing runs here.
    monkeypatch.setattr(compat, "miscompiles_scanned_offload", lambda: False)
    monkeypatch.setattr(Sizes, "is_miscompiled", False)
    job = workload(scanned=True)
    offloaded, full = (rj.measure(job, policy, "h200").device_bytes for policy in ("offload_inputs", "full"))
    with pytest.warns(rj.RematWarning, match="give them to the jax.jit of the step"):
        plan = rj.plan(job, (offloaded + full) // 2, "h200")
    assert plan.host_bytes > 0 and plan.compiler_options == overlapping_options()
    assert any("overlap compute only with plan.compiler_options" in note for note in plan.notes)
    reason = "The copies in loops overlap compute only with these options"
    assert f"{reason}: jax.jit(step, compiler_options={overlapping_options()!r})." in plan.explain()
    both = plan_by_hand(compiler_options={OPTION: 29, **overlapping_options()})
    assert f"Compiled with a memory limit. {reason}: " in both.explain()


def test_a_copy_outside_loops_or_without_a_later_wait_or_of_a_whole_array_does_not_count() -> None:
    body = "  ROOT %c = f32[2,8]{1,0:S(5)} fusion(%x), kind=kLoop, calls=%f\n"
    started = body.replace("fusion(", "fusion-start(")
    slices = (
        "%f (p: f32[2,8]) -> f32[1,8] {\n  %p = f32[2,8]{1,0:S(5)} parameter(0)\n"
        "  ROOT %s = f32[1,8]{1,0} dynamic-slice(%p), dynamic_slice_sizes={1,8}\n}\n"
    )
    whole = "  ROOT %c = (f32[2,8]{1,0}, f32[2,8]{1,0:S(5)}, u32[]) copy-start(%x)\n"
    cases = ((started, "%loop ", True), (body, "%loop ", False), (started, "ENTRY %loop ", False), (whole, "%loop ", False))
    for line, where, expected in cases:
        entry = "" if where.startswith("ENTRY") else "ENTRY %main (y: f32[8]) -> f32[8] {\n  ROOT %y = f32[8] parameter(0)\n}\n"
        text = f"{slices}{where}(x: f32[2,8]) -> f32[2,8] {{\n  %x = f32[2,8]{{1,0:S(5)}} parameter(0)\n{line}}}\n{entry}"
        assert starts_slice_copies(parse(text)) is expected


def test_an_option_that_xla_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.accepts_option(GRAPHS, KINDS)
    assert not compat.accepts_option(GRAPHS, "NO_SUCH_KIND") and not compat.accepts_option("xla_no_such_option", 1)
    sizes = Sizes(*range(8), starts_slice_copies=True)
    assert sizes.compiler_options == overlapping_options() != {}
    monkeypatch.setattr(compat, "accepts_option", lambda name, value: False)
    assert sizes.compiler_options == {}
