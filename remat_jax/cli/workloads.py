"""Reads the arguments of commands: a workload or a parity case in a file, policies by name or file, the axes of a mesh."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import typer
from jax.sharding import AbstractMesh

from remat_jax import compat
from remat_jax.apply.find_blocks import FoundBlocks
from remat_jax.cli.output import Answer, console, progress
from remat_jax.errors import ArgumentError, RematError, nearest
from remat_jax.hardware import Target
from remat_jax.memory.compile.devices import check_size
from remat_jax.mesh import as_mesh
from remat_jax.planning.model import GIVEN_FILE
from remat_jax.planning.plan import Plan
from remat_jax.policy import as_block_policy
from remat_jax.report.activity import activity
from remat_jax.workload import Workload

WORKLOAD = typer.Argument(
    metavar="FILE:FUNCTION", help="path/to/file.py:function or package.module:function.", show_default=False
)
WorkloadArgument = Annotated[str, WORKLOAD]
TargetOption = Annotated[str, typer.Option(help="The target to compile for; see remat-jax targets.")]
MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXIS=SIZE",
        help="Use this mesh, such as data=8,fsdp=8, instead of the workload's own, with the same shardings. Without shardings, "
        "the batch is partitioned over data and fsdp, and each parameter over fsdp.",
    ),
]


ArgsOption = Annotated[
    str | None,
    typer.Option(
        "--args",
        metavar="FILE:NAME",
        help="FILE:FUNCTION is a training step, and this is the tuple of its arguments (arrays or shapes), or a function that "
        "returns it. Default: example_args beside the step.",
    ),
]
_EXAMPLE = "example_args"


def load_on_mesh(
    name: str, mesh: str | None, target: Target | None, args: str | None, answer: Answer | None = None
) -> Workload:
    """The workload that `name` refers to. `mesh`, if given, replaces its mesh, and must be as large as `target`.

    If its blocks are to be found, `answer` shows which.
    """
    divided = None if mesh is None else as_mesh(mesh)
    if divided is not None and target is not None:
        check_size(divided, target, f"mesh={mesh!r}")
    compat.keep_to_cpu_without_gpu()
    with loading(name):
        job = with_mesh(divided, lambda: load_workload(name, args, divided))
        found = None if answer is None else _guarded(f"workload={name!r}", lambda: job.found)
    if answer is not None and found is not None:
        answer.show(found.text)
    return job


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """In a terminal, show that the user's code runs, and for how long; elsewhere print nothing."""
    with progress() if console(stderr=True).is_terminal else contextlib.nullcontext(), activity(f"running {name}"):
        yield


def find_blocks(name: str, job: Workload) -> FoundBlocks:
    """`job.find_blocks()`; errors of the user's code, which is traced here for the first time, are ArgumentErrors."""
    found: FoundBlocks = _guarded(f"workload={name!r}", job.find_blocks)
    return found


POLICY_HELP = "A name, a text, or the .json file of a plan"


def check_policy(given: str) -> Any:
    """Check `given` before the user's file runs, and return its policy; if `given` names a plan's file, return the path."""
    if not is_plan(given):
        return as_block_policy(given)
    path = Path(given)
    if not path.is_file():
        raise ArgumentError(f"policy={given!r}: no such file; write one with remat-jax plan --save")
    return path


def read_policy(given: str, workload: Workload) -> Any:
    """`given`; if it names a plan's file, a dict with the plan's policy for each block of `workload`."""
    return dict(Plan.load(given, workload).policies) if is_plan(given) else given


def is_plan(given: str) -> bool:
    """Whether `given` names a plan's file."""
    return given.endswith(".json")


_EXPECTED = "expected path/to/file.py:function or package.module:function"


class LacksMeshError(ArgumentError):
    """The user's code needs a mesh, and no mesh is active."""


def with_mesh(mesh: AbstractMesh | None, load: Callable[[], Workload]) -> Workload:
    """`load()`; if the user's code needs a mesh, as to initialise a model with bare `PartitionSpec`s, it runs under `mesh`."""
    try:
        return load()
    except LacksMeshError:
        if mesh is None:
            raise
        with jax.sharding.use_abstract_mesh(mesh):
            return load()


def load_workload(name: str, args: str | None = None, mesh: AbstractMesh | None = None) -> Workload:
    """The workload that `name` refers to, or that the function of this name returns without arguments; on `mesh`, if given.

    If `name` refers to a training step, the workload of this step. `args` names its arguments; without it they are
    `example_args` of the step's module.
    """
    subject, expected = f"workload={name!r}", "a remat_jax.Workload"
    loaded = _attribute(name, subject, (Workload,))
    module = name.rpartition(":")[0]
    has_example = hasattr(_module(module, subject), _EXAMPLE)
    if args is None and callable(loaded) and (_needed(loaded) or (has_example and inspect.signature(loaded).parameters)):
        args = f"{module}:{_EXAMPLE}"
        if not has_example:
            raise ArgumentError(
                f"{subject} needs the arguments {', '.join(_needed(loaded))}. A function without arguments that returns a "
                f"remat_jax.Workload needs none. If it is a training step, name its arguments with --args FILE:NAME, or put "
                f"them beside it as {_EXAMPLE}, a tuple of arrays or shapes"
            )
    if args is None:
        workload: Workload = load_named(name, "workload", (Workload,), expected)
        return workload if mesh is None else workload.on_mesh(mesh)
    if isinstance(loaded, Workload) or not callable(loaded):
        raise ArgumentError(
            f"args={args!r}: {subject} is a {type(loaded).__name__}, not a training step, and takes no arguments"
        )
    given = load_named(args, "args", (tuple,), "the tuple of the step's arguments")
    return _guarded(subject, lambda: Workload.from_step(loaded, *given, mesh=mesh, name=name.rpartition(":")[2]))


