"""A finished training step as a function of arrays, whatever its arguments are: NNX objects, models, static values."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from remat_jax import compat
from remat_jax.apply.donation import OwnArguments, donating, replaced
from remat_jax.apply.nnx import known_paths_in
from remat_jax.apply.nnx_state import NodeCopies, Objects, as_pure_function, is_node, nodes_in
from remat_jax.apply.pytrees import ModelArrays
from remat_jax.core.walk import of_some
from remat_jax.warning import warn

Step = Callable[..., Any]
_KINDS = inspect.Parameter
_POSITIONAL = (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD, _KINDS.VAR_POSITIONAL)


@dataclass(frozen=True)
class FinishedStep:
    """A step as a function of its arrays.

    Attributes:
      function: takes `shapes`. It returns the arrays that the step returns and, if there are NNX objects among the
        arguments, the arrays that it writes to them.
      shapes, arrays: an entry for each argument that is not static: its arrays as shapes, and the given arrays.
      places: the positions of these arguments in the call of the step.
      names: their names in the step's signature.
      own: which of them the step replaces, and how its `jit` donates them.
    """

    function: Step
    shapes: tuple[Any, ...]
    arrays: tuple[Any, ...]
    places: tuple[int, ...]
    names: tuple[str, ...]
    own: OwnArguments


def of_arrays(step: Step, args: tuple[Any, ...], structs: Callable[[Any], Any]) -> FinishedStep:
    """`step(*args)` as a function of arrays.

    Arguments that a `jax.jit` or `nnx.jit` around the step declares static are fixed, and so are the leaves of a callable
    model that are no arrays. The state of an NNX object in several arguments belongs to the first of them.

    Args:
      structs: replaces the arrays in a pytree by their shapes, and refuses other values.
    """
    own = step
    if options := compat.compiler_options(step):
        step = compat.without_compiler_options(step)
        warn(f"step: the compiler options of its jit, {options}, are not part of what is measured and planned")
    static = set(compat.jit_of(step).static)
    places = tuple(place for place in range(len(args)) if place not in static)
    varied = tuple(args[place] for place in places)
    all_names = _names(own, len(args))
    names = tuple(all_names[place] for place in places)
    of_varied = of_some(step, args, places) if static else step
    objects = nodes_in(varied)

    def how(numbers: Iterable[int]) -> str:
        return donating(own, all_names, [places[number] for number in numbers], bool(objects))

    if objects:
        function, shapes, written_by = _of_nnx(of_varied, varied, structs, own)
        return FinishedStep(function, shapes, arrays_of(varied), places, names, OwnArguments(written_by, how))
    models = ModelArrays(varied)

    @functools.wraps(step)
    def of_models(*arrays: Any) -> Any:
        results = of_varied(*models.whole(arrays))
        return jax.tree.map(lambda leaf: leaf if compat.is_array(leaf) else None, results)

    shapes = structs(models.arrays)

    def replaced_by(function: Step) -> tuple[int, ...]:
        return replaced(shapes, jax.eval_shape(function, *shapes))

    return FinishedStep(of_models, shapes, models.arrays, places, names, OwnArguments(replaced_by, how))


def _names(step: Step, count: int) -> list[str]:
    """The names that `step` gives its `count` arguments; their positions if it has no signature.

    >>> _names(lambda state, *batch: None, 3)
    ['state', 'batch[0]', 'batch[1]']
    """
    try:
        parameters = [each for each in inspect.signature(step).parameters.values() if each.kind in _POSITIONAL]
    except (TypeError, ValueError):
        parameters = []
    names = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_POSITIONAL][:count]
    more = next((each.name for each in parameters if each.kind is inspect.Parameter.VAR_POSITIONAL), None)
    first = 0 if more is None else len(names)
    return names + [f"{more or ''}[{place - first}]" for place in range(len(names), count)]


def _of_nnx(
    step: Step, args: tuple[Any, ...], structs: Callable[[Any], Any], own: Step
) -> tuple[Step, tuple[Any, ...], Callable[[Step], tuple[int, ...]]]:
    flat, treedef = jax.tree.flatten(args, is_leaf=is_node)
    objects = Objects([leaf for leaf in flat if is_node(leaf)])
    nodes = iter(NodeCopies(objects, structs(objects.leaves)).nodes)
    abstract = jax.tree.unflatten(treedef, [next(nodes) if is_node(leaf) else structs(leaf) for leaf in flat])
    numbers: set[int] = set()  # of the replaced arguments, in the last trace

    def noting(*args: Any) -> Any:
        before = list(map(_values, args))
        outputs = step(*args)
        numbers.clear()
        numbers.update(number for number, values in enumerate(map(_values, args)) if values != before[number])
        numbers.update(replaced(args, outputs))
        return outputs

    pure, *_ = as_pure_function(_in_paths(noting), abstract, {})
    if compat.is_jax_jit(own):
        _warn_of_lost_writes(own, abstract)

    others = [len(jax.tree.leaves(arg, is_leaf=is_node)) for arg in args]

    def of_parts(*parts: Any) -> list[Any]:
        state: list[Any] = []
        arguments: list[Any] = []
        for part, count in zip(parts, others, strict=True):
            leaves = list(part.values())
            state += leaves[: len(leaves) - count]
            arguments += leaves[len(leaves) - count :]
        arrays, _ = pure(state, *arguments)
        return list(arrays)

    shapes = arrays_of(abstract)

    def replaced_by(function: Step) -> tuple[int, ...]:
        jax.eval_shape(function, *shapes)
        return tuple(sorted(numbers))

    return of_parts, shapes, replaced_by


def _values(arg: Any) -> list[int]:
    """The identities of the values of the NNX variables in an argument."""
    variables = Objects(nodes_in(arg)).by_index.values()
    return [id(each.get_raw_value()) for each in variables if isinstance(each, nnx.Variable)]


def arrays_of(args: tuple[Any, ...]) -> tuple[OrderedDict[str, Any], ...]:
    """For each argument, the arrays of its NNX objects by path, then its other leaves; None for each object."""
    flat = [jax.tree.leaves_with_path(arg, is_leaf=is_node) for arg in args]
    nodes = [(place, _text(path), leaf) for place, leaves in enumerate(flat) for path, leaf in leaves if is_node(leaf)]
    parts = [OrderedDict[str, Any]() for _ in args]
    objects = Objects([node for *_, node in nodes])
    for (number, *path), leaf in zip(objects.paths, objects.leaves, strict=True):
        place, to_node, _ = nodes[number]
        parts[place]["/".join(filter(None, [to_node, *map(str, path)]))] = leaf
    for part, leaves in zip(parts, flat, strict=True):
        # An object that is a variable has the path of its value: the entry of an object has another name than any path.
        part.update((f"{_text(path)}/", None) if is_node(leaf) else (_text(path), leaf) for path, leaf in leaves)
    return tuple(parts)


def _text(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _in_paths(step: Step) -> Step:
    def run(*args: Any) -> Any:
        with known_paths_in(args):
            return step(*args)

    return run


def _warn_of_lost_writes(step: Step, args: tuple[Any, ...]) -> None:
    """Warn if `step`, under `jax.jit`, writes to NNX objects what it does not return: JAX drops it."""
    returned: set[int] = set()

    def inner(*args: Any) -> Any:
        outputs = inspect.unwrap(step)(*args)
        returned.update(map(id, jax.tree.leaves(outputs)))
        return outputs

    pure, state, arguments, _ = as_pure_function(inner, args, {})
    lost: list[int] = []
    jax.eval_shape(lambda *given: lost.append(sum(id(out) not in returned for out in pure(*given)[0])), state, *arguments)
    if lost[-1]:
        warn(
            f"step: it is under jax.jit, which drops what the step writes to its NNX arguments and does not return: {lost[-1]} "
            "arrays. XLA then removes what computes them, perhaps the whole gradient. Use nnx.jit, or return nnx.state(model)."
        )
