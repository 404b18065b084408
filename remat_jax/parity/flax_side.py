"""Flax's side of a comparison: the model's variables in each dtype, its blocks, and its training step in every mode."""

from __future__ import annotations

import functools
import os.path
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from remat_jax.apply.blocks import checkpoint_blocks
from remat_jax.apply.nnx import known_paths
from remat_jax.core.walk import of_arrays
from remat_jax.errors import ArgumentError
from remat_jax.memory.measure import measure
from remat_jax.memory.residuals import ResidualTable, residuals
from remat_jax.parity.case import Arrays, Case, Run, running
from remat_jax.parity.compiling import compile_options
from remat_jax.parity.trees import default_loss, is_floating, named_outputs, same_names
from remat_jax.porting import Rules, from_torch, gradients_to_torch
from remat_jax.porting.dataflow import down_casts, unread_inputs
from remat_jax.porting.float64 import FLOAT32_REMEDY, in_any_width
from remat_jax.porting.links import links_of_places
from remat_jax.porting.variables import Variables
from remat_jax.warning import silenced
from remat_jax.workload import Workload

Leaves = dict[str, Any]


def structure(case: Case, dtype: str) -> tuple[Any, Any]:
    """(model, variables): a Linen module with the given variables or `init`'s shapes; or an NNX graph definition and state."""
    module = case.flax(dtype)
    if isinstance(module, nnx.Module):
        return nnx.split(module)
    if case.variables is not None:
        return module, case.variables

    def init(*args: Any, **kwargs: Any) -> Any:
        return nn.init(case.flax_call, module)(jax.random.key(0), *args, **kwargs)

    init_of_arrays, arrays = of_arrays(init, *case.inputs.arguments(arrays_in(case, dtype)))

    def shapes() -> Any:
        with running("flax_module"):
            return jax.eval_shape(init_of_arrays, *arrays)

    return module, in_any_width(shapes)


def arrays_in(case: Case, dtype: str) -> Arrays:
    """The inputs: floating-point arrays in `dtype`; other arrays in the dtype that JAX gives them (`canonicalize_dtype`)."""
    canonical = jax.dtypes.canonicalize_dtype
    return {name: x.astype(dtype if is_floating(x) else canonical(x.dtype)) for name, x in case.inputs.arrays.items()}