def load_function(name: str) -> Callable[[int], Workload]:
    """The function that `name` refers to, which returns a workload for a batch size. Its errors are ArgumentErrors."""
    subject = f"workload={name!r}"
    function = _attribute(name, subject, (Workload,))
    if not callable(function):
        kind = type(function).__name__
        raise ArgumentError(f"{subject} is a {kind}: expected a function from a batch size to a remat_jax.Workload")
    try:
        inspect.signature(function).bind(1)
    except TypeError as error:
        raise ArgumentError(
            f"{subject} cannot be called with a batch size alone ({error}): expected a function from a batch size to a "
            "remat_jax.Workload"
        ) from None

    def of_batch(batch: int) -> Workload:
        made = _guarded(f"{subject} with batch {batch}", lambda: function(batch))
        if not isinstance(made, Workload):
            raise ArgumentError(f"{subject} gave a {type(made).__name__} for batch {batch}: expected a remat_jax.Workload")
        return made

    return of_batch


def load_named(name: str, argument: str, kinds: tuple[type, ...], expected: str) -> Any:
    """The instance of `kinds` that `name` refers to; if `name` refers to a function, the instance that it returns.

    Error messages call this argument `argument` and ask for `expected`.
    """
    subject = f"{argument}={name!r}"
    loaded = _attribute(name, subject, kinds)
    if not isinstance(loaded, kinds):
        loaded = _called(subject, loaded, expected)
    if not isinstance(loaded, kinds):
        raise ArgumentError(f"{subject} gave a {type(loaded).__name__}: expected {expected}")
    return loaded


def _attribute(name: str, subject: str, kinds: tuple[type, ...]) -> Any:
    """What `name` refers to. An error suggests the module's functions and its instances of `kinds`."""
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute.isidentifier():
        raise ArgumentError(f"{subject}: {_EXPECTED}, such as train.py:job")
    module = _guarded(subject, lambda: _module(where, subject))
    if not hasattr(module, attribute):
        choices = [
            choice
            for choice, value in vars(module).items()
            if not choice.startswith("_")
            and (isinstance(value, kinds) or (inspect.isfunction(value) and value.__module__ == module.__name__))
        ]
        raise ArgumentError(
            f"{subject}: {where} has no {attribute!r}.{nearest(attribute, choices)} "
            f"It has {', '.join(choices[:8]) or 'no function of its own'}."
        )
    return getattr(module, attribute)


def _called(subject: str, function: Any, expected: str) -> Any:
    if not callable(function):
        raise ArgumentError(f"{subject} is a {type(function).__name__}: expected {expected}, or a function that returns one")
    if needed := _needed(function):
        raise ArgumentError(
            f"{subject} needs the arguments {', '.join(needed)}: expected a function without arguments; "
            "give them defaults, or wrap it in a function without arguments"
        )
    return _guarded(subject, function)


def _needed(function: Any) -> list[str]:
    """The arguments of a function without defaults."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _module(where: str, subject: str) -> ModuleType:
    path = Path(where)
    if path.suffix == ".py":
        if not path.is_file():
            raise ArgumentError(f"{subject}: there is no file {where} in {Path.cwd()}; {_EXPECTED}")
        return _from_file(path.resolve())
    if not all(part.isidentifier() for part in where.split(".")):
        raise ArgumentError(f"{subject}: {where!r} is neither a .py file nor a module's name; {_EXPECTED}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        spec = importlib.util.find_spec(where)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise ArgumentError(f"{subject}: there is no module {where!r} here or among the installed packages; {_EXPECTED}")
    return importlib.import_module(where)


def _from_file(path: Path) -> ModuleType:
    """Import a file, as part of its package if it is in one. It may import modules next to itself or next to its package."""
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if len(parts) > 1:
        return importlib.import_module(".".join(parts))
    # Under its own name, a file such as types.py would replace Python's standard module of this name.
    version = path, path.stat().st_mtime_ns, path.stat().st_size
    if version not in _ran:
        spec = importlib.util.spec_from_file_location(f"{GIVEN_FILE}{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        _ran[version] = module
    return _ran[version]


_ran: dict[tuple[Path, int, int], ModuleType] = {}
"""The files that were run, each once: a step and its arguments may be in one file."""


def _is_users(file: str) -> bool:
    """Whether a file is neither of this package nor of an installed one, nor of Python."""
    folders = Path(file).parents
    libraries = (Path(__file__).parents[1], *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))
    return Path(file).is_file() and not any(library in folders for library in libraries)


def _guarded(subject: str, run: Callable[[], Any]) -> Any:
    """Return `run()`; an exception of the user's code becomes an ArgumentError with its type, message and line."""
    try:
        return run()
    except RematError:
        raise
    # A user's script that exits has returned no workload, and must not decide the command's exit status.
    except (Exception, SystemExit) as error:
        users = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        at = f", at {users[-1].filename}:{users[-1].lineno} in {users[-1].name}" if users else ""
        if compat.lacks_mesh(error):
            raise LacksMeshError(
                f"{subject}: it has a bare PartitionSpec in a sharding constraint, which needs a mesh{at}. Give one, such as "
                "--target 8xh200 --mesh fsdp=8"
            ) from error
        raise ArgumentError(f"{subject}: running it raised {type(error).__name__}: {error}{at}") from error
