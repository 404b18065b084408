"""Runs both models in float64 on the same inputs with chosen weights, to prove a weight map."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import InvalidRngError

from remat_jax import compat
from remat_jax.errors import PortingError, RematError, described
from remat_jax.porting.dataflow import down_casts, has_narrow_tables, unread_inputs
from remat_jax.porting.float64 import FLOAT32_REMEDY, in_any_width, keep_float64, keep_jax_float64, with_wider_retry
from remat_jax.porting.foreign import as_flax, on_the_model
from remat_jax.porting.rules import Rules
from remat_jax.porting.tensors import as_numpy, is_torch
from remat_jax.porting.transfer import fill, take
from remat_jax.porting.variables import Variables

Values = dict[str, np.ndarray]

# The largest error that counts as agreement: rounding gives 1e-12 or less, a softmax in float32 gives 1e-8.
LIMIT = 1e-9
# Rounding to float32 inside a model explains errors up to this limit, about a hundred times float32's ε.
FLOAT32_ERROR = 1e-5
# A tensor's error is divided by the larger of its norm and this fraction of the norm of all tensors: a norm may be 0.
FLOOR = 1e-3


def _as_module(flax_module: Any) -> Any:
    """The given Flax module, or the float64 module made by the given function of a dtype."""
    flax_module = as_flax(flax_module)
    if isinstance(flax_module, (nn.Module, nnx.Module)):
        return flax_module
    if wrapped := wrapper_text(flax_module):
        raise PortingError(wrapped)
    made = as_flax(flax_module("float64")) if callable(flax_module) else None
    if not isinstance(made, (nn.Module, nnx.Module)):
        raise PortingError(
            f"flax_module={repr(flax_module)[:120]}: expected a module of Linen, NNX, Equinox or Haiku, or a function of a "
            "dtype that makes one."
        )
    return made


def wrapper_text(flax_module: Any) -> str:
    """The error text for an object with a module inside, such as the wrappers of transformers; empty for other values."""
    inner = getattr(flax_module, "module", None)
    if isinstance(flax_module, (nn.Module, nnx.Module, type)) or not isinstance(inner, nn.Module):
        return ""
    return (
        f"flax_module is a {type(flax_module).__name__}, which holds a module but is not a module: give its module, a "
        f"{type(inner).__name__}, as flax_module=wrapper.module, and pass this module's arguments by flax_call"
    )


def _torch_copy(torch_module: Any) -> Any:
    """A float64 copy of the given PyTorch module, or the float64 module made by the given function."""
    import torch

    is_module = isinstance(torch_module, torch.nn.Module)
    if not is_module and not callable(torch_module):
        raise PortingError(
            f"torch_module={repr(torch_module)[:120]}: expected a torch.nn.Module, or a function that builds one."
        )
    with keep_float64():
        made = copy.deepcopy(torch_module) if is_module else torch_module()
    if not isinstance(made, torch.nn.Module):
        raise PortingError(f"torch_module() gave a {type(made).__name__}: expected a torch.nn.Module.")
    return made.double()


def call_hint(argument: str, error: Exception) -> str:
    """The remedy for a frequent error of the model in `argument`; empty for other errors."""
    text, call = str(error), f"{argument.partition('_')[0]}_call"
    if isinstance(error, TypeError) and re.search(r"missing \d+ required .*argument", text):
        return f"; add it to inputs, or pass it in {call}"
    if isinstance(error, InvalidRngError):
        return "; random results cannot be compared: make the model deterministic instead of giving it random keys"
    if '"deterministic" must be passed' in text:
        return f"; pass deterministic=True in {call}"
    return (
        f"; {FLOAT32_REMEDY}" if argument == "flax_module" and {"float32", "float64"} <= set(re.findall(r"\w+", text)) else ""
    )


@contextlib.contextmanager
def _running(argument: str, module: Any) -> Iterator[None]:
    """Turn an error inside a model into a PortingError that names the argument, with the error as its cause."""
    try:
        yield
    except RematError:
        raise
    except Exception as error:
        text = f"{argument}: {type(module).__name__} cannot be run on inputs: {described(error)}{call_hint(argument, error)}"
        raise PortingError(text) from error


class ModelPair:
    """A PyTorch and a Flax model that run with the same values; the caller's PyTorch module is copied, never changed."""

    def __init__(
        self,
        torch_module: Any,
        flax_module: Any,
        inputs: Any,
        variables: Any,
        calls: tuple[Any, Any],
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.torch, self.tell = _torch_copy(torch_module), tell or (lambda what: None)
        self.torch_call, self.flax_call = (on_the_model(call or operator.call) for call in calls)
        self.args: tuple[np.ndarray, ...] = ()
        self.kwargs: Values = {}
        if isinstance(inputs, Mapping):
            self.kwargs = {name: _wide(x) for name, x in inputs.items()}
        else:
            self.args = tuple(map(_wide, inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
        self.module = _as_module(flax_module)
        tree = self._variables(variables)
        self.variables, self.trainable = Variables(tree), set(Variables(tree, trainable=True).leaves)
        self.shapes = {path: tuple(leaf.shape) for path, leaf in self.variables.leaves.items()}
        quickly = compat.quick_compile_options()
        self._outputs = jax.jit(self._flax_outputs, compiler_options=quickly)
        self._gradients = jax.jit(jax.grad(self._flax_loss), compiler_options=quickly)
        self.initial = {name: as_numpy(tensor) for name, tensor in self.torch.state_dict().items()}
        self._changed: set[str] = set()
        self._generic: dict[int, Values] = {}
        self._last: tuple[Values, bool, tuple[list[np.ndarray], Values]] | None = None
        weights = {name for name, parameter in self.torch.named_parameters() if parameter.is_floating_point()}
        self.written = weights | {name for name in self.initial if name.endswith(("running_mean", "running_var"))}

    def write(self, names: set[str]) -> None:
        """Let `generic` change only these tensors."""
        self.written = names
        self._generic.clear()

    def generic(self, seed: int) -> Values:
        """Random values for all weights, in the scale of the model's own values: all different, and none 0 or 1."""
        if seed not in self._generic:
            self._generic[seed] = self._random(seed)
        return self._generic[seed]

    def _random(self, seed: int) -> Values:
        random = np.random.default_rng(seed)
        values = dict(self.initial)
        for name, old in self.initial.items():
            if name in self.written:
                new = old + random.normal(size=old.shape) * (0.5 * float(np.std(old)) or 0.1)
                values[name] = np.abs(new) + 0.1 if name.endswith("running_var") else new
        return values

    def disagreement(self, rules: Rules, values: Values, *, gradients: bool = True) -> tuple[float, str]:
        """The largest relative error of Flax against PyTorch with these values, and the name of the tensor that has it."""
        theirs, their_gradients = self._torch_results(values, gradients)
        ours = [np.asarray(x) for x in self._outputs(self._filled(rules, values))]
        if [x.shape for x in ours] != [x.shape for x in theirs]:
            shapes = f"{[x.shape for x in theirs]} and {[x.shape for x in ours]}"
            raise PortingError(
                f"the outputs have the shapes {shapes} in PyTorch and Flax; make them equal with torch_call or flax_call."
            )
        small = sorted({x.dtype.name for x in ours} - {"float64"})
        if small:
            raise PortingError(
                f"flax_module: computes in {', '.join(small)} with weights and inputs in float64; "
                f"let it derive its dtypes from its inputs, or give a function of a dtype that makes it; {FLOAT32_REMEDY}."
            )
        worst = _largest(_named(theirs), _named(ours))
        # A parameter of PyTorch alone is right if no output depends on it.
        compared = {n: x for n, x in their_gradients.items() if np.any(x) or not rules.allows_extra(n)}
        if not gradients or worst[0] > LIMIT or not compared:
            return worst
        return max(worst, _largest(compared, self.flax_gradients(rules, values)))

    def _torch_results(self, values: Values, gradients: bool) -> tuple[list[np.ndarray], Values]:
        """`run_torch`, but the last results are reused."""
        if self._last is None or self._last[0] is not values or (gradients and not self._last[1]):
            self._last = (values, gradients, self.run_torch(values, gradients=gradients))
        return self._last[2]

    def change(self, rules: Rules, values: Values, others: Values) -> float:
        """The relative difference of Flax's outputs between two sets of values."""
        before, after = (self._outputs(self._filled(rules, weights)) for weights in (values, others))
        return _largest(_named(before), _named(after))[0]

    def narrows(self) -> bool:
        """Whether an output of the Flax model depends on a cast from float64, or on an array made in a narrower dtype."""
        self._torch_results(self.generic(0), True)  # an error in PyTorch's model comes before one in Flax's
        traced, needs_widening = with_wider_retry(self._traced)
        if needs_widening or down_casts(traced):
            return True
        with keep_jax_float64():
            return has_narrow_tables(traced, self._traced)

    def unread(self) -> tuple[set[str], set[str]]:
        """The PyTorch tensors that have no gradient, and the Flax arrays that no output depends on."""
        gradients = self._torch_results(self.generic(0), True)[1]
        is_unread = unread_inputs(self._traced())
        paths = (path for path, unread in zip(sorted(self.variables.leaves), is_unread, strict=True) if unread)
        return {name for name, gradient in gradients.items() if not np.any(gradient)}, set(paths)

    def _traced(self) -> Any:
        """The jaxpr of the Flax outputs; its inputs are the variables, sorted by path."""
        leaves = {path: jax.ShapeDtypeStruct(x.shape, _wide_dtype(x.dtype)) for path, x in self.variables.leaves.items()}
        return self._outputs.trace(leaves).jaxpr

    def run_torch(self, values: Values, *, gradients: bool = True) -> tuple[list[np.ndarray], Values]:
        """PyTorch's outputs, and the gradients of the parameters that are not frozen; a missing gradient counts as 0."""
        import torch

        with torch.no_grad():
            # The state dict is not used, because it lists tied parameters twice.
            self._changed |= self.written  # a tensor that is written no more gets its first value again
            for name, tensor in (*self.torch.named_parameters(), *self.torch.named_buffers()):
                if name in self._changed:
                    tensor.copy_(torch.from_numpy(np.array(values[name])))
        self.torch.zero_grad(set_to_none=True)

        def convert(x: Any) -> Any:
            return torch.from_numpy(np.array(x))

        named = {name: p for name, p in self.torch.named_parameters() if p.requires_grad} if gradients else {}
        with keep_float64(), torch.set_grad_enabled(gradients), _running("torch_module", self.torch):
            result = self.torch_call(self.torch, *map(convert, self.args), **{k: convert(v) for k, v in self.kwargs.items()})
            outputs = [x for x in _leaves(result) if is_torch(x) and x.is_floating_point()]
            if named:
                sum((x * torch.from_numpy(_weights(i, x.shape))).sum() for i, x in enumerate(outputs)).backward()
        taken = {name: np.zeros(p.shape) if p.grad is None else as_numpy(p.grad) for name, p in named.items()}
        return [as_numpy(x) for x in outputs], taken

    def flax_gradients(self, rules: Rules, values: Values) -> Values:
        """Flax's gradients under PyTorch's names."""
        leaves = self._filled(rules, values)
        trained = {path: leaf for path, leaf in leaves.items() if path in self.trainable}
        others = {path: leaf for path, leaf in leaves.items() if path not in self.trainable}
        problems: list[str] = []
        result = take(rules, self._gradients(trained, others), problems, direction="adjoint")
        if problems:
            raise PortingError("the gradients do not fit the rules:\n  " + "\n  ".join(problems))
        return result

    def _filled(self, rules: Rules, values: Values) -> dict[str, Any]:
        """The Flax variables that the rules make from these values, by path."""
        problems: list[str] = []
        tied = {name.text for _, name in rules.ties}
        untied = {name: value for name, value in values.items() if name not in tied}
        leaves = self.variables.leaves | fill(rules, untied, self.variables.leaves, problems, direction="forward")
        for path, leaf in leaves.items():
            if hasattr(leaf, "__array__"):
                continue
            if rules.allows_missing(path):
                # Only Flax has this array. Random numbers in it make the models disagree if the array is used.
                leaves[path] = np.random.default_rng(7).normal(size=leaf.shape).astype(leaf.dtype)
            else:
                problems.append(f"{path}: has no value")
        if problems:
            raise PortingError("the rules do not fit both models:\n  " + "\n  ".join(problems))
        return {path: jnp.asarray(leaf) for path, leaf in leaves.items()}

    def _flax_loss(self, trained: dict[str, Any], others: dict[str, Any]) -> Any:
        outputs = self._flax_outputs({**trained, **others})
        return sum(jnp.sum(x * _weights(i, x.shape)) for i, x in enumerate(outputs))

    def _flax_outputs(self, leaves: dict[str, Any]) -> list[Any]:
        with _running("flax_module", self.module):
            tree = self.variables.rebuild(leaves)
            args, kwargs = jax.tree.map(jnp.asarray, (self.args, self.kwargs))  # NumPy's promotion differs from JAX's
            if isinstance(self.module, nn.Module):
                # A model in training mode writes statistics, which are ignored here.
                mutable = [name for name in tree if name != "params"]
                result = nn.apply(self.flax_call, self.module, mutable=mutable)(tree, *args, **kwargs)[0]
            else:
                graph = nnx.split(self.module)[0]
                # The variables are copied at this trace level: Flax refuses to write to variables of another level, such as
                # the count of a random key.
                result = self.flax_call(nnx.merge(graph, jax.tree.map(jnp.asarray, tree)), *args, **kwargs)
            return [x for x in _leaves(result) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]

    def _variables(self, variables: Any) -> Any:
        if isinstance(self.module, nnx.Module):
            return nnx.split(self.module)[1]
        if variables is not None:
            return variables
        init: Callable[..., Any] = nn.init(self.flax_call, self.module)

        def shapes() -> Any:
            with _running("flax_module", self.module):
                return jax.eval_shape(lambda: init(jax.random.key(0), *self.args, **self.kwargs))

        return in_any_width(shapes)


def _wide(x: Any) -> np.ndarray:
    array = as_numpy(x)
    return array.astype(np.float64) if np.issubdtype(array.dtype, np.floating) else array


def _wide_dtype(dtype: Any) -> Any:
    return jnp.dtype("float64") if jnp.issubdtype(dtype, jnp.floating) else dtype


def _leaves(result: Any) -> list[Any]:
    """The arrays of an output, in the same order in both frameworks."""
    if isinstance(result, Mapping):
        return [leaf for key in sorted(result) for leaf in _leaves(result[key])]
    if isinstance(result, (tuple, list)):
        return [leaf for part in result for leaf in _leaves(part)]
    if dataclasses.is_dataclass(result) and not hasattr(result, "dtype"):
        return _leaves({field.name: getattr(result, field.name) for field in dataclasses.fields(result)})
    return [] if result is None else [result]


def _weights(index: int, shape: Any) -> np.ndarray:
    """The weights of an output's elements in the loss: all different, so that no gradient cancels in the sum."""
    return np.random.default_rng((7, index)).normal(size=tuple(shape))


def _named(outputs: list[Any]) -> Values:
    return {f"output {i}": np.asarray(x) for i, x in enumerate(outputs)}


def _largest(reference: Values, candidate: Values) -> tuple[float, str]:
    if not reference:
        raise PortingError("the models have no floating-point output; return one by torch_call and flax_call.")
    total = float(np.sqrt(sum(float(np.sum(np.square(x))) for x in reference.values())))
    errors = []
    for name, x in reference.items():
        scale = max(float(np.linalg.norm(x)), FLOOR * total) or 1.0
        error = float(np.linalg.norm(x - candidate[name])) / scale if name in candidate else np.inf
        errors.append((error if np.isfinite(error) else np.inf, name))
    return max(errors)
