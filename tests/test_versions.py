"""What must hold in every version, and the command that runs the tests in each."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import pytest

import remat_jax as rj
from remat_jax.compat import versions as compat_versions
from remat_jax.policy import NAMED
from tests import versions
from tests.small_models import Mlp, assert_same, make_loss

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.versions
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_gradients_under_every_named_policy_are_the_plain_ones(x64: None, scanned: bool) -> None:
    plain, params, x = make_loss(Mlp, scanned=scanned)
    expected = jax.jit(jax.grad(plain, (0, 1)))(params, x)
    for policy in NAMED:
        grads = jax.jit(jax.grad(rj.checkpoint_blocks(plain, {Mlp: policy}), (0, 1)))(params, x)
        assert_same(grads, expected)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.10.2", (0, 10, 2)), ("0.13.0rc1", (0, 13, 0)), ("0.13.0.dev20261122", (0, 13, 0)), ("0.12.0+local", (0, 12, 0))],
)
def test_a_candidate_and_a_nightly_build_have_the_numbers_of_their_release(version: str, numbers: tuple[int, ...]) -> None:
    assert compat_versions._numbers(version) == numbers


def test_the_table_has_the_oldest_a_middle_and_the_newest_jax() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(set(versions.VERSIONS)) == len(versions.VERSIONS)
    lowest = next(dependency.partition(">=")[2] for dependency in project["dependencies"] if dependency.startswith("jax>="))
    assert {version.jax for version in versions.VERSIONS} == {lowest, "0.11.2", versions.NEWEST}
    newer = {(version.jax, version.flags) for version in versions.VERSIONS if version.python == "3.12"}
    assert newer >= {(name, flags) for name in ("0.11.2", versions.NEWEST) for flags in ((), versions.REMAT3)}
    assert newer >= {(versions.NEWEST, flags) for flags in (versions.DERIVATIVES, versions.REMAT3 + versions.DERIVATIVES)}
    assert versions.Version(project["requires-python"].removeprefix(">="), lowest, versions.REMAT3) in versions.VERSIONS


@pytest.mark.parametrize(("there", "status", "word"), [("0.10.2", 0, "passed"), ("0.11.2", 1, "FAILED")])
def test_each_version_runs_the_tests_with_its_own_flags_and_its_own_jax(monkeypatch, capsys, there, status, word):
    calls: list[tuple[Any, list[str], bool]] = []

    def pretend(command: list[Any], cwd: Path, env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        flags = [env[flag.upper()] for flag in ("jax_remat3", "jax_custom_jvp3", "jax_custom_vjp3")]
        calls.append((command, flags, "PYTHONPATH" in env))
        return subprocess.CompletedProcess(command, 0)

    missing = versions.Version("3.99", "0.10.2", versions.REMAT3)
    monkeypatch.setattr(versions, "VERSIONS", (versions.VERSIONS[0], missing))
    monkeypatch.setattr(versions, "interpreter", lambda python: f"python{python}" if python == "3.11" else None)
    monkeypatch.setattr(versions, "install", lambda version, python: version.folder / python)
    monkeypatch.setattr(versions, "installed", lambda python: there)
    monkeypatch.setattr(versions.subprocess, "run", pretend)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert [versions.main([]), versions.main(["--if-there", "-k", "docs", "tests/test_docs.py::test_a"])] == [1, status]
    printed = capsys.readouterr().out
    assert f"Python 3.11, JAX 0.10.2, flags jax_remat3: {word}" in printed
    assert "Python 3.99, JAX 0.10.2, flags jax_remat3: left out, no python3.99 on the path or among pyenv's" in printed
    assert [(flags, path) for _, flags, path in calls] == [(["1", "0", "0"], False)] * (2 if status == 0 else 0)
    assert [command[0].name for command, *_ in calls] == ["python3.11"] * len(calls)
    assert [command[-2:] for command, *_ in calls] == [["tests", "remat_jax"], ["docs", "tests/test_docs.py::test_a"]][
        : len(calls)
    ]


def test_an_environment_is_made_once_and_the_newest_asked_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert versions.installed(Path(sys.executable)) == jax.__version__
    assert versions.interpreter(f"{sys.version_info.major}.{sys.version_info.minor}") and versions.interpreter("3.99") is None
    commands: list[list[str]] = []

    def pretend(command: list[Any], check: bool) -> None:
        commands.append([str(word) for word in command])
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)
            (Path(command[-1]) / "bin" / "python").touch()

    monkeypatch.setattr(versions, "VENVS", tmp_path)
    monkeypatch.setattr(versions.subprocess, "run", pretend)
    fixed, newest = versions.Version("3.12", "0.11.2"), versions.Version("3.12", versions.NEWEST, versions.REMAT3)
    for version in (fixed, fixed, newest, newest):
        assert versions.install(version, "python3.12") == version.folder / "bin" / "python"
    assert ["venv" in words for words in commands] == [True, False, True, False, False]
    assert [words[7] for words in commands if "install" in words] == ["jax==0.11.2", "jax", "jax"]
    versions.install(versions.Version("3.12", "0.11.2", versions.REMAT3), "python3.12")
    assert len(commands) == 5
