"""Flax's side of a comparison: the model's variables in each dtype, its blocks, and its training step in every mode."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from remat_jax.apply.blocks import checkpoint_blocks
from remat_jax.apply.nnx import known_paths
from remat_jax.errors import ArgumentError, PortingError
from remat_jax.memory.measure import measure
from remat_jax.memory.residuals import ResidualTable, residuals
from remat_jax.parity.case import Arrays, Case, Run, is_floating, running
from remat_jax.parity.compiling import compile_options, down_casts, unread_inputs
from remat_jax.parity.trees import default_loss, named_outputs, same_names
from remat_jax.porting import Rules, from_torch
from remat_jax.porting.float64 import FLOAT32_REMEDY
from remat_jax.porting.links import links_of_places
from remat_jax.porting.transfer import take
from remat_jax.porting.variables import Variables
from remat_jax.warning import silenced
from remat_jax.workload import Workload


def structure(case: Case, dtype: str) -> tuple[Any, Any]:
    """The model without its variables, and the variables: a Linen module and shapes, or an NNX graph definition and state."""
    module = case.flax(dtype)
    if isinstance(module, nnx.Module):
        return nnx.split(module)
    if case.variables is not None:
        return module, case.variables
    init = nn.init(case.flax_call, module)
    args, kwargs = case.inputs.arguments({n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays_in(case, dtype).items()})
    arrays, treedef, where = _arrays_only((args, kwargs))

    def empty(*given: Any) -> Any:
        args, kwargs = _filled(treedef, where, given)
        return init(jax.random.key(0), *args, **kwargs)

    with running("flax_module"):
        return module, jax.eval_shape(empty, *arrays)


def arrays_in(case: Case, dtype: str) -> Arrays:
    """The inputs: floating-point arrays in `dtype`, other arrays in JAX's present dtypes."""
    floating = case.inputs.floating
    canonical = jax.dtypes.canonicalize_dtype
    arrays = case.inputs.arrays
    return {n: x.astype(dtype) if n in floating else x.astype(canonical(x.dtype)) for n, x in arrays.items()}


