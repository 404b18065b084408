"""What every test needs: JAX on the CPU, and torch-only tests left out where torch is not installed."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before JAX starts: no test but those marked `gpu` may touch a GPU, or try the CUDA plugin.
# Marks, not paths, which may have the word in them. A worker is given no command line: it inherits what its parent has set.
ON_GPU = (
    os.environ.get("JAX_PLATFORMS") != "cpu"
    if "PYTEST_XDIST_WORKER" in os.environ
    else any("gpu" in word and "not gpu" not in word and "/" not in word and "::" not in word for word in sys.argv[1:])
)
if not ON_GPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A flag that XLA does not know ends the process: later ones have the newer way to write fusions alone.
IN_A_HURRY = (
    ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
    if importlib.metadata.version("jax").startswith("0.10.")
    else ()
)

# What a test compiles it compiles itself: an answer kept by an earlier run would hide a compiler that fails.
os.environ["REMAT_JAX_CACHE"] = "off"

# What they test trains models of both frameworks; every other file in tests/ runs without PyTorch.
TESTS_OF_BOTH = ["tests/test_benchmarks.py", "tests/test_deep_mlp.py"]
WITHOUT_TORCH = importlib.util.find_spec("torch") is None

collect_ignore: list[str] = []
collect_ignore_glob: list[str] = []
if WITHOUT_TORCH:
    # A folder that is named on the command line, or under `testpaths`, is collected even if it is to be ignored.
    collect_ignore_glob += ["torch_ref/*", "parity_tests/*", "examples/pytorch/*"]
    # Their examples compare with PyTorch.
    names = ("capture_torch", "comparison", "localise", "semantics")
    collect_ignore += [
        "remat_jax/porting/float64.py",
        "remat_jax/porting/auto/propose.py",
        *(f"remat_jax/parity/{name}.py" for name in names),
    ]
    collect_ignore += TESTS_OF_BOTH
if os.environ.get("JAX_REMAT3") == "1" and tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) < (0, 12):
    # Its example is what such a JAX cannot do, and is refused (tests/test_jax_policy.py).
    collect_ignore.append("remat_jax/apply/jax_policies.py")


def pytest_configure() -> None:
    """Let this process compile for the CPU in a hurry: half the tests' time would go into machine code that runs once.

    Not said in the environment, so the children that compile and commands that are tested do what a user's would.
    """
    # Tracing makes many objects that live long: by Python's own numbers, a tenth of the time goes into looking through them.
    gc.set_threshold(50_000, 20, 50)
    if ON_GPU:
        return
    import jax

    # LLVM's passes alone are left out, and the older of XLA's ways to write a fusion's code is taken, a third of the time:
    # what XLA does with a program, and how it lays out memory, stays.
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {' '.join(IN_A_HURRY)}".strip())
        jax.devices()  # XLA reads its flags once, as it starts


@pytest.fixture(scope="module", autouse=True)
def garbage_of_this_file_alone() -> None:
    """Leave what earlier files and imports made out of garbage collection: counts of live bytes ask for it all the time.

    Half a second a time, with all that was imported; what a test makes is younger than this.
    """
    gc.collect()
    gc.freeze()


LONG_COLLECTION = 0.05
_collection = {"started": 0.0, "seconds": 0.0}
"""When the last full garbage collection began, and how long it took, by this thread's time."""


def _timed(phase: str, about: dict[str, int]) -> None:
    if phase == "start":
        _collection["started"] = time.thread_time()
    elif about["generation"] == 2:
        _collection["seconds"] = time.thread_time() - _collection["started"]


gc.callbacks.append(_timed)


@pytest.fixture(autouse=True)
def garbage_of_a_few_tests_alone() -> None:
    """Leave out what earlier tests of a file made as well, once there is much of it: some tests collect many times."""
    if _collection["seconds"] > LONG_COLLECTION:
        gc.collect()
        gc.freeze()
        _collection["seconds"] = 0.0


_kernels: dict[tuple[Any, ...], Any] = {}
"""By target and flags, the kernels that XLA's GPU compiler made in this run."""


@pytest.fixture(scope="module", autouse=True)
def kernels_made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let every compilation for a GPU have the kernels of the earlier ones: they are most of its time, and no size is theirs.

    `tests/test_kernels.py` holds that sizes are the same with them, and has none of this run's.
    """
    compiler = sys.modules.get("remat_jax.memory.compile.compiler")
    if compiler is None:
        yield
        return
    answers, kernels_of = compiler._answers, compiler.Kernels

    def with_kernels(entries: Any, target: Any, timeout: float, folder: Path, tell: Any, _: Any, *children: Any) -> Any:
        key = target.compiler_description, target.devices, compiler.compat.xla_flags()
        if key not in _kernels:
            _kernels[key] = kernels_of(tmp_path_factory.mktemp("kernels"))
        return answers(entries, target, timeout, folder, tell, _kernels[key], *children)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiler, "_answers", with_kernels)
        # Both cores have a worker already: a second process would only load the compiler and make the same kernels again.
        patched.setattr(compiler, "MOST_CHILDREN", 1)
        # Starting one takes longer than most compilations, and files that compile nothing take longer than half a minute.
        patched.setattr(sys.modules["remat_jax.memory.compile.process"], "IDLE_SECONDS", 55.0)
        yield


@pytest.fixture(autouse=True)
def search_path_of_this_test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what loading a user's file adds to `sys.path`: a `types.py` of one test is no module of the next one's."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(autouse=True)
def warnings_of_this_test_alone() -> None:
    """Forget which lines had which of our warnings: a line of a test with parameters runs once for each."""
    if "remat_jax.warning" in sys.modules:
        sys.modules["remat_jax.warning"]._given.clear()


@pytest.fixture
def children_as_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the processes that compile do it as this one does, where their figures are compared."""
    monkeypatch.setenv("XLA_FLAGS", " ".join(IN_A_HURRY))


@pytest.fixture(scope="session")
def in_a_hurry() -> dict[str, str]:
    """The environment of a command that compiles for the CPU what it runs a few times, as this process does."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {' '.join(IN_A_HURRY)}".strip()
    return {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": flags}


@pytest.fixture(scope="session")
def on_eight_devices(tmp_path_factory: pytest.TempPathFactory, in_a_hurry: dict[str, str]) -> Callable[..., Path]:
    """Run a module of the tests as a script on eight devices of a processor, with the path of the file that it is to write.

    How many devices there are is settled when JAX starts, so that it takes a process of its own.
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
def x64() -> Iterator[None]:
    """Run the test with JAX's 64-bit types."""
    import jax

    with jax.enable_x64(True):
        yield
