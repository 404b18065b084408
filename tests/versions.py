"""The tests that need no PyTorch, on the oldest, a middle and the newest JAX: `make test-versions`.

Each version has its own environment under `.venvs`, made once and updated when `pyproject.toml` changes; the newest JAX is
looked up each time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENVS = ROOT / ".venvs"
NEWEST = "newest"
EXTRAS = "gpu-compile,tpu-compile,test,docs"
PATHS = ("tests", "remat_jax")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Version:
    """One row of the table: a Python, a JAX, and the upgrade flags of JAX that are on."""

    python: str
    jax: str
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"Python {self.python}, JAX {self.jax}, flags {self.flag_names}"

    @property
    def flag_names(self) -> str:
        """The flags as one text, by which `--flags` selects a row."""
        return "+".join(self.flags) or "none"

    @property
    def folder(self) -> Path:
        """The folder of its environment; the flags are set when the tests run."""
        return VENVS / f"py{self.python}-jax-{self.jax}"


REMAT3, DERIVATIVES = ("jax_remat3",), ("jax_custom_jvp3", "jax_custom_vjp3")
# Python 3.11 with JAX 0.10.2 and PyTorch, without flags, is what `make test` runs. Every upgrade flag of the row's JAX is tried
# by tests/test_upgrade_flags.py.
VERSIONS = (
    Version("3.11", "0.10.2", REMAT3),
    Version("3.12", "0.11.2"),
    Version("3.12", "0.11.2", REMAT3),
    Version("3.12", NEWEST),
    Version("3.12", NEWEST, REMAT3),
    Version("3.12", NEWEST, DERIVATIVES),
    Version("3.12", NEWEST, REMAT3 + DERIVATIVES),
)
FLAGS = REMAT3 + DERIVATIVES


def interpreter(python: str) -> str | None:
    """A working Python of that version: this one, one on the path, or one of pyenv's; None if there is none."""
    candidates = [sys.executable, shutil.which(f"python{python}")]
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False).stdout.strip()
        candidates += sorted(map(str, Path(root, "versions").glob(f"{python}.*/bin/python")), reverse=True)
    code = "import sys, venv, ensurepip; print('{}.{}'.format(*sys.version_info))"
    for path in filter(None, candidates):
        # pyenv's shim of an unselected version is on the path but fails.
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == python:
            return path
    return None


def install(version: Version, python: str) -> Path:
    """The Python of the version's environment, made or updated if necessary."""
    inside, stamp = version.folder / "bin" / "python", version.folder / "installed"
    wanted = f"jax=={version.jax}" if version.jax != NEWEST else "jax"
    state = hashlib.sha256(f"{wanted} {EXTRAS} {(ROOT / 'pyproject.toml').read_text()}".encode()).hexdigest()
    if version.jax != NEWEST and stamp.exists() and stamp.read_text() == state:
        return inside
    if not inside.exists():
        subprocess.run([python, "-m", "venv", version.folder], check=True)
    pip = [inside, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade"]
    subprocess.run([*pip, wanted, "-e", f"{ROOT}[{EXTRAS}]"], check=True)
    stamp.write_text(state)
    return inside


def installed(python: Path) -> str:
    """The JAX version of the environment."""
    code = "import importlib.metadata; print(importlib.metadata.version('jax'))"
    return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def run(version: Version, python: Path, arguments: list[str]) -> int:
    """The tests' exit status. Unknown options go to pytest; without paths all tests run."""
    flags = {flag.upper(): str(int(flag in version.flags)) for flag in FLAGS}
    environment = {**os.environ, **ONE_THREAD, **flags}
    # Without PyTorch's tests, which this environment cannot run, and without another checkout on the path.
    environment.pop("PYTHONPATH", None)
    paths = () if any(argument.startswith(PATHS) for argument in arguments) else PATHS
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", *paths, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen versions; 1 if a test fails, a required interpreter is missing, or the JAX version is wrong."""
    parser = argparse.ArgumentParser(prog="make test-versions", description=__doc__, allow_abbrev=False)
    parser.add_argument("--jax", action="append", help="only this JAX of the table; may be repeated")
    parser.add_argument("--flags", action="append", help="only with these flags, joined by +, or none; may be repeated")
    parser.add_argument("--if-there", action="store_true", help="leave out, and say so, what there is no interpreter for")
    options, rest = parser.parse_known_args(arguments)
    wanted = [entry for entry in VERSIONS if not options.jax or entry.jax in options.jax]
    wanted = [entry for entry in wanted if not options.flags or entry.flag_names in options.flags]
    if not wanted:
        parser.error(f"--jax {options.jax}, --flags {options.flags}: the table has {'; '.join(map(str, VERSIONS))}")
    lines, failed = [], False
    for version in wanted:
        python = interpreter(version.python)
        if python is None:
            lines.append(f"{version}: left out, no python{version.python} on the path or among pyenv's")
            failed |= not options.if_there
            continue
        inside = install(version, python)
        there = installed(inside)
        print(f"== {version}: JAX {there}", flush=True)
        if version.jax not in (NEWEST, there):
            lines.append(f"{version}: FAILED, {version.folder} has JAX {there}; delete it to have it made again")
            failed = True
            continue
        status = run(version, inside, rest)
        lines.append(f"{version}: {'passed' if status == 0 else f'FAILED, pytest exits {status}'}")
        failed |= status != 0
    print("\n".join(lines), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
