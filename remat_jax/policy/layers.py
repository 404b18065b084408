"""Policies by layer: the first so many blocks under one policy, the next under another, as plain frozen data."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from remat_jax.errors import PolicyError
from remat_jax.policy.form import Policy

VERSION = 1
MOST_LAYERS = 10**6
"""In a run: a longer one is a slip of the pen, and a list of its layers would not fit."""
_RUN = re.compile(r"\s*(\d+)\s*[x×]\s+(.*)", re.DOTALL)
# A new run, and not a bar in the name of a residual.
_BAR = re.compile(r"\|(?=\s*\d+\s*[x×]\s)")
_GRAMMAR = "'8 × full | 4 × dots' (an x serves for ×), each run with a policy's name or text"


@dataclass(frozen=True, repr=False)
class LayerPolicies:
    """A policy for each layer: the i-th call of a block, in forward order, runs under the i-th policy.

    It goes wherever a policy is given to blocks: `checkpoint_blocks`, `Workload`, `residuals`, `measure`, `doctor`. Unrolled
    layers are counted as they are called; of layers under a scan the scan is cut into one for each run of equal policies, with
    the same parameters and the same results. There must be as many layers as calls.

    Written as text, runs stand between bars, `N × policy`, the first layers first; `x` serves for `×`.

    Attributes:
        runs: pairs of how many layers in a row and their policy; equal neighbours are one run.

    Raises:
        PolicyError: there is no run, a run has no layer, or something else than a policy is given for one.

    >>> policies = LayerPolicies.parse("8 x full | 4 x save: @dots")
    >>> str(policies), policies.layers, policies[8].name
    ('8 × full | 4 × dots', 12, 'dots')
    >>> policies == LayerPolicies.of(["full"] * 8 + ["dots"] * 4)
    True
    """

    runs: tuple[tuple[int, Policy], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.runs, Sequence) or isinstance(self.runs, str) or not self.runs:
            raise PolicyError(
                f"LayerPolicies: runs={self.runs!r}: expected one pair (layers, policy) or more, as in {_GRAMMAR}."
            )
        checked = [_checked_run(run) for run in self.runs]
        together = itertools.groupby(checked, key=lambda run: run[1])
        object.__setattr__(self, "runs", tuple((sum(count for count, _ in alike), policy) for policy, alike in together))

    @classmethod
    def of(cls, policies: Iterable[Policy | str]) -> LayerPolicies:
        """One policy (or its name or text) for each layer, the first layer's first.

        Raises:
            PolicyError: none at all, or one that is no policy.

        >>> LayerPolicies.of(["full", "dots", "dots"]).runs[1][0]
        2
        """
        if isinstance(policies, str | Policy) or not isinstance(policies, Iterable):
            raise PolicyError(f"LayerPolicies.of: policies={policies!r}: expected a sequence, one policy for each layer.")
        return cls(tuple((1, one) for one in policies))  # type: ignore[misc]  # each run is checked and parsed

    @classmethod
    def parse(cls, text: str, argument: str = "policy") -> LayerPolicies:
        """The policies that a text stands for; ``argument`` is what error messages call it.

        Raises:
            PolicyError: the text is malformed, or a run's policy is; the message quotes the run.

        >>> LayerPolicies.parse("1x save: *up*; offload: @inputs | 2 × off")
        LayerPolicies.parse('1 × save: *up*; offload: @inputs | 2 × off')
        """
        if not isinstance(text, str):
            raise PolicyError(f"{argument}={text!r} is of type {type(text).__name__}; write {_GRAMMAR}.")
        runs = []
        for part in _BAR.split(text):
            found = _RUN.fullmatch(part)
            if found is None:
                raise PolicyError(f"{argument}={text!r}: the run {part.strip()!r} is not 'N × policy'; write {_GRAMMAR}.")
            # Python reads no integer of thousands of digits.
            count = int(found[1][:18])
            runs.append((count, Policy.parse(found[2].strip(), argument)))
        return cls(tuple(runs))

    def __str__(self) -> str:
        return " | ".join(f"{count} × {policy.name or policy}" for count, policy in self.runs)

    def __repr__(self) -> str:
        return f"LayerPolicies.parse({str(self)!r})"

    @property
    def layers(self) -> int:
        """How many layers there are policies for."""
        return sum(count for count, _ in self.runs)

    @property
    def ranges(self) -> tuple[tuple[range, Policy], ...]:
        """The positions of each run, counted from 0, and its policy.

        >>> [(positions.start, positions.stop) for positions, _ in LayerPolicies.parse("8 x full | 4 x dots").ranges]
        [(0, 8), (8, 12)]
        """
        ends = list(itertools.accumulate(count for count, _ in self.runs))
        return tuple((range(end - count, end), policy) for end, (count, policy) in zip(ends, self.runs, strict=True))

    def run_of(self, layer: int) -> tuple[range, Policy]:
        """The run that has the layer at this position, counted from 0.

        Raises:
            IndexError: there is no such layer.
        """
        for positions, policy in self.ranges:
            if layer in positions:
                return positions, policy
        raise IndexError(f"layer={layer}: there are policies for {self.layers} layers, counted from 0")

    def __getitem__(self, layer: int) -> Policy:
        return self.run_of(layer)[1]

    @property
    def offloads(self) -> bool:
        """Whether any layer's policy offloads."""
        return any(policy.offloads for _, policy in self.runs)

    def map(self, change: Callable[[Policy], Policy]) -> LayerPolicies:
        """The same runs with another policy for each: ``change(policy)``."""
        return LayerPolicies(tuple((count, change(policy)) for count, policy in self.runs))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: ``version`` and ``runs``, each with ``layers`` and ``policy``."""
        return {"version": VERSION, "runs": [{"layers": count, "policy": policy.to_dict()} for count, policy in self.runs]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LayerPolicies:
        """The policies that ``to_dict`` gave ``data`` for.

        Raises:
            PolicyError: keys are missing or unknown, the version is another one, or a run is malformed.
        """
        runs = data.get("runs") if isinstance(data, dict) and set(data) == {"version", "runs"} else None
        if not isinstance(runs, list) or not all(isinstance(run, dict) and set(run) == {"layers", "policy"} for run in runs):
            raise PolicyError(
                f"policies by layer: {data!r}: expected an object with version and runs, and in each run layers and policy; "
                "give what LayerPolicies.to_dict wrote."
            )
        if type(data["version"]) is not int or data["version"] != VERSION:
            raise PolicyError(
                f"policies by layer: version={data['version']!r}, and this release reads version {VERSION} only; "
                "write the file again with this release."
            )
        return cls(tuple((run["layers"], Policy.from_dict(run["policy"])) for run in runs))

    def to_json(self) -> str:
        """``to_dict`` as one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> LayerPolicies:
        """The policies that ``to_json`` gave ``text`` for.

        Raises:
            PolicyError: ``text`` is not JSON, or ``from_dict`` refuses what it says.

        >>> LayerPolicies.from_json(LayerPolicies.parse("8 x full | 4 x dots").to_json()).layers
        12
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise PolicyError(
                f"policies by layer: {text!r} is not JSON ({error}); give what LayerPolicies.to_json wrote."
            ) from None
        return cls.from_dict(data)


def is_by_layer(value: object) -> bool:
    """Whether ``value`` is policies by layer, or a text of theirs.

    >>> is_by_layer("8 x full"), is_by_layer("save: x")
    (True, False)
    """
    return isinstance(value, LayerPolicies) or (isinstance(value, str) and _RUN.match(value) is not None)


def _checked_run(run: Any) -> tuple[int, Policy]:
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
            f"LayerPolicies: the policy {str(checked)!r} has a selector that reads like the start of a run; write '?' for its "
            "bar."
        )
    return count, checked
