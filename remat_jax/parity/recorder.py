"""Tap every module call of a Flax model while it is traced: Linen by an interceptor, NNX by a patched `__call__`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

from remat_jax import compat
from remat_jax.apply.calls import patched
from remat_jax.identity import ByIdentity
from remat_jax.parity.capture import LOSS, Slot, argument_names, names_of_arrays
from remat_jax.parity.tapped import Label, differentiated, step_traced, tap
from remat_jax.parity.trees import fields

_TAG = "parity_path"
_steps = itertools.count(1)


@dataclass
class RecordedTrace:
    """A traced call of a module; inside a loop, a single record covers all iterations.

    Attributes:
        path: the module's path, without the indices of loops.
        module: the module, of which only static attributes may be read.
        parent: the index of the enclosing call in `Recorder.calls`; None for the outermost call.
        parameters: shapes and dtypes of the module's own parameters; inside a loop, those of a single iteration.
        state: the names of the variables that the module itself wrote.
        names: slot → the name of the function's parameter, or the key of the result, that contains the array.
    """

    path: tuple[str, ...]
    module: Any
    parent: int | None
    parameters: dict[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    state: list[str] = field(default_factory=list)
    names: dict[Slot, str] = field(default_factory=dict)


@dataclass
class Recorder:
    """The calls that were traced inside `recording`, in the order in which they began.

    `running` has the indices in `calls` of the calls that have not ended, and `loss` is the index of the loss. `outputs` has
    the shapes of the model's outputs. `differentiated` has the labels of the taps whose arrays are differentiated.
    """

    calls: list[RecordedTrace] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    differentiated: set[Label] = field(default_factory=set)
    outputs: tuple[tuple[int, ...], ...] = ()
    loss: int | None = None

    def run(self, module: Any, path: tuple[str, ...], call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`call(*args, **kwargs)` with taps on its input and output arrays."""
        number, around = len(self.calls), self.running[-1] if self.running else None
        record = RecordedTrace(path, module, around)
        self.calls.append(record)
        self.running.append(number)
        try:
            named = argument_names(type(module).__call__, (module, *args), kwargs)[1:]
            args, kwargs = self._tap(number, "input", (args, kwargs), named)
            before = _writable(module)
            result = call(*args, **kwargs)
            outputs = self._tap(number, "output", result, fields(result).items())
            self._tap_state(number, module, before)
            record.parameters |= _parameters(module)
            return outputs
        finally:
            self.running.pop()

    def run_loss(self, loss: Callable[[Any], Any], outputs: Any) -> Any:
        """The loss of a model's outputs, tapped like a module that follows the model."""
        self.loss = len(self.calls)
        self.calls.append(RecordedTrace((LOSS,), loss, None))
        return self._tap(self.loss, "output", loss(self._tap(self.loss, "input", outputs, fields(outputs).items())))

    def _tap(self, number: int, role: str, values: Any, named: Iterable[tuple[str, Any]] = ()) -> Any:
        """`values` with taps; an array that occurs several times has only one tap and one cotangent."""
        leaves, treedef = jax.tree.flatten(values, is_leaf=_is_nnx_object)
        names = names_of_arrays(named, functools.partial(jax.tree.leaves, is_leaf=_is_nnx_object))
        tapped: ByIdentity[Any] = ByIdentity()
        for leaf in leaves:
            if _is_tappable(leaf) and leaf not in tapped:
                slot = (role, len(tapped))
                self.calls[number].names[slot] = names.get(leaf, "")
                tapped[leaf] = tap(leaf, Label(number, *slot))
        return jax.tree.unflatten(treedef, [tapped.get(leaf, leaf) for leaf in leaves])

    def _tap_state(self, number: int, module: Any, before: Mapping[str, _Variable]) -> None:
        """Tap the variables that a module wrote, and write the tapped values back: a loop drops a tap with an unused result."""
        for name, (value, write) in _writable(module).items():
            if _is_tappable(value) and not (name in before and before[name].value is value):
                write(tap(value, Label(number, "state", len(self.calls[number].state))))
                self.calls[number].state.append(name)

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """The path of every call."""
        return [call.path for call in self.calls]

    @contextmanager
    def recording(self, model: linen.Module | nnx.Module) -> Iterator[None]:
        """Tap the calls of Linen modules or, if `model` is an NNX module, the calls of the modules that `tag` has tagged."""
        if isinstance(model, nnx.Module):
            classes = {type(node) for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)}
            tapping = patched(classes, self._wrapped)
        else:
            tapping = linen.intercept_methods(self._intercept)
        token = differentiated.set(self.differentiated)
        try:
            with step_traced(next(_steps)), tapping:
                yield
        finally:
            differentiated.reset(token)

    def _intercept(self, next_fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        return self.run(context.module, tuple(context.module.path), next_fun, args, kwargs)

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            path = vars(module).get(_TAG)
            if path is None:
                return original(module, *args, **kwargs)
            return self.run(module, tuple(filter(None, path.split("/"))), functools.partial(original, module), args, kwargs)

        return call


def tag(model: nnx.Module) -> None:
    """Give every module of `model` its path as a static attribute, because NNX's transforms rebuild the module objects."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module):
            setattr(node, _TAG, "/".join(map(str, path)))


def _parameters(module: linen.Module | nnx.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a module's own parameters."""
    if isinstance(module, nnx.Module):
        parameters = {name: value.get_value() for name, value in vars(module).items() if isinstance(value, nnx.Param)}
    else:
        parameters = module.variables.get("params", {})
    unboxed = {name: linen.unbox(value) for name, value in parameters.items()}
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in unboxed.items() if hasattr(value, "shape")}


class _Variable(NamedTuple):
    value: Any
    write: Callable[[Any], None]


def _writable(module: linen.Module | nnx.Module) -> dict[str, _Variable]:
    """A module's own variables that a forward pass may write, by name, without parameters and RNG streams."""
    if isinstance(module, nnx.Module):
        variables = {name: each for name, each in vars(module).items() if isinstance(each, nnx.Variable)}
        return {
            name: _Variable(each.get_value(), each.set_value)
            for name, each in variables.items()
            if not isinstance(each, nnx.Param | nnx.RngState | nnx.Intermediate)
        }
    return {
        name: _Variable(value, functools.partial(module.put_variable, collection, name))
        for collection, variables in module.variables.items()
        if collection not in ("params", "intermediates") and module.is_mutable_collection(collection)
        for name, value in variables.items()
    }


def _is_nnx_object(leaf: object) -> bool:
    return isinstance(leaf, nnx.Variable | nnx.Module)


def _is_tappable(leaf: Any) -> bool:
    """Whether `leaf` is a numeric JAX array. RNG keys hold no numbers, and a NumPy array may have to stay concrete."""
    if not (compat.is_traced(leaf) or isinstance(leaf, jax.Array)):
        return False
    return bool(jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_)
