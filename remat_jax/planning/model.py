"""The model that a plan was made for; the plan refuses any other model."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.sharding import NamedSharding

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.nnx import is_node
from remat_jax.core.marks import CHECKPOINTS, Block
from remat_jax.core.rewrite import count_regions
from remat_jax.core.walk import of_arrays
from remat_jax.errors import PlanningError, UnsupportedError
from remat_jax.warning import warn
from remat_jax.workload import Workload

Leaf = tuple[str, tuple[int, ...], str]
"""Path, shape, dtype."""


@dataclass(frozen=True)
class Model:
    """The arguments and the blocks of a workload, as text.

    Attributes:
      parameters, batch: path, shape and dtype of every array.
      blocks: for each block its kind (`class`, `function`, `glob` or `checkpoints`), its name, and its module (empty for a
        glob).
      mesh: the axes with more than one device, and their sizes; None if an older file has no mesh.
      checkpoints: the number of `jax.checkpoint` regions in the loss, a scanned region counted once; None if unknown.
    """

    parameters: tuple[Leaf, ...]
    batch: tuple[Leaf, ...]
    blocks: tuple[tuple[str, str, str], ...]
    mesh: tuple[tuple[str, int], ...] | None = None
    checkpoints: int | None = None

    @classmethod
    def of(cls, workload: Workload) -> Model:
        """The model of a workload."""
        loss, *arguments = workload.split_loss("off")
        regions = _regions(loss, (*arguments, *workload.batch))
        mesh = _axes(workload.mesh) if workload.mesh is not None else ()
        keys = tuple(map(block_key, workload.blocks))
        return cls(_leaves(workload.params), _leaves(workload.batch), keys, mesh, regions)

    def check_workload(self, workload: Workload, told: str) -> None:
        """Refuse a workload of another model, or with another batch.

        Raises:
          PlanningError: the message names the first difference; `told` names the plan in the message.
        """
        other = Model.of(workload)
        for what in ("parameters", "batch"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise PlanningError(
                    f"{told} was made for another model than {workload.name!r}: {_difference(what, mine, theirs)}"
                )
        if [key[:2] for key in self.blocks] != [key[:2] for key in other.blocks]:
            names = [[name for _, name, _ in one.blocks] for one in (self, other)]
            raise PlanningError(f"{told} was made for the blocks {names[0]}, and {workload.name!r} has {names[1]}; plan again")
        if self.mesh is not None and self.mesh != other.mesh:
            shown = [dict(one) or "one device" for one in (self.mesh, other.mesh or ())]
            raise PlanningError(f"{told} was made for the mesh {shown[0]}, and {workload.name!r} has {shown[1]}; plan again")
        self.check_number(other.checkpoints, told)

    def check_arguments(self, arguments: Any, told: str) -> None:
        """Refuse arguments of a loss without the model's parameters.

        Raises:
          PlanningError: the message names a missing parameter.
        """
        self._check_parameters(_types(arguments), told)

    def check_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], told: str) -> None:
        """Refuse a call of `fn` with another model, batch or mesh than planned.

        Arguments beside the parameters and the batch are ignored.

        Raises:
          PlanningError: the message names the difference.
        """
        given = _types((args, kwargs))
        self._check_parameters(given, told)
        there = Counter(one[1:] for one in given)
        there.subtract(one[1:] for one in self.parameters)
        for leaf in self.batch:
            there[leaf[1:]] -= 1
        missing = next((leaf for leaf in self.batch if there[leaf[1:]] < 0), None)
        if missing is not None:
            instead = [one for one in given if there[one[1:]] > 0]
            raise PlanningError(f"{told} was {_planned_for(missing, instead, fn)}. {_REMEDY}")
        mesh = _axes(jax.sharding.get_abstract_mesh()) or _axes_of_arrays((args, kwargs))
        if self.mesh is not None and mesh and mesh != self.mesh:
            planned, called = (", ".join(f"{axis}={size}" for axis, size in one) or "one device" for one in (self.mesh, mesh))
            raise PlanningError(f"{told} was planned for the mesh {planned}, called under {called}. {_REMEDY}")

    def check_checkpoints(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], told: str) -> None:
        """Refuse a function with another number of its own checkpoints; traces the function once.

        Raises:
          PlanningError: the message has both numbers.
        """
        flat, arrays = of_arrays(fn, args, kwargs)

        def arrays_out(*values: Any) -> list[Any]:
            return [leaf for leaf in jax.tree.leaves(flat(*values)) if compat.is_array(leaf)]

        self.check_number(_regions(arrays_out, arrays), told)

    def check_number(self, regions: int | None, told: str) -> None:
        """Refuse a loss with another number of `regions`.

        Raises:
          PlanningError: the message has both numbers.
        """
        if None not in (regions, self.checkpoints) and regions != self.checkpoints:
            raise PlanningError(
                f"{told} was planned for a loss with {self.checkpoints} checkpoints of its own, called for one with {regions}. "
                f"{_REMEDY}"
            )

    def _check_parameters(self, given: Sequence[Leaf], told: str) -> None:
        there = Counter(one[1:] for one in given)
        for path, shape, dtype in self.parameters:
            there[shape, dtype] -= 1
            if there[shape, dtype] < 0:
                raise PlanningError(
                    f"{told} was made for a model with the parameter {path} of shape {list(shape)} and dtype {dtype}, but no "
                    "argument has it: apply the plan to the loss of the model that it was made for, or plan again"
                )


_REMEDY = (
    "Plan again for this call, call the plain function (evaluation needs no plan), or use plan.apply(loss, strict=False), "
    "whose memory is unknown"
)


def _regions(function: Callable[..., Any], arguments: Sequence[Any]) -> int | None:
    """The number of checkpoint regions in a function; None if the function takes its gradient itself."""
    try:
        return count_regions(jax.make_jaxpr(function)(*arguments))
    except UnsupportedError:
        return None


def _axes_of_arrays(tree: Any) -> tuple[tuple[str, int], ...]:
    """The axes of the mesh that arrays are on, for a step whose mesh is not set (`jax.set_mesh`); () for a single device."""
    shardings = (getattr(compat.type_of(leaf), "sharding", None) for leaf in jax.tree.leaves(tree) if compat.is_array(leaf))
    return next((axes for one in shardings if isinstance(one, NamedSharding) and (axes := _axes(one.mesh))), ())


def _axes(mesh: Any) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh that divide arrays, without the axes of an enclosing `shard_map`, whose arrays are of one device."""
    manual = getattr(mesh, "manual_axes", ())
    return tuple((str(axis), int(size)) for axis, size in mesh.shape.items() if size > 1 and axis not in manual)


