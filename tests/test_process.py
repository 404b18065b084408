"""When the compiler does not answer: each failure is an error that names its cause, and the next call works."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import time
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.errors import CompileError, UnsupportedError
from remat_jax.hardware import target
from remat_jax.memory.compile import cache, compiler, process
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.measure import measure_many
from remat_jax.step import TrainingStep
from tests.workloads import mean_square, needs_gpu_compiler, struct


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without other tests' compiled results or waiting processes."""
    cache.forget()
    process._idle.end()
    monkeypatch.setenv(cache.VARIABLE, "off")


def program(layers: int = 1, name: str = "cpu") -> ExportedProgram:
    def step(x: Any) -> Any:
        for layer in range(layers):
            x = jnp.sin(x @ x.T @ x) * (layer + 1.0) + x
        return x

    return export_step("full", TrainingStep(step, (struct(64, 32),), ()), target(name))


def compiled(exported: ExportedProgram, name: str = "cpu", timeout: float = 120) -> Sizes:
    return compile_programs([exported], target(name), timeout=timeout)[exported.key]


def other_child(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, script: str) -> None:
    """Another script instead of the compile script; `COMPILE` in it stands for that."""
    path = tmp_path / "child.py"
    path.write_text(script.replace("COMPILE", f"__import__('runpy').run_path({str(compiler.CHILD)!r}, run_name='__main__')"))
    monkeypatch.setattr(compiler, "CHILD", path)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import os; os.abort()", r"SIGABRT at policy='full'. Its output: .*. Either the compiler reached a memory limit"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL at policy='full'. Its output: none. .* another process killed it"),
        ("import sys; sys.stderr.write('no room left'); sys.exit(7)", r"exit status 7 .*Its output: no room left$"),
        ("raise MemoryError('x')", r"(?s)exit status 1 .*MemoryError: x. .* out of memory: give it more \(ulimit -v"),
        ("import sys; sys.stderr.write('a' * 600 + 'b' * 9000 + 'c' * 900)", "(?s)output: a{500}\n…\nb{100}c{900}$"),
        ("pass", r"exit status 0 at policy='full'. Its output: none$"),
        ("print('hello'); print('[1]'); raise SystemExit(3)", r"exit status 3"),
        (
            "import json; print(json.dumps({'key': 'full', 'error': 'XlaRuntimeError: RESOURCE_EXHAUSTED'}))",
            r"the compiler refused policy=full: XlaRuntimeError: RESOURCE_EXHAUSTED. The process ran out of memory",
        ),
        (
            "import json; print(json.dumps({'key': 'full', 'error': 'XlaRuntimeError: INTERNAL: Failed to load cuDNN'}))",
            r"refused policy=full: .*Failed to load cuDNN. The operator needs cuDNN: pip install nvidia-cudnn-cu13",
        ),
    ],
)
def test_a_compiler_that_dies_is_an_error_here(monkeypatch, tmp_path, script, message):
    exported = program()
    with monkeypatch.context() as patched:
        other_child(patched, tmp_path, script)
        with pytest.raises(CompileError, match=message) as caught:
            compiled(exported)
    assert str(caught.value).startswith("compiling for target='cpu': ")


