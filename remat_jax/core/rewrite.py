"""Rewrites the `jax.checkpoint` regions and the scans of a traced function.

`rewrite` puts each region, or the body of each scan, under another policy. `established` replaces each region of `jax_remat3`
by a region of the established rematerialisation with the same policy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.core.flow import all_inputs, flagged, has, inner_flags
from remat_jax.core.marks import CHECKPOINTS, SCANS, mark_of
from remat_jax.core.shared import note_fixed
from remat_jax.core.walk import bodies, differentiated_bodies, equations, interpret, is_differentiated, rebind, retrace
from remat_jax.errors import UnsupportedError

VIEWS = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "reshape", "rev", "slice", "squeeze", "transpose"}
)
"""Primitives that return a view of an array. A view of a parameter counts as a parameter."""


def _is_view(eqn: JaxprEqn, flags: list[bool]) -> bool:
    return eqn.primitive.name in VIEWS and all(flags)


RunRegion = Callable[[ClosedJaxpr, str, list[bool], list[Any], bool], list[Any]]
"""`run(body, path, inputs, values, looped)` evaluates a region on `values`.

`inputs`: for each value, whether `@inputs` selects it. `looped`: whether the region is in a loop.
"""


def rewrite(jaxpr: ClosedJaxpr, args: Sequence[Any], run: RunRegion, part: str = CHECKPOINTS) -> list[Any]:
    """Evaluate the closed `jaxpr` on `args`, where `run` evaluates every region, at any depth.

    A region is a checkpoint region or, if `part` is `SCANS`, the body of an outermost scan. An operand of a region is a
    parameter if it is an argument of `jaxpr` or a view of an argument (a slice, a cast, a row of a scanned stack). Other
    operands are inputs of the region. Operands that are the same array in every iteration of a loop are recorded
    (`shared.note_fixed`).

    Raises:
      UnsupportedError: a region has been differentiated already.
    """
    return _rewritten(run, part, jaxpr, args, [True] * len(args), (), None)


def _rewritten(
    run: RunRegion,
    part: str,
    jaxpr: ClosedJaxpr,
    args: Sequence[Any],
    from_arguments: Sequence[bool],
    path: tuple[str, ...],
    fixed: Sequence[bool] | None,
) -> list[Any]:
    """`rewrite` of a jaxpr inside the scopes `path`.

    Args:
      from_arguments: for each input, whether it is an argument of the function or a view of an argument.
      fixed: in a loop, for each input whether it is the same array in all iterations; None outside loops.
    """
    parameters = flagged(jaxpr, from_arguments, _is_view)
    same = None if fixed is None else flagged(jaxpr, fixed, all_inputs)

    def visit(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        flags = [has(atom, parameters) for atom in eqn.invars]
        kept = None if same is None else [has(atom, same) for atom in eqn.invars]
        scopes = path + compat.scopes(eqn)
        region = _region(eqn, part)
        if region is not None and part == SCANS:
            name = "/".join((*scopes, compat.function_name(region)))
            chosen = [not flag for flag in inner_flags(eqn, "jaxpr", region, flags, _is_view)]
            return rebind(eqn, inputs, lambda _, body: retrace(body, lambda *args: run(body, name, chosen, list(args), True)))
        if region is not None:
            note_fixed([value for value, is_same in zip(inputs, kept or (), strict=False) if is_same])
            with compat.eqn_context(eqn):
                return run(region, "/".join(scopes) or "region", [not flag for flag in flags], inputs, kept is not None)
        if not contains_region(eqn, part):
            return None

        def inside(key: str, body: ClosedJaxpr) -> ClosedJaxpr:
            if not is_differentiated(eqn, body):
                return body
            from_arguments, fixed = inner_flags(eqn, key, body, flags, _is_view), _fixed_inside(eqn, key, body, kept)
            return retrace(body, lambda *args: _rewritten(run, part, body, args, from_arguments, scopes, fixed))

        return rebind(eqn, inputs, inside)

    return interpret(jaxpr, args, visit)


def _fixed_inside(eqn: JaxprEqn, key: str, inner: ClosedJaxpr, same: list[bool] | None) -> list[bool] | None:
    """For each input of `inner`, the jaxpr `eqn.params[key]`: whether it is the same in all iterations; None outside loops.

    The constants of a scan are the same array in all iterations; its carry and rows are not.
    """
    name = eqn.primitive.name
    if name == "scan":
        consts, _ = compat.scan_layout(eqn)
        return [*(same or [True] * consts)[:consts], *[False] * (len(inner.in_avals) - consts)]
    if name == "while" and same is None:
        same = [True] * len(eqn.invars)
    return None if same is None else inner_flags(eqn, key, inner, same, all_inputs)


_leaving_blocks: ContextVar[bool] = ContextVar("leaving_blocks", default=False)


def leaving_blocks() -> contextlib.AbstractContextManager[None]:
    """Inside this context, blocks that already have a policy from an enclosing `checkpoint_blocks` do not count as regions."""
    return compat.setting(_leaving_blocks, True)


def region_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The body of `eqn` if it is a `jax.checkpoint` region or a block of remat_jax, tied or not; else None.

    Raises:
      UnsupportedError: the region has been differentiated already, so a new policy would have no effect.
    """
    if compat.is_block(eqn):
        if _leaving_blocks.get() and compat.replaces_checkpoints(eqn) is not None:
            return None
        body = bodies(eqn)[0]
        inside = body.jaxpr.eqns
        # A tied block is a block whose body is one block.
        return region_body(inside[0]) if len(inside) == 1 and compat.is_block(inside[0]) else body
    if not compat.is_checkpoint(eqn) or compat.is_chunk_policy(compat.parameters(eqn).get("policy")):
        return None
    body, params = compat.checkpoint_parts(eqn)
    if params.get("differentiated"):
        raise UnsupportedError(
            "fn contains a jax.checkpoint region that is already differentiated (fn takes a gradient itself), so its policy "
            "can no longer change. Give replan the loss function, and differentiate the function that it returns."
        )
    return body


