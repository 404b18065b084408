"""`remat`: a policy on one module class or function. The checkpoint itself is made in `core/block.py`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from flax import linen, nnx

from remat_jax import compat
from remat_jax.apply import linen as linen_blocks
from remat_jax.apply import nnx as nnx_blocks
from remat_jax.apply.audit import Audit
from remat_jax.apply.calls import is_inside
from remat_jax.apply.methods import CALL
from remat_jax.apply.region import run_block
from remat_jax.errors import ArgumentError, nearest
from remat_jax.policy import JaxPolicy, Policy, as_policy

T = TypeVar("T", bound=Callable[..., Any])


def remat(target: T, policy: Policy | str | JaxPolicy = "full", *, static_argnames: str | Iterable[str] = ()) -> T:
    """`target` with `policy` on every call: a drop-in for `nn.remat`, `nnx.remat` and `jax.checkpoint`.

    For a Linen or NNX class the result is a subclass of the same name, so automatic parameter names do not change. Keyword
    arguments, dropout and other RNG streams, and mutable collections work as in the plain class. Python and NumPy scalars,
    strings and None in the arguments always reach the target unchanged.

    Args:
      target: a Linen module class, an NNX module class, a function of arrays (pytrees of them), or a method, as a decorator.
      policy: a policy, its name or text, or a JAX policy object.
      static_argnames: names of arguments that must be Python values. A traced value, or an array of rank 1 or more, raises
        `ArgumentError`.

    Raises:
      ArgumentError: `target` is none of these, or lacks an argument that `static_argnames` names.
      PolicyError: `policy` is no policy.
      NoEffectError: when called, if a selector matches no residual, or there is nothing to offload.

    >>> import jax, jax.numpy as jnp
    >>> block = remat(lambda x: jnp.sin(jnp.sin(x)), "full")
    >>> round(float(jax.grad(block)(1.0)), 4)
    0.36
    """
    checked = as_policy(policy)
    if isinstance(target, linen.Module | nnx.Module):
        raise ArgumentError(
            f"target={type(target).__name__} instance: expected a module class or a function; use "
            f"remat({type(target).__name__}, policy), or gradient_checkpoint_forward for a single call"
        )
    if not callable(target):
        raise ArgumentError(f"target={target!r}: expected a Linen or NNX module class or a function")
    method = target.__call__ if isinstance(target, type) else target
    static = _StaticArguments(method, static_argnames)
    if not isinstance(target, type):
        return _function(target, checked, static)
    if not issubclass(target, linen.Module | nnx.Module):
        raise ArgumentError(f"target={target!r}: a class must be a flax.linen or flax.nnx module")
    return _module_class(target, checked, static)


class _StaticArguments:
    """The names of arguments that must not be traced."""

    def __init__(self, function: Callable[..., Any], names: str | Iterable[str]) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self.signature = inspect.signature(function) if self.names else None
        parameters = list(self.signature.parameters) if self.signature else []
        for name in self.names:
            if name not in parameters:
                raise ArgumentError(
                    f"static_argnames={name!r}: no argument has this name."
                    f"{nearest(name, parameters)} There are: {', '.join(parameters)}"
                )

    def check(self, /, *args: Any, **kwargs: Any) -> None:
        """Raise if a static argument is traced or is an array of rank 1 or more."""
        if self.signature is None:
            return
        bound = self.signature.bind_partial(*args, **kwargs).arguments
        for name in self.names:
            value = bound.get(name)
            if compat.is_traced(value) or (compat.is_array(value) and getattr(value, "ndim", 0) > 0):
                kind = "a traced value" if compat.is_traced(value) else f"an array of shape {getattr(value, 'shape', ())}"
                raise ArgumentError(
                    f"static_argnames={name!r}: got {kind}, expected a Python value that is known while tracing. Pass it as a "
                    f"Python scalar (and mark it static in the enclosing jax.jit), or take {name!r} out of static_argnames."
                )


def _function(target: Callable[..., Any], policy: Policy | JaxPolicy, static: _StaticArguments) -> Any:
    @functools.wraps(target)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        static.check(*args, **kwargs)
        return call_block(target, policy, args, kwargs)

    return checkpointed


def call_block(
    target: Any, policy: Policy | JaxPolicy, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = CALL
) -> Any:
    """`target(*args, **kwargs)` of a bound Linen module, an NNX module or a function, as one checkpointed block.

    Of a module it may be a call of another `method`.

    Raises:
      NoEffectError: a selector matches no residual, or there is nothing to offload.
    """
    audit = Audit()
    if not isinstance(target, linen.Module | nnx.Module) and args and isinstance(args[0], linen.Module):
        # A decorated method: `@remat` in the body of a class.
        method = getattr(target, "__name__", CALL)
        outputs = linen_blocks.call(args[0], target, args[1:], kwargs, policy, audit, method=method)
    elif isinstance(target, linen.Module | nnx.Module):
        blocks = linen_blocks if isinstance(target, linen.Module) else nnx_blocks
        outputs = blocks.call(target, getattr(type(target), method), args, kwargs, policy, audit, method=method)
    else:
        path = getattr(target, "__name__", type(target).__name__).replace("<lambda>", "lambda")
        outputs = run_block(lambda _, /, *args, **kwargs: target(*args, **kwargs), path, (), args, kwargs, policy, audit)
    audit.check()
    return outputs


def _module_class(target: type, policy: Policy | JaxPolicy, static: _StaticArguments) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        static.check(self, *args, **kwargs)
        return call_block(self, policy, args, kwargs)

    return subclass(target, {CALL: method_or_block(target, CALL, __call__)})


def method_or_block(cls: type, method: str, block: Callable[..., Any]) -> Callable[..., Any]:
    """`block`, a method that runs the `method` of `cls` as a block, and inside this block the `method` itself."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (getattr(cls, method) if is_inside(self, method) else block)(self, *args, **kwargs)

    return call


def subclass(cls: type, methods: Mapping[str, Callable[..., Any]]) -> Any:
    """A subclass of `cls` with other methods. It has the same name, from which Flax derives parameter names."""
    names = {
        **{name: functools.wraps(getattr(cls, name))(method) for name, method in methods.items()},
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return type(cls)(cls.__name__, (cls,), names)
