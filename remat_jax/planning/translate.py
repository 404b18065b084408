"""Translates between choices of the solver, named policies, and policies to apply.

`selectors` turns the residual names of one block into a policy for several blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from remat_jax.apply.audit import Audit
from remat_jax.core import marks as marking
from remat_jax.errors import PlanningError
from remat_jax.planning.candidate import Choices, Cuts, KeptArrays, Load, StepCandidate, block_policies, singles
from remat_jax.planning.model import block_name
from remat_jax.planning.problem import Described, Kind, block_seconds, extra_seconds
from remat_jax.policy import Action, LayerPolicies, Policy, PolicyRule, as_block_policy
from remat_jax.solver import Block, BlockPolicy, Choice, scans


def own_candidate(described: Described, choices: Choices) -> StepCandidate:
    """A candidate from the solver's choices, priced like any policy. Equal layers of a kind are priced once."""
    stack, loads, kept, seconds, first = described.stack, list[Load](), list[KeptArrays](), 0.0, 0
    for kind, block in zip(described.kinds, stack.blocks, strict=True):
        chosen = choices[first : first + block.repeats]
        first += block.repeats
        known = {}
        for layer, count in Counter(chosen).items():
            policy = BlockPolicy(block, layer)
            price = kind.program.price(policy_of(kind, policy), kind.paths[0])
            known[layer] = _load(policy), KeptArrays(price.saved, price.offloaded)
            each, last = (block_seconds(stack.link, block, price, last=last) for last in (False, True))
            seconds += count * each
            seconds += last - each if first == len(choices) and layer == chosen[-1] else 0.0
        loads += [known[layer][0] for layer in chosen]
        kept += [known[layer][1] for layer in chosen]
    seconds += _joining_seconds(described, kept, ())
    return StepCandidate(tuple(kept), loads=_with_cuts(loads, kept, ()), seconds=seconds, choices=choices)


def _with_cuts(loads: Sequence[Load], kept: Sequence[KeptArrays], cuts: Cuts) -> tuple[Load, ...]:
    """The loads, with a cut before each layer that keeps other arrays than the layer before it, and at `cuts`."""
    return tuple(replace(load, cut=at in cuts or (at > 0 and kept[at] != kept[at - 1])) for at, load in enumerate(loads))


def _joining_seconds(described: Described, kept: Sequence[KeptArrays], cuts: Cuts) -> float:
    """The seconds to join the stacked gradients of scans that were cut: each byte is read and written once."""
    blocks = singles(described.stack)
    counts = Counter(blocks[start].name for start, _ in scans(blocks, kept, cuts))
    cut = (block for block in described.stack.blocks if block.late_bytes and counts[block.name] > 1)
    joined = 2 * sum(block.repeats * block.late_bytes for block in cut)
    return described.micro_batches * joined / described.rates.hbm_bytes_per_s


def _load(policy: BlockPolicy) -> Load:
    pairs = zip(policy.block.residuals, policy.choices, strict=True)
    again = sum(residual.bytes for residual, choice in pairs if choice is Choice.RECOMPUTE)
    return Load(round(policy.saved_bytes - policy.block.input_bytes), round(again), round(policy.host_bytes))


def recut(described: Described, candidate: StepCandidate, cuts: Cuts) -> StepCandidate:
    """The candidate with its scans cut at `cuts`; cuts outside a scan, or between layers that differ, are dropped."""
    kept, first = [], 0
    for kind, block in zip(described.kinds, described.stack.blocks, strict=True):
        # If several kinds alternate in one scan, a cut for one kind would cut the others too: drop it.
        if kind.scanned and kind.program.call.stride == 1:
            inside = (at for at in cuts if first < at < first + block.repeats)
            kept += [at for at in inside if candidate.kept[at - 1] == candidate.kept[at]]
        first += block.repeats
    loads = _with_cuts(candidate.loads, candidate.kept, tuple(kept))
    joining = [_joining_seconds(described, candidate.kept, cuts) for cuts in (candidate.cuts, tuple(kept))]
    return replace(candidate, cuts=tuple(kept), loads=loads, seconds=candidate.seconds + joining[1] - joining[0])


