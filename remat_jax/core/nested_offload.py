"""Finds offload in a scan inside another scan, which XLA cannot compile for GPUs and TPUs (maxtext#4990).

The inner scan stacks the offloaded rows on the host, and the outer scan stacks these stacks. XLA:GPU then fails with "INTERNAL:
Expected instruction to have shape equal to …" after layout assignment, XLA:TPU with "INTERNAL: … The async-start expects the
shape of operand 0 to match the async shape". Offload in the outer scan alone compiles, and so does
offload in a scan inside an unrolled layer.
"""

from __future__ import annotations

from collections.abc import Collection

from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.core.origins import is_on_host, origin
from remat_jax.core.walk import bodies, equations, given_names
from remat_jax.errors import UnsupportedError


def refusal(block: str, names: Collection[str] = ()) -> UnsupportedError:
    """The error for a block at the path `block` that offloads the arrays `names` in nested scans."""
    arrays = f" ({', '.join(sorted(names)[:3])})" if names else ""
    return UnsupportedError(
        f"block {block or 'function'!r}: its policy offloads arrays{arrays} in a scan inside another scan, which XLA cannot "
        'compile for GPUs and TPUs (maxtext#4990). Use a policy that does not offload here, such as "full", and offload_inputs '
        "on a block directly in the outer scan, such as the block that contains the inner scan; or unroll one of the two scans."
    )


def names_in_scans(jaxpr: ClosedJaxpr) -> frozenset[str]:
    """The names that are given in the scans of the closed `jaxpr`."""
    scans = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan")
    return frozenset(name for eqn in scans for body in bodies(eqn) for name in given_names(body))


def refuse_nested_offload(jaxpr: ClosedJaxpr) -> None:
    """Raise UnsupportedError if a scan in the closed `jaxpr` stacks host arrays of a scan inside it."""
    for eqn in equations(jaxpr):
        inside = [inner for body in bodies(eqn) for inner in equations(body)] if _stacks_on_host(eqn) else []
        for inner in filter(_stacks_on_host, inside):
            (body,) = bodies(inner)
            stacked = [out for out, whole in zip(body.jaxpr.outvars, inner.outvars, strict=True) if is_on_host(whole)]
            names = [origin(body.jaxpr, out).name for out in stacked]
            raise refusal(names[0].rpartition(":")[0] or compat.source_line(inner), names)


def _stacks_on_host(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and any(map(is_on_host, eqn.outvars))
