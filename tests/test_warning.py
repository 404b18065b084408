from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import remat_jax as rj
from remat_jax import compat, warning
from remat_jax.hardware import google, nvidia
from tests.workloads import perceptrons

ROOT = Path(__file__).resolve().parents[1]
LINE = ROOT / "remat_jax_quiet.pth"
NO_GPU = not any(Path(path).exists() for path in nvidia.DEVICES)
WITHOUT_GPU = pytest.mark.skipif(
    not (NO_GPU and compat.gpu_compiler_installed()), reason="JAX's CUDA plugin is not installed, or there is a GPU for it"
)


def output(code: str, **environment: str) -> str:
    """Everything that a new Python process prints that runs `code`, started as a user starts it."""
    plain = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "default", "-c", code]
    done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout + done.stderr


@WITHOUT_GPU
def test_jax_prints_nothing_after_our_import() -> None:
    assert output("import remat_jax, jax; jax.devices()") == ""
    # Where no CUDA runtime is found, the plugin prints a line for each of its libraries.
    maps = "import pathlib; print({x for x in pathlib.Path('/proc/self/maps').read_text().split() if 'libcudart' in x})"
    printed = output(f"import jax, remat_jax; jax.devices(); {maps}")
    assert printed.count("/site-packages/nvidia/") == printed.count("libcudart") == printed.count("\n") == 1


@WITHOUT_GPU
def test_jax_prints_nothing_in_a_script_that_does_not_know_us(tmp_path: Path) -> None:
    """Python runs the `.pth` files of a site folder at its start, as `site.addsitedir` does here.

    libtpu's lines are of no concern here (docs/limits.md).
    """
    script = "import sys, jax; jax.devices(); assert 'remat_jax' not in sys.modules"
    (tmp_path / LINE.name).write_text(LINE.read_text())
    assert output(f"import site; site.addsitedir({str(tmp_path)!r}); {script}", **google.QUIET) == ""
    # An empty value is set by a user and asks for the check.
    installed = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages", LINE.name).exists()
    assert ("cuDNN" in output(script, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="")) or installed


def test_the_startup_line_looks_for_the_same_devices() -> None:
    assert repr(nvidia.DEVICES) in LINE.read_text() and LINE.read_text().count("\n") == 1


@pytest.mark.parametrize("start", ["function", "line"])
def test_nothing_is_skipped_where_a_gpu_is(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "nvidiactl"
    line = LINE.read_text().replace(repr(nvidia.DEVICES), repr((str(device),)))
    monkeypatch.setattr(nvidia, "DEVICES", (str(device),))

    def run() -> str | None:
        import os

        nvidia.quiet_without_gpu() if start == "function" else exec(line, {})
        return os.environ.get(nvidia.VARIABLE)

    monkeypatch.delenv(nvidia.VARIABLE, raising=False)
    assert run() == nvidia.MARK
    device.touch()
    # Variables that come with a machine without a GPU are removed; a user's variables are not.
    assert run() is None
    monkeypatch.setenv(nvidia.VARIABLE, "1")
    assert run() == "1"


def test_what_a_report_warns_of_is_a_python_warning_once_and_printed() -> None:
    job = perceptrons(4, 8, layers=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            report = rj.measure(job, "offload_inputs", "cpu")
    assert [str(warning.message) for warning in caught] == list(report.warnings) and len(caught) == 1
    assert caught[0].category is rj.RematWarning and caught[0].filename == __file__
    assert " ".join(report.warnings[0].split()) in " ".join(str(report).split())


def test_who_reports_warnings_itself_gives_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with warning.silenced():
            rj.measure(perceptrons(4, 8, layers=2), "offload_inputs", "cpu")


def test_notes_that_change_what_a_plan_does_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    job = perceptrons(4, 8, layers=2)
    monkeypatch.setattr("remat_jax.planning.make_plan.host_shortage", lambda *_: "the host has too little memory")
    with pytest.warns(rj.RematWarning, match="^Host memory: the host has too little memory") as caught:
        plan = rj.plan(job, "1 MB", "cpu")
    assert {str(warning.message) for warning in caught} <= set(plan.notes)
    assert not any(str(warning.message).startswith("Not shown") for warning in caught)
