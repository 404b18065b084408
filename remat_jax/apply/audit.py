"""What a policy really met, so that a policy without effect is an error and never silence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from remat_jax import compat
from remat_jax.core import PlannedBlock
from remat_jax.core.walk import given_names
from remat_jax.errors import NoEffectError, nearest
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


@dataclass
class _Selected:
    """What each selector of automatic names does: the blocks in which it has an effect, and those in which it has none.

    Attributes:
      wide: the selectors that match several arrays of a block.
    """

    effective: dict[str, set[str]] = field(default_factory=dict)
    idle: dict[str, set[str]] = field(default_factory=dict)
    wide: set[str] = field(default_factory=set)

    def note(self, path: str, block: PlannedBlock, along: Sequence[int] | None = None, *, whole: bool = True) -> None:
        """A block at `path`, differentiated along some inputs, or along all; not to be judged where it is not `whole`."""
        assert isinstance(block.policy, Policy)
        for selector in block.policy.kept_globs:
            chosen = [one for one in block.candidates if matches(selector, one)]
            if not whole or _has_effect(selector, block, chosen, along):
                self.effective.setdefault(selector, set()).add(path)
            elif chosen:
                self.idle.setdefault(selector, set()).add(path)
            if len(chosen) > 1:
                self.wide.add(selector)

    def add(self, other: _Selected) -> None:
        """What `other` has noted is noted here, too."""
        self.wide |= other.wide
        for mine, theirs in ((self.effective, other.effective), (self.idle, other.idle)):
            for selector, paths in theirs.items():
                mine.setdefault(selector, set()).update(paths)


def _has_effect(selector: str, block: PlannedBlock, chosen: Sequence[Candidate], along: Sequence[int] | None) -> bool:
    """Whether the backward pass reads one of the arrays that a selector has chosen, by whichever rule it is kept."""
    assert isinstance(block.policy, Policy)
    # An input that stays is kept anyway.
    if any(one.is_input and block.policy.action(one) is not Action.OFFLOAD for one in chosen):
        return True
    # What nobody reads because what is computed from it is kept, too, would be read without that.
    alone = replace(block, policy=Policy((PolicyRule(Action.SAVE, (selector,)),)))
    for one in (block, alone) if chosen else ():
        kept = one.kept if along is None else one.kept_along(along)
        if kept is None or any(candidate.name in kept for candidate in chosen):
            return True
    return False


@dataclass
class _Seen:
    paths: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    unmatched: set[str] | None = None
    candidates: dict[str, Candidate] = field(default_factory=dict)
    offloaded: set[str] = field(default_factory=set)
    moved: bool = False
    selected: _Selected = field(default_factory=lambda: _Selected())

    def add(self, other: _Seen) -> None:
        """The blocks that `other` saw were traced too."""
        self.paths += other.paths
        self.given |= other.given
        self.candidates |= other.candidates
        self.offloaded |= other.offloaded
        self.moved |= other.moved
        self.selected.add(other.selected)
        if other.unmatched is not None:
            self.unmatched = other.unmatched if self.unmatched is None else self.unmatched & other.unmatched


class Audit:
    """A record of the blocks that were traced under each policy."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Policy | JaxPolicy, range | None], _Seen] = {}

    def saw(
        self,
        path: str,
        block: PlannedBlock,
        *,
        whole: bool = True,
        layers: range | None = None,
        looped: bool | None = None,
    ) -> None:
        """A block at `path` was traced, as it is differentiated (`whole`) or while its parameters are made.

        Args:
          layers: the layers that the policy is for, where others have another one.
          looped: whether the block stands in a loop, where the caller knows; None to ask JAX.
        """
        seen = self._seen.setdefault((block.policy, layers), _Seen())
        seen.paths.append(path)
        seen.candidates |= block.named.candidates
        seen.offloaded |= block.offloaded
        # One block that moves something is enough, and finding out costs a trace.
        seen.moved = seen.moved or (bool(block.offloaded) and (not whole or block.moves_bytes))
        if isinstance(block.policy, Policy) and block.policy.kept_globs:
            seen.selected.note(path, block, whole=whole)
        if kept := compat.kept_names_in(block.policy):
            seen.given |= _given(block, kept)
        if isinstance(block.policy, Policy):
            missed = set(block.policy.unmatched(block.named.candidates.values()))
            if missed:
                # What only a derivative rule computes shows in the linearisation; it costs another trace to look there.
                missed = set(block.policy.unmatched(block.candidates))
                seen.candidates |= {candidate.name: candidate for candidate in block.candidates}
            seen.unmatched = missed if seen.unmatched is None else seen.unmatched & missed

    def add(self, other: Audit) -> None:
        """The blocks that `other` saw were traced too."""
        for key, theirs in other._seen.items():
            self._seen.setdefault(key, _Seen()).add(theirs)

    @property
    def reached(self) -> tuple[str, ...]:
        """The module paths of the blocks that were traced, one entry per trace."""
        return tuple(path for seen in self._seen.values() for path in seen.paths)

    def check(self) -> None:
        """Raise unless every selector matched a residual and every offload found something to move.

        A policy on matrix products that means convolutions is a warning.

        Raises:
          NoEffectError: naming the policy, the selector, the blocks and the residuals that there are.
        """
        for (policy, layers), seen in self._seen.items():
            if isinstance(policy, Policy):
                where = f" of {layers_text(layers)}" if layers is not None else ""
                _check_policy(policy, seen, where)
                remark = _of_convolutions(policy, seen)
                warn(f"policy={str(policy)!r}{where}:{remark}" if remark else None)
            else:
                _check_names(policy, seen)