def has_ended(pid: str) -> bool:
    state = pathlib.Path("/proc", pid, "stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def children() -> set[int]:
    return {int(pid) for path in pathlib.Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


LIMITED = """
import mmap, resource
held = mmap.mmap(-1, {held} << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
COMPILE
"""


@needs_gpu_compiler
def test_a_compiler_without_memory_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """2 GiB of address space, partly occupied: as if a larger program had taken it by then."""
    exported = program(name="h200")
    with monkeypatch.context() as patched:
        other_child(patched, tmp_path, LIMITED.format(held=1200))
        with pytest.raises(CompileError, match="(?s)'h200': .*policy='?full.*(ran out of memory|reached a memory limit)"):
            compiled(exported, "h200")
    assert compiled(exported, "h200").argument == 64 * 32 * 4


HANGING = """
import pathlib, subprocess, time
pathlib.Path(STARTED).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
time.sleep(600)
"""


def test_a_compiler_that_hangs_is_stopped_with_what_it_started(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    started = tmp_path / "started"
    # It holds the pipe open that this process reads: if it were left alone, this call would wait for it.
    message = "not done after timeout=5 s, stopped at policy='full'. Give a longer timeout"
    with monkeypatch.context() as patched, pytest.raises(CompileError, match=message):
        other_child(patched, tmp_path, HANGING.replace("STARTED", repr(str(started))))
        compiled(program(), timeout=5)
    assert compiled(program()).argument == 64 * 32 * 4, "the next call works"
    assert has_ended(started.read_text())


REFUSING = """
import json, sys, time
keys = [one["key"] for one in json.loads(sys.stdin.readline())["programs"]]
print(json.dumps({"key": keys[0], "error": "refused at once"}), flush=True)
time.sleep(600)
"""


def test_a_refusal_before_the_timeout_is_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    other_child(monkeypatch, tmp_path, REFUSING)
    monkeypatch.setattr(compiler, "MOST_CHILDREN", 1)
    programs = [replace(program(layers + 1), key=key) for layers, key in enumerate(("refused", "late"))]
    with pytest.raises(CompileError, match="refused policy=refused: refused at once"):
        compile_programs(programs, target("cpu"), timeout=3)


SLOW = """
import json, os, pathlib, sys, time
keys = [one["key"] for one in json.loads(sys.stdin.readline())["programs"]]
if "quick" in keys:
    print(json.dumps({"key": "quick", "error": "refused at once"}), flush=True)
    sys.exit()
folder = pathlib.Path(FOLDER)
(folder / f"started_{os.getpid()}").touch()
time.sleep(15)
(folder / "ended").touch()
"""


def slow_child(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
    other_child(monkeypatch, folder, SLOW.replace("FOLDER", repr(str(folder))))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(compiler, "MOST_CHILDREN", 2)


@pytest.mark.parametrize("keys", [("quick", "slow"), ("slow", "quick")])
def test_where_one_step_is_refused_the_others_are_not_waited_for(monkeypatch, tmp_path, keys):
    slow_child(monkeypatch, tmp_path)
    programs = [replace(program(layers + 1), key=key) for layers, key in enumerate(keys)]
    with pytest.raises(CompileError, match="refused policy=quick: refused at once"):
        compile_programs(programs, target("cpu"), timeout=60)
    assert not (tmp_path / "ended").exists()


def test_an_interrupted_call_ends_its_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    slow_child(monkeypatch, tmp_path)

    def interrupted(*_: Any) -> None:
        while len(list(tmp_path.glob("started_*"))) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("remat_jax.memory.measure"), "_residuals", interrupted)
    job = mean_square(nn.Dense(8), struct(8, 8), nn.Dense)
    with pytest.raises(KeyboardInterrupt):
        measure_many(job, ["off", "full"], "cpu", timeout=60)
    assert not (tmp_path / "ended").exists()
    assert all(has_ended(path.name.removeprefix("started_")) for path in tmp_path.glob("started_*"))


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_process_compiles_the_next_program_of_its_caller_and_environment_until_a_long_wait(monkeypatch) -> None:
    before = children()
    assert compiled(program()).argument == 64 * 32 * 4
    (first,) = children() - before
    with pytest.raises(CompileError, match="no_such_option"):
        compile_programs([program(2)], target("cpu"), timeout=60, compiler_options={"no_such_option": "1"})
    assert compiled(program(3)).argument == 64 * 32 * 4
    assert children() - before == {first}
    (mine,) = process._idle._waiting
    if (fork := os.fork()) == 0:
        os._exit(len(process._idle._waiting))
    assert os.waitpid(fork, 0)[1] == 0 and mine.process.poll() is None, "a forked process starts its own"
    with monkeypatch.context() as patched:
        patched.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
        compiled(program())
    (second,) = children() - before - {first}
    monkeypatch.setattr(process, "IDLE_SECONDS", 0.0)
    compiled(program(2))
    assert not children() & {first, second} and len(children() - before) == 1


def test_without_the_gpu_compiler_the_command_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = program()
    monkeypatch.setattr(compat.xla, "gpu_compiler_installed", lambda: False)
    with pytest.raises(UnsupportedError, match=r"pip install 'remat-jax\[gpu-compile\]'.*or use target='cpu'"):
        compiled(exported, "h200")
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(UnsupportedError, match="published for Linux only; use target='cpu' here"):
        compiled(exported, "h200")


def test_an_operator_that_needs_cudnn_is_named_with_its_line_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without cuDNN, wherever this test runs."""

    def missing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("cuDNN not found.")

    # Private JAX: no public function pretends that cuDNN is missing where it is installed.
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", missing)

    def loss(x: Any) -> Any:
        return jax.nn.dot_product_attention(x, x, x, implementation="cudnn").astype(jnp.float32).sum()

    x = struct(2, 512, 4, 64, dtype=jnp.bfloat16)
    with pytest.raises(CompileError) as caught:
        rj.measure(rj.Workload.from_step(jax.grad(loss), x, blocks="*"), "off", "h200")
    message = str(caught.value)
    assert "dot_product_attention at " in message and f"{pathlib.Path(__file__).name}:" in message
    assert "cuDNN not found. The operator needs cuDNN: pip install nvidia-cudnn-cu13" in message
    assert "implementation='xla'" in message and "Pallas" in message


def test_what_libraries_print_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    sizes = dict.fromkeys(("temp", "argument", "output", "alias", "host_temp", "host_argument", "host_output", "host_alias"), 1)
    answer = json.dumps({"key": "full", "sizes": sizes, "untiled": False})
    other_child(monkeypatch, tmp_path, f"print('[1]'); print('{{'); print({answer!r})")
    assert compiled(program()) == Sizes(**sizes, no_time="not modelled for a CPU")