def named_candidate(described: Described, name: str) -> StepCandidate:
    """The candidate of a named policy or `off`; raises `PolicyError` if the policy has no effect on the workload."""
    meant = Policy.parse(name)
    if meant.checkpoint:
        audit = Audit()
        for kind in described.kinds:
            # One block per kind is enough: all layers of a kind have the same block.
            audit.saw(kind.paths[0], replace(kind.program.call.block, policy=meant))
        audit.check()
    loads, kept = list[Load](), list[KeptArrays]()
    for kind, block in zip(described.kinds, described.stack.blocks, strict=True):
        price = kind.program.price(meant)
        needed = sum(residual.bytes for residual in block.residuals if residual.needed)
        again = max(0, round(needed) - price.saved_bytes - price.host_bytes)
        loads += [Load(price.saved_bytes, again, price.host_bytes)] * block.repeats
        kept += [KeptArrays(price.saved, price.offloaded, meant.checkpoint)] * block.repeats
    named = StepCandidate(tuple(kept), source="named", name=name, loads=tuple(loads), seconds=extra_seconds(described, meant))
    alike = _alike(described, named, meant) if meant.checkpoint else None
    # The loads above do not count recomputed intermediates. The loads of the equivalent choices do.
    return named if alike is None else replace(named, choices=alike.choices, loads=alike.loads)


def _alike(described: Described, named: StepCandidate, policy: Policy) -> StepCandidate | None:
    """The same program as a named policy, from choices of the solver; None if no choices express it."""
    chosen: list[tuple[Choice, ...]] = []
    for kind, block in zip(described.kinds, described.stack.blocks, strict=True):
        names = (residual.name for residual in block.residuals)
        choices = dict(zip(names, choices_of(kind, block, policy), strict=True))
        for residual in reversed(block.residuals):
            if choices[residual.name] is Choice.RECOMPUTE:
                choices |= {parent: Choice.RECOMPUTE for parent in residual.parents if choices[parent] is Choice.UNUSED}
        chosen += [tuple(choices.values())] * block.repeats
    try:
        equivalent = own_candidate(described, tuple(chosen))
    except PlanningError:
        # The policy keeps an array that is not one of the solver's residuals.
        return None
    kept = [[(load.saved, load.offloaded) for load in candidate.loads] for candidate in (equivalent, named)]
    return equivalent if equivalent == named and kept[0] == kept[1] else None


def choices_of(kind: Kind, block: Block, policy: Policy) -> list[Choice]:
    """The choice that a policy makes for each residual of a block."""
    saved, away = kind.program.names(policy)
    choices = []
    for residual, members in zip(block.residuals, kind.members, strict=True):
        if away.intersection(members):
            choices.append(Choice.OFFLOAD)
        elif saved.intersection(members) or residual.seconds is None:
            choices.append(Choice.SAVE)
        else:
            choices.append(Choice.RECOMPUTE if residual.needed else Choice.UNUSED)
    return choices


def policies_of(described: Described, candidate: StepCandidate) -> dict[marking.Block, Any]:
    """A dict from block to its policy, or to `LayerPolicies` if its layers differ or a scan is cut."""
    if candidate.name or candidate.choices is None:
        everywhere = as_block_policy(candidate.name if candidate.checkpoints else "off")
        return dict.fromkeys((kind.block for kind in described.kinds), everywhere)
    layers: dict[marking.Block, dict[int, Policy]] = {kind.block: {} for kind in described.kinds}
    cuts: dict[marking.Block, list[int]] = {kind.block: [] for kind in described.kinds}
    chosen = enumerate(block_policies(described.stack, candidate.choices))
    for kind in described.kinds:
        policies: dict[Any, Policy] = {}
        for position in kind.layers:
            at, policy = next(chosen)
            if at in candidate.cuts:
                cuts[kind.block].append(position)
            if policy.choices not in policies:
                policies[policy.choices] = policy_of(kind, policy)
            layers[kind.block][position] = policies[policy.choices]
    return {key: _one_or_many(key, policies, cuts[key]) for key, policies in layers.items()}