def _given(block: PlannedBlock, kept: frozenset[str]) -> set[str]:
    """The names that the model gives in a block; those in derivative rules only where a name of `kept` is still missing."""
    given = set(given_names(block.jaxpr))
    if kept - given:
        given |= {name for name in given_names(block.linearised.jaxpr) if ":" not in name}
    return given


def _check_names(policy: JaxPolicy, seen: _Seen) -> None:
    kept = compat.kept_names_in(policy)
    if not kept or kept & seen.given:
        return  # a list of names may serve several models; `doctor` lists the names that are missing in this one
    blocks = _some(dict.fromkeys(path or "the block" for path in seen.paths), 3)
    raise NoEffectError(
        f"policy={getattr(policy, '__qualname__', policy)}: no checkpoint_name in {blocks} gives "
        f"{_some(sorted(map(repr, kept)), 8)}, so the policy keeps nothing. The names that are given: "
        f"{_some(sorted(map(repr, seen.given)), 8)}.{nearest(min(kept), sorted(seen.given))} Correct the name in the policy "
        'or in the model, or use policy="full" to recompute everything.'
    )


def _of_convolutions(policy: Policy, seen: _Seen) -> str:
    """What a policy on matrix products means in blocks that have convolutions and no matrix product; else nothing."""
    asked = next((one for one in (DOTS, DOTS_WITH_NO_BATCH_DIMS) if one in policy.selectors), None)
    kinds = {candidate.primitive for candidate in seen.candidates.values()}
    if asked is None or CONVOLUTION not in kinds or "dot_general" in kinds:
        return ""
    means = "selects the convolutions" if asked == DOTS else "selects no convolution, as in JAX"
    return f" The blocks have convolutions but no matrix products. {asked!r} {means}; '{CONVS}' selects convolutions alone."


def layers_text(layers: range) -> str:
    """What messages call a run of layers, counted from 0.

    >>> layers_text(range(8, 12)), layers_text(range(3, 4))
    ('layers 8–11', 'layer 3')
    """
    return f"layer {layers.start}" if len(layers) == 1 else f"layers {layers.start}–{layers.stop - 1}"