def _region(eqn: JaxprEqn, part: str) -> ClosedJaxpr | None:
    """The body of `eqn` if it is a region of the kind `part`; else None.

    A scan that contains another block, or runs over chunks (`in_chunks`), is no region, but there may be regions inside.
    """
    if part == CHECKPOINTS:
        return region_body(eqn)
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2:
        return None
    inside = [inner for body in bodies(eqn) for inner in equations(body)]
    chunks = (compat.is_chunk_policy(compat.parameters(inner).get("policy")) for inner in inside)
    return None if any(map(mark_of, inside)) or any(map(compat.is_block, inside)) or any(chunks) else bodies(eqn)[0]


def contains_region(eqn: JaxprEqn, part: str = CHECKPOINTS) -> bool:
    """Whether `eqn` contains a region on which a policy has an effect."""
    inside = (inner for body in differentiated_bodies(eqn) for inner in body.jaxpr.eqns)
    return any(_region(inner, part) is not None or contains_region(inner, part) for inner in inside)


def count_regions(jaxpr: ClosedJaxpr, part: str = CHECKPOINTS) -> int:
    """How many regions `jaxpr` has. A checkpoint region inside a scan counts once."""
    total = 0
    for eqn in jaxpr.jaxpr.eqns:
        if _region(eqn, part) is not None:
            total += 1
        elif contains_region(eqn, part):
            total += sum(count_regions(body, part) for body in differentiated_bodies(eqn))
    return total


def established(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The closed `jaxpr` with the names and regions of `jax_remat3` replaced by those of the established rematerialisation.

    Returns `jaxpr` itself if it has none. JAX's policies ignore `jax_remat3` names and cannot keep arrays inside `jax_remat3`
    regions, so named arrays would silently be recomputed.
    """
    if not any(map(compat.is_of_remat3, equations(jaxpr))):
        return jaxpr

    def visit(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        if compat.is_of_remat3(eqn):
            name = compat.given_name(eqn)
            if name is None:
                return compat.bind_established(eqn, established(bodies(eqn)[0]), inputs)
            with compat.eqn_context(eqn):
                return [compat.named(inputs[0], name)]
        # Leave functions with a custom derivative: JAX traces their rules later, perhaps with another value of `jax_remat3`.
        if compat.has_own_derivative(eqn) or not bodies(eqn):
            return None
        return rebind(eqn, inputs, lambda _, body: established(body))

    with compat.established_forms():
        return retrace(jaxpr, lambda *args: interpret(jaxpr, args, visit))
