"""The checked arguments of a comparison, and the result of one run of either framework."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import numpy as np
from flax import nnx

from remat_jax.errors import ArgumentError, RematError, UnsupportedError, described
from remat_jax.parity.optimizers import Optimizer, OptimizerPair, as_optimizer
from remat_jax.parity.tolerances import dtype_name, epsilon
from remat_jax.parity.trees import is_floating
from remat_jax.policy import Policy, as_policy
from remat_jax.porting import Rules, as_rules
from remat_jax.porting.auto.pair import call_hint, wrapper_text
from remat_jax.porting.foreign import as_flax, on_the_model
from remat_jax.porting.tensors import as_numpy, is_torch

Arrays = dict[str, np.ndarray]
Call = Callable[..., Any]
RUN = "run on inputs"


@dataclass
class Run:
    """The result of a short training run as NumPy arrays; `gradients` have PyTorch's names, `updates` Flax's paths.

    `state` has the variables that the forward pass wrote; `after` has the parameters after the optimizer's first step. In a
    PyTorch run, `state` and `after` are whole state dicts. In float64, `updates` are the parameters' changes in the first
    step; in narrower dtypes, the updated parameters. `unused` are PyTorch's trained parameters that the backward pass did not
    reach.
    """

    outputs: Arrays
    gradients: Arrays
    input_gradients: Arrays
    losses: list[float]
    state: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    updates: Arrays = field(default_factory=dict)
    unused: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Inputs:
    """The arguments of both models by name: `arrays`, and `others`, which are passed on unchanged.

    The name of a positional argument is its index. `positional` has the names in order; None if all arguments are keywords.
    """

    arrays: Arrays
    others: dict[str, Any]
    positional: tuple[str, ...] | None

    @classmethod
    def of(cls, inputs: Any) -> Inputs:
        """Read a tuple of positional arguments, a dictionary of keywords, or a single array."""
        if isinstance(inputs, Mapping):
            named, positional = {str(name): value for name, value in inputs.items()}, None
        else:
            arguments = inputs if isinstance(inputs, tuple | list) else (inputs,)
            named = {str(index): value for index, value in enumerate(arguments)}
            positional = tuple(named)
        arrays = {name: as_numpy(value) for name, value in named.items() if is_torch(value) or hasattr(value, "__array__")}
        spoilt = [name for name, x in arrays.items() if is_floating(x) and np.isnan(x.astype(np.float64)).any()]
        if spoilt:
            raise ArgumentError(f"inputs: {', '.join(spoilt)} holds NaN, which cannot be compared; give numbers")
        if not arrays:
            raise ArgumentError(f"inputs={inputs!r}: expected arrays: a tuple of arguments, or a dictionary of keywords")
        return cls(arrays, {name: value for name, value in named.items() if name not in arrays}, positional)

    @property
    def floating(self) -> list[str]:
        """The names of the floating-point arrays, which have gradients."""
        return [name for name, array in self.arrays.items() if is_floating(array)]

    def arguments(self, arrays: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of a call; `arrays` replaces the stored arrays."""
        by_name = {**self.others, **arrays}
        if self.positional is None:
            return (), by_name
        return tuple(by_name[name] for name in self.positional), {}


