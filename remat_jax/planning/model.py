"""The model that a plan was made for, as text, and checks that a workload or a call has the same model."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.sharding import NamedSharding

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.methods import CALL, defines, loaded_methods, subclasses
from remat_jax.apply.nnx_state import is_node
from remat_jax.core.marks import PARTS, Block
from remat_jax.core.rewrite import count_regions
from remat_jax.core.walk import of_arrays
from remat_jax.errors import PlanningError, UnsupportedError, inside_a_step
from remat_jax.warning import warn
from remat_jax.workload import Workload

Leaf = tuple[str, tuple[int, ...], str]
"""Path, shape, dtype."""

GIVEN_FILE = "_workload_"
"""Before the name of a file's module, if the file was given to `remat-jax`."""


@dataclass(frozen=True)
class Model:
    """The arguments and the blocks of a workload, as text.

    Attributes:
      blocks: the `block_key` of each block.
      mesh: (name, size) of each axis with more than one device; None if unknown, as in older files.
      checkpoints: the number of `jax.checkpoint` regions in the loss, a scanned region counted once; None if unknown, as for a
        finished step, whose first argument counts as the parameters.
    """

    parameters: tuple[Leaf, ...]
    batch: tuple[Leaf, ...]
    blocks: tuple[tuple[str, str, str], ...]
    mesh: tuple[tuple[str, int], ...] | None = None
    checkpoints: int | None = None

    @classmethod
    def of(cls, workload: Workload) -> Model:
        """The model of a workload."""
        if workload.has_loss:
            loss, trained, frozen = workload.split_loss("off")
            parameters, batch = workload.params, workload.whole_batch
            regions = _regions(loss, (trained, frozen, *workload.batch))
        else:  # a finished step: the plan is applied to the step itself
            arguments = tuple(map(_single, workload.step("off").arguments))
            parameters, batch, regions = arguments[:1], arguments[1:], None
        mesh = _axes(workload.mesh) if workload.mesh is not None else ()
        keys = tuple(map(block_key, workload.blocks))
        return cls(_leaves(parameters), _leaves(batch), keys, mesh, regions)

    def check_workload(self, workload: Workload, plan_name: str) -> None:
        """Raise if a workload has another model, batch or mesh.

        Raises:
          PlanningError: the message names the plan and the first difference.
        """
        other = Model.of(workload)
        for name in ("parameters", "batch"):
            if difference := _difference(getattr(self, name), getattr(other, name)):
                raise PlanningError(
                    f"{plan_name} was made for another model than {workload.name!r}: {name}: {difference}; plan again"
                )
        if [key[:2] for key in self.blocks] != [key[:2] for key in other.blocks]:
            planned, names = ([name for _, name, _ in model.blocks] for model in (self, other))
            raise PlanningError(f"{plan_name} was made for the blocks {planned}, and {workload.name!r} has {names}; plan again")
        if self.mesh is not None and self.mesh != other.mesh:
            planned_on, mesh = (dict(axes) or "one device" for axes in (self.mesh, other.mesh or ()))
            raise PlanningError(f"{plan_name} was made for the mesh {planned_on}, and {workload.name!r} has {mesh}; plan again")
        self._check_regions(other.checkpoints, plan_name)

    def check_arguments(self, arguments: Any, plan_name: str) -> tuple[Leaf, ...]:
        """Raise if the arguments of a loss lack a parameter of the model; returns a `Leaf` for each array in the arguments.

        Raises:
          PlanningError: the message names a missing parameter.
        """
        types = _types(arguments)
        there = Counter(leaf[1:] for leaf in types)
        for path, shape, dtype in self.parameters:
            there[shape, dtype] -= 1
            if there[shape, dtype] < 0:
                raise PlanningError(
                    f"{plan_name} was made for a model with the parameter {path} of shape {list(shape)} and dtype {dtype}, but "
                    "no argument has it: apply the plan to the loss or the step that it was made for, or plan again"
                )
        return types

    def check_call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plan_name: str,
        *,
        micro_batches: int = 1,
        or_whole: bool = False,
    ) -> None:
        """Raise if a call of `fn` has another model, batch or mesh than planned. Additional arguments are ignored.

        Args:
          micro_batches: the number of micro-batches of which the batch is one.
          or_whole: whether it may also be the whole batch.

        Raises:
          PlanningError: the message names the difference.
        """
        types = self.check_arguments((args, kwargs), plan_name)
        there = Counter(leaf[1:] for leaf in types)
        there.subtract(leaf[1:] for leaf in (*self.parameters, *self.batch))
        missing = next((leaf for leaf in self.batch if there[leaf[1:]] < 0), None)
        if missing is None and micro_batches > 1 and not or_whole:
            raise PlanningError(
                f"{plan_name} has {micro_batches} micro-batches, but is called with the whole batch: plan.train_step(loss, "
                "optimizer) cuts it; in a step of your own, call this function with one micro-batch"
            )
        for leaf in self.batch if missing is not None else ():  # an array that is not there may be there with fewer rows
            part = _with_rows(leaf, micro_batches)
            if there[leaf[1:]] < 0 < there[part]:
                there.update({leaf[1:]: 1, part: -1})
        missing = next((leaf for leaf in self.batch if there[leaf[1:]] < 0), None)
        if missing is not None:
            instead = [leaf for leaf in types if there[leaf[1:]] > 0]
            closure = f". {_OF_A_CLOSURE}" if not instead else ""
            raise PlanningError(f"{plan_name} was {_planned_for(missing, instead, fn)}. {_REMEDY}{closure}")
        mesh = _axes(jax.sharding.get_abstract_mesh()) or _axes_of_arrays((args, kwargs))
        if self.mesh is not None and mesh and mesh != self.mesh:
            planned, called = (", ".join(f"{axis}={size}" for axis, size in axes) or "one device" for axes in (self.mesh, mesh))
            raise PlanningError(f"{plan_name} was planned for the mesh {planned}, but is called under {called}. {_REMEDY}")

    def check_checkpoints(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], plan_name: str) -> None:
        """Raise if a function has another number of its own checkpoints than planned; traces the function once.

        Raises:
          PlanningError: the message has both numbers.
        """
        flat, arrays = of_arrays(fn, args, kwargs)

        def arrays_out(*values: Any) -> list[Any]:
            return [leaf for leaf in jax.tree.leaves(flat(*values)) if compat.is_array(leaf)]

        self._check_regions(_regions(arrays_out, arrays), plan_name)

    def _check_regions(self, regions: int | None, plan_name: str) -> None:
        if None not in (regions, self.checkpoints) and regions != self.checkpoints:
            raise PlanningError(
                f"{plan_name} was planned for a loss with {self.checkpoints} checkpoints of its own, but this loss has "
                f"{regions}. {_REMEDY}"
            )


