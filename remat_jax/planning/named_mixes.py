"""Mixes of two named policies by their compiled bytes and times, where one keeps too much and the other is slow.

The search prices residuals by the traced program, which does not include what keeping costs. The compiled schedules of named
policies do. Between two of them both bytes and time are nearly linear in the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from remat_jax.planning.candidate import StepCandidate, Tried
from remat_jax.planning.fit import Fit
from remat_jax.planning.last_word import TELLS
from remat_jax.planning.problem import Described
from remat_jax.policy import LayerPolicies, Policy

_ROOM = 0.99
"""The share of the budget that a mix may be predicted to fill."""


def can_be_mixed(described: Described) -> bool:
    """Whether all blocks are layers of one class, one after another, so that a policy by layer can be written for them."""
    pairs = zip(described.kinds, described.stack.blocks, strict=True)
    positions = [position for kind, block in pairs for position in kind.layers[: block.repeats]]
    return len({kind.block for kind in described.kinds}) == 1 and positions == list(range(len(positions)))


def ends(fit: Fit, named: Sequence[StepCandidate]) -> list[StepCandidate]:
    """The policies to compile first: the smallest that is too large and the leanest, if they were not compiled."""
    able = sorted(_mixable(named), key=fit.expected)
    over = [candidate for candidate in able if fit.expected(candidate) > fit.budget]
    if not over or over == able:
        return []
    return [candidate for candidate in (over[0], able[0]) if fit.known(candidate) is None]


def best_mix(fit: Fit, named: Sequence[StepCandidate], seconds: float) -> StepCandidate | None:
    """The fastest mix of two compiled policies that is predicted to fit; None if none takes clearly less than `seconds`.

    The policy that keeps more has the last layers, whose residuals are kept for the shortest time.
    """
    tried = [known for candidate in _mixable(named) if (known := fit.known(candidate)) is not None]
    able = [known for known in tried if known.compiled.sound and known.compiled.seconds]
    mixes = [mix for rich, lean in product(able, able) for mix in _mixes(fit.budget, rich, lean)]
    if not mixes or (fastest := min(mixes, key=lambda mix: mix[0]))[0] >= (1 - TELLS) * seconds:
        return None
    return _candidate(fastest[1], fastest[2].candidate, fastest[3].candidate)


def _mixable(named: Sequence[StepCandidate]) -> list[StepCandidate]:
    return [candidate for candidate in named if candidate.name != "off" and not candidate.host_bytes]


def _mixes(budget: float, rich: Tried, lean: Tried) -> Iterator[tuple[float, int, Tried, Tried]]:
    """The predicted seconds of the mix that fills the budget, and how many layers are under `rich`; nothing if none fits."""
    more = rich.compiled.device_bytes - lean.compiled.device_bytes
    room, layers = _ROOM * budget - lean.compiled.device_bytes, len(rich.candidate.loads)
    count = math.floor(layers * room / more) if more > 0 else 0
    if 0 < count < layers:
        fast, slow = rich.compiled.seconds or math.inf, lean.compiled.seconds or math.inf
        yield slow + (fast - slow) * count / layers, count, rich, lean


def _candidate(count: int, rich: StepCandidate, lean: StepCandidate) -> StepCandidate:
    layers = len(rich.loads)
    names = (lean.name,) * (layers - count) + (rich.name,) * count
    return StepCandidate(
        name=str(LayerPolicies.of([Policy.parse(name) for name in names])),
        loads=lean.loads[: layers - count] + rich.loads[layers - count :],
        seconds=lean.seconds + (rich.seconds - lean.seconds) * count / layers,
        by_layer=names,
    )