class FlaxSide:
    """The Flax model of a case with the weights of the PyTorch model.

    Attributes:
        names: Flax's name of an output → PyTorch's name.
        sources: the path of a variable → the names of the PyTorch tensors that fill it.
        trained: the paths of the variables trained in both frameworks, except those that `set_aside` excluded.
        blocks: the classes to checkpoint; empty if there are none.
        down_casts: a text for each cast from float64 in the float64 step of mode `off` (`dataflow.down_casts`); empty until
            that step is compiled.
    """

    def __init__(self, case: Case, torch: Any, rules: Rules, structure: Callable[[str], tuple[Any, Any]]) -> None:
        self.case, self.rules, self.torch, self._structure = case, rules, torch, structure
        self._variables = functools.cache(lambda dtype: Variables(structure(dtype)[1]))
        self._step, self._update = functools.cache(self._compiled_step), functools.cache(self._compiled_update)
        self.down_casts: list[str] = []
        self._unused: set[str] = set()
        shapes = {path: tuple(leaf.shape) for path, leaf in self._variables("float64").leaves.items()}
        links = links_of_places(rules, shapes)
        self.sources: dict[str, tuple[str, ...]] = {place.path: () for place in links}
        for place, link in links.items():
            self.sources[place.path] += tuple(link.torch)
        trainable = Variables(structure("float64")[1], trainable=True).leaves
        names = {*torch.trained, *torch.ties}
        self.trained = {path for path in trainable if names & set(self.sources.get(path, ()))}
        self.names, self.blocks = self._look()

    def set_aside(self, names: Collection[str]) -> set[str]:
        """Exclude from `trained` each variable that the step does not read and that only tensors in `names` fill.

        Returns the PyTorch names in `names` whose variables are all excluded.
        """
        filled = {path: {self.torch.ties.get(name, name) for name in self.sources[path]} for path in self.trained}
        trained, others = self._shapes("float64")
        jaxpr = jax.make_jaxpr(self._loss("float64"))(trained, *self._arguments("float64", others))
        unread = [path for path, is_unread in zip(sorted(trained), unread_inputs(jaxpr), strict=False) if is_unread]
        self._unused = {path for path in unread if filled[path] <= set(names)}
        self.trained -= self._unused
        return set(names).difference(*(filled[path] for path in self.trained))

    def weights(self, state_dict: Mapping[str, Any], dtype: str) -> Leaves:
        """Flax's variables (path → array) with the values of PyTorch's tensors; floating-point arrays have `dtype`."""
        filled = Variables(from_torch(state_dict, self._start(dtype), self.rules, dtype=dtype)).leaves
        return {path: x.astype(dtype) if is_floating(x) else x for path, x in filled.items()}

    def _start(self, dtype: str) -> Any:
        """The variables before PyTorch's values fill them; a proposed map may leave arrays over, which get random values."""
        variables = self._variables(dtype)
        if not self.case.auto:
            return self._structure(dtype)[1]
        random, start = np.random.default_rng(7), dict[str, Any]()
        for path, leaf in variables.leaves.items():
            is_left_over = self.rules.allows_missing(path) and not hasattr(leaf, "__array__")
            start[path] = random.normal(size=leaf.shape).astype(leaf.dtype) if is_left_over else leaf
        return variables.rebuild(start)

    def tree(self, weights: Leaves) -> Any:
        """`weights`, path → float64 array, in the structure of the model's variables."""
        return self._variables("float64").rebuild(weights)

    def run(self, dtype: str, mode: str, weights: Leaves, *, steps: int = 0) -> Run:
        """Run a training step with these weights, or `steps` steps if the case has an optimizer."""
        trained, others = self._divided(weights)
        step, arguments = self._step(dtype, mode), self._arguments(dtype, others)
        (loss, (outputs, state)), (gradients, input_gradients) = step(trained, *arguments)
        by_torch_name = gradients_to_torch(gradients, self.rules, numpy=True)
        run = Run(
            outputs={self.names[name]: np.asarray(x) for name, x in outputs.items()},
            gradients={n: x for n, x in by_torch_name.items() if n in self.torch.trained or n in self.torch.ties},
            input_gradients={name: np.asarray(x) for name, x in input_gradients.items()},
            losses=[float(loss)],
            state={path: np.asarray(x) for path, x in state.items()},
        )
        if self.case.optimizer and steps:
            update, optimizer_state = self._update(dtype), self.case.optimizer.optax().init(trained)
            trained, optimizer_state = update(gradients, optimizer_state, trained)
            run.after = {path: np.asarray(x) for path, x in trained.items()}
            for _ in range(steps - 1):
                (loss, _), (gradients, _) = step(trained, *arguments)
                run.losses.append(float(loss))
                trained, optimizer_state = update(gradients, optimizer_state, trained)
        return run

    @silenced()
    def kept(self, dtype: str, mode: str) -> ResidualTable:
        """The residuals in a mode, without parameters and inputs."""
        return residuals(self._workload(dtype), mode)

    @silenced()
    def peak(self, dtype: str, mode: str, target: str | None) -> int:
        """The peak device bytes of a training step compiled for `target`; without a target, of the step that `run` compiled."""
        if target:
            return measure(self._workload(dtype), mode, target).device_bytes
        needed = self._step(dtype, mode).memory_analysis()
        outputs = needed.output_size_in_bytes - needed.alias_size_in_bytes
        return int(needed.argument_size_in_bytes + outputs + needed.temp_size_in_bytes)

    def applied(self, mode: str) -> Callable[..., Any] | None:
        """The transformation that applies a mode or a policy to a function that runs the model; None for `off`."""
        if mode == "off":
            return None
        if not self.blocks:
            raise ArgumentError(
                f"modes has {mode!r}, but no Flax class has the weights of PyTorch's blocks: name the class to checkpoint "
                "with flax_blocks, or give modes=('off',)"
            )
        blocks = dict.fromkeys(self.blocks if isinstance(self.blocks, tuple) else (self.blocks,), mode)
        return lambda function: checkpoint_blocks(function, blocks)

    # The model as a function.

    def _apply(self, dtype: str, leaves: Leaves, arrays: Mapping[str, Any]) -> tuple[Any, Leaves]:
        """The model's output, and the variables that the call may have written, by path."""
        maker, _ = self._structure(dtype)
        args, kwargs = self.case.inputs.arguments(arrays)
        tree = self._variables(dtype).rebuild(leaves)
        if isinstance(maker, nn.Module):
            output, written = self.case.apply_linen(maker, tree, args, kwargs)
            return output, Variables(written).leaves
        # The variables are copied at this trace level, because Flax refuses to write to variables of another level.
        model = nnx.merge(maker, jax.tree.map(lambda leaf: leaf, tree))
        with known_paths(model):
            output = self.case.flax_call(model, *args, **kwargs)
        after = Variables(nnx.state(model)).leaves
        return output, {path: leaf for path, leaf in after.items() if path not in self.trained}

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
                if not hasattr(value, "shape") or value.size != 1 or not is_floating(value):
                    raise ArgumentError(f"loss gave {value!r} for Flax: expected a floating-point scalar")
            written = {path: x for path, x in state.items() if path in self.sources.keys() - self._unused}
            return jnp.reshape(value, ()), (outputs, written)

        return loss

    def _look(self) -> tuple[dict[str, str], Any]:
        """Trace the model in float64 to find `names` and `blocks`.

        Raises ArgumentError if float64 is to be compared and a floating-point output is not float64.
        """
        classes: dict[str, type] = {}

        def note_class(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
            classes["/".join(context.module.path)] = type(context.module)
            return call(*args, **kwargs)

        def named(leaves: Leaves, arrays: Leaves) -> dict[str, Any]:
            return named_outputs(self._apply("float64", leaves, arrays)[0], "flax")

        leaves = shapes_in("float64", self._variables("float64").leaves)
        with nn.intercept_methods(note_class), running("flax_module"):
            outputs = jax.eval_shape(named, leaves, arrays_in(self.case, "float64"))
        names = same_names(self.torch.shapes, {name: x.shape for name, x in outputs.items()})
        small = [name for name, x in outputs.items() if is_floating(x) and x.dtype != np.float64]
        if small and "float64" in self.case.dtypes:
            raise ArgumentError(
                f"flax_module returns {', '.join(f'{name} in {outputs[name].dtype}' for name in small)}, although weights and "
                "inputs are float64: let it derive its dtypes from its inputs, or give a function of a dtype that makes it; "
                f"{FLOAT32_REMEDY}"
            )
        return names, self.case.flax_blocks or self._find_blocks(classes)

    def _find_blocks(self, classes: Mapping[str, type]) -> tuple[type, ...]:
        """The classes of the Flax modules that contain the weights of PyTorch's blocks; `classes`: path → Linen class."""
        module = self.case.flax("float64")
        if isinstance(module, nnx.Module):
            nodes = ((path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Module))
            classes = {re.sub(r"/(\d+)(?=/|$)", r"_\1", "/".join(map(str, path))): type(node) for path, node in nodes}
        blocks: dict[type, None] = {}
        for block in self.torch.block_paths:
            inside = [p for p, names in self.sources.items() if any(name.startswith(f"{block}.") for name in names)]
            # The innermost module with all these variables; a variable's path is collection/module/name.
            around = "/".join(os.path.commonprefix([path.split("/")[1:-1] for path in inside]))
            if inside and around in classes:
                blocks[classes[around]] = None
        return tuple(blocks)

    # The compiled functions.

    def _compiled_step(self, dtype: str, mode: str) -> jax.stages.Compiled:
        """The compiled loss and its gradient in a mode, with the auxiliary results of `_loss`."""
        apply, loss = self.applied(mode), self._loss(dtype)
        gradient = jax.value_and_grad(apply(loss) if apply else loss, (0, 1), has_aux=True)
        trained, others = self._shapes(dtype)
        traced = jax.jit(gradient).trace(trained, *self._arguments(dtype, others))
        if (dtype, mode) == ("float64", "off"):
            self.down_casts = down_casts(traced.jaxpr)
        return traced.lower().compile(compiler_options=compile_options(dtype))

    def _compiled_update(self, dtype: str) -> Callable[..., Any]:
        assert self.case.optimizer is not None
        transformation = self.case.optimizer.optax()

        def update(gradients: Leaves, state: Any, trained: Leaves) -> Any:
            updates, state = transformation.update(gradients, state, trained)
            return optax.apply_updates(trained, updates), state

        return jax.jit(update, compiler_options=compile_options(dtype))

    def _workload(self, dtype: str) -> Workload:
        trained, others = self._shapes(dtype)
        arguments = self._arguments(dtype, others)
        return Workload(self._loss(dtype), trained, arguments, self.blocks or "*", has_aux=True, name="parity")

    # The arguments of the compiled functions.

    def _arguments(self, dtype: str, others: Leaves) -> tuple[Leaves, ...]:
        """The arguments of `_loss` that follow the trained weights."""
        arrays, floating = arrays_in(self.case, dtype), self.case.inputs.floating
        targets = {} if self.case.loss else {name: x.astype(dtype) for name, x in self.torch.targets.items()}
        rest = {name: x for name, x in arrays.items() if name not in floating}
        return {name: arrays[name] for name in floating}, others, rest, targets

    def _divided(self, leaves: Leaves) -> tuple[Leaves, Leaves]:
        """(trained variables, other variables)."""
        trained = {path: leaf for path, leaf in leaves.items() if path in self.trained}
        return trained, {path: leaf for path, leaf in leaves.items() if path not in self.trained}

    def _shapes(self, dtype: str) -> tuple[Leaves, Leaves]:
        return self._divided(shapes_in(dtype, self._variables(dtype).leaves))


def shapes_in(dtype: str, leaves: Leaves) -> Leaves:
    """The leaves as `jax.ShapeDtypeStruct`; floating-point leaves get `dtype`."""
    return {path: jax.ShapeDtypeStruct(x.shape, dtype if is_floating(x) else x.dtype) for path, x in leaves.items()}
