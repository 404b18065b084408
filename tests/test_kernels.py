"""Kernels that are cached between compilations: who has which file, and that sizes do not depend on the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.hardware import target
from remat_jax.memory.compile import cache, compiler
from remat_jax.memory.compile import options as of_kernels
from remat_jax.memory.compile.compiler import compile_programs, export_step
from remat_jax.memory.compile.options import Kernels
from remat_jax.workload import TrainingStep
from tests.small_models import Attention, make_loss

needs_gpu_compiler = pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="XLA's GPU compiler is not installed")


@pytest.fixture(scope="module", autouse=True)
def kernels_made_once():
    """Replaces the fixture that shares kernels between files: these tests start without any."""


def test_a_file_is_of_one_process_at_a_time_and_the_fullest_is_taken_first(tmp_path):
    kernels = Kernels(tmp_path)
    first, second = kernels.take(), kernels.take()
    assert first != second
    first.write_bytes(b"1")
    second.write_bytes(b"22")
    kernels.give_back(first)
    kernels.give_back(second)
    assert [kernels.take(), kernels.take()] == [second, first] and kernels.take() not in (first, second)


def test_a_file_that_nobody_wrote_is_not_kept(tmp_path):
    kernels = Kernels(tmp_path)
    kernels.give_back(kernels.take())
    assert kernels.take().name == "kernels_2"


OTHER = """
import json, sys
request = json.loads(sys.stdin.readline())
for one in request["programs"]:
    options = one["compiler_options"]
    for name in {unknown}:
        if name in options:
            print(json.dumps({{"key": one["key"], "error": f"No such compile option: {{name!r}}"}}), flush=True)
            break
    else:
        kept = [name for name in options if name.startswith(("xla_gpu_kernel_cache", "xla_gpu_enable_llvm"))]
        sizes = dict.fromkeys(("argument", "output", "alias", "temp", "host_argument", "host_output", "host_alias"), 0)
        print(json.dumps({{"key": one["key"], "untiled": False, "sizes": sizes | {{"host_temp": len(kept)}}}}), flush=True)
"""
FILE, APART = "xla_gpu_kernel_cache_file", "xla_gpu_enable_llvm_module_compilation_parallelism"


@pytest.mark.parametrize(("unknown", "children"), [([APART], [2, 1, 1]), ([FILE], [2, 1, 1]), ([FILE, APART], [2, 1, 0, 0])])
def test_an_option_that_this_compiler_does_not_know_is_left_out_from_then_on(monkeypatch, tmp_path, unknown, children):
    monkeypatch.setenv(cache.VARIABLE, "off")
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(of_kernels, "_refused", set())
    monkeypatch.setattr(compat, "require_gpu_compiler", lambda: None)
    (tmp_path / "child.py").write_text(OTHER.format(unknown=unknown))
    monkeypatch.setattr(compiler, "CHILD", tmp_path / "child.py")
    asked = []

    def noted(question, *rest, real=compiler.ask):
        asked.append(len({FILE, APART} & question.request["programs"][0]["compiler_options"].keys()))
        return real(question, *rest)

    monkeypatch.setattr(compiler, "ask", noted)
    step = TrainingStep(lambda x: x * 2, (jax.ShapeDtypeStruct((4,), jnp.float32),), ())
    program = export_step("one", step, target("h200"))
    for _ in range(2):
        cache.forget()
        sizes = compile_programs([program], target("h200"), timeout=60)["one"]
        assert sizes.host_temp == children[-1]
    assert asked == children


@needs_gpu_compiler
def test_sizes_are_the_same_with_the_kernels_of_another_step_and_with_a_file_that_xla_refuses(monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, "off")
    monkeypatch.setattr(cache, "_memory", {})
    h200 = target("h200")

    def program(times):
        def step(x):
            for _ in range(times):
                x = jnp.sin(x @ x) + x
            return x

        return export_step(str(times), TrainingStep(step, (jax.ShapeDtypeStruct((256, 256), jnp.float32),), ()), h200)

    def sizes(times, kernels):
        cache.forget()
        return compile_programs([program(times)], h200, timeout=400, kernels=kernels)[str(times)]

    alone = sizes(3, None)
    with Kernels.temporary() as kernels:
        sizes(2, kernels)
        file = kernels.take()
        before = file.read_bytes()
        assert before
        kernels.give_back(file)
        assert sizes(3, kernels) == alone
        taken = kernels.take()
        assert taken == file and len(taken.read_bytes()) >= len(before)
        # The same kernel under two names, as two concatenated files would have it.
        taken.write_bytes(before + before.replace(b"fusion", b"nofusi"))
        kernels.give_back(taken)
        asked = []
        monkeypatch.setattr(compiler, "ask", lambda *given, real=compiler.ask: asked.append(given) or real(*given))
        assert sizes(3, kernels) == alone and len(asked) == 2


@pytest.mark.parametrize("name", ["cpu", pytest.param("h200", marks=needs_gpu_compiler)])
@pytest.mark.parametrize("policy", ["off", "dots"])
def test_sizes_are_those_of_a_step_whose_code_is_optimised(monkeypatch, name, policy):
    """By default code that never runs is not optimised, which takes half the time of a compilation."""
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setenv(cache.VARIABLE, "off")
    loss, params, x = make_loss(Attention, scanned=policy == "dots")
    job = rj.Workload(loss, params, (x,), Attention)
    program = export_step(policy, job.step(policy), target(name))
    optimised = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    optimised |= {"xla_gpu_disable_gpuasm_optimizations": False} if name == "h200" else {}
    plain, given = (
        compile_programs([program], target(name), timeout=300, compiler_options=options)[policy]
        for options in (None, optimised)
    )
    assert plain == given and plain.temp > 0
