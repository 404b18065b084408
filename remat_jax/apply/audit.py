"""Records what each policy selected in each block, so that a policy without effect is an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from remat_jax.apply.audit_jax import (
    NAME_THE_INPUT,
    JaxSelection,
    check_jax_policy,
    idle_names,
    is_settled,
    jax_selection,
    some,
)
from remat_jax.core import BlockUnderPolicy
from remat_jax.core.origins import output_names
from remat_jax.errors import NoEffectError
from remat_jax.policy import (
    CONVOLUTION,
    CONVS,
    DOTS,
    DOTS_WITH_NO_BATCH_DIMS,
    Action,
    Candidate,
    JaxPolicy,
    Policy,
    PolicyRule,
    matches,
)
from remat_jax.warning import warn


@dataclass(frozen=True)
class _Selection:
    """The effect of a selector in the block at `path`: how many `arrays` match, and whether the backward pass reads any."""

    path: str
    selector: str
    arrays: int
    has_effect: bool


def _selections(
    path: str, block: BlockUnderPolicy, along: Sequence[int] | None = None, *, whole: bool = True
) -> list[_Selection]:
    """The effects, in one block, of the globs that save or offload (`Policy.kept_globs`), or of plain names (`kept_names`).

    `along` has the indices of the differentiated inputs (None: all). If not `whole` (`Audit.saw`), every `has_effect` is True.
    """
    assert isinstance(block.policy, Policy)
    selections = []
    for selector in block.policy.kept_globs or block.policy.kept_names:
        chosen = [candidate for candidate in block.candidates if matches(selector, candidate)]
        has_effect = not whole or _has_effect(selector, block, chosen, along)
        if has_effect or chosen:
            selections.append(_Selection(path, selector, len(chosen), has_effect))
    return selections


def _has_effect(selector: str, block: BlockUnderPolicy, chosen: Sequence[Candidate], along: Sequence[int] | None) -> bool:
    """Whether the backward pass reads any of the `chosen` arrays, which `selector` matches.

    An array counts if it is read under the block's policy, or under a policy that saves only the `chosen` arrays.
    """
    assert isinstance(block.policy, Policy)
    # JAX keeps every input that is not offloaded.
    if any(candidate.is_input and block.policy.action(candidate) is not Action.OFFLOAD for candidate in chosen):
        return True
    # The backward pass may not read a chosen array if the policy also keeps an array that is computed from it. So the
    # selector is also tested alone.
    alone = replace(block, policy=Policy((PolicyRule(Action.SAVE, (selector,)),)))
    for variant in (block, alone) if chosen else ():
        kept = variant.kept(along)
        if kept is None or any(candidate.name in kept for candidate in chosen):
            return True
    return False


@dataclass(frozen=True)
class _TracedBlock:
    """What a policy selected in one block.

    Attributes:
      candidates: the arrays that selectors can match, by name.
      moves: whether this block, or an earlier block under the same policy, moves an offloaded array.
      outputs: the names of the block's outputs, if a selection has no effect.
      unmatched: the selectors that match nothing.
      by_jax: what the policy selects, if it is a JAX policy.
    """

    path: str
    candidates: dict[str, Candidate]
    offloaded: frozenset[str]
    moves: bool
    outputs: frozenset[str]
    unmatched: Sequence[str]
    selections: Sequence[_Selection]
    by_jax: JaxSelection | None


class Audit:
    """A record of the blocks that were traced under each policy."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[Policy | JaxPolicy, range | None], list[_TracedBlock]] = {}

    def saw(
        self,
        path: str,
        block: BlockUnderPolicy,
        *,
        whole: bool = True,
        layers: range | None = None,
        looped: bool | None = None,
    ) -> None:
        """Record a block that was traced at `path`.

        Args:
          whole: False if the model is being initialised: without parameters the backward pass reads fewer residuals.
          layers: the layers that have this policy; None if every layer has it.
          looped: whether the block is in a loop; None to ask JAX. Only subclasses of `Audit` use it.
        """
        policy, candidates = block.policy, block.named.candidates
        unmatched: tuple[str, ...] = ()
        selections: list[_Selection] = []
        # One block that moves an array is enough, and `moves_bytes` costs a trace.
        moved_before = any(before.moves for before in self._blocks.get((policy, layers), ()))
        offloads = isinstance(policy, Policy) and bool(block.offloaded)
        moves = moved_before or (offloads and (not whole or block.moves_bytes))
        if isinstance(policy, Policy):
            unmatched = policy.unmatched(candidates.values())
            if unmatched:
                # Arrays that only derivative rules compute are in the linearisation, which costs another trace.
                candidates = {candidate.name: candidate for candidate in block.candidates}
                unmatched = policy.unmatched(candidates.values())
            selections = _selections(path, block, whole=whole)
        idle = (offloads and not moves) or not all(selection.has_effect for selection in selections)
        outputs = output_names(block.named.jaxpr.jaxpr) if idle else frozenset()
        by_jax = None
        if not isinstance(policy, Policy):
            earlier = [each.by_jax for each in self._blocks.get((policy, layers), ()) if each.by_jax is not None]
            by_jax = jax_selection(path, block, whole=whole, settled=is_settled(policy, earlier))
        traced = _TracedBlock(path, candidates, block.offloaded, moves, outputs, unmatched, selections, by_jax)
        self._blocks.setdefault((policy, layers), []).append(traced)

    def add(self, other: Audit) -> None:
        """Add the blocks that `other` saw."""
        for key, blocks in other._blocks.items():
            self._blocks.setdefault(key, []).extend(blocks)

    def check(self) -> None:
        """Raise if a selector matches no residual or keeps nothing, or if a policy that offloads moves no array.

        The same holds for JAX policies (`check_jax_policy`). Warns if a policy selects matmuls in blocks
        that have only convolutions.

        Raises:
          NoEffectError: names the policy, the selector or names, the blocks, and their residuals or names.
        """
        for (policy, layers), blocks in self._blocks.items():
            if isinstance(policy, Policy):
                subject = f"policy={str(policy)!r}" + (f" of {layers_text(layers)}" if layers is not None else "")
                candidates = {name: candidate for block in blocks for name, candidate in block.candidates.items()}
                remark = _of_convolutions(policy, candidates)
                _check_policy(policy, blocks, candidates, subject, remark)
                warn(f"{subject}:{remark}" if remark else None)
            else:
                check_jax_policy(policy, [block.by_jax for block in blocks if block.by_jax is not None])


