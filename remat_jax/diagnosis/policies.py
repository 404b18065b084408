"""Traps of a policy: selectors and names that match nothing, offloads that move nothing, and arrays saved needlessly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from remat_jax import compat
from remat_jax.apply.audit import closest
from remat_jax.apply.audit_jax import NAME_THE_INPUT
from remat_jax.core.flow import CALLS, flagged
from remat_jax.core.marks import name_of
from remat_jax.core.matmuls import MATMULS
from remat_jax.core.origins import output_names
from remat_jax.core.walk import bodies, equations, given_names, variables
from remat_jax.diagnosis.findings import Finding, some
from remat_jax.diagnosis.watch import Kept, Observed, Region, is_view
from remat_jax.errors import nearest
from remat_jax.policy import Action, JaxPolicy, LayerPolicies, Policy
from remat_jax.report.tables import format_bytes

# If a region's saved parameters, such as the scales of norms, are at most this share of its saved bytes, nothing is reported.
_NEGLIGIBLE = 0.01

_KERNELS = frozenset({"pallas_call", "ffi_call", "custom_call", "triton_kernel_call", "jax_triton", "tpu_custom_call"})


def unreached_block(observed: Observed) -> Iterator[Finding]:
    """Blocks that are never called, so that their policy has no effect."""
    for block, why in observed.unreached.items():
        problem, _, remedy = why.partition(": ")[2].rstrip(".").rpartition(". ")
        if not remedy.startswith(("Name", "Take")):
            problem, remedy = f"{problem}. {remedy}", "Correct the glob: it is matched against module paths"
        yield Finding("unreached_block", name_of(block), "", problem, remedy)


def unmatched_name(observed: Observed) -> Iterator[Finding]:
    """Selectors, and names in JAX's policies, that match no residual."""
    for policy in _distinct_policies(observed):
        yield from _unmatched_selectors(policy, observed.of(policy))
    for jax_policy in dict.fromkeys(region.policy for region in observed.regions if callable(region.policy)):
        yield from _unmatched_names(jax_policy, [region for region in observed.regions if region.policy == jax_policy])


def _unmatched_selectors(policy: Policy, regions: list[Region]) -> Iterator[Finding]:
    names = [name for region in regions for name in region.block.named.candidates]
    for selector in _missed(policy, regions):
        if selector.strip("*"):
            yield Finding(
                "unmatched_name",
                some(path for region in regions for path in region.paths),
                "",
                f"the selector {selector!r} matches none of the {len(set(names))} residuals here ({some(names)}), so it has "
                "no effect",
                f"Correct the selector or leave it out.{closest(selector, names).rstrip('?')}",
            )


def _missed(policy: Policy, regions: list[Region]) -> tuple[str, ...]:
    if not regions:
        return ()
    missed = policy.unmatched(candidate for region in regions for candidate in region.block.named.candidates.values())
    # Arrays that derivative rules compute get names only in the linearisation, which costs another trace.
    return missed and policy.unmatched(candidate for region in regions for candidate in region.block.candidates)


def _unmatched_names(policy: JaxPolicy, regions: list[Region]) -> Iterator[Finding]:
    names, jaxprs = compat.names_in(policy), [region.block.jaxpr for region in regions]
    if names - {name for jaxpr in jaxprs for name in given_names(jaxpr)}:
        # Names given in derivative rules (kernels name their residuals there) appear only in the linearisation.
        jaxprs += [region.block.linearised.jaxpr for region in regions if not region.is_opaque]
    model_names = sorted({name for jaxpr in jaxprs for name in given_names(jaxpr) if ":" not in name})
    for name in sorted(names - set(model_names)):
        yield Finding(
            "unmatched_name",
            some(path for region in regions for path in region.paths),
            regions[0].place,
            f"the policy selects the name {name!r}, but no checkpoint_name in its regions gives it; the names there are "
            f"{some(model_names, 8) or 'none'}",
            f"Correct the name in the policy or in the model.{nearest(name, model_names).rstrip('?')}",
        )


def named_for_offload(observed: Observed) -> Iterator[Finding]:
    """Offloaded names whose arrays the backward pass does not read, so that nothing is moved."""
    for region in observed.regions:
        unmoved = _offloaded_by_name(region) - {kept.name for kept in region.offloaded}
        outputs = output_names(region.block.jaxpr.jaxpr) if unmoved else frozenset()
        for name in sorted(unmoved):
            if name in outputs:
                yield _named_output(region, name)
                continue
            yield region.finding(
                "offload_without_effect",
                f"{name!r} is offloaded, but the backward pass does not read it, because the other kept arrays suffice",
                "Offload an array before or after it in the computation, or leave it out",
            )


