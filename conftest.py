"""Settings of every test: JAX runs on the CPU, and tests of PyTorch are skipped where PyTorch is not installed."""

from __future__ import annotations

import atexit
import gc
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest import runner

# Only tests marked `gpu` may use a GPU or load the CUDA plugin; this must be decided before JAX starts.
# `gpu` is looked for in marks, not in paths. An xdist worker has no command line, but inherits its parent's environment.
ON_GPU = (
    os.environ.get("JAX_PLATFORMS") != "cpu"
    if "PYTEST_XDIST_WORKER" in os.environ
    else any("gpu" in word and "not gpu" not in word and "/" not in word and "::" not in word for word in sys.argv[1:])
)
if not ON_GPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Only for the JAX that constraints.txt pins: later versions of XLA have no second fusion emitter to choose, and an unknown flag
# ends the process.
IN_A_HURRY = (
    ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
    if importlib.metadata.version("jax").startswith("0.10.")
    else ()
)

# One folder of compiled programs for all processes of this run; two fifths of the programs are compiled more than once.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["REMAT_JAX_TESTS_COMPILED"] = tempfile.mkdtemp(prefix="remat_jax_tests_")
    atexit.register(shutil.rmtree, os.environ["REMAT_JAX_TESTS_COMPILED"], ignore_errors=True)
UNREADABLE = "Error reading persistent compilation cache entry"
"""JAX's warning about an entry that another process is writing; the program is then compiled again."""
COMPILED_ONCE: dict[str, Any] = {
    "JAX_COMPILATION_CACHE_DIR": os.environ["REMAT_JAX_TESTS_COMPILED"],
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0.0,
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1,
}

# No results cached by an earlier run: they would hide a failing compiler.
os.environ["REMAT_JAX_CACHE"] = "off"

# These two train models of both frameworks; every other file in tests/ runs without PyTorch.
TESTS_OF_BOTH = ["tests/test_benchmarks.py", "tests/test_deep_mlp.py"]
WITHOUT_TORCH = importlib.util.find_spec("torch") is None

collect_ignore: list[str] = []
collect_ignore_glob: list[str] = []
if WITHOUT_TORCH:
    # `collect_ignore` does not apply to folders named on the command line or in `testpaths`; patterns do.
    collect_ignore_glob += ["torch_ref/*", "parity_tests/*", "examples/pytorch/*"]
    # The examples in these docstrings use PyTorch.
    names = ("capture_torch", "comparison", "localise", "semantics")
    collect_ignore += [
        "remat_jax/porting/float64.py",
        "remat_jax/porting/auto/propose.py",
        *(f"remat_jax/parity/{name}.py" for name in names),
    ]
    collect_ignore += TESTS_OF_BOTH
if os.environ.get("JAX_REMAT3") == "1" and tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) < (0, 12):
    # Its example does not run with remat3 on these versions of JAX (tests/test_jax_policy.py).
    collect_ignore.append("remat_jax/apply/jax_policies.py")