def _check_policy(policy: Policy, seen: _Seen, where: str) -> None:
    blocks = _some(dict.fromkeys(path or "the block" for path in seen.paths), 3)
    if policy.offloads and not seen.offloaded:
        raise NoEffectError(
            f"policy={str(policy)!r}{where} offloads nothing in {blocks}: an offload rule must select an array of rank 1 or "
            f"more that no earlier rule takes.{_of_convolutions(policy, seen)} The residuals are: "
            f'{_some(seen.candidates, 8)}. Select one of these, or use policy="full" to offload nothing.'
        )
    if policy.offloads and not seen.moved:
        raise NoEffectError(
            f"policy={str(policy)!r}{where} offloads nothing in {blocks}: it selects {_some(sorted(seen.offloaded), 3)}, but "
            "the policy also keeps other arrays, and given those the backward pass reads none of these. Offload arrays that "
            "are computed from these, or recompute the other arrays."
        )
    for selector in policy.selectors:
        if selector in (seen.unmatched or ()) and selector != "*":
            raise NoEffectError(
                f"policy={str(policy)!r}{where}: the selector {selector!r} matches no residual of {blocks}."
                f"{_of_convolutions(policy, seen)}{closest(selector, seen.candidates)} "
                f"Its residuals are: {_some(seen.candidates, 8)}. Correct the selector or leave it out."
            )
    for selector in policy.kept_globs:
        _check_effect(selector, seen.selected, f"policy={str(policy)!r}{where}: the selector {selector!r}")


def _check_effect(selector: str, selected: _Selected, subject: str) -> None:
    effective = selected.effective.get(selector, set())
    idle = sorted(path or "the block" for path in selected.idle.get(selector, set()) - effective)
    if idle and not effective:
        raise NoEffectError(
            f"{subject} keeps nothing in {_some(idle, 8)}: the backward pass reads none of the arrays that it selects. Select "
            "arrays that are computed from them, or leave the selector out."
        )
    # What matches several arrays of a block is meant to find some; which, may differ from layer to layer.
    if idle and selector not in selected.wide:
        raise NoEffectError(
            f"{subject} has an effect in {_some(sorted(effective), 3)}, but keeps nothing in {_some(idle, 8)}: the backward "
            "pass there does not read the array. Restrict the selector to the blocks where it has an effect: put their path in "
            "front of it."
        )


def check_differentiated(blocks: Iterable[tuple[PlannedBlock, Sequence[int]]], policies: Iterable[Policy]) -> None:
    """Raise unless each selector of automatic names keeps something for the gradients that are really taken.

    Args:
      blocks: all blocks that are differentiated, with the inputs that they are differentiated along.

    Raises:
      NoEffectError: naming the selector, and the blocks that have what it selects.
    """
    seen: dict[Policy, _Selected] = {policy: _Selected() for policy in policies}
    for block, live in blocks:
        if isinstance(block.policy, Policy) and block.policy in seen and block.policy.kept_globs:
            seen[block.policy].note(block.named.path, block, live)
    for policy, selected in seen.items():
        for selector in (one for one in policy.kept_globs if one not in selected.effective):
            where = _some(sorted(path or "the block" for path in selected.idle.get(selector, ["any block"])), 8)
            raise NoEffectError(
                f"policy={str(policy)!r}: the selector {selector!r} keeps nothing in {where}: the requested gradients do not "
                "need the arrays that it selects. A block whose input is not differentiated needs fewer residuals. Select "
                "another array, or leave the selector out."
            )


def closest(selector: str, names: Iterable[str]) -> str:
    """The end of a sentence that names the residual closest to what a glob on residual names may have meant; or nothing.

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


def _some(names: Iterable[str], limit: int) -> str:
    shown = list(names)
    more = f", and {len(shown) - limit} more" if len(shown) > limit else ""
    return (", ".join(shown[:limit]) or "none") + more
