"""Checks the wheel alone: its contents, and that it works in an empty environment. `make smoke`."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venvs" / "smoke"
TOP = re.compile(r"(remat_jax|torch_ref|remat_jax-[^/]+\.dist-info)/|remat_jax_quiet\.pth$")
FORBIDDEN = re.compile(r"(^|/)(tests?|parity_tests|benchmarks|docs|__pycache__|conftest\.py|test_[^/]*|\.[^/]*)(/|$)|\.pyc$")
PAGE = ("page.css", "page.js")
WANTED = (
    *("remat_jax/py.typed", "torch_ref/py.typed", "remat_jax/examples/__init__.py", "remat_jax/hardware/targets.toml"),
    "remat_jax_quiet.pth",
    *(f"remat_jax/report/{name}" for name in PAGE),
)
# A user's first file: a model's gradient under a policy, the policy's effect on memory, and a page of it, on the CPU.
USE = """
import flax.linen as nn, jax, jax.numpy as jnp, numpy as np
import remat_jax as rj

class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(64, name="down")(nn.gelu(nn.Dense(256, name="up")(x)))

model, x = nn.Sequential([Block(), Block()]), jnp.ones((32, 64)) / 8
params = model.init(jax.random.key(0), x)
loss = lambda params, x: jnp.mean(model.apply(params, x) ** 2)

def job():
    return rj.Workload(loss, params, (x,), Block, name="two blocks")

if __name__ == "__main__":
    plain, found = jax.grad(loss)(params, x), jax.grad(rj.checkpoint_blocks(loss, {Block: "dots"}))(params, x)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)
        assert float(jnp.abs(a).max()) > 0
    off, full = (rj.residuals(job(), policy).device_bytes for policy in ("off", "full"))
    assert full < off, (full, off)
    rj.save_report("page.html", job(), ["off", "full"], "cpu", plan="1 GiB")
    print(rj.__version__, rj.__file__)
"""


def check_contents(names: list[str]) -> None:
    """Raise if a wheel has unwanted files or lacks needed ones.

    >>> check_contents([*WANTED, "remat_jax-1.dist-info/licenses/LICENSE", "remat_jax/__init__.py"])
    >>> check_contents([*WANTED, "remat_jax-1.dist-info/licenses/LICENSE", "tests/smoke.py"])
    Traceback (most recent call last):
      ...
    ValueError: the wheel must not have: tests/smoke.py
    >>> check_contents(["remat_jax-1.dist-info/licenses/LICENSE", *WANTED[1:]])
    Traceback (most recent call last):
      ...
    ValueError: the wheel lacks: remat_jax/py.typed
    """
    wrong = [name for name in names if not TOP.match(name) or FORBIDDEN.search(name)]
    if wrong:
        raise ValueError(f"the wheel must not have: {', '.join(wrong)}")
    missing = [name for name in WANTED if name not in names]
    missing += [] if any(name.endswith("/licenses/LICENSE") for name in names) else ["LICENSE"]
    if missing:
        raise ValueError(f"the wheel lacks: {', '.join(missing)}")


def check_page(page: str, assets: Path) -> None:
    """Raise if a page lacks the installed style or script."""
    for name in PAGE:
        if (assets / name).read_text(encoding="utf-8") not in page:
            raise ValueError(f"the page that the wheel makes lacks {name}")


def ran(*command: str | Path, cwd: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed; returns its output."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} exits {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def output(*command: str | Path, cwd: str) -> str:
    """Standard output of a command that must succeed."""
    return ran(*command, cwd=cwd).stdout


def check_quiet(python: Path, wheel: Path) -> None:
    """Install the wheel's extra `gpu-compile`, and raise if a script that starts JAX then prints anything.

    The GPU compiler is a plugin of JAX that prints a traceback on machines without a GPU. The script runs in an empty folder,
    so that the installed wheel is imported. Then a step is compiled for a GPU.
    """
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{wheel}[gpu-compile]"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        done = ran(python, "-c", "import remat_jax, jax; jax.devices()", cwd=folder)
        Path(folder, "train.py").write_text(USE)
        measured = ("measure", "train.py:job", "--target", "h100", "--policy", "full", "--json")
        assert '"device_bytes"' in output(python.with_name("remat-jax"), *measured, cwd=folder)
    if done.stdout or done.stderr:
        raise SystemExit(f"with the extra gpu-compile, starting JAX prints:\n{done.stdout}{done.stderr}")


def seconds(python: Path, code: str, cwd: str) -> float:
    """Processor time of a new Python process that runs `code`, the least of three."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        output(python, "-c", code, cwd=cwd)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def main(wheel: str) -> None:
    """Check the wheel's contents, install it with its dependencies, and use it from an empty folder."""
    path = Path(wheel).resolve()
    check_contents(zipfile.ZipFile(path).namelist())
    version = path.name.split("-")[1]
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    python, command = VENV / "bin" / "python", VENV / "bin" / "remat-jax"
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", path], check=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(USE)
        printed, where = output(python, "train.py", cwd=folder).split()
        assert printed == version and Path(where).is_relative_to(VENV), (printed, where, version)
        check_page(Path(folder, "page.html").read_text(encoding="utf-8"), Path(where).parent / "report")
        assert output(command, "--version", cwd=folder) == f"remat-jax {version}\n"
        assert "doctor" in output(command, "--help", cwd=folder)
        findings = json.loads(output(command, "doctor", "--json", cwd=folder))
        assert (findings["versions"]["remat_jax"], findings["versions"]["torch"]) == (version, None), findings
        measured = ("measure", "train.py:job", "--target", "cpu", "--policy", "full", "--json")
        assert '"device_bytes"' in output(command, *measured, cwd=folder)
        jax, both = seconds(python, "import jax", folder), seconds(python, "import jax, remat_jax", folder)
        names = seconds(python, "import jax, remat_jax as rj; [getattr(rj, name) for name in rj.__all__]", folder)
    # Last, because the imports are timed without the GPU compiler.
    check_quiet(python, path)
    print(
        f"{path.name}: {len(zipfile.ZipFile(path).namelist())} files, installed by itself, works, and is quiet with gpu-compile"
    )
    print(
        f"processor time of imports: JAX {jax:.2f} s, remat_jax {both - jax:.2f} s more, all its names {names - jax:.2f} s more"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
