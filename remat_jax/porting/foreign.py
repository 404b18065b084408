"""Equinox and Haiku models as Linen modules, so that their weights have paths and a comparison can run them."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from remat_jax.porting.float64 import initialisers_in_any_width


class ForeignModel(nn.Module):
    """A model of another library; `rebuilt()` returns it with the Linen module's parameters as its weights."""

    model: Any

    def rebuilt(self) -> Any:
        """The model as a callable. Subclasses declare its parameters."""
        raise NotImplementedError

    def __call__(self, *args: Any, run: Callable[..., Any] = operator.call, **kwargs: Any) -> Any:
        """The output of `run(model, *args, **kwargs)`."""
        return run(self.rebuilt(), *args, **kwargs)


class PytreeModel(ForeignModel):
    """A callable pytree, such as an Equinox module; its floating-point arrays are the parameters.

    If the model does not take the inputs, it is mapped over their first axis: Equinox's layers take a single example.
    """

    @nn.compact
    def rebuilt(self) -> Any:
        """The pytree, as a function that falls back to `jax.vmap`."""
        with_paths, treedef = jax.tree_util.tree_flatten_with_path(self.model)
        leaves = [self._leaf(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in with_paths]
        return functools.partial(_batched, jax.tree.unflatten(treedef, leaves))

    def _leaf(self, path: str, leaf: Any) -> Any:
        is_weight = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return self.param(path, lambda key: jnp.asarray(leaf)) if is_weight else leaf


def _batched(model: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return model(*args, **kwargs)
    except (TypeError, ValueError):
        return jax.vmap(model)(*args, **kwargs)


class HaikuModel(ForeignModel):
    """A function that `haiku.transform` has transformed; it is applied without a random key."""

    def rebuilt(self) -> Any:
        """The function of the inputs; its call declares the parameters."""
        return lambda *args, **kwargs: self.model.apply(self._parameters(args, kwargs), None, *args, **kwargs)

    @nn.compact
    def _parameters(self, args: Any, kwargs: Any) -> dict[str, dict[str, Any]]:
        if self.is_initializing():
            made = self.model.init(jax.random.key(0), *args, **kwargs)
            start = {f"{module}/{name}": x for module, leaves in made.items() for name, x in leaves.items()}
        else:
            start = dict(self.variables["params"])
        parameters: dict[str, dict[str, Any]] = {}
        for path, x in start.items():
            module, _, name = path.rpartition("/")
            parameters.setdefault(module, {})[name] = self.param(path, lambda key, x=x: x)
        return parameters


def as_flax(model: Any) -> Any:
    """A Linen module for a model of Equinox or Haiku; anything else is returned unchanged."""
    if isinstance(model, nn.Module | nnx.Module | type):
        return model
    haiku = sys.modules.get("haiku")
    if haiku is not None and isinstance(model, haiku.Transformed):
        return HaikuModel(model)
    is_tree = callable(model) and any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(model))
    return PytreeModel(model) if is_tree else model


def name_of(module: Any) -> str:
    """The name of the class of a Flax module, or of the model that a `ForeignModel` holds."""
    return type(module.model if isinstance(module, ForeignModel) else module).__name__


def on_the_model(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` as a function of a model, in which a `ForeignModel` is replaced by the model itself.

    Initialisers of Linen modules may fail under 64-bit types.
    """

    @functools.wraps(call)
    def on_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, ForeignModel):
            return model(*args, run=call, **kwargs)
        with initialisers_in_any_width():
            return call(model, *args, **kwargs)

    return on_model
