"""XLA_FLAGS as XLA reads it: flags, or the name of a file of flags, to which nothing can be added."""

from __future__ import annotations

import os
import pathlib
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.errors import CompileError
from remat_jax.hardware import target
from remat_jax.memory.compile import cache, compiler, devices
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.process import Question
from remat_jax.step import TrainingStep
from tests.workloads import struct

GPU = compat.GPU_COMPILER_FLAGS


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "flags"
    path.write_text("--xla_a=1\n  --xla_b=2\n")
    monkeypatch.setenv("XLA_FLAGS", str(path))
    return path


@pytest.mark.parametrize(("given", "joined"), [("", "--more"), ("--own", "--own --more"), (" \n--own ", "--own --more")])
def test_flags_are_joined(monkeypatch: pytest.MonkeyPatch, given: str, joined: str) -> None:
    monkeypatch.setenv("XLA_FLAGS", given)
    assert compat.xla_flags("--more") == joined
    monkeypatch.delenv("XLA_FLAGS")
    assert (compat.xla_flags(), compat.xla_flags("--more")) == ("", "--more")


@pytest.mark.parametrize(
    ("given", "passes"),
    [
        ("--xla_disable_hlo_passes=", ()),
        ("--xla_disable_hlo_passes=a,b --xla_dump_to= --xla_disable_hlo_passes='c'", ("a", "b", "c")),
        ('--other=--xla_disable_hlo_passes=a --xla_disable_hlo_passes="b"', ("b",)),
    ],
)
def test_the_passes_that_are_left_out(monkeypatch: pytest.MonkeyPatch, given: str, passes: tuple[str, ...]) -> None:
    monkeypatch.setenv("XLA_FLAGS", given)
    assert compat.disabled_passes() == passes


def test_flags_of_a_file_are_read_before_others_are_joined(monkeypatch: pytest.MonkeyPatch, file: pathlib.Path) -> None:
    user_flags = "--xla_a=1\n  --xla_b=2"
    assert compat.xla_flags() == user_flags
    for name, flag in (("h200", GPU), ("2xcpu", "--xla_force_host_platform_device_count=2")):
        assert backend_of(target(name)).environment(target(name))["XLA_FLAGS"] == f"{user_flags} {flag}"
    asked: list[Question] = []

    def answer(question: Question) -> dict[str, Any]:
        asked.append(question)
        return {"the attached GPU": {"device_kind": "NVIDIA H200"}}

    monkeypatch.setattr(devices, "ask", answer)
    assert devices.device_kind() == "NVIDIA H200" and asked[0].environment["XLA_FLAGS"] == f"{user_flags} {GPU}"


def program() -> ExportedProgram:
    return export_step("full", TrainingStep(jnp.sin, (struct(8),), ()), target("cpu"))


def test_a_step_is_compiled_with_the_flags_of_a_file(file: pathlib.Path) -> None:
    cache.forget()
    file.write_text("--xla_cpu_enable_fast_math=false\n")
    assert compile_programs([program()], target("2xcpu"), timeout=60)["full"].argument == 32
    file.write_text("--xla_no_such_flag=1\n")
    cache.forget()
    with pytest.raises(CompileError, match="(?s)Its output: .*--xla_no_such_flag=1"):
        compile_programs([program()], target("2xcpu"), timeout=60)


def test_what_was_compiled_with_other_flags_of_the_same_file_is_no_answer(file: pathlib.Path) -> None:
    before = cache.digest(program(), target("h200"), {}, compiler.CHILD)
    job = rj.Workload(lambda w, x: (x * w).sum(), jnp.ones(4), (jnp.ones(4),), blocks="*")
    file.write_text("--xla_cpu_enable_fast_math=false\n")
    assert cache.digest(program(), target("h200"), {}, compiler.CHILD) != before
    first = rj.measure(job, "off")
    assert rj.measure(job, "off") is first
    file.write_text("--xla_cpu_enable_fast_math=true\n")
    again = rj.measure(job, "off")
    assert again is not first and replace(again) == first


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (lambda file: None, "No such file"),
        (os.mkfifo, "not a regular file"),
        (lambda file: file.write_bytes(b"-" * (2**16 + 1)), "more than 65536 bytes"),
        (lambda file: file.write_bytes(b"--xla_a=\0"), "a null byte"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_with_the_remedy(file: pathlib.Path, put: Any, reason: str) -> None:
    file.unlink()
    put(file)
    message = rf"(?s)^XLA_FLAGS='.*flags' does not begin with '-'.*{reason}.*: name an existing file"
    with pytest.raises(CompileError, match=message):
        rj.measure(rj.Workload(lambda w: w.sum(), jnp.ones(4), (), blocks="*"), "off")