def pytest_configure() -> None:
    """Compile for the CPU with few optimizations: optimizing code that runs once would take half of the tests' time.

    Equal programs are compiled once for all workers. The environment is not changed, so compile processes, and commands that
    are tested without `in_a_hurry`, run as they do for a user.
    """
    # Tracing makes many long-lived objects: with Python's default thresholds, a tenth of the time is garbage collection.
    gc.set_threshold(50_000, 20, 50)
    if ON_GPU:
        return
    import jax

    if IN_A_HURRY:
        _share_mlir_contexts()
    jax.monitoring.register_event_duration_secs_listener(_count_lowered)
    # Only LLVM's passes are skipped, and fusions use XLA's older emitter, which takes a third of the time. XLA's own passes
    # and its memory assignment are unchanged.
    jax.config.update("jax_disable_most_optimizations", True)
    for option, value in COMPILED_ONCE.items():
        jax.config.update(option.lower(), value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {' '.join(IN_A_HURRY)}".strip())
        jax.devices()  # XLA reads its flags once, as it starts


def pytest_collection_finish() -> None:
    """Exempt what the imports made from garbage collection: millions of objects that stay alive until the end."""
    gc.collect()
    gc.freeze()


LOWERED_TOGETHER = 200


def _share_mlir_contexts() -> None:
    """Lower many programs in one MLIR context: making one takes longer than lowering a single operation, and JAX keeps it.

    Without this, the tests of `remat`, NNX and policies by layer take 9 % more processor time; without the large frame 8 %, and
    without freezing objects 2 %. This private JAX is not in `remat_jax.compat`, because only the tests use it.
    """
    from jax._src.interpreters import mlir

    make, shared = mlir.make_ir_context, list[Any]()

    def context() -> Any:
        if not shared:
            shared.extend([make()] * LOWERED_TOGETHER)
        return shared.pop()

    mlir.make_ir_context = context


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


# A frame of more than half a mebibyte. Python keeps frames in chunks of 16 KiB. It maps a new chunk when a call does not fit in
# the last one, and unmaps it as soon as that call returns. Tracing calls deeply and crosses such a border thousands of times a
# second. The chunk of a large frame has a mebibyte, in which all further frames fit: half of the time in the kernel is saved, a
# tenth of the tests' time.
_call.__code__ = _call.__code__.replace(co_stacksize=70_000)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    """Run each test above a large frame."""
    return _call(runner.pytest_runtest_protocol, item, nextitem)


MOST_LOWERED = 1000
_lowered = {"programs": 0}
"""The number of programs lowered since JAX's caches were cleared."""


def _count_lowered(event: str, *_: Any, **__: Any) -> None:
    _lowered["programs"] += event.endswith("jaxpr_to_mlir_module_duration")


@pytest.fixture(scope="module", autouse=True)
def garbage_of_this_file_alone() -> None:
    """Exclude objects of imports and of earlier files from garbage collection: a full collection would take half a second.

    Tests that count live bytes collect often. JAX's caches keep an MLIR context for each lowered program. Each context takes
    memory and slows the next lowering, so the caches are cleared after many programs.
    """
    forget_programs()


def forget_programs(most: int = MOST_LOWERED) -> None:
    """Clear JAX's caches after more than `most` programs, and exempt what is left from garbage collection."""
    if _lowered["programs"] > most:
        import jax

        jax.clear_caches()
        gc.unfreeze()
        _lowered["programs"] = 0
    gc.collect()
    gc.freeze()


LONG_COLLECTION = 0.05
_collection = {"started": 0.0, "seconds": 0.0}
"""The start and the duration of the last full garbage collection, in seconds of this thread's processor time."""


def _timed(phase: str, about: dict[str, int]) -> None:
    if phase == "start":
        _collection["started"] = time.thread_time()
    elif about["generation"] == 2:
        _collection["seconds"] = time.thread_time() - _collection["started"]


gc.callbacks.append(_timed)


@pytest.fixture(autouse=True)
def garbage_of_a_few_tests_alone() -> None:
    """Exclude objects of earlier tests in the same file too, once collections take long."""
    if _collection["seconds"] > LONG_COLLECTION:
        gc.collect()
        gc.freeze()
        _collection["seconds"] = 0.0


_kernels: dict[tuple[Any, ...], Any] = {}
"""The kernels that XLA's GPU compiler made in this run, by target and flags."""


@pytest.fixture(scope="module", autouse=True)
def kernels_made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Reuse compiled GPU kernels in all files: they take most of the compile time and do not affect sizes.

    `tests/test_kernels.py` tests that sizes are equal with and without reuse; it does not use this cache.
    """
    compiler = sys.modules.get("remat_jax.memory.compile.compiler")
    if compiler is None:
        yield
        return
    answers, kernels_of = compiler._answers, compiler.Kernels
    tmp_path_factory.getbasetemp()  # pytest makes it at its first use, which may be in two threads of one plan

    def with_kernels(entries: Any, target: Any, timeout: float, folder: Path, tell: Any, _: Any, *children: Any) -> Any:
        key = target.compiler_description, target.devices, sys.modules["remat_jax.compat"].xla_flags()
        if key not in _kernels:
            _kernels[key] = kernels_of(tmp_path_factory.mktemp("kernels"))
        return answers(entries, target, timeout, folder, tell, _kernels[key], *children)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiler, "_answers", with_kernels)
        # Both cores run a test worker already: a second compile process would only load the compiler again.
        patched.setattr(compiler, "MOST_CHILDREN", 1)
        # Starting a compile process takes longer than most compilations, so keep it while other files run.
        patched.setattr(sys.modules["remat_jax.memory.compile.process"], "IDLE_SECONDS", 600.0)
        yield


@pytest.fixture(autouse=True)
def search_path_of_this_test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore `sys.path`, which loading a user's file extends: one test's `types.py` must not be imported by the next."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(autouse=True)
def warnings_of_this_test_alone() -> None:
    """Forget which lines have warned already, so that each case of a parametrized test warns again."""
    if "remat_jax.warning" in sys.modules:
        sys.modules["remat_jax.warning"]._given.clear()


@pytest.fixture
def children_as_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give compile processes the flags of this process, for tests that compare their figures."""
    monkeypatch.setenv("XLA_FLAGS", " ".join(IN_A_HURRY))


@pytest.fixture(scope="session")
def in_a_hurry() -> dict[str, str]:
    """The environment of a command that compiles for the CPU as this process does: few optimizations, each program once."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {' '.join(IN_A_HURRY)}".strip()
    once = {option: str(value) for option, value in COMPILED_ONCE.items()} | {"PYTHONWARNINGS": f"ignore:{UNREADABLE}"}
    return {**os.environ, **once, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": flags}


@pytest.fixture(scope="session")
def on_eight_devices(tmp_path_factory: pytest.TempPathFactory, in_a_hurry: dict[str, str]) -> Callable[..., Path]:
    """Run a test module as a script on eight CPU devices; its argument is the path of the file to write.

    The number of devices is fixed when JAX starts, so the script needs its own process.
    """

    def run(module: str, name: str, **environment: str) -> Path:
        path = tmp_path_factory.mktemp("on_eight_devices") / name
        flags = f"{in_a_hurry['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
        eight = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        command = [sys.executable, "-m", module, str(path)]
        root = Path(__file__).parent
        done = subprocess.run(
            command, env=in_a_hurry | eight | environment, capture_output=True, text=True, timeout=480, cwd=root, check=False
        )
        assert done.returncode == 0, done.stderr
        return path

    return run


@pytest.fixture
def remat3() -> Iterator[None]:
    """Run the test with JAX's new rematerialisation."""
    import jax

    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


@pytest.fixture
def with_flags() -> Iterator[Callable[[Iterable[str]], None]]:
    """A function that switches flags of JAX on for the rest of the test."""
    import jax

    before: dict[str, Any] = {}

    def switch_on(flags: Iterable[str]) -> None:
        for flag in flags:
            before.setdefault(flag, getattr(jax.config, flag))
            jax.config.update(flag, True)

    yield switch_on
    for flag, value in before.items():
        jax.config.update(flag, value)


@pytest.fixture
def x64() -> Iterator[None]:
    """Run the test with JAX's 64-bit types."""
    import jax

    with jax.enable_x64(True):
        yield