def _arrays_only(tree: Any) -> tuple[list[Any], Any, list[tuple[bool, Any]]]:
    """The arrays of a tree, and the data to rebuild it: `jax.eval_shape` takes only arrays."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None)
    is_array = [hasattr(leaf, "shape") for leaf in leaves]
    where = [(yes, None if yes else leaf) for yes, leaf in zip(is_array, leaves, strict=True)]
    return [leaf for yes, leaf in zip(is_array, leaves, strict=True) if yes], treedef, where


def _filled(treedef: Any, where: list[tuple[bool, Any]], arrays: Any) -> Any:
    given = iter(arrays)
    return jax.tree.unflatten(treedef, [next(given) if yes else leaf for yes, leaf in where])


def find_blocks(module: Any, seen: Mapping[str, type], torch: Any, sources: Mapping[str, tuple[str, ...]]) -> tuple[type, ...]:
    """The classes of the Flax modules that hold exactly the weights of PyTorch's blocks; empty if there are none.

    `seen` has the classes of Linen's modules by path, recorded during a run; `sources` has the tensors of each variable.
    """
    classes = dict(seen)
    if isinstance(module, nnx.Module):
        nodes = ((path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Module))
        classes = {re.sub(r"/(\d+)(?=/|$)", r"_\1", "/".join(map(str, path))): type(node) for path, node in nodes}
    names = [name for name in torch.weights if any(name in torches for torches in sources.values())]
    found: dict[type, None] = {}
    for prefix in _prefixes(names, torch.block_paths):
        paths = [path for path, torches in sources.items() if any(name.startswith(f"{prefix}.") for name in torches)]
        kind = classes.get(_common(paths)) if paths else None
        if kind is not None:
            found[kind] = None
    return tuple(found)


def _prefixes(names: list[str], paths: list[str]) -> list[str]:
    return [path for path in paths if any(name.startswith(f"{path}.") for name in names)]


def _common(paths: list[str]) -> str:
    """The path of the innermost module that has all these variables, without the collection and the variable's name."""
    modules = [path.split("/")[1:-1] for path in paths]
    shared = []
    for parts in zip(*modules, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


Leaves = dict[str, Any]


class FlaxRun(NamedTuple):
    """A run, and the parameters after the optimizer's first step, by path."""

    run: Run
    after: Arrays


class FlaxSide:
    """The Flax model of a case under the weights of the PyTorch model.

    Attributes:
        names: Flax's name of an output → PyTorch's.
        sources: the path of a variable → the PyTorch tensors that fill it.
        trained: the paths of variables with a gradient in both frameworks, without excluded ones.
        blocks: the checkpointed classes; None if there are none.
        down_casts: where the float64 step casts to a smaller dtype; known after compilation.

    Raises:
        ArgumentError: the outputs differ in names, shapes or dtype.
        PortingError: the rules do not fit both models.
    """

    def __init__(self, case: Case, torch: Any, rules: Rules, structure: Callable[[str], tuple[Any, Any]]) -> None:
        self._structure = structure
        self.case, self.rules, self.torch = case, rules, torch
        self.down_casts: list[str] = []
        self._unused: set[str] = set()
        self._compiled: dict[tuple[str, str], Any] = {}
        shapes = {path: tuple(leaf.shape) for path, leaf in self._variables("float64").leaves.items()}
        links = links_of_places(rules, shapes)
        self.sources: dict[str, tuple[str, ...]] = {place.path: () for place in links}
        for place, link in links.items():
            self.sources[place.path] += tuple(link.torch)
        trainable = Variables(self._tree("float64"), trainable=True).leaves
        wanted = {*torch.trained, *torch.ties}
        self.trained = {path for path in trainable if wanted & set(self.sources.get(path, ()))}
        self.names, self.blocks = self._look()

    def set_aside(self, names: Collection[str]) -> set[str]:
        """Exclude from `trained` the weights that only PyTorch's tensors `names` fill and that the traced step does not read.

        Returns the `names` whose variables are all excluded. A weight that the traced step does not read is unused; a gradient
        of 0 could be a coincidence.
        """
        filled = {path: {self.torch.ties.get(name, name) for name in self.sources[path]} for path in self.trained}
        trained, others = self._shapes("float64")
        jaxpr = jax.make_jaxpr(self._loss("float64"))(trained, *self._ordered(others, self._data("float64")))
        unread = [path for path, alone in zip(sorted(trained), unread_inputs(jaxpr), strict=False) if alone]
        self._unused = {path for path in unread if filled[path] <= set(names)}
        self.trained -= self._unused
        return set(names).difference(*(filled[path] for path in self.trained))

    def weights(self, state_dict: Mapping[str, Any], dtype: str) -> Leaves:
        """PyTorch's tensors as Flax's variables in a dtype, path → array."""
        filled = Variables(from_torch(state_dict, self._tree(dtype), self.rules, dtype=dtype)).leaves
        return {path: x.astype(dtype) if is_floating(x.dtype) else x for path, x in filled.items()}

    def tree(self, weights: Leaves) -> Any:
        """Float64 variables in the model's own structure."""
        return self._variables("float64").rebuild(weights)

    def run(self, dtype: str, mode: str, weights: Leaves, *, steps: int = 0) -> FlaxRun:
        """A training step with these weights; with an optimizer, `steps` steps."""
        trained, others = self._divided(weights)
        step = self._step(dtype, mode)
        (loss, (outputs, state)), (gradients, input_gradients) = step(trained, others, *self._data(dtype))
        run = Run(
            outputs={self.names[name]: np.asarray(x) for name, x in outputs.items()},
            gradients=self._to_torch(gradients),
            input_gradients={name: np.asarray(x) for name, x in input_gradients.items()},
            state={path: np.asarray(x) for path, x in state.items()},
            losses=[float(loss)],
        )
        after: Arrays = {}
        if self.case.optimizer and steps:
            trained, optimizer = self._updated(dtype, trained, gradients, self._optimizer_state(dtype, trained))
            after = {path: np.asarray(x) for path, x in trained.items()}
            for _ in range(steps - 1):
                (loss, _), (gradients, _) = step(trained, others, *self._data(dtype))
                run.losses.append(float(loss))
                trained, optimizer = self._updated(dtype, trained, gradients, optimizer)
        return FlaxRun(run, after)

    @silenced()
    def kept(self, dtype: str, mode: str) -> ResidualTable:
        """The residuals between the passes, without parameters and inputs."""
        return residuals(self._workload(dtype), mode)

    def peak_here(self, dtype: str, mode: str) -> int:
        """The bytes of the comparison's own compiled step."""
        self._step(dtype, mode)
        needed = self._compiled[dtype, mode].memory_analysis()
        outputs = needed.output_size_in_bytes - needed.alias_size_in_bytes
        return int(needed.argument_size_in_bytes + outputs + needed.temp_size_in_bytes)

    @silenced()
    def peak(self, dtype: str, mode: str, target: str) -> int:
        """The device bytes of a training step compiled for a target."""
        return measure(self._workload(dtype), mode, target).device_bytes

    # The model as a function.

    def _tree(self, dtype: str) -> Any:
        return self._structure(dtype)[1]

    @functools.cache  # noqa: B019 - one side per comparison
    def _variables(self, dtype: str) -> Variables:
        return Variables(self._tree(dtype))

    def _apply(self, dtype: str, leaves: Leaves, arrays: Mapping[str, Any]) -> tuple[Any, Leaves]:
        """The model's output, and the updated variables that are not parameters."""
        maker, _ = self._structure(dtype)
        args, kwargs = self.case.inputs.arguments(arrays)
        tree = self._variables(dtype).rebuild(leaves)
        if isinstance(maker, nn.Module):
            mutable = [name for name in tree if name != "params"]
            found = nn.apply(self.case.flax_call, maker, mutable=mutable or False)(tree, *args, **kwargs)
            return (found[0], Variables(found[1]).leaves) if mutable else (found, {})
        # New variables at this trace level, because Flax refuses to write to variables of another level.
        model = nnx.merge(maker, jax.tree.map(lambda leaf: leaf, tree))
        with known_paths(model):
            found = self.case.flax_call(model, *args, **kwargs)
        after = Variables(nnx.state(model)).leaves
        return found, {path: leaf for path, leaf in after.items() if path not in self.trained}

    def _loss(self, dtype: str) -> Callable[..., Any]:
        """`loss(trained, floating inputs, others, other inputs, targets) → (scalar, (outputs, state))`."""

        def loss(trained: Leaves, floating: Leaves, others: Leaves, rest: Leaves, targets: Leaves) -> Any:
            result, state = self._apply(dtype, {**trained, **others}, {**floating, **rest})
            outputs = named_outputs(result, "flax")
            if self.case.loss is None:
                value = default_loss({self.names[name]: x for name, x in outputs.items()}, targets)
            else:
                with running("loss", "computed from Flax's output"):
                    value = self.case.loss[1](result)
                if not hasattr(value, "shape") or value.size != 1 or not jnp.issubdtype(value.dtype, jnp.floating):
                    raise ArgumentError(f"loss gave {value!r} for Flax: expected a floating-point scalar")
            written = {path: x for path, x in state.items() if path in self.sources.keys() - self._unused}
            return jnp.reshape(value, ()), (outputs, written)

        return loss

    def _look(self) -> tuple[dict[str, str], Any]:
        """Trace the model for the names of the outputs, their dtype, and the blocks."""
        leaves = {path: jax.ShapeDtypeStruct(x.shape, _wide(x.dtype)) for path, x in self._variables("float64").leaves.items()}
        seen: dict[str, type] = {}

        def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            seen["/".join(context.module.path)] = type(context.module)
            return call(*args, **kwargs)

        def outputs(leaves: Leaves, arrays: Leaves) -> Any:
            return named_outputs(self._apply("float64", leaves, arrays)[0], "flax")

        with nn.intercept_methods(note), running("flax_module"):
            found = jax.eval_shape(outputs, leaves, arrays_in(self.case, "float64"))
        names = same_names({n: shape for n, (shape, _) in self.torch.shapes.items()}, {n: x.shape for n, x in found.items()})
        small = [n for n, x in found.items() if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != np.float64]
        if small and "float64" in self.case.dtypes:
            raise ArgumentError(
                f"flax_module gives {', '.join(f'{name} in {found[name].dtype}' for name in small)} from weights and inputs "
                "in float64: let it derive its dtypes from its inputs, or give a function of a dtype that makes it; "
                f"{FLOAT32_REMEDY}"
            )
        return names, self.case.flax_blocks or find_blocks(self.case.flax("float64"), seen, self.torch, self.sources)

    # Compiled.

    def _step(self, dtype: str, mode: str) -> Callable[..., Any]:
        key = (dtype, mode)
        if key not in self._compiled:
            apply, loss = self.applied(mode), self._loss(dtype)
            loss = apply(loss) if apply else loss
            gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
            trained, others = self._shapes(dtype)
            traced = jax.jit(gradient).trace(trained, *self._ordered(others, self._data(dtype)))
            if key == ("float64", "off"):
                self.down_casts = down_casts(traced.jaxpr)
            self._compiled[key] = traced.lower().compile(compiler_options=compile_options(dtype))
        executable = self._compiled[key]
        return lambda trained, others, *data: executable(trained, *self._ordered(others, data))

    def applied(self, mode: str) -> Callable[..., Any] | None:
        """The transformation that applies a mode or a policy to a function that runs the model; None for `off`."""
        if mode == "off":
            return None
        blocks = dict.fromkeys(self._require_blocks(mode), mode)
        return lambda function: checkpoint_blocks(function, blocks)

    def _require_blocks(self, mode: str) -> tuple[Any, ...]:
        if not self.blocks:
            raise ArgumentError(
                f"modes has {mode!r}, but no Flax class has the weights of PyTorch's blocks: name the class to checkpoint "
                "with flax_blocks, or give modes=('off',)"
            )
        return self.blocks if isinstance(self.blocks, tuple) else (self.blocks,)

    @staticmethod
    def _ordered(others: Leaves, data: tuple[Leaves, Leaves, Leaves]) -> tuple[Leaves, ...]:
        floating, rest, targets = data
        return floating, others, rest, targets

    def _updated(self, dtype: str, trained: Leaves, gradients: Leaves, state: Any) -> tuple[Leaves, Any]:
        return self._update(dtype)(gradients, state, trained)

    def _optimizer_state(self, dtype: str, trained: Leaves) -> Any:
        assert self.case.optimizer is not None
        return self.case.optimizer.optax().init(trained)

    @functools.cache  # noqa: B019
    def _update(self, dtype: str) -> Callable[..., Any]:
        assert self.case.optimizer is not None
        transformation = self.case.optimizer.optax()

        def update(gradients: Leaves, state: Any, trained: Leaves) -> Any:
            updates, state = transformation.update(gradients, state, trained)
            return optax.apply_updates(trained, updates), state

        return jax.jit(update, compiler_options=compile_options(dtype))

    def _workload(self, dtype: str) -> Workload:
        loss, (trained, others) = self._loss(dtype), self._shapes(dtype)
        data = self._ordered(others, self._data(dtype))
        return Workload(loss, trained, data, self.blocks or "*", has_aux=True, name="parity")

    # Data.

    def _data(self, dtype: str) -> tuple[Leaves, Leaves, Leaves]:
        arrays, floating = arrays_in(self.case, dtype), self.case.inputs.floating
        targets = {} if self.case.loss else {name: x.astype(dtype) for name, x in self.torch.targets.items()}
        return {n: arrays[n] for n in floating}, {n: x for n, x in arrays.items() if n not in floating}, targets

    def _divided(self, leaves: Leaves) -> tuple[Leaves, Leaves]:
        trained = {path: leaf for path, leaf in leaves.items() if path in self.trained}
        return trained, {path: leaf for path, leaf in leaves.items() if path not in self.trained}

    def _shapes(self, dtype: str) -> tuple[Leaves, Leaves]:
        leaves = self._variables(dtype).leaves
        return self._divided(
            {
                path: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype) if is_floating(x.dtype) else x.dtype)
                for path, x in leaves.items()
            }
        )

    def _to_torch(self, gradients: Leaves) -> Arrays:
        problems: list[str] = []
        found = take(self.rules, gradients, problems, direction="adjoint")
        if problems:
            raise PortingError("the gradients do not fit the rules:\n  " + "\n  ".join(problems))
        return {name: x for name, x in found.items() if name in self.torch.trained or name in self.torch.ties}


def _wide(dtype: Any) -> Any:
    return jnp.dtype("float64") if is_floating(dtype) else dtype
