"""The project's own rules: imports, pins, and the wheel's contents."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests import smoke

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PACKAGES = ("remat_jax", "torch_ref")
ALL_CODE = (*PACKAGES, "examples", "benchmarks", "tests", "parity_tests")


def sources(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def imports_of(path):
    nodes = ast.walk(ast.parse(path.read_text(), str(path)))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_names(path):
    """Every module that a file imports, with its line; `from a import b` counts as `a` and `a.b`."""
    for node in imports_of(path):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.Import):
            yield from ((name, node.lineno) for name in names)
        elif node.level == 0:
            yield from ((name, node.lineno) for name in [node.module, *(f"{node.module}.{name}" for name in names)])


def importing(pattern, *folders):
    """The imports of modules whose names match, as file:line name."""
    return [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sources(*folders)
        for name, line in imported_names(path)
        if re.fullmatch(pattern, name)
    ]


def name_of(requirement):
    return re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower().replace("_", "-")


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_module_but_the_examples_imports_without_torch(in_a_hurry):
    """Tests without PyTorch must import without it: the others are left out at collection."""
    ignored = re.findall(r'"(tests/test_\w+\.py)"', (ROOT / "conftest.py").read_text())
    paths = [path.relative_to(ROOT) for path in sources("remat_jax", "tests")]
    names = [".".join(path.with_suffix("").parts) for path in paths if path.as_posix() not in ignored]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    code = f"import importlib, sys\nsys.modules['torch'] = None\nfor name in {names}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=in_a_hurry, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and len(names) > 20, done.stderr


def test_what_jax_does_not_promise_is_used_in_compat_only():
    """Private are underscores, and the legacy modules of JAX's compatibility page; `jax.experimental` is not promised either.

    The compile process runs without this package.
    """
    private = r"jaxlib|jax(\.\w+)*\._"
    not_promised = rf"{private}|jax\.(core|interpreters|lib|util|experimental|example_libraries)\b"

    def users(names, *folders):
        files = {entry.partition(":")[0] for entry in importing(rf"({names}).*", *folders)}
        return {file for file in files if not file.startswith("remat_jax/compat/")}

    assert users(not_promised, "remat_jax") == {"remat_jax/memory/compile/child.py"}
    assert users(private, *ALL_CODE) == set()
    read = [path for path in sources("remat_jax") if re.search(r"\bjax\.(core|interpreters|lib|util)\.", path.read_text())]
    assert [path.name for path in read if path.parent.name != "compat"] == []


def test_no_module_inside_the_package_imports_its_root():
    """The root imports all public names; importing it from inside would be a cycle."""
    inside = "|".join(path.stem for path in (ROOT / "remat_jax").iterdir() if path.suffix in ("", ".py"))
    through_the_root = importing(rf"remat_jax\.(?!({inside})$)\w+", "remat_jax")
    assert [entry for entry in through_the_root if not entry.startswith("remat_jax/cli")] == []


def test_files_are_at_most_400_lines():
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in sources(*ALL_CODE)}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
    assert len(lengths) > 20


def test_everything_that_is_installed_for_development_is_pinned():
    wanted = list(PROJECT["dependencies"])
    for extra in ("torch", "gpu-compile", "test", "dev", "docs"):
        wanted += PROJECT["optional-dependencies"][extra]
    pinned = {name.lower().replace("_", "-") for name in pins()}
    assert {name_of(requirement) for requirement in wanted} - pinned == set()
    # The compiler plugin comes through an extra of JAX and must be of JAX's own version.
    assert pins()["jax-cuda13-plugin"] == pins()["jax"] == pins()["jaxlib"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", pins()["torch"]), "one release, without a build tag"


def test_a_wheel_carries_the_examples_inside_the_package():
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["only-include"] == ["remat_jax", "torch_ref", "examples"]
    assert wheel["sources"] == {"examples": "remat_jax/examples"}
    # The wheel has no top-level package of this name.
    assert importing(r"examples(\..*)?", "examples", *PACKAGES) == [], "import relatively: from .models import …"


def test_the_smoke_test_wants_every_file_that_is_no_module():
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    data_files = {path.relative_to(ROOT).as_posix() for path in files if path.suffix not in (".py", ".pyc")}
    assert set(smoke.WANTED) == data_files | {"remat_jax/examples/__init__.py", "remat_jax_quiet.pth"} and len(data_files) == 5


def test_nothing_names_a_machine():
    """No home path and no registry: the files must work everywhere."""
    words = re.compile(r"/(?:home|root|Users)/\w|https?://[^\s\"']*/simple\b|file://|--(?:extra-)?index-url")
    kept = [*ROOT.glob("*.*"), ROOT / "Makefile", ROOT / ".ci" / "run", *sources(*ALL_CODE)]
    hits = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in kept
        if path.is_file() and path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), 1)
        if words.search(line)
    ]
    assert hits == []