def _one_or_many(key: marking.Block, layers: dict[int, Policy], cuts: list[int]) -> Policy | LayerPolicies:
    if sorted(layers) != list(range(len(layers))):
        raise PlanningError(f"block {block_name(key)!r}: its layers are {sorted(layers)}, expected 0 to {len(layers) - 1}")
    if len(set(layers.values())) == 1 and not cuts:
        return layers[0]
    return LayerPolicies.of([layers[position] for position in range(len(layers))], cuts)


def policy_of(kind: Kind, choice: BlockPolicy) -> Policy:
    """The solver's choice for a block of `kind` as a policy for every block of the kind.

    If the blocks have different paths, the selectors match any path. Raises `PlanningError` if `choice` and `kind` differ in
    their residuals.
    """
    residual_names = [block_residual.name for block_residual in choice.block.residuals]
    if residual_names != list(kind.residuals):
        raise PlanningError(
            f"policy_of: the choice is for a block of {residual_names}, and {kind.name!r} has {list(kind.residuals)}; take the "
            "block of the same Described."
        )
    chosen: dict[str, list[str]] = {"offload": [], "save": []}
    for names, action in zip(kind.members, choice.choices, strict=True):
        if action.value == "offload" or (action.value == "save" and names[0] not in kind.program.inputs):
            chosen[action.value] += names
    return selectors(chosen, kind.paths, tuple(kind.program.call.block.linearised.candidates))


def selectors(chosen: Mapping[str, Sequence[str]], paths: Sequence[str], names: Sequence[str]) -> Policy:
    """The policy that applies the given action to each residual in `chosen` and recomputes the rest.

    Args:
      chosen: a dict from action to residual names, as in the block at `paths[0]`.
      paths: the module paths of all blocks that get the policy.
      names: all residual names of the block at `paths[0]`.

    >>> selectors({"save": ["a_0/up:add#0"], "offload": []}, ["a_0", "a_1"], ["a_0/up:add#0", "a_0/b/up:add#0"])
    Policy.parse('recompute: */b/up:add#0; save: */up:add#0')
    """
    actions = {name: action for action, listed in chosen.items() for name in listed}
    if not actions:
        return Policy.parse("full")
    if all(path == paths[0] for path in paths):
        return _policy((_escaped(name), action) for name, action in actions.items())
    chosen_selectors = [_selector(name, paths[0]) for name in actions]
    # The selector `*/up` also matches deeper names such as `a/b/up`, so the rules of these names must come first.
    matched = [name for name in names if any(_matches(selector, name) for selector in chosen_selectors)]
    actions = {**actions, **{name: "recompute" for name in matched if name not in actions}}
    rules = [(_selector(name, paths[0]), action) for name, action in actions.items()]
    wide = {
        selector
        for selector, action in rules
        if any(action != other and _matches(selector, name) for name, other in actions.items())
    }

    def rank(rule: tuple[str, str]) -> tuple[Any, ...]:
        selector, action = rule
        return (True, -len(selector)) if selector in wide else (False, action == "recompute", action)

    return _policy(sorted(rules, key=rank))


def _policy(rules: Iterable[tuple[str, str]]) -> Policy:
    by_action = groupby(dict.fromkeys(rules), key=lambda rule: rule[1])
    return Policy(tuple(PolicyRule(Action(action), tuple(selector for selector, _ in group)) for action, group in by_action))


def _selector(name: str, path: str) -> str:
    inside = name.startswith((path + "/", path + ":"))
    return "*" + _escaped(name[len(path) :], glob=True) if inside and path else _escaped(name)


def _escaped(name: str, *, glob: bool = False) -> str:
    """A selector that matches `name`. `?` replaces commas and semicolons, which end selectors; if `glob`, `*?[` are escaped."""
    if glob:
        name = re.sub(r"([*?[])", r"[\1]", name)
    return name.replace(",", "?").replace(";", "?")


def _matches(selector: str, name: str) -> bool:
    return selector == name or fnmatchcase(name, selector)
