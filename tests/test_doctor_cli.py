"""`remat-jax doctor`: its output and its exit statuses."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

import remat_jax as rj
from remat_jax.cli import workloads
from remat_jax.cli.app import app
from remat_jax.compat import versions
from remat_jax.errors import TargetError

# Functions of the packages have the modules' names.
environment = importlib.import_module("remat_jax.diagnosis.environment")
FILE = Path(__file__).with_name("cli_jobs.py")
TRACED = ("--target", "none")


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_a_trap_exits_1_and_is_told_with_its_remedy_and_none_exits_0():
    done = run(f"{FILE}:job", "--policy", "dots", *TRACED)
    assert done.exit_code == 0, done.output
    assert "two blocks under dots (traced, not compiled): no traps; one checkpointed region." in done.stdout
    done = run(f"{FILE}:unchecked", *TRACED)
    assert done.exit_code == 1 and "tracing" in done.stderr, done.output
    shown, _, remedy = " ".join(done.stdout.split()).partition(" Remedy: ")
    assert "remat_scan_of_one_length in " in shown
    assert "two or more lengths" in remedy and remedy.endswith("checkpoint_blocks(loss, {Block: 'full'}).")


def test_json_is_one_object_with_what_the_library_says():
    done = run(f"{FILE}:job", "-p", "save: gelu_out", "--json", *TRACED)
    assert done.exit_code == 1
    job = workloads.load_workload(f"{FILE}:job")
    assert json.loads(done.stdout) == rj.doctor(job, "save: gelu_out").to_dict()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("job -p ful", "Did you mean 'full'"),
        ("job --target cpu", "not a GPU"),
        ("job --timeout 0", "timeout=0.0: expected a positive number of seconds"),
    ],
)
def test_bad_usage_exits_2(arguments, said):
    done = run(*f"{FILE}:{arguments}".split())
    assert done.exit_code == 2 and said in done.stderr


def test_without_a_workload_it_says_what_this_machine_is_and_cannot_do(monkeypatch):
    monkeypatch.setattr(environment, "gpus", list)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = run("--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert set(report) == {"python", "platform", "versions", "gpus", "attached", "flags", "limits"}
    assert report["versions"]["jax"] == jax.__version__ and report["versions"]["remat_jax"] == rj.__version__
    assert (report["gpus"], report["attached"], report["flags"]["JAX_PLATFORMS"]) == ([], None, "cpu")
    shown = run().stdout
    assert f"\njax: {jax.__version__}\n" in shown and "GPU" in shown and "JAX_PLATFORMS" in shown


def test_a_gpu_that_jax_cannot_use_is_told_with_the_reason(monkeypatch):
    driver = {"name": "NVIDIA H200", "driver_version": "580.1", "memory.total": "143771 MiB"}

    def none_there():
        raise TargetError("JAX finds no GPU on this machine (libcudnn.so.9 is missing)")

    monkeypatch.setattr(environment, "gpus", lambda: [driver])
    monkeypatch.setattr(environment, "device_kind", none_there)
    report = json.loads(run("--json").stdout)
    assert report["gpus"] == [driver] and "libcudnn.so.9 is missing" in report["attached"]


def test_what_this_jax_cannot_do_is_told_with_the_remedy(monkeypatch, remat3):
    installed = {"jaxlib": "0.12.0.1", "jax-cuda13-plugin": "0.11.2", "libtpu": "0.0.1"}
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda name: installed[name])
    monkeypatch.setattr(versions, "_PLUGINS", ("jax-cuda13-plugin",))
    monkeypatch.setattr(versions, "JAX_VERSION", (0, 11, 0))
    monkeypatch.setattr(versions, "_cured_here", lambda: None)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    refused, tpu_compiler, miscompiled, plugin = versions.limits()[-4:]
    assert refused.startswith("jax_remat3=True") and "use JAX 0.12" in refused
    assert "pip install 'remat-jax[tpu-compile]'" in tpu_compiler
    assert miscompiled.startswith("offload inside a scan is refused on GPUs") and "use JAX 0.11.1 or later" in miscompiled
    assert plugin.endswith("pip install jax-cuda13-plugin==0.12.0.1")
    # One suitable version suffices, whatever else is installed.
    installed |= {"jax-cuda13-plugin": "0.12.0.1+local", "jax-cuda12-plugin": "0.9.0"}
    monkeypatch.setattr(versions, "_PLUGINS", ("jax-cuda12-plugin", "jax-cuda13-plugin"))
    monkeypatch.setattr(versions, "JAX_VERSION", (0, 12, 0))
    assert [limit for limit in versions.limits() if "plugin is" in limit or "scan" in limit] == []


def test_what_only_a_workload_can_use_is_refused_without_one():
    for option, given, shown in (("--policy", "off", "'off'"), ("--mesh", "data=8", "'data=8'"), ("--timeout", "300", "300.0")):
        done = run(option, given)
        assert done.exit_code == 2 and f"{option} {shown}" in done.stderr and "give FILE:FUNCTION as well" in done.stderr
