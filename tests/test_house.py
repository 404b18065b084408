"""The project's own rules: imports, pins, and the wheel's contents."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import smoke

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PACKAGES = ("remat_jax", "torch_ref")
ALL_CODE = (*PACKAGES, "examples", "benchmarks", "tests", "parity_tests")


def sources(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_names(path):
    """Every module that a file imports, with its line; `from a import b` counts as `a` and `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def loaded_after(code, environment=None):
    """The modules that a new Python process has loaded after `code`."""
    program = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def name_of(requirement):
    return re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower().replace("_", "-")


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize(
    "module", ["remat_jax", "remat_jax.report", "remat_jax.policy", "remat_jax.hardware", "remat_jax.solver"]
)
def test_importing_loads_no_torch_and_no_plotting(module):
    loaded = loaded_after(f"import {module}")
    assert module in loaded
    assert loaded & {"torch", "torch_ref", "matplotlib", "plotly"} == set()


def test_every_module_but_the_examples_imports_without_torch(in_a_hurry):
    """Tests without PyTorch must import without it: the others are left out at collection."""
    ignored = re.findall(r'"(tests/test_\w+\.py)"', (ROOT / "conftest.py").read_text())
    paths = [path.relative_to(ROOT) for path in sources("remat_jax", "tests")]
    names = [".".join(path.with_suffix("").parts) for path in paths if path.as_posix() not in ignored]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    code = "import importlib\nsys.modules['torch'] = None\n" + "\n".join(f"importlib.import_module({n!r})" for n in names)
    assert set(names) <= loaded_after(code, in_a_hurry) and len(names) > 20


def test_what_jax_does_not_promise_is_used_in_compat_only():
    """Private are underscores, and the legacy modules of JAX's compatibility page; `jax.experimental` is not promised either.

    `conftest.py` is an exception that it explains, and the compile process runs without this package.
    """
    private = re.compile(r"jaxlib|jax(\.\w+)*\._")
    not_promised = re.compile(rf"{private.pattern}|jax\.(core|interpreters|lib|util|experimental|example_libraries)\b")
    package = list(sources("remat_jax"))

    def users(names, paths):
        return {
            path.relative_to(ROOT).as_posix()
            for path in paths
            for name, _ in imported_names(path)
            if names.match(name) and not path.is_relative_to(ROOT / "remat_jax" / "compat")
        }

    assert users(not_promised, package) == {"remat_jax/memory/compile/child.py"}
    assert users(private, [ROOT / "conftest.py", *sources(*ALL_CODE)]) == {"conftest.py"}
    read = [path for path in package if re.search(r"\bjax\.(core|interpreters|lib|util)\.", path.read_text())]
    assert [path.name for path in read if not path.is_relative_to(ROOT / "remat_jax" / "compat")] == []


def test_no_module_inside_the_package_imports_its_root():
    """The root imports all public names; importing it from inside would be a cycle."""
    inside = {path.stem for path in (ROOT / "remat_jax").iterdir() if path.suffix in ("", ".py")}
    through_the_root = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sources("remat_jax")
        for name, line in imported_names(path)
        if re.fullmatch(r"remat_jax\.\w+", name) and name.partition(".")[2] not in inside
    ]
    assert [entry for entry in through_the_root if not entry.startswith("remat_jax/cli")] == []


def test_modules_import_each_other_in_one_direction_only():
    """Imports for types count too."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources(*PACKAGES)}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    modules, imports = set(names.values()), dict[str, set[str]]()
    for path, name in names.items():
        wanted = set()
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                # A relative import starts at the package that contains the module.
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1 if node.level else 0], *filter(None, [node.module])])
                inside = [f"{base}.{alias.name}" for alias in node.names]
                wanted |= {module if module in modules else base for module in inside}
        imports[name] = wanted & modules - {name}
    ordered = list(graphlib.TopologicalSorter(imports).static_order())  # CycleError names the cycle
    assert len(ordered) == len(modules) > 200


def test_a_public_class_name_stands_for_one_class():
    places = {}
    for path in sources("remat_jax"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: lines for name, lines in places.items() if len(lines) > 1} == {} and len(places) > 100


def test_files_are_at_most_400_lines():
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in sources(*ALL_CODE)}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
    assert len(lengths) > 20


def test_torch_is_pinned_to_one_release_without_a_build_tag():
    assert re.fullmatch(r"\d+\.\d+\.\d+", pins()["torch"])


def test_everything_that_is_installed_for_development_is_pinned():
    wanted = list(PROJECT["dependencies"])
    for extra in ("torch", "gpu-compile", "test", "dev", "docs"):
        wanted += PROJECT["optional-dependencies"][extra]
    pinned = {name.lower().replace("_", "-") for name in pins()}
    assert {name_of(requirement) for requirement in wanted} - pinned == set()
    # The compiler plugin comes through an extra of JAX and must be of JAX's own version.
    assert pins()["jax-cuda13-plugin"] == pins()["jax"] == pins()["jaxlib"]


def test_pins_satisfy_the_lower_bounds():
    extras = [requirement for group in PROJECT["optional-dependencies"].values() for requirement in group]
    pinned = {name.lower().replace("_", "-"): version for name, version in pins().items()}
    checked = 0
    for requirement in [*PROJECT["dependencies"], *extras]:
        bound, version = re.search(r">=([\d.]+)", requirement), pinned.get(name_of(requirement))
        if bound and version:
            checked += 1
            assert numbers(version) >= numbers(bound.group(1)), f"{requirement} is pinned to {version}"
    assert checked >= 12


def numbers(version):
    return tuple(int(part) for part in re.findall(r"\d+", version))


def test_the_version_comes_from_the_tag_and_types_are_told():
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert PYPROJECT["tool"]["hatch"]["version"]["source"] == "vcs"
    assert {name_of(requirement) for requirement in PYPROJECT["build-system"]["requires"]} == {"hatchling", "hatch-vcs"}
    assert [(ROOT / package / "py.typed").exists() for package in PACKAGES] == [True, True]


def test_a_wheel_carries_the_examples_inside_the_package():
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["only-include"] == ["remat_jax", "torch_ref", "examples"]
    assert wheel["sources"] == {"examples": "remat_jax/examples"}
    # The wheel has no top-level package of this name.
    through_the_top = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sources("examples", *PACKAGES)
        for name, line in imported_names(path)
        if name.split(".")[0] == "examples"
    ]
    assert through_the_top == [], "import relatively: from .models import …"


def test_the_smoke_test_wants_every_file_that_is_no_module():
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    data_files = {path.relative_to(ROOT).as_posix() for path in files if path.suffix not in (".py", ".pyc")}
    assert set(smoke.WANTED) == data_files | {"remat_jax/examples/__init__.py", "remat_jax_quiet.pth"} and len(data_files) == 5


def test_the_smoke_test_sees_a_page_without_one_of_its_files():
    assets = ROOT / "remat_jax" / "report"
    page = "".join((assets / name).read_text(encoding="utf-8") for name in smoke.PAGE)
    smoke.check_page(page, assets)
    for name in smoke.PAGE:
        with pytest.raises(ValueError, match=f"the page that the wheel makes lacks {name}"):
            smoke.check_page(page.replace((assets / name).read_text(encoding="utf-8"), ""), assets)


TARGETS = ["setup", "demo", "test", "test-browser", "test-versions", "test-newest", "wheel", "smoke", "lint", "format"]
TARGETS += ["bench", "bench-gpu", "figures", "docs", "fuzz", "clean"]


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_its_targets(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_make_installs_the_pinned_torch_and_none_when_told(tmp_path):
    def plan(*arguments):
        command = ["make", "-n", "setup", f"VENV={tmp_path}/venv", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert f"install -q -c constraints.txt 'torch=={pins()['torch']}'" in plan()
    assert "-e '.[gpu-compile,tpu-compile,test,dev,docs,torch]'" in plan()
    without = plan("TORCH=")
    assert (
        "torch" not in without and "constraints" not in without and "-e '.[gpu-compile,tpu-compile,test,dev,docs]'" in without
    )


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
