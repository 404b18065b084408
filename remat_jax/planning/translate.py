"""Translates between the solver's choices, named policies, and applied policies."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from remat_jax.apply.audit import Audit
from remat_jax.core import marks as marking
from remat_jax.errors import PlanningError
from remat_jax.planning.candidate import Choices, Cuts, Load, StepCandidate, block_policies
from remat_jax.planning.model import block_name
from remat_jax.planning.point import LayerRow
from remat_jax.planning.problem import Described, Kind, block_seconds, extra_seconds, policy_of
from remat_jax.planning.program import Price
from remat_jax.policy import LayerPolicies, Policy, as_block_policy
from remat_jax.solver import Block, BlockPolicy, Choice

Policies = dict[marking.Block, Any]


def own_candidate(described: Described, choices: Choices) -> StepCandidate:
    """A candidate from the solver's choices, priced like any policy. Equal layers of a kind are priced once."""
    stack, loads, seconds, first = described.stack, list[Load](), 0.0, 0
    for kind, block in zip(described.kinds, stack.blocks, strict=True):
        chosen = choices[first : first + block.repeats]
        first += block.repeats
        load_of = {}
        for one, count in Counter(chosen).items():
            policy = BlockPolicy(block, one)
            load_of[one] = _load(policy)
            price = kind.program.price(policy_of(kind, policy), described.rates, kind.paths[0])
            each, last = (block_seconds(stack.link, block, price, last=last) for last in (False, True))
            seconds += count * each
            seconds += last - each if first == len(choices) and one == chosen[-1] else 0.0
        loads += [load_of[one] for one in chosen]
    return StepCandidate("", tuple(loads), seconds, choices)


def _load(policy: BlockPolicy) -> Load:
    again = round(_bytes(policy, Choice.RECOMPUTE))
    return Load(round(policy.saved_bytes - policy.block.input_bytes), again, round(policy.host_bytes))


def recut(described: Described, candidate: StepCandidate, cuts: Cuts) -> StepCandidate:
    """The same choices with scans cut at those of `cuts` that are in a scan, between blocks with equal choices."""
    choices = candidate.choices
    assert choices is not None, "a named policy is one for all layers"
    kept, first = [], 0
    for kind, block in zip(described.kinds, described.stack.blocks, strict=True):
        # Kinds that alternate in one scan are cut together, so a single kind cannot be cut.
        if kind.scanned and kind.program.call.stride == 1:
            kept += [at for at in cuts if first < at < first + block.repeats and choices[at - 1] == choices[at]]
        first += block.repeats
    return replace(candidate, cuts=tuple(kept))


def named_candidate(described: Described, name: str) -> StepCandidate:
    """A named policy, `off` included.

    Raises:
      PolicyError: the policy has no effect on this workload.
    """
    meant = Policy.parse(name)
    if meant.checkpoint:
        audit = Audit()
        for kind in described.kinds:
            # Tracing the loss under the policy would meet the same block in each layer.
            audit.saw(kind.paths[0], replace(kind.program.call.block, policy=meant))
        audit.check()
    loads = []
    for kind, block in zip(described.kinds, described.stack.blocks, strict=True):
        price = kind.program.price(meant, described.rates)
        again = max(0, round(sum(one.bytes for one in block.residuals if one.needed)) - price.saved_bytes - price.host_bytes)
        loads += [Load(price.saved_bytes, again, price.host_bytes)] * block.repeats
    found = StepCandidate(name, tuple(loads), extra_seconds(described, meant))
    like = None if name == "off" else _like(described, found)
    # Intermediates are recomputed under a named policy, too: the same program has the same loads.
    return found if like is None else replace(found, like=like, loads=own_candidate(described, like).loads)


def _like(described: Described, named: StepCandidate) -> Choices | None:
    chosen: list[tuple[Choice, ...]] = []
    for kind, block in zip(described.kinds, described.stack.blocks, strict=True):
        names = [one.name for one in block.residuals]
        actions = dict(zip(names, _actions(kind, block, named.name), strict=True))
        for one in reversed(block.residuals):
            if actions[one.name] == Choice.RECOMPUTE.value:
                actions |= {parent: Choice.RECOMPUTE.value for parent in one.parents if actions[parent] == Choice.UNUSED.value}
        chosen += [tuple(Choice(actions[name]) for name in names)] * block.repeats
    try:
        own = own_candidate(described, tuple(chosen))
    except PlanningError:
        # The policy keeps an array that the solver is not offered.
        return None
    kept = [[(load.saved, load.offloaded) for load in one.loads] for one in (own, named)]
    alike = kept[0] == kept[1] and math.isclose(own.seconds, named.seconds, rel_tol=1e-9, abs_tol=1e-15)
    return tuple(chosen) if alike else None