def _in_functions_with_rules(selector: str, candidates: dict[str, Candidate]) -> str:
    """A remark for a selector of matmuls, if matmuls may be in functions with derivative rules of their own."""
    kinds = {candidate.primitive for candidate in candidates.values()}
    kinds &= {"custom_vjp_call", "custom_jvp_call", "custom_vjp_call_jaxpr"}
    if selector not in (DOTS, DOTS_WITH_NO_BATCH_DIMS) or not kinds:
        return ""
    names = [name for name, candidate in candidates.items() if candidate.primitive in kinds]
    selectors = " or ".join(f"'@primitive:{kind}'" for kind in sorted(kinds))
    return (
        f" A matmul in a function with a derivative rule of its own, as in float8, is part of that function: {selectors} "
        f"selects the results of such functions, here {some(names, 4)}."
    )


def _of_convolutions(policy: Policy, candidates: dict[str, Candidate]) -> str:
    """A remark if the policy selects matmuls, but the blocks have only convolutions; else an empty text."""
    selector = next((selector for selector in (DOTS, DOTS_WITH_NO_BATCH_DIMS) if selector in policy.selectors), None)
    kinds = {candidate.primitive for candidate in candidates.values()}
    if selector is None or CONVOLUTION not in kinds or "dot_general" in kinds:
        return ""
    means = "selects the convolutions" if selector == DOTS else "selects no convolution, as in JAX"
    return f" The blocks have convolutions but no matrix products. {selector!r} {means}; '{CONVS}' selects convolutions alone."


def layers_text(layers: range) -> str:
    """The name of a run of layers in messages. Layers are counted from 0.

    >>> layers_text(range(8, 12)), layers_text(range(3, 4))
    ('layers 8–11', 'layer 3')
    """
    return f"layer {layers.start}" if len(layers) == 1 else f"layers {layers.start}–{layers.stop - 1}"


