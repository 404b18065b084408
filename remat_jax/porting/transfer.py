"""Convert weights and gradients between PyTorch and Flax by a weight map; a single error lists everything that does not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from remat_jax.errors import PortingError
from remat_jax.porting.links import fit, links_of_places, links_of_tensors, tied_pairs
from remat_jax.porting.pattern import FlaxPattern, Pattern, Place
from remat_jax.porting.rules import Rule, Rules, as_rules
from remat_jax.porting.tensors import as_jax, as_numpy, as_torch, is_torch, memory_of
from remat_jax.porting.variables import Leaves, Variables

Arrays = dict[str, np.ndarray]


def from_torch(state_dict: Mapping[str, Any], variables: Any, rules: Any, *, dtype: Any = None) -> Any:
    """Return `variables` filled with PyTorch's values; every tensor is used exactly once and every array is filled.

    `state_dict` maps names to tensors or arrays. `variables` are arrays or `jax.ShapeDtypeStruct`: the result of a Linen
    module's `init`, an NNX State, or an NNX module; the returned tree has the same type. `rules` is a `Rules`, its text, or a
    sequence of rules. The result's arrays are copies with the tensors' dtypes. There are two exceptions: floating-point arrays
    get `dtype` if it is given, and integers get the integer dtype of the array in `variables` if it holds their values. Each
    array has the NamedSharding, if any, of the array in `variables`.

    Raises:
        PortingError: lists every tensor that is missing, extra, duplicated or of the wrong shape, and every array that is not
            filled; or 64-bit values would lose digits because JAX's 64-bit types are off.

    >>> variables = {"params": {"head": {"kernel": np.zeros((2, 3), np.float32)}}}
    >>> weight = np.arange(6, dtype=np.float32).reshape(3, 2)
    >>> from_torch({"head.weight": weight}, variables, "head.weight -> params/head/kernel | linear")["params"]["head"]["kernel"]
    Array([[0., 2., 4.],
           [1., 3., 5.]], dtype=float32)
    """
    rules, target = as_rules(rules), Variables(variables)
    problems: list[str] = []
    arrays = _read(state_dict, problems)
    _refuse_shared(rules, state_dict, arrays, problems)
    arrays = _join_tied(rules, arrays, problems)
    filled = fill(rules, arrays, target.leaves, problems, direction="forward")
    filled = {path: _in_dtype(array, dtype, target.leaves[path]) for path, array in filled.items()}
    leaves = target.leaves | _converted(filled, lambda path, array: as_jax(array, target.leaves[path]), problems)
    if not problems:
        remedy = "give variables with values, such as those of the model's init"
        problems += [
            f"{path}: is named under 'missing:', but `variables` has no value for it; {remedy}" for path in _abstract(leaves)
        ]
    _raise(problems, "the tensors do not fit the variables")
    return target.rebuild(leaves)


def to_torch(variables: Any, rules: Any, *, like: Mapping[str, Any] | None = None, numpy: bool = False) -> dict[str, Any]:
    """Return the PyTorch state dict from which `from_torch` would make `variables`: the inverse of the map.

    `like` is a state dict of the PyTorch model: the result must have the same names and shapes, and tensors that the rules name
    as extra are copied from `like`. The values are copies: tensors, or NumPy arrays if `numpy`. A permutation is inverted bit
    for bit; `scale` and `shift` round; the inverse of `sum` sets one tensor to the whole value and the others to 0.

    Raises:
        PortingError: lists every array that no rule matches, and every tensor of `like` that no rule makes in its shape.

    >>> variables = {"params": {"head": {"kernel": np.ones((2, 3))}}}
    >>> to_torch(variables, "head.weight -> params/head/kernel | linear", numpy=True)["head.weight"].shape
    (3, 2)
    """
    rules, source = as_rules(rules), Variables(variables)
    problems: list[str] = []
    result = take(rules, source.leaves, problems, direction="inverse")
    for first, second in tied_pairs(rules, result):
        if like is None or second in like:
            result.setdefault(second, result[first])
        if like is not None and first not in like:
            result.pop(first, None)
    if like is not None:
        _hold_to(like, rules, result, problems)
    _raise(problems, "the variables do not fit the tensors")
    return result if numpy else {name: as_torch(array) for name, array in result.items()}


def gradients_from_torch(gradients: Mapping[str, Any], variables: Any, rules: Any) -> Any:
    """Convert PyTorch's gradients to those that JAX would compute, by the inverse of the map's adjoint.

    `gradients` maps the names of parameters to their gradients. Only the parameters in `variables` are used: the result is
    `{"params": …}` for Linen, and a State of parameters for NNX, as from `nnx.grad`. A parameter that the rules name as
    missing has the gradient 0. The gradients of tied tensors are added, unless both names have the same gradient tensor,
    which already is the sum. `scale(x)` multiplies a weight by x and divides its gradient by x.

    Raises:
        PortingError: in the cases of `from_torch`; a gradient that is None counts as missing.

    >>> variables = {"params": {"table": np.zeros(2, np.float32)}}
    >>> gradients_from_torch({"table": np.array([8, 4], np.float32)}, variables, "table -> params/table | scale(4)")
    {'params': {'table': Array([2., 1.], dtype=float32)}}
    """
    rules, target = as_rules(rules), Variables(variables, trainable=True)
    absent = [name for name, value in gradients.items() if value is None]
    problems = [f"{name}: its gradient is None" for name in absent if not rules.allows_extra(name)]
    present = {name: value for name, value in gradients.items() if value is not None}
    arrays = _join_tied(rules, _read(present, problems), problems, gradients=present)
    filled = fill(rules, arrays, target.leaves, problems, direction="gradient")
    for path, leaf in target.leaves.items():
        if path not in filled and rules.allows_missing(path):
            filled[path] = np.zeros(leaf.shape, leaf.dtype)
    leaves = _converted(filled, lambda _, array: as_jax(array), problems)
    _raise(problems, "the gradients do not fit the parameters")
    return target.rebuild(leaves)


def gradients_to_torch(gradients: Any, rules: Any, *, numpy: bool = False) -> dict[str, Any]:
    """Convert JAX's gradients to PyTorch's names and shapes, by the adjoint of the map.

    `gradients` is a tree like the variables (`{"params": …}`, an NNX State); only the parameters are used. Tied tensors have a
    single gradient, under the name that rules use. If `numpy`, the values are NumPy arrays. Raises a PortingError that lists
    every array that no rule matches.

    >>> gradients_to_torch({"params": {"table": np.array([2.0])}}, "table -> params/table | scale(4)", numpy=True)
    {'table': array([8.])}
    """
    rules, source = as_rules(rules), Variables(gradients, trainable=True)
    problems: list[str] = []
    result = take(rules, source.leaves, problems, direction="adjoint")
    _raise(problems, "the gradients do not fit the rules")
    return result if numpy else {name: as_torch(array) for name, array in result.items()}


def restack(variables: Any, like: Any, each: str, stack: str) -> Any:
    """Return the values of `variables` in the form of `like`: unrolled layers are stacked on axis 0, or the reverse.

    `each` is the name of a single layer, such as `layers_{i}`; `stack` is the name of the stacked layers. `variables` and
    `like` may each be Linen or NNX; `like` may be shapes. If both are stacked or both unrolled, only the tree type changes.

    Raises:
        PortingError: lists every array that only one of the two has, or that differs in shape.

    >>> zero, one = np.zeros(2, np.float32), np.ones(2, np.float32)
    >>> unrolled = {"params": {"layers_0": {"scale": zero}, "layers_1": {"scale": one}}}
    >>> stacked = {"params": {"layers": {"scale": np.zeros((2, 2))}}}
    >>> restack(unrolled, stacked, "layers_{i}", "layers")["params"]["layers"]["scale"].tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """
    if len(Pattern(each).placeholders) != 1:
        raise PortingError(f"each={each!r}: expected a name with one placeholder, such as 'layers_{{i}}'.")
    unrolled = to_torch(variables, _unrolling(Variables(variables), each, stack), numpy=True)
    return from_torch(unrolled, like, _unrolling(Variables(like), each, stack))


def _unrolling(variables: Variables, each: str, stack: str) -> Rules:
    """Rules from unrolled paths, in place of PyTorch names, to the variables' paths; rules of unstacked arrays come first."""
    (placeholder,) = Pattern(each).placeholders
    rules = []
    for path in sorted(variables.leaves, key=lambda path: f"/{stack}/" in f"/{path}/"):
        if "{" in path or "}" in path:
            raise PortingError(
                "restack: a path of the variables has braces in it, which name a placeholder; rename the module."
            )
        name = f"/{path}/".replace(f"/{stack}/", f"/{each}/").strip("/")
        index = (Pattern(f"{{{placeholder}}}"),) if name != path else ()
        rules.append(Rule((Pattern(name),), (FlaxPattern(Pattern(path), index),)))
    return Rules(tuple(rules))


