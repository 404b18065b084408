"""A scanned offload as compiled for a GPU: the slot of its copies, and its refusal."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys

import jax
import pytest

import remat_jax
from remat_jax import compat
from remat_jax.compat import versions
from remat_jax.errors import UnsupportedError
from remat_jax.hardware import target
from remat_jax.memory.hlo.slots import scanned_offload_is_miscompiled
from tests.gpu_text import Compiled, compile_for_h200
from tests.overlap_at_rates import read_overlap
from tests.test_measure import workload
from tests.workloads import needs_gpu_compiler

ROOT = pathlib.Path(__file__).resolve().parents[1]
CURE = "--xla_disable_hlo_passes=dynamic-slice-annotator"

SCANNED = """
import remat_jax as rj

def block(x, w):
    return x + jax.nn.gelu(x @ w[0]) @ w[1]

def loss(ws, x):
    body = rj.remat(block, "offload_dot_with_no_batch_dims")
    return (jax.lax.scan(lambda x, w: (body(x, w), None), x, ws)[0] ** 2).mean()

keep("scanned", jax.grad(loss), (struct((8, 64, 256)), struct((8, 256, 64))), struct((16384, 64)))
"""
HOST = 8 * 16384 * 256 * 4


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compile_for_h200(tmp_path_factory.mktemp("scanned"), SCANNED)["scanned"]


@pytest.mark.versions
@needs_gpu_compiler
def test_a_scanned_offload_is_judged_as_it_is_compiled(scanned: Compiled) -> None:
    assert scanned.host_temp == HOST
    assert scanned_offload_is_miscompiled(scanned.text) == (compat.JAX_VERSION in compat.SCANNED_OFFLOAD_MISCOMPILED)
    overlap = read_overlap(scanned.text, target("h200"))
    assert (overlap.out.bytes, overlap.back.bytes, overlap.out.count, overlap.back.count) == (HOST, HOST, 8, 8)


@needs_gpu_compiler
def test_without_the_pass_the_copies_are_right_and_the_memory_is_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, scanned: Compiled
) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {CURE}".strip())
    cured = compile_for_h200(tmp_path, SCANNED)["scanned"]
    assert not scanned_offload_is_miscompiled(cured.text)
    assert cured.host_temp == HOST and cured.temp <= scanned.temp
    # The warning disappears with the fault.
    assert remat_jax.measure(workload(scan=True), "offload_inputs", "h200").receipt.warnings == ()


# --- the refusal where it would run -----------------------------------------------------------------------------------


def differentiate(scan: bool = True) -> None:
    step = workload(scan=scan, rows=64).step("offload_inputs")
    jax.eval_shape(step.function, *step.arguments)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX 0.11.0 with a GPU that is not the default device, and an XLA that does not report its flags."""
    monkeypatch.setattr(versions, "JAX_VERSION", (0, 11, 0))
    monkeypatch.setattr(jax, "devices", lambda platform=None: ["a GPU"] if platform == "gpu" else ["a CPU"])
    monkeypatch.setattr(versions, "_cured_here", lambda: None)
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.usefixtures("a_gpu")
def test_where_a_gpu_could_run_it_a_scanned_offload_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=f"gradients are silently wrong .*XLA_FLAGS={CURE}"):
        differentiate()
    differentiate(scan=False)


# Whether a scanned offload is refused under these flags.
FLAGS = {
    CURE: False,
    f"--xla_dump_to= {CURE},other --xla_dump_max_hlo_modules=2": False,
    "--xla_disable_hlo_passes=other": True,
    f"{CURE} --xla_disable_hlo_passes=other": False,  # XLA leaves out the passes of both
    "--xla_disable_hlo_passes='other,dynamic-slice-annotator'": False,
    "--xla_dump_hlo_pass_re=dynamic-slice-annotator": True,
    "--xla_disable_hlo_passes=not-dynamic-slice-annotator": True,
}


@pytest.mark.usefixtures("a_gpu")
def test_where_xla_does_not_say_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, refused in FLAGS.items():
        monkeypatch.setenv("XLA_FLAGS", flags)
        with pytest.raises(UnsupportedError, match="openxla/xla#46231") if refused else contextlib.nullcontext():
            differentiate()


@pytest.mark.usefixtures("a_gpu")
def test_xla_itself_is_asked_whether_the_pass_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_cured_here", lambda: True)
    differentiate()
    # Set after XLA's start it changes nothing here, but in a compile process it does.
    monkeypatch.setattr(versions, "_cured_here", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", CURE)
    assert not compat.miscompiles_scanned_offload()
    with pytest.raises(UnsupportedError, match="openxla/xla#46231"):
        differentiate()


ASKING = f"""
import os
import sys
import jax
from remat_jax.compat import versions

for flags in sys.argv[1:]:
    # XLA starts in each process anew; importing JAX, most of the time, starts nothing.
    if os.fork() == 0:
        os.environ["XLA_FLAGS"] = flags
        told = [versions._cured_here()]
        jax.jit(lambda x: x + 1)(1.0)
        os.environ["XLA_FLAGS"] = "{CURE}"
        jax.jit(lambda x: x + 2)(1.0)
        print(*told, versions._cured_here(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.versions
def test_xla_says_what_it_read_when_it_started(tmp_path: pathlib.Path) -> None:
    """Before and after other flags are set."""
    file = tmp_path / "flags"
    file.write_text(f"{CURE}\n")
    refused = {"": True, str(file): False, **dict(list(FLAGS.items())[:4])}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ASKING, *refused]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    said = dict(zip(refused, map(str.split, done.stdout.splitlines()), strict=True))
    assert said == {flags: [str(not is_refused)] * 2 for flags, is_refused in refused.items()}


@pytest.mark.usefixtures("a_gpu")
def test_a_jax_that_compiles_it_right_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ((0, 11, 1), (0, 11, 2), (0, 12, 0)):
        monkeypatch.setattr(versions, "JAX_VERSION", version)
        differentiate()


def test_where_no_gpu_is_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "JAX_VERSION", (0, 11, 0))
    assert not versions.has_gpu()
    differentiate()