def _planned_for(planned: Leaf, given: Sequence[Leaf], fn: Callable[..., Any]) -> str:
    """`planned for tokens int32[8, 1024], called with int32[16, 1024]`."""
    place, _, path = planned[0].partition("/")
    name = path or _argument_name(fn, int(place) + 1) or f"batch[{place}]"
    alike = sorted(given, key=lambda one: (one[2] != planned[2], len(one[1]) != len(planned[1])))
    called = f"called with {_type_text(alike[0])}" if alike else "called without it"
    return f"planned for {name} {_type_text(planned)}, {called}"


def _argument_name(fn: Callable[..., Any], place: int) -> str:
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return ""
    return names[place] if place < len(names) and names[place] not in ("args", "kwargs", "batch") else ""


def _type_text(leaf: Leaf) -> str:
    return f"{leaf[2]}{list(leaf[1])}"


def _types(arguments: Any) -> tuple[Leaf, ...]:
    """The arrays and numbers among the arguments of a call, with JAX's dtypes."""
    leaves = jax.tree.leaves(jax.tree.map(_state, arguments, is_leaf=is_node))
    numbers = [jnp.asarray(leaf) if isinstance(leaf, bool | int | float | complex) else leaf for leaf in leaves]
    canonical = functools.partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
    return tuple(("", tuple(one.shape), str(canonical(one.dtype))) for one in numbers if compat.is_array(one))


