"""Traps of a region's saved arrays and of its recomputation: wasted bytes, and wrong numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from remat_jax import compat
from remat_jax.core.flow import CALLS, flagged
from remat_jax.core.products import MATMULS
from remat_jax.core.walk import bodies, equations
from remat_jax.diagnosis.findings import Finding, some
from remat_jax.diagnosis.watch import Kept, Observed, Region, is_view

# The share of a region's saved bytes that is too small to report, such as the scales of its norms.
_NEGLIGIBLE = 0.01

_KERNELS = frozenset({"pallas_call", "ffi_call", "custom_call", "triton_kernel_call", "jax_triton", "tpu_custom_call"})


def kernel_run_again(observed: Observed) -> Iterator[Finding]:
    """Kernels with several results (flash attention and its log-sum-exp) that save one and run again for another."""
    for region in observed.regions:
        again = [eqn for eqn in region.rerun if _is_expensive(eqn)] if region.kept else []
        wasted: dict[int, tuple[Any, list[Kept]]] = {}
        for array in region.kept if again else ():
            eqn = _kernel_of(*region.makers[array.name]) if array.name in region.makers else None
            if eqn is not None and any(_is_same(eqn, other) for other in again):
                wasted.setdefault(id(eqn), (eqn, []))[1].append(array)
        for eqn, kept in wasted.values():
            results = ", ".join(f"{var.aval.dtype}{list(var.aval.shape)}" for var in eqn.outvars)
            yield Finding(
                "kernel_run_again",
                some(region.paths),
                compat.source_line(eqn) or region.place,
                f"{some(array.name for array in kept)} of {eqn.primitive.name} is kept ({sum(array.nbytes for array in kept)} "
                f"bytes), yet {eqn.primitive.name} runs again in the backward pass, which needs another of its results "
                f"({results})",
                "Keep the other results that the backward pass reads too (of flash attention the log-sum-exp; remat-jax "
                "measure --residuals lists the names; a JAX policy needs names in the kernel's own derivative rule), or keep "
                "none of the results",
            )


def _kernel_of(name: Any, made: Mapping[Any, Any]) -> Any | None:
    """The only kernel with several results that the named array comes from without further expensive work, or None."""
    kernels: dict[int, Any] = {}
    seen: set[Any] = set()
    ahead = [(atom, made) for atom in name.invars]
    while ahead:
        atom, made = ahead.pop()
        if hasattr(atom, "val") or atom in seen:
            continue
        seen.add(atom)
        eqn = made.get(atom)
        if eqn is None or eqn.primitive.name in MATMULS:
            return None
        if len(eqn.outvars) > 1 and _is_expensive(eqn):
            kernels[id(eqn)] = eqn
        elif compat.kind(eqn) in CALLS and bodies(eqn):
            inner = bodies(eqn)[0].jaxpr
            whole = [maker for maker in inner.eqns if maker.primitive.name not in ("scan", "while")]
            ahead.append((inner.outvars[eqn.outvars.index(atom)], {var: maker for maker in whole for var in maker.outvars}))
        else:
            ahead += [(operand, made) for operand in eqn.invars]
    return next(iter(kernels.values())) if len(kernels) == 1 else None


def _is_expensive(eqn: Any) -> bool:
    """Whether `eqn` is a kernel, or a loop or custom-VJP call that contains kernels or matrix multiplications."""
    if not eqn.primitive.name.startswith(("scan", "while", "custom_vjp_call")):
        return _is_kernel(eqn)
    inside = [inner for body in bodies(eqn) for inner in equations(body)]
    return any(inner.primitive.name in MATMULS or _is_kernel(inner) for inner in inside)


def _is_kernel(eqn: Any) -> bool:
    return eqn.primitive.name in _KERNELS or "attention" in eqn.primitive.name


def _is_same(eqn: Any, again: Any) -> bool:
    """Whether `again` is a recomputation of `eqn`, perhaps without unread results; the transpose of `eqn` is not."""
    first, second = ((each.primitive.name, compat.source_line(each), each.params.get("reverse")) for each in (eqn, again))
    avals = [str(var.aval) for var in eqn.outvars]
    return first == second and all(str(var.aval) in avals for var in again.outvars)


def parameter_kept(observed: Observed) -> Iterator[Finding]:
    """Parameters, or copies in another dtype, that a policy saves although they are on the device anyway."""
    for region in observed.regions:
        copies = _copies_of_parameters(region)
        wasted = [array for array in region.kept if array.name in copies]
        wasted = [array for array in wasted if array.on_host or copies[array.name] or region.looped]
        for on_host in (False, True):
            names = sorted(array.name for array in wasted if array.on_host is on_host)
            nbytes = sum(array.nbytes for array in wasted if array.on_host is on_host)
            if nbytes <= _NEGLIGIBLE * sum(array.nbytes for array in region.kept):
                continue
            each = " in each round of the loop" if region.looped else ""
            yield Finding(
                "parameter_kept",
                some(region.paths),
                region.place,
                f"{nbytes} bytes{each} of {'host' if on_host else 'device'} memory hold copies of parameters or constants "
                f"({some(names)}), which are on the device anyway",
                f'Recompute them at the cost of a cast: put a rule such as "recompute: {_selectors(names)}" before the others',
            )


def _selectors(names: list[str]) -> str:
    if all(":" in name for name in names):
        names = sorted({f"@primitive:{name.rpartition(':')[2].partition('#')[0]}" for name in names})
    return ", ".join(names)


def _copies_of_parameters(region: Region) -> dict[str, bool]:
    """The names of arrays that are views or casts of a parameter → whether the array was cast."""
    jaxpr = region.block.named.jaxpr
    views = flagged(jaxpr, region.parameters, is_view)
    copies: dict[str, bool] = {}
    cast: set[Any] = set()
    for eqn in jaxpr.jaxpr.eqns:
        if not eqn.outvars or eqn.outvars[0] not in views:
            continue
        operands = [atom for atom in eqn.invars if not hasattr(atom, "val")]
        if operands and (eqn.primitive.name == "convert_element_type" or cast & set(operands)):
            cast.add(eqn.outvars[0])
        name = compat.given_name(eqn)
        if name is not None:
            copies[name] = eqn.invars[0] in cast
    return copies


def keyless_random(observed: Observed) -> Iterator[Finding]:
    """Random numbers without a key in a recomputation: they differ, so the gradients belong to a different mask.

    Numbers of `jax.random` (any implementation) are a function of their key: recomputed, they are equal bit for bit.
    """
    for region in observed.regions:
        for eqn in region.rerun:
            if eqn.primitive.name == "rng_uniform":
                yield Finding(
                    "keyless_random",
                    some(region.paths),
                    compat.source_line(eqn) or region.place,
                    "lax.rng_uniform has no key, so the backward pass draws other numbers than the forward pass, and the "
                    "gradient is wrong",
                    "Draw with jax.random and a key, which repeats the same numbers, or save them: @primitive:rng_uniform",
                )
