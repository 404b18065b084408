"""The code of kernels, cached or left out: who has which file, and that sizes do not depend on the code."""

from __future__ import annotations

import os
import shutil

import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.errors import CompileError
from remat_jax.hardware import target
from remat_jax.memory.compile import cache, compiler, options, process
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.options import Kernels
from remat_jax.step import TrainingStep
from tests.small_models import Attention, make_loss
from tests.workloads import needs_gpu_compiler, struct


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
    assert [kernels.take(), kernels.take()] == [second, first] and (third := kernels.take()) not in (first, second)
    kernels.give_back(third)
    assert kernels.take() != third, "a file that nobody wrote is not kept"


XLAS_DEFAULT = "./cuda_sdk_lib"
FILE, APART = "xla_gpu_kernel_cache_file", "xla_gpu_enable_llvm_module_compilation_parallelism"


@pytest.mark.parametrize("lacking", [{APART}, {FILE}])
def test_options_that_this_xla_lacks_are_left_out(monkeypatch, tmp_path, lacking):
    monkeypatch.setattr(compat, "accepts_option", lambda name, value: name not in lacking)
    assert options.kernel_options(tmp_path / "kernels").keys() == {FILE, APART} - lacking


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

        return export_step(str(times), TrainingStep(step, (struct(256, 256),), ()), h200)

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


def small_program(policy, name, *, scanned=False):
    loss, params, x = make_loss(Attention, scanned=scanned)
    return export_step(policy, rj.Workload(loss, params, (x,), Attention).step(policy), target(name))


@needs_gpu_compiler
def test_a_compilation_needs_nothing_of_an_installed_toolkit(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setenv(cache.VARIABLE, "off")
    program, called, installed = small_program("off", "h200"), tmp_path / "called", tmp_path / "bin" / "ptxas"
    installed.parent.mkdir()
    installed.write_text(f"#!/bin/sh\necho installed >> {called}\n")
    installed.chmod(0o700)
    monkeypatch.setenv("PATH", str(installed.parent), prepend=os.pathsep)
    monkeypatch.setattr(options, "_PROGRAM", f"{options._PROGRAM}echo substitute >> {called}\n")
    process.end_idle()  # they have another PATH
    assert compile_programs([program], target("h200"), timeout=300)["off"].temp > 0
    assert set(called.read_text().split()) == {"substitute"}
    cache.forget()
    monkeypatch.setattr(options, "_LIBDEVICE", "no module")
    with pytest.raises(CompileError, match="libdevice"):
        compile_programs([program], target("h200"), timeout=300)


def test_where_no_program_may_run_the_installed_toolkit_is_used(monkeypatch, tmp_path):
    assert options.toolkit_options(tmp_path / "a") == {options.TOOLKIT: str(tmp_path / "a")}
    monkeypatch.setattr(os, "access", lambda *_: False)  # as on a file system mounted with noexec
    assert options.toolkit_options(tmp_path / "b") == {}
    for missing in ("INTERNAL: libdevice not found at ./libdevice.10.bc", "Couldn't find a suitable version of ptxas."):
        assert "noexec" in process._remedy(missing, 0) and "another folder in TMPDIR" in process._remedy(missing, 0)


@pytest.mark.parametrize(("name", "policy"), [("cpu", "off"), pytest.param("h200", "dots", marks=needs_gpu_compiler)])
def test_sizes_are_those_of_a_step_whose_code_is_optimised(monkeypatch, name, policy):
    """Code that never runs is not optimised and not assembled; this takes more than half of the time of a compilation."""
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setenv(cache.VARIABLE, "off")
    program = small_program(policy, name, scanned=policy == "dots")
    optimised = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    if name == "h200" and shutil.which("ptxas"):
        optimised[options.TOOLKIT] = XLAS_DEFAULT  # the installed toolkit
    plain, given = (
        compile_programs([program], target(name), timeout=300, compiler_options=options)[policy]
        for options in (None, optimised)
    )
    assert plain == given and plain.temp > 0
