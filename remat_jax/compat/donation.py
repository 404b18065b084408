"""Donation in programs with arrays in host memory: a result reuses an argument's buffer only in the same memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

# The programs being lowered whose donated arguments were looked at: their signature is complete before their first equation.
_mended: weakref.WeakSet[Any] = weakref.WeakSet()

_ALIAS, _DONOR, _MEMORY = "tf.aliasing_output", "jax.buffer_donor", "mhlo.memory_kind"


def reusing_the_same_memory(values: Sequence[Any]) -> list[Any]:
    """`values` unchanged, in a program whose results reuse only donated arguments in the same memory, device or host.

    `jit` gives a donated argument's buffer to the first result of its shape and dtype, and does not look at the memory unless
    `out_shardings` names it. On a CPU, a result in another memory than its buffer ends the process: JAX aborts. For such an
    argument XLA chooses the result, among those in the same memory.
    """
    return _same_memory_p.bind(*values) if values else []


def keeping_memories(rule: Any) -> Any:
    """The lowering `rule` of a primitive, which does the same to the program around it as `reusing_the_same_memory`."""

    def lowered(ctx: Any, *values: Any, **params: Any) -> Any:
        program = ctx.module_context
        if program.module not in _mended and "main" in program.symbol_table:
            _mended.add(program.module)
            _mend(program.symbol_table["main"])
        return rule(ctx, *values, **params)

    return lowered


def _mend(main: Any) -> None:
    """Let XLA choose the result for each argument of `main`, an MLIR function, that JAX gave to one in another memory."""
    if "arg_attrs" not in main.attributes:
        return
    arguments = [{entry.name: entry.attr for entry in attributes} for attributes in main.attributes["arg_attrs"]]
    results = [_memory(attributes) for attributes in main.attributes["res_attrs"]]
    for attributes in arguments:
        alias = attributes.get(_ALIAS)
        if alias is not None and results[ir.IntegerAttr(alias).value] != _memory(attributes):
            attributes[_DONOR] = ir.BoolAttr.get(True)
            del attributes[_ALIAS]
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(list(map(ir.DictAttr.get, arguments)))


def _memory(attributes: Any) -> str:
    return ir.StringAttr(attributes[_MEMORY]).value if _MEMORY in attributes else "device"


_same_memory_p = jex.Primitive("reusing_the_same_memory")
_same_memory_p.multiple_results = True
_same_memory_p.def_impl(lambda *values: list(values))
_same_memory_p.to_lojax = lambda *values: list(values)
_same_memory_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(_same_memory_p, keeping_memories(lambda _, *values: values))
ad.primitive_jvps[_same_memory_p] = lambda primals, tangents: (_same_memory_p.bind(*primals), tangents)
batching.primitive_batchers[_same_memory_p] = lambda args, axes: (_same_memory_p.bind(*args), axes)
