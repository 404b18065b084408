"""The checkpointing calls of PyTorch pipelines, with the same arguments and meaning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import linen, nnx

from remat_jax.apply import linen as linen_blocks
from remat_jax.apply import nnx as nnx_blocks
from remat_jax.apply.audit import Audit
from remat_jax.apply.remat import call_block
from remat_jax.errors import ArgumentError
from remat_jax.policy import JaxPolicy, Policy, as_policy, is_off


def gradient_checkpoint_forward(
    model: Any, use_gradient_checkpointing: bool, use_gradient_checkpointing_offload: bool, *args: Any, **kwargs: Any
) -> Any:
    """`model(*args, **kwargs)` in one of three modes: off, checkpoint, or offload.

    The arguments are those of DiffSynth-Studio's function of this name, so that a pipeline's `model_fn` can be ported line by
    line.

    Args:
      model: a bound Linen module, an NNX module, or a function.
      use_gradient_checkpointing: True for policy `full`: keep the block's inputs and recompute everything else.
      use_gradient_checkpointing_offload: True for policy `offload_inputs`: keep the inputs (the arrays anywhere in `args` and
        `kwargs`) in host memory and recompute everything else. This flag overrides
        `use_gradient_checkpointing`. If both flags are False, no checkpoint is made.
      args, kwargs: the arguments of `model`.

    Raises:
      ArgumentError: a flag is not a bool; in modes checkpoint and offload, `model` is not a bound Linen module, an NNX module
        or a function; or `model` takes an argument with a flag's name, or named `model`, that `args` do not pass by position.
      NoEffectError: in mode offload, if the arguments hold no array of rank 1 or more.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> block = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    >>> gradient_checkpoint_forward(block, True, False, jnp.ones((2, 4))).shape
    (2, 4)
    """
    _check_flags(use_gradient_checkpointing, use_gradient_checkpointing_offload)
    _check_names(model, args)
    if use_gradient_checkpointing_offload:
        mode = "offload_inputs"
    else:
        mode = "full" if use_gradient_checkpointing else "off"
    return call_model(model, as_policy(mode), args, kwargs)


_OWN = ("model", "use_gradient_checkpointing", "use_gradient_checkpointing_offload")


def _check_flags(checkpoint: object, offload: object) -> None:
    for name, value in zip(_OWN[1:], (checkpoint, offload), strict=True):
        if not isinstance(value, bool | np.bool_):
            raise ArgumentError(f"{name}={value!r}: expected True or False, known while tracing")


def _check_names(model: Any, args: tuple[Any, ...]) -> None:
    """Raise if `model` has an argument named in `_OWN` that `args` do not pass by position.

    A keyword with this name would not reach the model.
    """
    is_module = isinstance(model, linen.Module | nnx.Module)
    call = type(model).__call__ if is_module else model
    try:
        signature = inspect.signature(call) if callable(call) else inspect.Signature()
        filled = signature.bind_partial(*([model] if is_module else []), *args).arguments
    except (TypeError, ValueError):  # no signature, or too many arguments: the call itself raises
        return
    for name in _OWN:
        if name in signature.parameters and name not in filled:
            raise ArgumentError(
                f"model={getattr(model, '__name__', type(model).__name__)}: the model has an argument {name!r}, but "
                "gradient_checkpoint_forward consumes this keyword itself. Pass it by position, bind it in a function "
                f"without that argument (lambda *args: model(*args, {name}=…)), or rename it."
            )


def call_model(model: Any, policy: Policy | JaxPolicy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`model(*args, **kwargs)` as one checkpointed block; `model` is a bound Linen module, an NNX module or a function.

    Raises:
      ArgumentError: `model` is none of these, or is a Linen module that is not bound. Under `off` nothing is checked.
      NoEffectError: a selector matches no residual, or there is nothing to offload.
    """
    if is_off(policy):
        return model(*args, **kwargs)
    if isinstance(model, linen.Module) and model.scope is None:
        raise ArgumentError(
            f"model={type(model).__name__}: this Linen module is not bound, so it has no parameters to run with. Call it "
            "inside another module, bind it (model.bind(variables)), or pass a function: "
            "lambda x: model.apply(variables, x)"
        )
    if not callable(model) or isinstance(model, type):
        raise ArgumentError(f"model={model!r}: expected a bound Linen module, an NNX module or a function")
    return call_block(model, policy, args, kwargs)


def checkpoint_sequential(functions: Sequence[Callable[..., Any]], segments: int, x: Any, *, policy: Any = "full") -> Any:
    """`functions[-1](…functions[0](x))` in `segments` pieces; all pieces but the last are checkpointed blocks, as in PyTorch.

    Each piece has `len(functions) // segments` functions; the last piece also has the remainder. The last piece is not
    checkpointed: its backward pass directly follows its forward pass, so recomputing would save no memory.

    Args:
      functions: functions, bound Linen modules or NNX modules of one argument each, or an `nnx.Sequential`.
      segments: how many pieces, from 1 to `len(functions)`.
      x: the input of the first function, an array or a pytree of arrays.
      policy: the policy of each checkpointed piece.

    Raises:
      ArgumentError: `functions` is empty or not a list, `segments` is out of range, a checkpointed piece has both Linen and
        NNX modules, or one of its Linen modules is not bound.

    >>> import jax, jax.numpy as jnp
    >>> round(float(jax.grad(lambda x: checkpoint_sequential([jnp.sin] * 4, 2, x))(1.0)), 4)
    0.2059
    """
    checked = as_policy(policy)
    if isinstance(functions, nnx.Sequential):
        functions = functions.layers
    if not isinstance(functions, Sequence | nnx.List) or isinstance(functions, str):
        raise ArgumentError(f"functions={functions!r}: expected a list of functions or modules")
    layers = list(functions)
    if not layers:
        raise ArgumentError("functions=[]: expected at least one function")
    if not isinstance(segments, int) or isinstance(segments, bool) or not 1 <= segments <= len(layers):
        raise ArgumentError(f"segments={segments!r}: expected an integer from 1 to the number of functions, {len(layers)}")
    size = len(layers) // segments
    for start in range(0, size * (segments - 1), size):
        x = _segment(layers[start : start + size], checked, x)
    return _run(layers[size * (segments - 1) :], x)


def _run(layers: Sequence[Callable[..., Any]], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def _segment(layers: Sequence[Callable[..., Any]], policy: Policy | JaxPolicy, x: Any) -> Any:
    """One checkpointed piece. The parameters of its modules, Linen or NNX, are the block's parameters."""
    if len(layers) == 1:
        return call_model(layers[0], policy, (x,), {})
    is_linen = [isinstance(layer, linen.Module) for layer in layers]
    is_nnx = [isinstance(layer, nnx.Module) for layer in layers]
    if not any(is_linen) and not any(is_nnx):
        return call_model(lambda x: _run(layers, x), policy, (x,), {})
    if any(is_linen) and any(is_nnx):
        raise ArgumentError("functions: Linen and NNX modules in one segment; checkpoint them in separate calls")
    audit = Audit()
    modules = [layer for layer in layers if isinstance(layer, linen.Module | nnx.Module)]

    def run(modules: Sequence[Any], x: Any) -> Any:
        left = iter(modules)
        return _run([next(left) if isinstance(layer, linen.Module | nnx.Module) else layer for layer in layers], x)

    blocks = linen_blocks if any(is_linen) else nnx_blocks
    outputs = blocks.call_together(modules, run, policy, x, audit)
    audit.check()
    return outputs