def _named_output(region: Region, name: str) -> Finding:
    input_bytes = sum(
        compat.array_bytes(aval.shape, aval.dtype)
        for aval, parameter in zip(region.block.jaxpr.in_avals, region.parameters, strict=True)
        if not parameter
    )
    block, reader = ("a scan's body", "iteration") if region.looped else ("the block", "block")
    return region.finding(
        "named_output",
        f"{name!r} is offloaded, but it is the output of {block}: the next {reader} reads it as its input, which stays "
        f"on the device (up to {format_bytes(input_bytes)} each time)",
        NAME_THE_INPUT,
    )


def nothing_offloaded(observed: Observed) -> Iterator[Finding]:
    """Policies with an offload that moves nothing at all."""
    for policy in _distinct_policies(observed):
        if policy.offloads:
            yield from _nothing_moved(policy, observed.of(policy))


def _nothing_moved(policy: Policy, regions: list[Region]) -> Iterator[Finding]:
    if not regions or any(region.offloaded for region in regions):
        return
    offloaded = {selector for rule in policy.rules if rule.action is Action.OFFLOAD for selector in rule.selectors}
    if any(map(_offloaded_by_name, regions)) or offloaded <= set(_missed(policy, regions)):
        return  # reported by `named_for_offload` or `unmatched_name`
    selected = sorted({name for region in regions for name in region.block.offloaded})
    why = "an offload rule must select an array of rank 1 or more that no earlier rule matches"
    if selected:
        why = f"it selects {some(selected)}, but the backward pass reads none of these, because the other kept arrays suffice"
    yield Finding(
        "offload_without_effect",
        some(path for region in regions for path in region.paths),
        regions[0].place,
        f"the policy offloads nothing: {why}",
        'Offload what the backward pass reads (remat-jax measure --residuals lists it), or use policy "full"',
    )


def _offloaded_by_name(region: Region) -> set[str]:
    """The names that the model gives by `checkpoint_name` and that the policy offloads by exact name. Globs do not count."""
    names = set(given_names(region.block.jaxpr))
    if isinstance(region.policy, Policy):
        exact = names & set(region.policy.selectors)
        candidates = [candidate for candidate in region.block.named.candidates.values() if candidate.name in exact]
        return {candidate.name for candidate in candidates if region.policy.action(candidate) is Action.OFFLOAD}
    if region.policy is None or region.policy is jax.checkpoint_policies.nothing_saveable:
        return set()
    return names & set(compat.offloaded_by(region.policy, region.block.jaxpr))


def _distinct_policies(observed: Observed) -> list[Policy]:
    """The distinct `Policy` objects of the workload, including those of single layers; JAX policies are left out."""
    entries = observed.policies.entries if observed.policies else ()
    runs = [policy.runs if isinstance(policy, LayerPolicies) else ((None, policy),) for _, policy in entries]
    return [policy for policy in dict.fromkeys(policy for run in runs for _, policy in run) if isinstance(policy, Policy)]


# --- saved arrays and recomputation ---------------------------------------------------------------------------------------


def kernel_run_again(observed: Observed) -> Iterator[Finding]:
    """Kernels that run again although one of their results is saved, because the backward pass also needs another result.

    Flash attention, for example, runs again if its output is saved but its log-sum-exp is not.
    """
    for region in observed.regions:
        again = [eqn for eqn in region.rerun if _is_expensive(eqn)] if region.kept else []
        makers = region.makers() if again else {}
        wasted: dict[Any, list[Kept]] = {}
        for array in region.kept if again else ():
            eqn = _kernel_of(*makers[array.name]) if array.name in makers else None
            if eqn is not None and any(_is_same(eqn, other) for other in again):
                wasted.setdefault(eqn, []).append(array)
        for eqn, kept in wasted.items():
            results = ", ".join(f"{var.aval.dtype}{list(var.aval.shape)}" for var in eqn.outvars)
            yield region.finding(
                "kernel_run_again",
                f"{some(array.name for array in kept)} of {eqn.primitive.name} is kept "
                f"({format_bytes(sum(array.nbytes for array in kept))}), yet {eqn.primitive.name} runs again in the backward "
                f"pass, which needs another of its results ({results})",
                "Also keep the other results that the backward pass reads (for flash attention, the log-sum-exp; remat-jax "
                "measure --residuals lists the names; a JAX policy needs names in the kernel's own derivative rule), or keep "
                "none of the results",
                eqn=eqn,
            )


