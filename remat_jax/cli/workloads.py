"""What a command is asked about: a workload or a case in a file, policies by name or file, the axes of a mesh."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from jax.sharding import AbstractMesh

from remat_jax.errors import ArgumentError, RematError, nearest
from remat_jax.hardware import Target
from remat_jax.memory.compile.devices import check_size
from remat_jax.mesh import as_mesh
from remat_jax.planning.plan import Plan
from remat_jax.policy import as_block_policy
from remat_jax.workload import Workload

MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXIS=SIZE,…",
        help="Divide by these axes, such as data=8,fsdp=8, in place of the workload's own mesh; its shardings stay. Where "
        "it has none, the batch lies over data and fsdp, and each parameter over fsdp.",
    ),
]


def checked_mesh(text: str | None, target: Target | None) -> AbstractMesh | None:
    """The mesh that was asked for, of as many devices as the target; None where none was.

    Raises:
      ArgumentError: it is no mesh, or of another size.
    """
    if text is None:
        return None
    found = as_mesh(text)
    if target is not None:
        check_size(found, target, f"mesh={text!r}")
    return found


def load_on_mesh(name: str, mesh: AbstractMesh | None) -> Workload:
    """The workload that `name` stands for, on `mesh` where there is one."""
    job = load_workload(name)
    return job if mesh is None else job.on_mesh(mesh)


TAKEN = "A name, a text, or the .json file of a plan"


def check_policy(given: str) -> Any:
    """What can be said of `given` before the user's file runs: the policy, or the path of the plan.

    Raises:
      PolicyError: it is no policy.
      ArgumentError: there is no such file.
    """
    if not is_plan(given):
        return as_block_policy(given)
    path = Path(given)
    if not path.is_file():
        raise ArgumentError(f"policy={given!r}: there is no such file; write one with remat-jax plan --save")
    return path


def read_policy(given: str, workload: Workload) -> Any:
    """The policy, or those that a plan gives the blocks of `workload`.

    Raises:
      PlanningError: the file is no plan, or one of another model.
    """
    return dict(Plan.load(given, workload).policies) if is_plan(given) else given


def is_plan(given: str) -> bool:
    """Whether `given` names the file of a plan."""
    return given.endswith(".json")


_EXPECTED = "expected path/to/file.py:function or package.module:function"


def load_workload(name: str) -> Workload:
    """The workload that `name` stands for: a function without arguments that returns one, or the workload itself.

    Raises:
      ArgumentError: as `load_named`.
    """
    found: Workload = load_named(name, "workload", (Workload,), "a remat_jax.Workload")
    return found


def load_named(name: str, argument: str, kinds: tuple[type, ...], expected: str) -> Any:
    """What `name` stands for: a function without arguments that returns one of `kinds`, or that itself.

    A file inside a package is imported as a part of it, so that its relative imports work; a file by itself may import
    what lies beside it, as if Python ran it. `argument` is what messages call it, and `expected` what they ask for.

    Raises:
      ArgumentError: there is no such file, module or function, it cannot be run, or it gives something else.
    """
    where, colon, attribute = name.rpartition(":")
    told = f"{argument}={name!r}"
    if not colon or not where or not attribute.isidentifier():
        raise ArgumentError(f"{told}: {_EXPECTED}, such as train.py:job")
    module = _guarded(told, lambda: _module(where, told))
    if not hasattr(module, attribute):
        choices = [one for one, value in vars(module).items() if _may_be_meant(module, one, value, kinds)]
        raise ArgumentError(
            f"{told}: {where} has no {attribute!r}.{nearest(attribute, choices)} "
            f"It has {', '.join(choices[:8]) or 'no function of its own'}."
        )
    found = getattr(module, attribute)
    if not isinstance(found, kinds):
        found = _called(told, found, expected)
    if not isinstance(found, kinds):
        raise ArgumentError(f"{told} gave a {type(found).__name__}: expected {expected}")
    return found


def _called(told: str, function: Any, expected: str) -> Any:
    if not callable(function):
        raise ArgumentError(f"{told} is a {type(function).__name__}: expected {expected}, or a function that returns one")
    needed = [
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if needed:
        raise ArgumentError(
            f"{told} needs the arguments {', '.join(needed)}: expected a function without arguments; "
            "give them defaults, or wrap it in one that takes none"
        )
    return _guarded(told, function)


def _module(where: str, told: str) -> ModuleType:
    path = Path(where)
    if path.suffix == ".py":
        if not path.is_file():
            raise ArgumentError(f"{told}: there is no file {where} in {Path.cwd()}; {_EXPECTED}")
        return _from_file(path.resolve())
    if not all(part.isidentifier() for part in where.split(".")):
        raise ArgumentError(f"{told}: {where!r} is neither a .py file nor a module's name; {_EXPECTED}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    if not _exists(where):
        raise ArgumentError(f"{told}: there is no module {where!r} here or among what is installed; {_EXPECTED}")
    return importlib.import_module(where)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _from_file(path: Path) -> ModuleType:
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if len(parts) > 1:
        return importlib.import_module(".".join(parts))
    # Under its own name a file such as types.py would stand in for the module of that name.
    spec = importlib.util.spec_from_file_location(f"_workload_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _guarded(told: str, run: Callable[[], Any]) -> Any:
    """`run()`, with whatever the user's code raises told in one line that says where."""
    try:
        return run()
    except RematError:
        raise
    # A script that ends itself has given no answer, and its exit status is not ours.
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        users = [frame for frame in frames if "importlib" not in frame.filename and Path(frame.filename).parent != _HERE]
        at = f", at {users[0].filename}:{users[0].lineno} in {users[0].name}" if users else ""
        raise ArgumentError(f"{told}: running it raised {type(error).__name__}: {error}{at}") from error


_HERE = Path(__file__).parent


def _may_be_meant(module: ModuleType, name: str, value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, kinds) and not name.startswith("_"):
        return True
    return inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
