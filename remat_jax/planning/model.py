"""Which model a plan is for, so that it can refuse another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen, nnx

from remat_jax.apply import scope
from remat_jax.apply.marking import Block
from remat_jax.apply.nnx import is_node
from remat_jax.errors import PlanningError
from remat_jax.workload import Workload

Leaf = tuple[str, tuple[int, ...], str]
"""Path, shape, dtype."""


@dataclass(frozen=True)
class Model:
    """The arguments and the blocks of a workload, as text.

    Attributes:
      parameters, batch: path, shape and dtype of every array.
      blocks: of each block whether it is a `class`, a `function` or a `glob`, its name, and its module (empty for a glob).
    """

    parameters: tuple[Leaf, ...]
    batch: tuple[Leaf, ...]
    blocks: tuple[tuple[str, str, str], ...]

    @classmethod
    def of(cls, workload: Workload) -> Model:
        """The model of a workload."""
        return cls(_leaves(workload.params), _leaves(workload.batch), tuple(map(block_key, workload.blocks)))

    def check_workload(self, workload: Workload, told: str) -> None:
        """Refuse a workload of another model, or with another batch.

        Raises:
          PlanningError: with the first thing that differs; `told` says which plan.
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

    def check_arguments(self, arguments: Any, told: str) -> None:
        """Refuse arguments of a loss among which the model's parameters are not.

        Raises:
          PlanningError: naming a parameter that is missing.
        """
        leaves = jax.tree.leaves(jax.tree.map(_state, arguments, is_leaf=is_node))
        there = Counter((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves if hasattr(leaf, "dtype"))
        for path, shape, dtype in self.parameters:
            there[shape, dtype] -= 1
            if there[shape, dtype] < 0:
                raise PlanningError(
                    f"{told} was made for a model with the parameter {path} of shape {list(shape)} and dtype {dtype}, and it "
                    "is not among the arguments: apply the plan to the loss of the model that it was made for, or plan again"
                )


def block_key(block: Block) -> tuple[str, str, str]:
    """A block as text: what it is, its name, its module.

    >>> block_key("layers_*"), block_key(linen.Dense)[:2]
    (('glob', 'layers_*', ''), ('class', 'Dense'))
    """
    if isinstance(block, str):
        return "glob", block, ""
    return "class" if isinstance(block, type) else "function", block.__qualname__, block.__module__


def block_name(block: Block) -> str:
    """What reports call a block."""
    return block_key(block)[1]


def find_block(key: tuple[str, str, str], workload: Workload | None, told: str) -> Block:
    """The block that `block_key` wrote as `key`: one of the workload, or a module class that is loaded. Nothing is imported.

    Raises:
      PlanningError: there is none of that name, or several from other modules.
    """
    kind, name, module = key
    if workload is not None:
        # Two modules may each have a class of that name; another module's is taken where a file was run, then imported.
        found_here = sorted(workload.blocks, key=lambda block: block_key(block) != key)
        for block in found_here:
            if block_key(block)[:2] == (kind, name):
                return block
        raise PlanningError(f"{told} puts a policy on {name!r}, which is none of the blocks of {workload.name!r}; plan again")
    if kind == "glob":
        return name
    modules_known = _subclasses(linen.Module) + _subclasses(nnx.Module)
    known: list[Block] = [*scope.marked] if kind == "function" else [*modules_known]
    found = {one for one in known if not isinstance(one, str) and one.__qualname__ == name}
    exact = {one for one in found if one.__module__ == module}
    # A file that is run has another module name than the same file imported. Defined again in a notebook, the last one counts.
    chosen = exact if exact else found
    modules = sorted({one.__module__ for one in chosen})
    if len(modules) != 1:
        how = f"several modules define one ({', '.join(modules)})" if modules else f"no {kind} of that name is loaded"
        raise PlanningError(
            f"{told} puts a policy on the {kind} {name!r} of {module!r}, and {how}: import the model first, or give the "
            "workload, as in Plan.load(path, workload)"
        )
    return next(one for one in reversed(known) if one in chosen)


def _subclasses(base: type) -> list[type]:
    direct: list[type] = list(base.__subclasses__())
    return [below for one in direct for below in (one, *_subclasses(one))]


def _state(leaf: Any) -> Any:
    """An NNX object as its state: it need not be a pytree."""
    return nnx.state(leaf) if is_node(leaf) and not isinstance(leaf, nnx.Variable) else leaf


def _leaves(tree: Any) -> tuple[Leaf, ...]:
    leaves = jax.tree.leaves_with_path(tree)
    return tuple((jax.tree_util.keystr(path, simple=True, separator="/"), tuple(x.shape), str(x.dtype)) for path, x in leaves)


def _difference(what: str, mine: Sequence[Leaf], theirs: Sequence[Leaf]) -> str:
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return f"{what}: the plan has {_written(one)}, the workload {_written(other)}; plan again"
    return f"{what}: the plan has {len(mine)} arrays, the workload {len(theirs)}; plan again"


def _written(leaf: Leaf) -> str:
    return f"{leaf[0] or 'an array'} {leaf[2]}{list(leaf[1])}"