def _kernel_of(name: Any, made: Mapping[Any, Any]) -> Any | None:
    """Follow the operand of the naming equation `name` back through cheap operations to the single kernel that computes it.

    Only kernels with several results count. None if the operand comes from several kernels, from a matmul, or from a variable
    that no equation in `made` computes. `made` maps each variable to the equation that computes it.
    """
    kernels: set[Any] = set()
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
            kernels.add(eqn)
        elif compat.kind(eqn) in CALLS and bodies(eqn):
            inner = bodies(eqn)[0].jaxpr
            whole = [maker for maker in inner.eqns if maker.primitive.name not in ("scan", "while")]
            ahead.append((inner.outvars[eqn.outvars.index(atom)], {var: maker for maker in whole for var in maker.outvars}))
        else:
            ahead += [(operand, made) for operand in eqn.invars]
    return next(iter(kernels)) if len(kernels) == 1 else None


def _is_expensive(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a call of a custom kernel, or a loop or `custom_vjp` call that contains such calls or matmuls."""
    if compat.kind(eqn) not in ("scan", "while", "custom_vjp_call"):
        return _is_kernel(eqn)
    inside = [inner for body in bodies(eqn) for inner in equations(body)]
    return any(inner.primitive.name in MATMULS or _is_kernel(inner) for inner in inside)


def _is_kernel(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _KERNELS or "attention" in eqn.primitive.name


def _is_same(eqn: JaxprEqn, again: Any) -> bool:
    """Whether `again` recomputes `eqn`; `again` may lack results that are not read. A transpose of `eqn` does not count."""
    first, second = ((each.primitive.name, compat.source_line(each), each.params.get("reverse")) for each in (eqn, again))
    avals = [str(var.aval) for var in eqn.outvars]
    return first == second and all(str(var.aval) in avals for var in again.outvars)


def parameter_kept(observed: Observed) -> Iterator[Finding]:
    """Parameters, or casts of parameters, that a policy saves although the parameters are on the device anyway.

    Arrays that a policy selects one by one, as plans do, are saved on purpose.
    """
    for region in observed.regions:
        copies = _copies_of_parameters(region)
        arrays = [array for array in region.kept if array.name in copies and not _is_asked_for(array.name, region.policy)]
        for on_host in (False, True):
            there = [array for array in arrays if array.on_host is on_host]
            wasted = [array for array in there if on_host or copies[array.name] or region.looped]
            names, nbytes = sorted(array.name for array in wasted), sum(array.nbytes for array in wasted)
            if nbytes <= _NEGLIGIBLE * sum(array.nbytes for array in region.kept):
                continue
            each = " in each iteration of the loop" if region.looped else ""
            size, where = f"{format_bytes(nbytes)}{each}", "host" if on_host else "device"
            yield region.finding(
                "parameter_kept",
                f"{size} of {where} memory hold copies of parameters or constants ({some(names)}), which are on the device "
                "anyway",
                f'Recompute them at the cost of a cast: put a rule such as "recompute: {_selectors(names)}" before the others',
            )


def _is_asked_for(name: str, policy: Any) -> bool:
    """Whether a selector with the number of a residual, such as `*/up:convert_element_type#0`, selects this one."""
    return isinstance(policy, Policy) and any("#" in each and fnmatchcase(name, each) for each in policy.selectors)


def _selectors(names: list[str]) -> str:
    if all(":" in name for name in names):
        names = sorted({f"@primitive:{name.rpartition(':')[2].partition('#')[0]}" for name in names})
    return ", ".join(names)


def _copies_of_parameters(region: Region) -> dict[str, bool]:
    """Name of an array that is a view or a cast of a parameter → whether the array is a cast."""
    jaxpr = region.block.named.jaxpr
    views = flagged(jaxpr, region.parameters, is_view)
    copies: dict[str, bool] = {}
    cast: set[Any] = set()
    for eqn in jaxpr.jaxpr.eqns:
        if not eqn.outvars or eqn.outvars[0] not in views:
            continue
        operands = variables(eqn.invars)
        if operands and (eqn.primitive.name == "convert_element_type" or not cast.isdisjoint(operands)):
            cast.add(eqn.outvars[0])
        name = compat.given_name(eqn)
        if name is not None:
            copies[name] = eqn.invars[0] in cast
    return copies


def keyless_random(observed: Observed) -> Iterator[Finding]:
    """Random numbers drawn without a key in a recomputation: they differ from the forward pass's, so gradients are wrong."""
    for region in observed.regions:
        for eqn in region.rerun:
            if eqn.primitive.name == "rng_uniform":
                yield region.finding(
                    "keyless_random",
                    "lax.rng_uniform has no key, so the backward pass draws other numbers than the forward pass, and the "
                    "gradient is wrong",
                    "Draw with jax.random and a key, which repeats the same numbers, or save them: @primitive:rng_uniform",
                    eqn=eqn,
                )
