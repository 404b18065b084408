"""Finding the existing `jax.checkpoint` regions of a traced function, and running each under another policy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from remat_jax import compat
from remat_jax.core.flow import flagged, has, inner_flags
from remat_jax.core.shared import note_fixed
from remat_jax.core.walk import inner_jaxprs, interpret, retrace
from remat_jax.errors import UnsupportedError

# Views of an array: a view of a parameter counts as a parameter.
_VIEWS = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "reshape", "rev", "slice", "squeeze", "transpose"}
)


def _is_view(eqn: Any, flags: list[bool]) -> bool:
    return eqn.primitive.name in _VIEWS and all(flags)


RunRegion = Callable[[Any, str, list[bool], list[Any], bool], list[Any]]
"""`run(body, path, inputs, values, looped)`: evaluate a region; `inputs` says which values `@inputs` selects."""


def rewrite(jaxpr: Any, args: Sequence[Any], run: RunRegion) -> list[Any]:
    """Evaluate the closed `jaxpr` on `args`, where `run` evaluates every checkpoint region, at any depth.

    A region's operand is a parameter if it is an argument of the function or a view of one (a slice, a cast, a row of a scanned
    stack). A computed operand is an input of the region. Arrays that all iterations of a scan read are recorded (`shared`).

    Raises:
      UnsupportedError: a region has been differentiated already.
    """
    return _Rewriter(run).evaluate(jaxpr, args, [True] * len(args), (), None)


class _Rewriter:
    def __init__(self, run: RunRegion) -> None:
        self.run = run

    def evaluate(
        self, jaxpr: Any, args: Sequence[Any], given: Sequence[bool], path: tuple[str, ...], fixed: Sequence[bool] | None
    ) -> list[Any]:
        """Evaluate `jaxpr`, whose scopes are `path`.

        Args:
          given: for each input, whether it is an argument of the function or a view of one.
          fixed: in a loop, for each input whether it is the same array in all iterations; None outside loops.
        """
        parameters = flagged(jaxpr, given, _is_view)
        same = None if fixed is None else flagged(jaxpr, fixed, _is_of_these_only)

        def visit(eqn: Any, inputs: list[Any]) -> list[Any] | None:
            flags = [has(atom, parameters) for atom in eqn.invars]
            kept = None if same is None else [has(atom, same) for atom in eqn.invars]
            here = path + compat.scopes(eqn)
            body = region_body(eqn)
            if body is not None:
                note_fixed([value for value, is_same in zip(inputs, kept or (), strict=False) if is_same])
                with compat.eqn_context(eqn):
                    return self.run(body, "/".join(here) or "region", [not flag for flag in flags], inputs, kept is not None)
            if not contains_region(eqn):
                return None
            return compat.bind(eqn, inputs, **self._inside(eqn, flags, here, kept))

        return interpret(jaxpr, args, visit)

    def _evaluate_again(self, jaxpr: Any, *args: Any, **where: Any) -> list[Any]:
        return self.evaluate(jaxpr, args, **where)

    def _inside(self, eqn: Any, flags: list[bool], path: tuple[str, ...], same: list[bool] | None) -> dict[str, Any]:
        changed = {}
        for key, value in inner_jaxprs(eqn).items():
            inner = [compat.closed(one) for one in (value if isinstance(value, tuple) else (value,))]
            given = inner_flags(eqn, key, inner[0], flags, _is_view)
            fixed = _fixed_inside(eqn, key, inner[0], same)
            with compat.inner_context(eqn):
                new = [
                    retrace(one, functools.partial(self._evaluate_again, one, given=given, path=path, fixed=fixed))
                    for one in inner
                ]
            changed[key] = (
                tuple(compat.like(a, b) for a, b in zip(new, value, strict=True))
                if isinstance(value, tuple)
                else compat.like(new[0], value)
            )
        return changed


def _is_of_these_only(eqn: Any, flags: list[bool]) -> bool:
    return all(flags)


def _fixed_inside(eqn: Any, key: str, inner: Any, same: list[bool] | None) -> list[bool] | None:
    """For each input of `inner`, the parameter `key` of `eqn`: whether it is the same array in all iterations around it.

    The constants of a scan are; its carry and rows are not. None outside loops.
    """
    name = eqn.primitive.name
    if name == "scan":
        consts, _ = compat.scan_layout(eqn)
        return [*(same or [True] * consts)[:consts], *[False] * (len(inner.in_avals) - consts)]
    if name == "while" and same is None:
        same = [True] * len(eqn.invars)
    return None if same is None else inner_flags(eqn, key, inner, same, _is_of_these_only)


_leaving_blocks: ContextVar[bool] = ContextVar("leaving_blocks", default=False)


@contextlib.contextmanager
def leaving_blocks() -> Iterator[None]:
    """Inside this context, blocks that already have a policy from an enclosing `checkpoint_blocks` do not count as regions."""
    token = _leaving_blocks.set(True)
    try:
        yield
    finally:
        _leaving_blocks.reset(token)


def region_body(eqn: Any) -> Any | None:
    """The body of `eqn` if it is a checkpoint region, tied or not; else None.

    Raises:
      UnsupportedError: the region has been differentiated already, so a new policy would have no effect.
    """
    if compat.is_block(eqn):
        if _leaving_blocks.get() and compat.replaces_checkpoints(eqn) is not None:
            return None
        body = compat.closed(eqn.params["call_jaxpr"])
        inside = body.jaxpr.eqns
        # A tied block is a block around a block.
        return region_body(inside[0]) if len(inside) == 1 and compat.is_block(inside[0]) else body
    if not compat.is_checkpoint(eqn) or compat.is_chunk_policy(eqn.params.get("policy")):
        return None
    body, params = compat.checkpoint_parts(eqn)
    if params.get("differentiated"):
        raise UnsupportedError(
            "fn contains a jax.checkpoint region that is already differentiated (fn takes a gradient itself), so its policy "
            "can no longer change. Give replan the loss function, and differentiate the function that it returns."
        )
    return body


def contains_region(eqn: Any) -> bool:
    """Whether there is a checkpoint region inside `eqn` on which a policy has an effect."""
    if eqn.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call")):
        # JAX differentiates these by their own rules and never partially evaluates their bodies.
        return False
    return any(
        region_body(one) is not None or contains_region(one)
        for value in inner_jaxprs(eqn).values()
        for inner in (value if isinstance(value, tuple) else (value,))
        for one in compat.closed(inner).jaxpr.eqns
    )


def count_regions(jaxpr: Any) -> int:
    """How many checkpoint regions `jaxpr` has. A region inside a scan counts once."""
    total = 0
    for eqn in jaxpr.jaxpr.eqns:
        if region_body(eqn) is not None:
            total += 1
        elif contains_region(eqn):
            for value in inner_jaxprs(eqn).values():
                total += sum(count_regions(compat.closed(one)) for one in (value if isinstance(value, tuple) else (value,)))
    return total
