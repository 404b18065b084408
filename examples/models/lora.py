"""Low-rank adapters for an unchanged Flax Linen model: Hu et al., LoRA, 2021.

The factors are beside the kernels that they change, as `lora_a` and `lora_b`; in a scanned stack they are stacked too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import flax.linen as nn
import jax
from flax import traverse_util

FIRST, SECOND = "lora_a", "lora_b"
TRAINED = "*/lora_[ab]"
"""The trainable parameters, as `Workload` takes them."""


def with_adapters(key: jax.Array, params: Any, modules: Sequence[str], rank: int) -> Any:
    """Return `params` with two factors beside the kernel of every `nn.Dense` whose path a glob of `modules` matches.

    The first factor, (…, in, rank), is uniform within ±1/√in, and the second, (…, rank, out), is zero, as in PEFT: at first
    the model's output is unchanged. Both have the kernel's dtype. With `jax.eval_shape`, `params` may be shapes.

    Raises:
        ValueError: when `rank` is less than 1, or a glob matches no kernel.

    >>> params = {"layers": {"up": {"kernel": jax.numpy.ones((3, 8, 6))}, "down": {"kernel": jax.numpy.ones((3, 6, 8))}}}
    >>> found = with_adapters(jax.random.key(0), params, ["*/up"], 2)
    >>> {name: leaf.shape for name, leaf in found["layers"]["up"].items()}
    {'kernel': (3, 8, 6), 'lora_a': (3, 8, 2), 'lora_b': (3, 2, 6)}
    """
    if rank < 1:
        raise ValueError(f"rank={rank}: expected at least 1")
    flat = traverse_util.flatten_dict(params)
    kernels = {"/".join(path[:-1]): path[:-1] for path in flat if path[-1] == "kernel"}
    for glob in modules:
        if not any(fnmatchcase(name, glob) for name in kernels):
            raise ValueError(f"modules: {glob!r} matches no module with a kernel; there are {', '.join(kernels)}")
    for index, (name, path) in enumerate(kernels.items()):
        if any(fnmatchcase(name, glob) for glob in modules):
            kernel = flat[*path, "kernel"]
            *stack, inner, outer = kernel.shape
            drawn = jax.random.uniform(jax.random.fold_in(key, index), (*stack, inner, rank), kernel.dtype, -1, 1)
            flat[*path, FIRST] = drawn / math.sqrt(inner)
            flat[*path, SECOND] = jax.numpy.zeros((*stack, rank, outer), kernel.dtype)
    return traverse_util.unflatten_dict(flat)


@contextmanager
def adapters() -> Iterator[None]:
    """A context in which every `nn.Dense` with factors beside its kernel adds its input times the factors."""
    with nn.intercept_methods(_adapted):
        yield


def _adapted(next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    found, module = next_fun(*args, **kwargs), context.module
    if context.method_name != "__call__" or not module.has_variable("params", FIRST):
        return found
    if not isinstance(module, nn.Dense):
        kind = type(module).__name__
        raise TypeError(
            f"{'/'.join(module.path)} is a {kind} with adapters, and only nn.Dense adds them: leave it out of `modules`"
        )
    given = (args[0] if args else kwargs["inputs"]).astype(found.dtype)
    first, second = (module.get_variable("params", name).astype(found.dtype) for name in (FIRST, SECOND))
    return found + given @ first @ second