def policies_of(described: Described, candidate: StepCandidate) -> Policies:
    """Block → policy, or a policy for each layer if the layers differ."""
    choices, cuts = candidate.choices, candidate.cuts
    if choices is None:
        named = as_block_policy(candidate.name)
        return dict.fromkeys((kind.block for kind in described.kinds), named)
    layers: dict[Any, dict[int, Policy]] = {kind.block: {} for kind in described.kinds}
    cut: dict[Any, list[int]] = {kind.block: [] for kind in described.kinds}
    chosen = iter(enumerate(block_policies(described.stack, choices)))
    for kind, block in zip(described.kinds, described.stack.blocks, strict=True):
        known: dict[Any, Policy] = {}
        for position in kind.layers[: block.repeats]:
            at, one = next(chosen)
            cut[kind.block] += [position] if at in cuts else []
            if one.choices not in known:
                known[one.choices] = policy_of(kind, one)
            layers[kind.block][position] = known[one.choices]
    return {key: _one_or_many(key, found, cut[key]) for key, found in layers.items()}


def _one_or_many(key: marking.Block, layers: dict[int, Policy], cuts: list[int]) -> Any:
    if sorted(layers) != list(range(len(layers))):
        raise PlanningError(f"block {block_name(key)!r}: its layers are {sorted(layers)}, expected 0 to {len(layers) - 1}")
    if len(set(layers.values())) == 1 and not cuts:
        return layers[0]
    return LayerPolicies.of([layers[position] for position in range(len(layers))], cuts)


def text_of(kind: Kind, block: Block, candidate: StepCandidate, at: int) -> str:
    """The policy of the block at a position, as text."""
    if candidate.choices is None:
        return candidate.name
    found = policy_of(kind, BlockPolicy(block, candidate.choices[at]))
    return found.name or str(found)


def price_at(described: Described, kind: Kind, block: Block, candidate: StepCandidate, at: int) -> Price:
    """The price of the whole policy of the block at a position: a named policy may keep arrays beside the residuals."""
    if candidate.choices is not None:
        policy = policy_of(kind, BlockPolicy(block, candidate.choices[at]))
    else:
        policy = Policy.parse(candidate.policy_name)
    price = kind.program.price(policy, described.rates)
    # A group of layers runs forward once more, before its layers do.
    return replace(price, seconds=price.seconds + block.forward_seconds) if at < candidate.grouped else price


def rows_of(kind: Kind, block: Block, candidate: StepCandidate, at: int) -> tuple[LayerRow, ...]:
    """The action for each residual of the block at a position; residuals neither kept nor recomputed are left out."""
    if candidate.choices is not None:
        actions = [choice.value for choice in candidate.choices[at]]
    else:
        actions = _actions(kind, block, candidate.policy_name)
    return tuple(
        LayerRow(_short(kind, one.name), action, round(one.bytes), one.seconds)
        for one, action in zip(block.residuals, actions, strict=True)
        if action != Choice.UNUSED.value
    )


def _actions(kind: Kind, block: Block, name: str) -> list[str]:
    saved, away = kind.program.names(Policy.parse(name))
    found = []
    for one, members in zip(block.residuals, kind.members, strict=True):
        if away.intersection(members):
            found.append("offload")
        elif saved.intersection(members) or one.seconds is None:
            found.append("save")
        else:
            found.append("recompute" if one.needed else "unused")
    return found


def _short(kind: Kind, name: str) -> str:
    """A residual's name without its block's path, which differs in each layer."""
    return name.removeprefix(kind.paths[0]).lstrip("/:") or name


def name_of(kind: Kind) -> str:
    """The name of a kind's block in reports."""
    return block_name(kind.block)


def _bytes(policy: BlockPolicy, wanted: Choice) -> float:
    pairs = zip(policy.block.residuals, policy.choices, strict=True)
    return sum(one.bytes for one, choice in pairs if choice is wanted)
