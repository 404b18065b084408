"""Traps of the policy itself: selectors and names that match nothing, and offloads that move nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax

from remat_jax import compat
from remat_jax.apply.audit import closest
from remat_jax.apply.scope import BlockPolicies
from remat_jax.core.marks import name_of
from remat_jax.core.origins import origin
from remat_jax.core.walk import given_names
from remat_jax.diagnosis.findings import Finding, some
from remat_jax.diagnosis.watch import Observed, Region
from remat_jax.errors import nearest
from remat_jax.policy import Action, JaxPolicy, LayerPolicies, Policy


def unreached_block(observed: Observed) -> Iterator[Finding]:
    """Blocks that are never called, so that their policy has no effect."""
    for block, why in observed.unreached.items():
        name = name_of(block)
        problem, _, remedy = why.partition(": ")[2].rstrip(".").rpartition(". ")
        if not remedy.startswith(("Name", "Take")):
            problem, remedy = f"{problem}. {remedy}", "Correct the glob: it is matched against module paths"
        yield Finding("unreached_block", name, "", problem, remedy)


def unmatched_name(observed: Observed) -> Iterator[Finding]:
    """Selectors, and names in JAX's policies, that match no residual."""
    for policy in _distinct(observed.policies):
        if isinstance(policy, Policy):
            yield from _unmatched_selectors(policy, observed.of(policy))
    for policy in {region.policy: None for region in observed.regions if callable(region.policy)}:
        assert callable(policy)
        yield from _unmatched_names(policy, [region for region in observed.regions if region.policy == policy])


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
    # Arrays of derivative rules show only in the linearisation, which costs another trace.
    return missed and policy.unmatched(candidate for region in regions for candidate in region.block.candidates)


def _unmatched_names(policy: JaxPolicy, regions: list[Region]) -> Iterator[Finding]:
    names, jaxprs = compat.names_in(policy), [region.block.jaxpr for region in regions]
    if names - {name for jaxpr in jaxprs for name in given_names(jaxpr)}:
        # Names given in derivative rules (kernels name their residuals there) show only in the linearisation.
        jaxprs += [region.block.linearised.jaxpr for region in regions if not region.is_opaque]
    given = sorted({name for jaxpr in jaxprs for name in given_names(jaxpr) if ":" not in name})
    for name in sorted(names - set(given)):
        yield Finding(
            "unmatched_name",
            some(path for region in regions for path in region.paths),
            regions[0].place,
            f"the policy selects the name {name!r}, but no checkpoint_name in its regions gives it; the names there are "
            f"{some(given, 8) or 'none'}",
            f"Correct the name in the policy or in the model.{nearest(name, given).rstrip('?')}",
        )


def named_for_offload(observed: Observed) -> Iterator[Finding]:
    """Offloaded names of arrays that the backward pass does not read, so that nothing is moved."""
    for region in observed.regions:
        unmoved = _offloaded_by_name(region) - {kept.name for kept in region.offloaded}
        outputs = _outputs(region) if unmoved else set()
        for name in sorted(unmoved):
            if name in outputs:
                yield _named_output(region, name)
                continue
            yield Finding(
                "offload_without_effect",
                some(region.paths),
                region.place,
                f"{name!r} is offloaded, but given the other kept arrays, the backward pass does not read it",
                "Offload an array that is computed from it, or an array that it is computed from, or leave it out",
            )


def _named_output(region: Region, name: str) -> Finding:
    input_bytes = sum(
        aval.size * compat.itemsize(aval.dtype)
        for aval, parameter in zip(region.block.jaxpr.in_avals, region.parameters, strict=True)
        if not parameter
    )
    block, reader = ("a scan's body", "round") if region.looped else ("the block", "block")
    return Finding(
        "named_output",
        some(region.paths),
        region.place,
        f"{name!r} is offloaded, but it is the output of {block}: the next {reader} reads it as its input, and that copy stays "
        f"on the device (up to {input_bytes} bytes each time)",
        "Name the input of the block instead of its output (jax#23869): the selector @inputs, the policy offload_inputs, or "
        "checkpoint_name on the first line",
    )


def nothing_offloaded(observed: Observed) -> Iterator[Finding]:
    """Policies with an offload that moves nothing at all."""
    for policy in _distinct(observed.policies):
        if isinstance(policy, Policy) and policy.offloads:
            yield from _nothing_moved(policy, observed.of(policy))


def _nothing_moved(policy: Policy, regions: list[Region]) -> Iterator[Finding]:
    if not regions or any(region.offloaded for region in regions):
        return
    offloaded = {selector for rule in policy.rules if rule.action is Action.OFFLOAD for selector in rule.selectors}
    if any(map(_offloaded_by_name, regions)) or offloaded <= set(_missed(policy, regions)):
        return  # reported by `named_for_offload` or `unmatched_name`
    selected = sorted({name for region in regions for name in region.block.offloaded})
    if selected:
        why = f"it selects {some(selected)}, but given the other arrays that it keeps, the backward pass reads none of these"
    else:
        why = "an offload rule must select an array of rank 1 or more that no earlier rule takes"
    yield Finding(
        "offload_without_effect",
        some(path for region in regions for path in region.paths),
        regions[0].place,
        f"the policy offloads nothing: {why}",
        'Offload what the backward pass reads (remat-jax measure --residuals lists it), or use policy "full"',
    )


def _offloaded_by_name(region: Region) -> set[str]:
    """The user's own names that the policy offloads by exact name, not by a glob."""
    given = set(given_names(region.block.jaxpr))
    if isinstance(region.policy, Policy):
        exact = given & set(region.policy.selectors)
        candidates = [candidate for candidate in region.block.named.candidates.values() if candidate.name in exact]
        return {candidate.name for candidate in candidates if region.policy.action(candidate) is Action.OFFLOAD}
    if region.policy is None or region.policy is jax.checkpoint_policies.nothing_saveable:
        return set()
    return given & set(compat.offloaded_by(region.policy, region.block.jaxpr))


def _outputs(region: Region) -> set[str]:
    jaxpr = region.block.jaxpr.jaxpr
    sources = [origin(jaxpr, atom) for atom in jaxpr.outvars]
    return {name for source in sources for name in (source.name, *source.aliases)}


def _distinct(policies: BlockPolicies | None) -> Iterable[Policy | JaxPolicy]:
    """The distinct policies of the workload, including those of single layers."""
    unique: dict[Policy | JaxPolicy, None] = {}
    for _, policy in policies.entries if policies else ():
        unique |= dict.fromkeys([run for _, run in policy.runs] if isinstance(policy, LayerPolicies) else [policy])
    return unique