def _check_policy(
    policy: Policy, blocks: Sequence[_TracedBlock], candidates: dict[str, Candidate], subject: str, remark: str
) -> None:
    offloaded = {name for block in blocks for name in block.offloaded}
    outputs = frozenset(name for block in blocks for name in block.outputs)
    if policy.offloads and not offloaded:
        raise NoEffectError(
            f"{subject} offloads nothing in {_paths(blocks)}: an offload rule must select an array of rank 1 or more that no "
            f"earlier rule matches.{remark} The residuals are: {some(candidates, 8)}. Select one of these, or use "
            'policy="full" to offload nothing.'
        )
    if policy.offloads and not any(block.moves for block in blocks):
        remedy = (
            f"{NAME_THE_INPUT}."
            if offloaded <= outputs
            else "Offload arrays computed from these instead, or recompute the other arrays."
        )
        raise NoEffectError(
            f"{subject} offloads nothing in {_paths(blocks)}: it selects {some(sorted(offloaded), 3)}, but the backward pass "
            f"reads none of these arrays, because the other kept arrays suffice. {remedy}"
        )
    for selector in policy.selectors:
        if selector != "*" and all(selector in block.unmatched for block in blocks):
            raise NoEffectError(
                f"{subject}: the selector {selector!r} matches no residual of {_paths(blocks)}."
                f"{remark}{_in_functions_with_rules(selector, candidates)}"
                f"{closest(selector, candidates)} Its residuals are: {some(candidates, 8)}. Correct the selector or leave it "
                "out."
            )
    for selector in policy.kept_globs:
        selections = [selection for block in blocks for selection in block.selections if selection.selector == selector]
        _check_effect(selections, f"{subject}: the selector {selector!r}")
    named = [selection for block in blocks for selection in block.selections if selection.selector in policy.kept_names]
    if named and not any(selection.has_effect for selection in named):
        raise idle_names(subject, _paths(blocks), frozenset(selection.selector for selection in named), outputs)


def _check_effect(selections: Sequence[_Selection], subject: str) -> None:
    effective = {selection.path for selection in selections if selection.has_effect}
    idle = sorted(path or "the block" for path in {selection.path for selection in selections} - effective)
    if idle and not effective:
        raise NoEffectError(
            f"{subject} keeps nothing in {some(idle, 8)}: the backward pass reads none of the arrays that it selects. Select "
            "arrays that are computed from them, or leave the selector out."
        )
    # If a selector matches several arrays of a block, the backward pass may read different arrays in different layers.
    if idle and all(selection.arrays < 2 for selection in selections):
        raise NoEffectError(
            f"{subject} has an effect in {some(sorted(effective), 3)}, but keeps nothing in {some(idle, 8)}: the backward "
            "pass there does not read the array. Restrict the selector to the blocks where it has an effect: begin the "
            "selector with their path."
        )


def check_differentiated(blocks: Iterable[tuple[BlockUnderPolicy, Sequence[int]]], policies: Iterable[Policy]) -> None:
    """Raise unless every selector in `kept_globs` of these policies keeps a residual for the gradients that are really taken.

    Args:
      blocks: every differentiated block, with the indices of its differentiated inputs.

    Raises:
      NoEffectError: names the selector, and the blocks in which it matches an array.
    """
    by_policy: dict[Policy, list[_Selection]] = {policy: [] for policy in policies}
    for block, live in blocks:
        if isinstance(block.policy, Policy) and block.policy in by_policy:
            by_policy[block.policy] += _selections(block.named.path, block, live)
    for policy, selections in by_policy.items():
        effective = {selection.selector for selection in selections if selection.has_effect}
        for selector in (selector for selector in policy.kept_globs if selector not in effective):
            paths = {selection.path or "the block" for selection in selections if selection.selector == selector}
            raise NoEffectError(
                f"policy={str(policy)!r}: the selector {selector!r} keeps nothing in "
                f"{some(sorted(paths) or ['any block'], 8)}: the requested gradients do not need the arrays that it selects. "
                "A block whose input is not differentiated needs fewer residuals. Select another array, or leave the selector "
                "out."
            )


def closest(selector: str, names: Iterable[str]) -> str:
    """A hint at the residual name that is closest to a glob; empty if no name is close.

    >>> closest("*ffn/uq*", ["layers/norm1:mul#0", "layers/ffn/up:dot_general#0"])
    " Did you mean 'layers/ffn/up:dot_general#0'?"
    """
    by_end: dict[str, str] = {}
    for name in names:
        path, _, made = name.rpartition(":")
        parts = path.split("/")
        ends = ["/".join(parts[place:]) for place in range(len(parts))]
        for end in (made.partition("#")[0], name.rsplit("/", 1)[-1], name, *ends):
            by_end.setdefault(end, name)
    matches = difflib.get_close_matches(selector.strip("*"), by_end, n=1, cutoff=0.5)
    return f" Did you mean {by_end[matches[0]]!r}?" if matches else ""


def _paths(blocks: Sequence[_TracedBlock]) -> str:
    return some(dict.fromkeys(block.path or "the block" for block in blocks), 3)