_REMEDY = (
    "Plan again for this call, call the plain function (evaluation needs no plan), or use plan.apply(loss, strict=False), "
    "whose memory is unknown"
)


_OF_A_CLOSURE = (
    "A loss inside a train step, which closes over the batch, is never called with it; with the planned batch it needs the "
    f"planned memory:\n{inside_a_step('plan.apply(loss_fn, strict=False)')}"
)


def _single(argument: Any) -> Any:
    """The array of an argument that is a single array; any other argument unchanged. An NNX step's arrays are in lists."""
    leaves = jax.tree.leaves(argument)
    return leaves[0] if len(leaves) == 1 else argument


def _regions(function: Callable[..., Any], arguments: Sequence[Any]) -> int | None:
    """The number of checkpoint regions in a function; None if the function computes gradients inside."""
    try:
        return count_regions(jax.make_jaxpr(function)(*arguments))
    except UnsupportedError:
        return None


def _axes_of_arrays(tree: Any) -> tuple[tuple[str, int], ...]:
    """The `_axes` of the mesh of the arrays in `tree`, for a call without `jax.set_mesh`; () on a single device."""
    shardings = (getattr(compat.type_of(leaf), "sharding", None) for leaf in jax.tree.leaves(tree) if compat.is_array(leaf))
    return next((axes for sharding in shardings if isinstance(sharding, NamedSharding) and (axes := _axes(sharding.mesh))), ())