def _read(tensors: Mapping[str, Any], problems: list[str]) -> Arrays:
    if not isinstance(tensors, Mapping):
        raise PortingError(f"{type(tensors).__name__} is not a mapping of names to tensors; give module.state_dict().")

    def read(_: str, value: Any) -> np.ndarray:
        if not (is_torch(value) or hasattr(value, "__array__")):
            raise PortingError(f"is of type {type(value).__name__}, not a tensor or array")
        return as_numpy(value)

    return _converted(tensors, read, problems)


def _converted(values: Mapping[str, Any], convert: Callable[[str, Any], Any], problems: list[str]) -> dict[str, Any]:
    """`convert(name, value)` of each value; a PortingError becomes a problem with the value's name."""
    converted = {}
    for name, value in values.items():
        try:
            converted[name] = convert(name, value)
        except PortingError as error:
            problems.append(f"{name}: {error}")
    return converted


def _join_tied(rules: Rules, arrays: Arrays, problems: list[str], gradients: Mapping[str, Any] | None = None) -> Arrays:
    """The arrays with each tied pair under the name that rules use: values must be equal, and gradients are added."""
    result = dict(arrays)
    for first_name, name in tied_pairs(rules, arrays):
        if name not in result:
            continue
        second = result.pop(name)
        first = result.setdefault(first_name, second)
        if first is second:
            continue
        if first.shape != second.shape or first.dtype != second.dtype:
            kinds = f"{first.dtype} {first.shape} and {second.dtype} {second.shape}"
            problems.append(f"{name}: tied to {first_name}, but they are {kinds}")
        elif gradients is None:
            if first.tobytes() != second.tobytes():
                remedy = "remove the tie, or give equal tensors"
                problems.append(f"{name}: tied to {first_name}, but their values differ; {remedy}")
        elif memory_of(gradients[first_name]) != memory_of(gradients[name]):
            result[first_name] = (first.astype(np.float64) + second.astype(np.float64)).astype(first.dtype)
    return result