def block_key(block: Block) -> tuple[str, str, str]:
    """A block as text: its kind, its name, its module.

    >>> block_key("layers_*"), block_key(linen.Dense)[:2]
    (('glob', 'layers_*', ''), ('class', 'Dense'))
    """
    if isinstance(block, str):
        return (CHECKPOINTS, block, "") if block == CHECKPOINTS else ("glob", block, "")
    return "class" if isinstance(block, type) else "function", block.__qualname__, block.__module__


def block_name(block: Block) -> str:
    """A block's name in reports."""
    return block_key(block)[1]


def find_block(key: tuple[str, str, str], workload: Workload | None, told: str) -> Block:
    """The block with this `block_key`, from the workload or among the loaded classes. Nothing is imported.

    Raises:
      PlanningError: no block has the name, or several blocks from other modules have it.
    """
    kind, name, module = key
    if workload is not None:
        # Prefer the class of the same module. Its module's name differs if the file was first run, then imported.
        found_here = sorted(workload.blocks, key=lambda block: block_key(block) != key)
        for block in found_here:
            if block_key(block)[:2] == (kind, name):
                return block
        raise PlanningError(f"{told} puts a policy on {name!r}, which is not a block of {workload.name!r}; plan again")
    if kind in ("glob", CHECKPOINTS):
        return name
    known: list[Any] = list(scope.marked) if kind == "function" else _subclasses(linen.Module) + _subclasses(nnx.Module)
    if kind == "class" and not any(one.__qualname__ == name for one in known):
        known = [one for one in _subclasses(object) if any("__call__" in vars(base) for base in one.__mro__)]
    found = {one for one in known if one.__qualname__ == name}
    exact = {one for one in found if one.__module__ == module}
    # A file that is run has another module name than the same file imported. If a notebook redefines a class, the last counts.
    chosen = exact if exact else found
    modules = sorted({one.__module__ for one in chosen})
    if len(modules) != 1:
        how = f"several modules define one ({', '.join(modules)})" if modules else f"no {kind} of that name is loaded"
        raise PlanningError(
            f"{told} puts a policy on the {kind} {name!r} of {module!r}, and {how}: import the model first, or give the "
            "workload, as in Plan.load(path, workload)"
        )
    if not exact:
        warn(
            f"{told} puts a policy on the {kind} {name!r} of the module {module!r}, which is not loaded: the {kind} of the "
            f"same name in {modules[0]!r} was used instead. Give the workload, as in Plan.load(path, workload), to be sure"
        )
    return next(one for one in reversed(known) if one in chosen)


def _subclasses(base: Any) -> list[Any]:
    """All subclasses, each once, in the order of their definition."""
    found: dict[Any, None] = {}
    waiting = list(type.__subclasses__(base))
    while waiting:
        one = waiting.pop(0)
        if one not in found and one is not type:
            found[one] = None
            waiting += type.__subclasses__(one)
    return list(found)


def _state(leaf: Any) -> Any:
    """The state of an NNX object, because the object need not be a pytree."""
    return nnx.state(leaf) if is_node(leaf) and not isinstance(leaf, nnx.Variable) else leaf


def _leaves(tree: Any) -> tuple[Leaf, ...]:
    leaves = jax.tree.leaves_with_path(tree)
    return tuple((jax.tree_util.keystr(path, simple=True, separator="/"), tuple(x.shape), str(x.dtype)) for path, x in leaves)


def _difference(what: str, mine: Sequence[Leaf], theirs: Sequence[Leaf]) -> str:
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return f"{what}: the plan has {_written(one)}, the workload has {_written(other)}; plan again"
    return f"{what}: the plan has {len(mine)} arrays, the workload has {len(theirs)}; plan again"


def _written(leaf: Leaf) -> str:
    return f"{leaf[0] or 'an array'} {leaf[2]}{list(leaf[1])}"
