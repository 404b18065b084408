"""What a policy really met, so that a policy without effect is an error and never silence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from remat_jax.core import PlannedBlock
from remat_jax.errors import NoEffectError
from remat_jax.policy import CONVOLUTION, CONVS, DOTS, DOTS_WITH_NO_BATCH_DIMS, Candidate, JaxPolicy, Policy
from remat_jax.warning import warn


@dataclass
class _Seen:
    paths: list[str] = field(default_factory=list)
    unmatched: set[str] | None = None
    candidates: dict[str, Candidate] = field(default_factory=dict)
    offloaded: set[str] = field(default_factory=set)
    moved: bool = False
    kept: bool = False


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
        seen.kept = seen.kept or not whole or block.keeps_what_it_selects
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
            seen = self._seen.setdefault(key, _Seen())
            seen.paths += theirs.paths
            seen.candidates |= theirs.candidates
            seen.offloaded |= theirs.offloaded
            seen.moved |= theirs.moved
            seen.kept |= theirs.kept
            if theirs.unmatched is not None:
                seen.unmatched = theirs.unmatched if seen.unmatched is None else seen.unmatched & theirs.unmatched

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


def _of_convolutions(policy: Policy, seen: _Seen) -> str:
    """What a policy on matrix products means in blocks that have convolutions and no matrix product; else nothing."""
    asked = next((one for one in (DOTS, DOTS_WITH_NO_BATCH_DIMS) if one in policy.selectors), None)
    kinds = {candidate.primitive for candidate in seen.candidates.values()}
    if asked is None or CONVOLUTION not in kinds or "dot_general" in kinds:
        return ""
    means = "means their convolutions" if asked == DOTS else "means no convolution, as in JAX"
    return f" The blocks have convolutions and no matrix products, and {asked!r} {means}: select them with '{CONVS}'."


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
            f"policy={str(policy)!r}{where} offloads nothing in {blocks}: no residual that an offload rule selects is an array "
            f"of rank 1 or more that an earlier rule leaves to it.{_of_convolutions(policy, seen)} There are: "
            f"{_some(seen.candidates, 8)}. Select one of "
            'these, or use policy="full" if nothing is to be offloaded.'
        )
    if policy.offloads and not seen.moved:
        raise NoEffectError(
            f"policy={str(policy)!r}{where} offloads nothing in {blocks}: it selects {_some(sorted(seen.offloaded), 3)}, but "
            "with what else it keeps, the backward pass reads none of these. Offload what is computed from them, or "
            "recompute the rest."
        )
    for selector in policy.selectors:
        if selector in (seen.unmatched or ()) and selector != "*":
            raise NoEffectError(
                f"policy={str(policy)!r}{where}: the selector {selector!r} matches no residual of {blocks}."
                f"{_of_convolutions(policy, seen)}{closest(selector, seen.candidates)} "
                f"Its residuals are: {_some(seen.candidates, 8)}. Correct the selector or leave it out."
            )
    if not seen.kept:
        raise NoEffectError(
            f"policy={str(policy)!r}{where} keeps nothing in {blocks}: the backward pass reads none of what it selects. "
            'Save what is computed from it, or use policy="full".'
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
    found = difflib.get_close_matches(selector.strip("*"), by_end, n=1, cutoff=0.5)
    return f" Did you mean {by_end[found[0]]!r}?" if found else ""


def _some(names: Iterable[str], limit: int) -> str:
    shown = list(names)
    more = f", and {len(shown) - limit} more" if len(shown) > limit else ""
    return (", ".join(shown[:limit]) or "none") + more
