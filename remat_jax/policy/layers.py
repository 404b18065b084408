"""Policies by layer as plain frozen data: runs of consecutive layers, each run under one policy, and groups of layers.

A group is consecutive layers inside one checkpoint, which keeps only the first layer's input.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from remat_jax.errors import PolicyError
from remat_jax.policy.form import Policy
from remat_jax.policy.text import parse_json

VERSION, CUT_VERSION, GROUP_VERSION = 1, 2, 3
"""The versions of the JSON form without cuts, with cuts, and with groups."""
MOST_LAYERS = 10**6
"""The most layers in a run. A larger number is a typo, and a list of its layers would not fit in memory."""
_RUN = re.compile(r"\s*(\d+)\s*[x×]\s+(.*)", re.DOTALL)
# A bar separates runs only before a new run, because residual names may contain bars.
_BAR = re.compile(r"(\|\|?)(?=\s*\d+\s*[x×]\s)")
_GRAMMAR = (
    "'8 × full | 4 × dots' (x means × too), where each run has a policy's name or text; '||' cuts a run, and '8 × full in "
    "groups of 4' puts one checkpoint around each 4 layers"
)
Group = tuple[int, int]
"""The first layer of a group, counted from 0, and the first layer after the group."""
_IN_GROUPS = re.compile(r"(.*\S)\s+in\s+groups\s+of\s+(\S+)\s*", re.DOTALL)


@dataclass(frozen=True, repr=False)
class LayerPolicies:
    """A policy for each layer: the i-th call of a block, in forward order, runs under the i-th policy.

    `checkpoint_blocks`, `Workload`, `residuals`, `measure` and `doctor` take `LayerPolicies` as a block's policy. A scan over
    layers is cut into one scan for each run of equal policies; parameters and results do not change. The number of policies
    must be the number of calls.

    A text lists the runs, `N × policy` or `N x policy`, separated by bars. `||` cuts a scan between two layers with the same
    policy. A cut can change memory, because XLA does not treat a scan of a single layer as a loop
    (`docs/notes/cutting_a_scan.md`).

    `N × policy in groups of k` sets one checkpoint around each k consecutive layers. This checkpoint keeps only the group's
    input. The backward pass recomputes the group: its layers, under their policy, and the computation between them. If their
    policy is `full`, at most N/k + k layer inputs and the residuals of one layer are alive, and each layer runs forward three
    times. If the policy is `off`, each layer runs forward twice, and the residuals of k layers are alive (Chen et al.,
    arXiv:1604.06174). The last group of a run may be shorter. A group of one layer is that layer under `full`.

    Attributes:
        runs: pairs (number of consecutive layers, their policy). Neighbours with equal policies become one run.
        cuts: the layers, counted from 0, before which a scan is cut although the layer before has the same policy. If such a
            layer is in the middle of an iteration that runs several layers, the cut is before the next iteration. A cut where
            the policy changes anyway is dropped.
        groups: for each group, its first layer and the first layer after it. A group is inside one run and contains no cut.

    Raises:
        PolicyError: a run, its policy, a cut or a group is malformed, or a policy offloads inside a group.

    >>> policies = LayerPolicies.parse("8 x full | 4 x save: @dots")
    >>> str(policies), policies.layers, policies[8].name
    ('8 × full | 4 × dots', 12, 'dots')
    >>> policies == LayerPolicies.of(["full"] * 8 + ["dots"] * 4)
    True
    >>> LayerPolicies.parse("3 x full || 1 x full | 1 x dots").cuts
    (3,)
    >>> LayerPolicies.parse("7 x full in groups of 3 | 2 x dots").groups
    ((0, 3), (3, 6), (6, 7))
    """

    runs: tuple[tuple[int, Policy], ...]
    cuts: tuple[int, ...] = ()
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.runs, Sequence) or isinstance(self.runs, str) or not self.runs:
            raise PolicyError(
                f"LayerPolicies: runs={self.runs!r}: expected one pair (layers, policy) or more, as in {_GRAMMAR}."
            )
        checked = [_checked_run(run) for run in self.runs]
        alike_runs = itertools.groupby(checked, key=lambda run: run[1])
        object.__setattr__(self, "runs", tuple((sum(count for count, _ in equal), policy) for policy, equal in alike_runs))
        cuts = _checked_cuts(self.cuts, self.layers)
        object.__setattr__(self, "groups", _checked_groups(self.groups, self.runs, cuts))
        borders = set(itertools.accumulate(count for count, _ in self.runs)) | _series_borders(self.groups)
        object.__setattr__(self, "cuts", tuple(sorted(cuts - borders)))

    @classmethod
    def of(cls, policies: Iterable[Policy | str], cuts: Iterable[int] = (), groups: Iterable[Group] = ()) -> LayerPolicies:
        """Policies by layer from one policy (or its name or text) for each layer, in forward order.

        >>> LayerPolicies.of(["full", "dots", "dots"]).runs[1][0]
        2
        """
        if isinstance(policies, str | Policy) or not isinstance(policies, Iterable):
            raise PolicyError(f"LayerPolicies.of: policies={policies!r}: expected a sequence, one policy for each layer.")
        if isinstance(cuts, str) or not isinstance(cuts, Iterable):
            raise PolicyError(f"LayerPolicies.of: cuts={cuts!r}: expected the layers before which a scan is cut, such as (3,).")
        if isinstance(groups, str) or not isinstance(groups, Iterable):
            raise PolicyError(f"LayerPolicies.of: groups={groups!r}: expected pairs such as ((0, 4), (4, 8)).")
        return cls(tuple((1, policy) for policy in policies), tuple(cuts), tuple(groups))  # type: ignore[misc]  # each run is checked and parsed

    @classmethod
    def parse(cls, text: str, argument: str = "policy") -> LayerPolicies:
        """The policies that a text describes. ``argument`` is the text's name in error messages.

        Raises:
            PolicyError: the text or a run's policy is malformed; the message quotes the run.

        >>> LayerPolicies.parse("1x save: *up*; offload: @inputs | 2 × off")
        LayerPolicies.parse('1 × save: *up*; offload: @inputs | 2 × off')
        """
        if not isinstance(text, str):
            raise PolicyError(f"{argument}={text!r} is of type {type(text).__name__}; write {_GRAMMAR}.")
        runs: list[tuple[int, Policy]] = []
        cuts: list[int] = []
        groups: list[Group] = []
        # Odd parts are the bars between runs.
        for nth, part in enumerate(_BAR.split(text)):
            first = sum(count for count, _ in runs)
            if nth % 2:
                cuts += [first] if part == "||" else []
                continue
            match = _RUN.fullmatch(part)
            if match is None:
                raise PolicyError(f"{argument}={text!r}: the run {part.strip()!r} is not 'N × policy'; write {_GRAMMAR}.")
            digits = match[1].lstrip("0")
            if len(digits) > len(str(MOST_LAYERS)):
                # int() refuses thousands of digits.
                raise PolicyError(f"{argument}: a run of {digits[:12]}… layers: expected 1 or more, at most {MOST_LAYERS}.")
            policy, size = _split_groups(match[2].strip(), argument)
            count = int(digits or 0)
            if size is not None and count <= MOST_LAYERS:
                groups += [(start, min(start + size, first + count)) for start in range(first, first + count, size)]
            runs.append((count, Policy.parse(policy, argument)))
        return cls(tuple(runs), tuple(cuts), tuple(groups))

    def __str__(self) -> str:
        parts: list[str] = []
        for layers, policy, size in self._written():
            bar = (" || " if layers.start in self.cuts else " | ") if parts else ""
            parts.append(f"{bar}{len(layers)} × {policy.name or policy}" + (f" in groups of {size}" if size else ""))
        return "".join(parts)

    def _written(self) -> list[tuple[range, Policy, int | None]]:
        """`ranges`, each with its group size or None. The shorter last group of a run is joined with the groups before it."""
        written: list[tuple[range, Policy, int | None]] = []
        for layers, policy in self.ranges:
            group = self.group_of(layers.start)
            size = len(group) if group else None
            before, of_before, size_before = written[-1] if written else (layers, policy, None)
            # Only the last group of a run is shorter.
            whole = size_before is not None and len(before) % size_before == 0
            short = size is not None and size_before is not None and size == len(layers) < size_before
            if whole and short and of_before == policy and layers.start not in self.cuts:
                written[-1] = (range(before.start, layers.stop), policy, size_before)
            else:
                written.append((layers, policy, size))
        return written

    def __repr__(self) -> str:
        return f"LayerPolicies.parse({str(self)!r})"

    @property
    def layers(self) -> int:
        """The number of layers."""
        return sum(count for count, _ in self.runs)

    @property
    def ranges(self) -> tuple[tuple[range, Policy], ...]:
        """A pair (layers counted from 0, their policy) for each run.

        A run is split at cuts, and where consecutive groups of one size begin or end.

        >>> [(positions.start, positions.stop) for positions, _ in LayerPolicies.parse("8 x full | 4 x dots").ranges]
        [(0, 8), (8, 12)]
        """
        pieces, start = [], 0
        borders = sorted({*self.cuts, *_series_borders(self.groups)})
        for count, policy in self.runs:
            places = [start, *(border for border in borders if start < border < start + count), start + count]
            pieces += [(range(*pair), policy) for pair in itertools.pairwise(places)]
            start += count
        return tuple(pieces)

    def run_of(self, layer: int) -> tuple[range, Policy]:
        """The element of `ranges` that contains a layer, counted from 0; `IndexError` if there is no such layer."""
        for positions, policy in self.ranges:
            if layer in positions:
                return positions, policy
        raise IndexError(f"layer={layer}: there are policies for {self.layers} layers, counted from 0")

    def group_of(self, layer: int) -> range | None:
        """The layers of the group that contains a layer; None if the layer is in no group.

        >>> LayerPolicies.parse("7 x full in groups of 3 | 2 x dots").group_of(6)
        range(6, 7)
        """
        place = bisect.bisect_right(self.groups, layer, key=lambda group: group[0]) - 1
        group_layers = range(*self.groups[place]) if place >= 0 else range(0)
        return group_layers if layer in group_layers else None

    def __getitem__(self, layer: int) -> Policy:
        return self.run_of(layer)[1]

    @property
    def offloads(self) -> bool:
        """Whether any layer's policy offloads."""
        return any(policy.offloads for _, policy in self.runs)

    def map(self, change: Callable[[Policy], Policy]) -> LayerPolicies:
        """The same runs and groups with ``change(policy)`` for each policy; runs that become equal are not merged.

        >>> str(LayerPolicies.parse("2 x save: a | 2 x offload: a").map(lambda policy: Policy.parse("full")))
        '2 × full || 2 × full'
        """
        cuts = tuple(layers.start for layers, _ in self.ranges[1:])
        return LayerPolicies(tuple((count, change(policy)) for count, policy in self.runs), cuts, self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: ``version``; ``runs``, each with ``layers`` and ``policy``; ``cuts`` and ``groups`` if any."""
        data: dict[str, Any] = {"runs": [{"layers": count, "policy": policy.to_dict()} for count, policy in self.runs]}
        data |= {"cuts": list(self.cuts)} if self.cuts else {}
        data |= {"groups": [list(group) for group in self.groups]} if self.groups else {}
        return {"version": _version(data), **data}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LayerPolicies:
        """The policies that ``to_dict`` wrote as ``data``; `PolicyError` for anything else."""
        keys = set(data) if isinstance(data, dict) else set()
        runs = data["runs"] if {"version", "runs"} <= keys <= {"version", "runs", "cuts", "groups"} else None
        if not isinstance(runs, list) or not all(isinstance(run, dict) and set(run) == {"layers", "policy"} for run in runs):
            raise PolicyError(
                f"policies by layer: {data!r}: expected an object with version and runs, and in each run layers and policy; "
                "give what LayerPolicies.to_dict wrote."
            )
        if type(data["version"]) is not int or data["version"] != _version(data):
            raise PolicyError(
                f"policies by layer: version={data['version']!r}, and this release reads version {VERSION}, version "
                f"{CUT_VERSION} with cuts and version {GROUP_VERSION} with groups; write the file again with this release."
            )
        cuts, groups = data.get("cuts", []), data.get("groups", [])
        if not isinstance(cuts, list) or not isinstance(groups, list):
            raise PolicyError(f"policies by layer: cuts={cuts!r}, groups={groups!r}: expected lists of positions of layers.")
        return cls(tuple((run["layers"], Policy.from_dict(run["policy"])) for run in runs), tuple(cuts), tuple(groups))

    def to_json(self) -> str:
        """``to_dict`` as one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> LayerPolicies:
        """The policies that ``to_json`` wrote as ``text``; `PolicyError` for anything else.

        >>> LayerPolicies.from_json(LayerPolicies.parse("8 x full | 4 x dots").to_json()).layers
        12
        """
        return cls.from_dict(parse_json(text, "policies by layer", "LayerPolicies.to_json"))


def _version(data: dict[str, Any]) -> int:
    """The version of JSON with these keys. An older release refuses a version that it cannot read."""
    return GROUP_VERSION if "groups" in data else CUT_VERSION if "cuts" in data else VERSION


def is_by_layer(value: object) -> bool:
    """Whether ``value`` is a `LayerPolicies` or the text of policies by layer."""
    if isinstance(value, str):
        return _RUN.match(value) is not None or _is_in_groups(value)
    return isinstance(value, LayerPolicies)


def _checked_cuts(cuts: object, layers: int) -> set[int]:
    if not isinstance(cuts, Sequence) or isinstance(cuts, str):
        raise PolicyError(f"LayerPolicies: cuts={cuts!r}: expected the positions of the layers before which a scan is cut.")
    for cut in cuts:
        if isinstance(cut, bool) or not isinstance(cut, int) or not 0 < cut < layers:
            raise PolicyError(f"LayerPolicies: a cut before layer {cut!r} of {layers}: expected 1 to {layers - 1}.")
    return set(cuts)


def _checked_run(run: object) -> tuple[int, Policy]:
    if not isinstance(run, Sequence) or isinstance(run, str) or len(run) != 2:
        raise PolicyError(f"LayerPolicies: run={run!r}: expected a pair (layers, policy), as in (8, 'full').")
    count, policy = run
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_LAYERS:
        raise PolicyError(
            f"LayerPolicies: a run of {count!r:.40} layers: expected 1 or more, at most {MOST_LAYERS}; leave an empty run out."
        )
    checked = Policy.parse(policy) if not isinstance(policy, Policy) else policy
    if _BAR.search(str(checked)):
        raise PolicyError(
            f"LayerPolicies: the policy {str(checked)!r} has a selector that contains '| N ×', which starts a "
            "run; write '?' in place of its bar."
        )
    if _is_in_groups(str(checked)):
        raise PolicyError(
            f"LayerPolicies: the policy {str(checked)!r} has a selector that reads like groups of layers; write '?' for a "
            "space."
        )
    return count, checked


def _split_groups(text: str, argument: str) -> tuple[str, int | None]:
    """The policy in a run's text, and the number of layers in each group (None without groups)."""
    match = _IN_GROUPS.fullmatch(text)
    if match is None:
        return text, None
    size = match[2]
    if not (size.isascii() and size.isdigit() and len(size) < 8 and int(size)):
        raise PolicyError(
            f"{argument}: 'in groups of {size:.20}': a group needs 1 layer or more; write 'N × policy in groups of 4'."
        )
    return match[1], int(size)


def _is_in_groups(text: str) -> bool:
    """Whether a text ends in 'in groups of N'."""
    return _IN_GROUPS.fullmatch(text) is not None


def _checked_groups(groups: object, runs: Sequence[tuple[int, Any]], cuts: Iterable[int]) -> tuple[Group, ...]:
    """The groups, sorted.

    Raises:
        PolicyError: a group is not inside one run, contains a cut or overlaps another group, or its policy offloads.
    """
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise PolicyError(f"LayerPolicies: groups={groups!r}: expected pairs (first layer, first layer after the group).")
    checked = sorted(_checked_pair(pair) for pair in groups)
    borders = [0, *itertools.accumulate(count for count, _ in runs)]
    cut = set(cuts)
    last_end = 0
    for first, end in checked:
        if first < last_end:
            raise PolicyError(f"LayerPolicies: groups: layer {first} is in two groups; a layer is in one group at most.")
        last_end = end
        run = min(bisect.bisect_right(borders, first), len(runs)) - 1
        if not borders[run] <= first < end <= borders[run + 1]:
            raise PolicyError(
                f"LayerPolicies: groups: the group of layers {first} to {end - 1}: expected layers of one run, such as those "
                f"from {borders[run]} to {borders[run + 1] - 1}."
            )
        inside = cut & set(range(first + 1, end))
        if inside:
            raise PolicyError(
                f"LayerPolicies: a cut before layer {min(inside)} inside the group of layers {first} to {end - 1}: cut between "
                "groups."
            )
        policy = runs[run][1]
        if policy.offloads:
            raise PolicyError(
                f"LayerPolicies: the policy {str(policy)!r} of the layers {first} to {end - 1} offloads inside a group, but a "
                "group is recomputed as a whole and keeps no residuals of its layers. Use 'full' inside the group, or remove "
                "the group."
            )
    return tuple(checked)


def _series_borders(groups: Sequence[Group]) -> set[int]:
    """The layers before which a series of consecutive groups of equal size begins or ends."""
    sizes = {first: end - first for first, end in groups}
    size_before = {end: end - first for first, end in groups}
    starts = {first for first, size in sizes.items() if size_before.get(first) != size}
    return starts | (size_before.keys() - sizes.keys())


def _checked_pair(pair: Any) -> Group:
    whole = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
    if not whole or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in pair) or not 0 <= pair[0] < pair[1]:
        raise PolicyError(
            f"LayerPolicies: group={pair!r}: expected a pair (first layer, first layer after the group), as in (0, 4)."
        )
    return pair[0], pair[1]