def _axes(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> tuple[tuple[str, int], ...]:
    """(name, size) of each mesh axis with more than one device. Inside a `shard_map`, its axes are left out."""
    manual = getattr(mesh, "manual_axes", ())
    return tuple((str(axis), int(size)) for axis, size in mesh.shape.items() if size > 1 and axis not in manual)


def _with_rows(leaf: Leaf, micro_batches: int) -> tuple[tuple[int, ...], str]:
    """The shape and dtype of an array of the batch in one micro-batch."""
    _, shape, dtype = leaf
    return (shape[0] // micro_batches, *shape[1:]) if shape else shape, dtype


def _planned_for(planned: Leaf, leaves: Sequence[Leaf], fn: Callable[..., Any]) -> str:
    """The mismatch as text, such as `planned for tokens int32[8, 1024], called with int32[16, 1024]`."""
    place, _, path = planned[0].partition("/")
    name = path or _argument_name(fn, int(place) + 1) or f"batch[{place}]"
    alike = sorted(leaves, key=lambda leaf: (leaf[2] != planned[2], len(leaf[1]) != len(planned[1])))
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
    """For each array and number among a call's arguments, a `Leaf` with an empty path and JAX's dtype."""
    leaves = jax.tree.leaves(jax.tree.map(_state, arguments, is_leaf=is_node))
    numbers = [jnp.asarray(leaf) if isinstance(leaf, bool | int | float | complex) else leaf for leaf in leaves]
    canonical = functools.partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
    return tuple(("", tuple(leaf.shape), str(canonical(leaf.dtype))) for leaf in numbers if compat.is_array(leaf))


def block_key(block: Block) -> tuple[str, str, str]:
    """A block as text: its kind (`class`, `function`, `glob` or `checkpoints`), its name, and its module (or empty).

    >>> block_key("layers_*"), block_key(linen.Dense)[:2]
    (('glob', 'layers_*', ''), ('class', 'Dense'))
    """
    if isinstance(block, str):
        return block if block in PARTS else "glob", block, ""
    return "class" if isinstance(block, type) else "function", block.__qualname__, block.__module__


def block_name(block: Block) -> str:
    """A block's name in reports."""
    return block_key(block)[1]


def find_block(key: tuple[str, str, str], workload: Workload | None, plan_name: str) -> Block:
    """The block with this `block_key`, from the workload or the loaded classes and functions. Nothing is imported.

    Raises:
      PlanningError: no block has the name, or blocks of several modules have it.
    """
    kind, name, module = key
    if workload is not None:
        # Prefer the block of the same module. A module that was run (`__main__`) has another name when it is imported.
        for block in sorted(workload.blocks, key=lambda block: block_key(block) != key):
            if block_key(block)[:2] == (kind, name):
                return block
        raise PlanningError(f"{plan_name} puts a policy on {name!r}, which is not a block of {workload.name!r}; plan again")
    if kind == "glob" or kind in PARTS:
        return name
    loaded: list[Any] = list(scope.marked) if kind == "function" else subclasses(linen.Module) + subclasses(nnx.Module)
    if kind == "class" and not any(each.__qualname__ == name for each in loaded):
        loaded = [each for each in subclasses(object) if defines(each, CALL)]
    named = [each for each in loaded if each.__qualname__ == name]
    if kind == "function" and not named:
        named = loaded_methods(name)
    exact = [each for each in named if each.__module__ == module]
    exact = exact or [each for each in named if _imported_as(each.__module__) == _imported_as(module)]
    modules = sorted({each.__module__ for each in exact or named})
    if len(modules) != 1:
        how = (
            f"several modules define a {kind} of that name ({', '.join(modules)})"
            if modules
            else f"no {kind} of that name is loaded"
        )
        raise PlanningError(
            f"{plan_name} puts a policy on the {kind} {name!r} of {module!r}, and {how}: import the model first, or give the "
            "workload, as in Plan.load(path, workload)"
        )
    if not exact:
        here = "has none here" if module in sys.modules else "is not loaded"
        warn(
            f"{plan_name} puts a policy on the {kind} {name!r} of the module {_imported_as(module)!r}, which {here}: "
            f"the {kind} of the same name in {modules[0]!r} was used instead. Give the workload, as in "
            "Plan.load(path, workload), to be sure"
        )
    # If a notebook redefines a class, take the last definition.
    return (exact or named)[-1]


def _imported_as(module: str) -> str:
    """The name under which a program imports this module: a file that is run, or given to `remat-jax`, has another name."""
    file = getattr(sys.modules["__main__"], "__file__", None) if module == "__main__" else None
    return Path(file).stem if file else module.removeprefix(GIVEN_FILE)


def _state(leaf: Any) -> Any:
    """The state of an NNX object, because the object need not be a pytree; any other leaf unchanged."""
    return nnx.state(leaf) if is_node(leaf) and not isinstance(leaf, nnx.Variable) else leaf


def _leaves(tree: Any) -> tuple[Leaf, ...]:
    leaves = jax.tree.leaves_with_path(tree)
    return tuple((jax.tree_util.keystr(path, simple=True, separator="/"), tuple(x.shape), str(x.dtype)) for path, x in leaves)


def _difference(planned: Sequence[Leaf], leaves: Sequence[Leaf]) -> str:
    """The first difference in words; empty if there is none."""
    for planned_leaf, other in zip(planned, leaves, strict=False):
        if planned_leaf != other:
            mine, theirs = (f"{leaf[0] or 'an array'} {_type_text(leaf)}" for leaf in (planned_leaf, other))
            return f"the plan has {mine}, the workload has {theirs}"
    if len(planned) != len(leaves):
        return f"the plan has {len(planned)} arrays, the workload has {len(leaves)}"
    return ""