def _refuse_shared(rules: Rules, state_dict: Mapping[str, Any], arrays: Arrays, problems: list[str]) -> None:
    """Refuse a tensor with two names that would fill two arrays: the arrays would diverge in training."""
    tied = {frozenset(pair) for pair in tied_pairs(rules, state_dict)}
    by_memory: dict[Hashable, list[str]] = {}
    # A mapping may read each tensor anew. All are alive at once, so that no memory is used twice.
    tensors = {name: state_dict[name] for name in links_of_tensors(rules, arrays)}
    for name, tensor in tensors.items():
        by_memory.setdefault(memory_of(tensor), []).append(name)
    for first, *others in by_memory.values():
        for other in others:
            if frozenset((first, other)) not in tied:
                problems.append(
                    f"{other}: duplicated: it is the same tensor as {first}, but would fill a second array, which then trains "
                    f"separately; share one array in Flax, and write 'tie: {first} = {other}'; or give copies if the arrays "
                    "should train separately"
                )


def fill(rules: Rules, arrays: Arrays, leaves: Leaves, problems: list[str], *, direction: str) -> Arrays:
    """Flax path → array, from PyTorch's values (`direction` "forward") or gradients ("gradient").

    The parts of a stack are put together into one array.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    links, misfits = fit(rules, {name: array.shape for name, array in arrays.items()}, shapes)
    problems += misfits
    parts: dict[str, dict[Place, np.ndarray]] = {}
    for link in links:
        tensors = [arrays[name] for name in link.torch]
        if len({array.dtype for array in tensors}) > 1:
            problems.append(
                f"{', '.join(link.torch)}: several dtypes, {', '.join(str(x.dtype) for x in tensors)}, expected one"
            )
            continue
        try:
            results = getattr(link.rule.transform, direction)(tensors, link.flax_shapes(shapes))
        except PortingError as error:
            problems.append(f"{', '.join(link.torch)}: {error}")
            continue
        for place, result in zip(link.flax, results, strict=True):
            parts.setdefault(place.path, {})[place] = result
    filled = {}
    for path, of_array in parts.items():
        dtypes = {part.dtype for part in of_array.values()}
        if len(dtypes) > 1:
            problems.append(
                f"{path}: the parts of the stack are of several dtypes, {', '.join(map(str, dtypes))}, expected one"
            )
        filled[path] = np.empty(shapes[path], next(iter(dtypes)))
        for place, part in of_array.items():
            filled[path][place.key] = part
    return filled


def take(rules: Rules, leaves: Leaves, problems: list[str], *, direction: str) -> Arrays:
    """PyTorch's tensors, as NumPy arrays, from Flax's values (`direction` "inverse") or gradients ("adjoint")."""
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    links = list(dict.fromkeys(links_of_places(rules, shapes).values()))
    wanted: dict[str, tuple[int, ...]] = {name: () for link in links for name in link.torch}
    problems += [f"{path}: has no value" for path in _abstract(leaves)]
    # Give `fit` every tensor that the rules make from these arrays, so that it finds no tensor missing and reports only
    # problems of the arrays.
    for link in links:
        with contextlib.suppress(PortingError, KeyError):  # `fit` reports the problem with its names
            wanted |= zip(link.torch, link.rule.transform.before(link.flax_shapes(shapes), len(link.torch)), strict=True)
    good, misfits = fit(rules, wanted, shapes)
    problems += misfits
    if problems:
        return {}
    arrays = {path: np.asarray(leaf) for path, leaf in leaves.items()}
    result: Arrays = {}
    for link in good:
        parts = [arrays[place.path][place.key] for place in link.flax]
        tensors = getattr(link.rule.transform, direction)(parts, len(link.torch))
        result |= {name: np.array(tensor) for name, tensor in zip(link.torch, tensors, strict=True)}
    return result


def _hold_to(like: Mapping[str, Any], rules: Rules, result: Arrays, problems: list[str]) -> None:
    for name, tensor in like.items():
        if name in result:
            shape, expected = result[name].shape, tuple(tensor.shape)
            problems += [f"{name}: shape {shape}, expected {expected}"] if shape != expected else []
        elif rules.allows_extra(name):
            result[name] = as_numpy(tensor)
        else:
            problems.append(f"{name}: no rule makes it; write a rule, or name it under 'extra:'")
    expected_names = {*like, *(name for pair in tied_pairs(rules, like) for name in pair)}
    problems += [f"{name}: not a tensor of the PyTorch model" for name in result if name not in expected_names]


def _in_dtype(array: np.ndarray, dtype: Any, leaf: Any) -> np.ndarray:
    if array.dtype.kind == "V" or jnp.issubdtype(array.dtype, jnp.floating):
        return array if dtype is None else array.astype(dtype)
    # PyTorch's counts and positions are always 64-bit integers; in JAX they get the dtype of the variable.
    cast = array.astype(leaf.dtype) if array.dtype.kind in "iu" and np.issubdtype(leaf.dtype, np.integer) else array
    return cast if np.array_equal(cast, array) else array


def _abstract(leaves: Leaves) -> list[str]:
    return [path for path, leaf in leaves.items() if not hasattr(leaf, "__array__")]


def _raise(problems: list[str], headline: str) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise PortingError(f"{headline}, {count}:\n  " + "\n  ".join(problems))
