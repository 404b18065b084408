"""Module paths as named scopes, for modules that leave none in a traced program: NNX, Equinox, any callable pytree.

Linen and Haiku name their modules' scopes themselves. A path begins with the module that is called outside of any other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import jax
from flax import nnx

from remat_jax.apply import nnx as nnx_blocks
from remat_jax.apply import pytrees
from remat_jax.apply.calls import Call, in_named_part, named_scopes, naming, patched
from remat_jax.apply.methods import CALL, block_path, classes_and_methods, with_own_method


def with_module_names(function: Call, blocks: Iterable[Any] = ()) -> Call:
    """`function`, whose NNX modules, callable pytrees and marked functions run in scopes named by their paths.

    The methods among `blocks` have scopes too; the classes of pytrees are those of the arguments and of `blocks`. The path of a
    module that is called outside of any other is its path in the arguments, or the name of its class.
    """
    methods = [(cls, name) for cls, name in classes_and_methods(blocks) if pytrees.is_tree_class(cls)]
    of_nnx = [(cls, name) for cls, name in classes_and_methods(blocks) if issubclass(cls, nnx.Module) and name != CALL]

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        trees = {type(node) for argument in args for _, node in pytrees.callables(argument)}
        with ExitStack() as stack:
            stack.enter_context(naming(True))
            stack.enter_context(patched(set(with_own_method(nnx.Module)), functools.partial(_outermost, nnx_blocks, CALL)))
            for cls, name in of_nnx:
                stack.enter_context(patched({cls}, functools.partial(_outermost, nnx_blocks, name), name))
            if trees or methods:
                stack.enter_context(pytrees.known_paths(*args))
                stack.enter_context(patched(trees, functools.partial(_outermost, pytrees, CALL)))
            for cls, name in methods:
                if name != CALL or cls not in trees:
                    stack.enter_context(patched({cls}, functools.partial(_outermost, pytrees, name), name))
            return function(*args, **kwargs)

    return named


def _outermost(library: Any, method: str, original: Call) -> Call:
    """`original`, a `method` of modules of a `library` (its file here); outside any other module it runs in a named scope."""

    @functools.wraps(original)
    def run(module: object, /, *args: Any, **kwargs: Any) -> Any:
        if in_named_part():
            return original(module, *args, **kwargs)
        scope = jax.named_scope(block_path(library.path_of(module), method))
        with scope, named_scopes(library.parts_in(module), library.parts_in, library.shapes):
            return original(module, *args, **kwargs)

    return run