@dataclass
class Case:
    """The arguments of `compare`, which documents them and their errors. The constructor checks them and runs no model.

    `auto` is whether a weight map is proposed for the tensors that `rules` do not match.
    """

    torch_module: Any
    flax_module: Any
    inputs: Inputs
    rules: Rules
    variables: Any
    loss: tuple[Call, Call] | None
    torch_blocks: tuple[type, ...] | None
    flax_blocks: Any
    modes: tuple[str, ...]
    optimizer: Optimizer | OptimizerPair | None
    dtypes: tuple[str, ...]
    steps: int
    torch_call: Any
    flax_call: Any
    excite: bool
    keep_float64: bool | None
    auto: bool = field(init=False)

    def __post_init__(self) -> None:
        require_torch()
        self.flax_module = as_flax(self.flax_module)
        module, flax = self.torch_module, self.flax_module
        if not _is_module(module) and (_is_flax(module) or not _is_function(module)):
            raise ArgumentError(f"torch_module={_short(module)}: expected a torch.nn.Module, or a function that builds one")
        if wrapped := wrapper_text(flax):
            raise ArgumentError(wrapped)
        if not _is_flax(flax) and (_is_module(flax) or not _is_function(flax)):
            raise ArgumentError(
                f"flax_module={_short(flax)}: expected a module of Linen, NNX, Equinox or Haiku, or a function of a dtype that "
                "makes one"
            )
        self.inputs = Inputs.of(self.inputs)
        self.rules, self.auto = _rules(self.rules)
        self.loss = _losses(self.loss)
        self.torch_blocks = _torch_blocks(self.torch_blocks)
        self.modes = _modes(self.modes)
        self.optimizer = as_optimizer(self.optimizer)
        self.steps = _steps(self.steps)
        self.dtypes = _dtypes(self.dtypes)
        self.torch_call = self.torch_call or operator.call
        self.flax_call = on_the_model(self.flax_call or operator.call)

    @property
    def builds(self) -> bool:
        """Whether `torch_module` is a function that builds the model."""
        return not _is_module(self.torch_module)

    def torch(self) -> Any:
        """The given PyTorch model, or a new model from the given function."""
        if not self.builds:
            return self.torch_module
        with running("torch_module()", "built"):
            made = self.torch_module()
        if not _is_module(made):
            raise ArgumentError(f"torch_module() gave a {type(made).__name__}: expected a torch.nn.Module")
        return made

    def flax(self, dtype: str) -> Any:
        """The Flax model for a dtype."""
        if _is_flax(self.flax_module):
            return self.flax_module
        with running(f"flax_module({dtype!r})", "made"):
            made = as_flax(self.flax_module(dtype))
        if not _is_flax(made):
            raise ArgumentError(
                f"flax_module({dtype!r}) gave a {type(made).__name__}: expected a module of Linen, NNX, Equinox or Haiku; "
                "a function for flax_module takes a dtype's name and makes the model"
            )
        return made

    def apply_linen(self, module: Any, variables: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The output of a Linen module, and the variables that it wrote."""
        mutable = [name for name in variables if name != "params"]
        return nn.apply(self.flax_call, module, mutable=mutable)(variables, *args, **kwargs)

    def traced_call(self, module: Any) -> Call:
        """The user's `flax_call`; for a Linen module, a function that takes the module, its variables and the inputs."""
        if not isinstance(module, nn.Module):
            return self.flax_call
        return lambda module, variables, *args, **kwargs: self.apply_linen(module, variables, args, kwargs)[0]

    def by_name(self, call: Call) -> Call:
        """`call` as a function of a model and the input arrays (keywords); the inputs that are not arrays are added."""

        def run(model: Any, **arrays: Any) -> Any:
            args, kwargs = self.inputs.arguments(arrays)
            return call(model, *args, **kwargs)

        return run


def arguments(case: Case, arrays: Mapping[str, Any]) -> Any:
    """The arguments of a model's call: a tuple, or a dictionary of keywords."""
    args, kwargs = case.inputs.arguments(arrays)
    return kwargs or args


def require_torch() -> None:
    """Raise UnsupportedError if PyTorch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise UnsupportedError("parity compares with PyTorch, which is not installed: pip install 'remat_jax[torch]'") from None


@contextlib.contextmanager
def running(argument: str, what: str = RUN) -> Iterator[None]:
    """Turn an error inside a user's model into an ArgumentError that names the argument, with the error as its cause."""
    try:
        yield
    except RematError:
        raise
    except Exception as error:
        hint = call_hint(argument, error) if what == RUN else ""
        raise ArgumentError(f"{argument} cannot be {what}: {described(error)}{hint}") from error


def _is_module(value: object) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _is_flax(value: object) -> bool:
    return isinstance(value, nn.Module | nnx.Module)


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _rules(rules: Any) -> tuple[Rules, bool]:
    """The given rules, and whether "auto" is among them, as a line of a text or an item of a sequence."""
    items = rules.splitlines() if isinstance(rules, str) else rules
    if not isinstance(items, list | tuple):
        return as_rules(rules), False
    others = [item for item in items if not (isinstance(item, str) and item.strip() == "auto")]
    texts = all(isinstance(item, str) for item in others)
    return as_rules("\n".join(others) if texts else others), len(others) < len(items)


def _losses(loss: Any) -> tuple[Call, Call] | None:
    if loss is None:
        return None
    pair = loss if isinstance(loss, tuple) else (loss, loss)
    if len(pair) != 2 or not all(map(callable, pair)):
        raise ArgumentError(
            f"loss={_short(loss)}: expected a function of a model's output that works on both frameworks' arrays, or a pair "
            "of functions, PyTorch's and JAX's"
        )
    return pair


def _torch_blocks(blocks: Any) -> tuple[type, ...] | None:
    import torch

    if blocks is None:
        return None
    classes = blocks if isinstance(blocks, tuple) else (blocks,)
    if not classes or not all(isinstance(each, type) and issubclass(each, torch.nn.Module) for each in classes):
        raise ArgumentError(f"torch_blocks={blocks!r}: expected a class of torch.nn.Module, or a tuple of them")
    return classes


def _modes(modes: Any) -> tuple[str, ...]:
    texts = tuple(map(str, (modes,) if isinstance(modes, str | Policy) else modes))
    for text in texts:
        as_policy(text, "modes")
    if not texts or len(set(texts)) != len(texts):
        raise ArgumentError(f"modes={modes!r}: expected one or more modes or policies, each once")
    return texts


def _dtypes(dtypes: Any) -> tuple[str, ...]:
    names = tuple(dtype_name(dtype) for dtype in ((dtypes,) if isinstance(dtypes, str) else dtypes))
    for name in names:
        epsilon(name)
    if not names or len(set(names)) != len(names):
        raise ArgumentError(f"dtypes={dtypes!r}: expected one or more of float64, float32, bfloat16, float16, each once")
    return tuple(sorted(names, key=lambda name: name != "float64"))


def _steps(steps: object) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"steps={steps!r}: expected the number of training steps, 1 or more")
    return steps


def _short(value: object) -> str:
    return " ".join(repr(value).split())[:120]
