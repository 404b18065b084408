"""Policies by layer as data: their text, their JSON, and their errors."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import remat_jax as rj
from remat_jax.errors import PolicyError
from remat_jax.policy import as_block_policy, as_policy

FULL, DOTS = rj.Policy.parse("full"), rj.Policy.parse("dots")


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("8 × full | 4 × dots", [(8, "full"), (4, "dots")]),
        ("8x full|4 x dots", [(8, "full"), (4, "dots")]),
        ("1 x full | 2 x full | 1 x off", [(3, "full"), (1, "off")]),
        ("2 × offload: @inputs; save: a, b | 1 × everything", [(2, "offload: @inputs; save: a, b"), (1, "everything")]),
        ("2 × save: a|b, *x | 1 × full", [(2, "save: a|b, *x"), (1, "full")]),
        ("12 × nothing_saveable", [(12, "full")]),
    ],
)
def test_a_text_is_read_and_written_back(text: str, runs: list[tuple[int, str]]) -> None:
    policies = rj.LayerPolicies.parse(text)
    assert policies.runs == tuple((count, rj.Policy.parse(policy)) for count, policy in runs)
    assert rj.LayerPolicies.parse(str(policies)) == policies
    assert eval(repr(policies), {"LayerPolicies": rj.LayerPolicies}) == policies
    assert as_block_policy(text) == policies


def test_equal_layers_are_equal_policies() -> None:
    policies = rj.LayerPolicies.of(["full"] * 8 + [DOTS] * 4)
    assert policies == rj.LayerPolicies(((8, FULL), (1, DOTS), (3, DOTS))) == rj.LayerPolicies.parse("8 x full | 4 x dots")
    assert len({policies, rj.LayerPolicies.parse("8 x full | 4 x dots")}) == 1
    assert (policies.layers, policies.offloads, rj.LayerPolicies.parse("1 x offload").offloads) == (12, False, True)
    assert [policies[layer].name for layer in (0, 7, 8, 11)] == ["full", "full", "dots", "dots"]
    assert policies.ranges == ((range(8), FULL), (range(8, 12), DOTS)) and policies.run_of(9) == (range(8, 12), DOTS)
    assert policies.map(lambda policy: FULL).runs == ((12, FULL),)
    with pytest.raises(IndexError, match="layer=12: there are policies for 12"):
        policies.run_of(12)


def test_cuts_stand_between_layers_under_one_policy() -> None:
    policies = rj.LayerPolicies.parse("3 x full || 1 x full || 1 × full | 1 x dots")
    assert policies.runs == ((5, FULL), (1, DOTS)) and policies.cuts == (3, 4)
    assert policies.ranges == ((range(3), FULL), (range(3, 4), FULL), (range(4, 5), FULL), (range(5, 6), DOTS))
    assert policies.run_of(3) == (range(3, 4), FULL) and policies.layers == 6
    assert str(policies) == "3 × full || 1 × full || 1 × full | 1 × dots" and rj.LayerPolicies.parse(str(policies)) == policies
    # Where policies differ there is a cut anyway.
    assert rj.LayerPolicies.of(["full"] * 5 + ["dots"], cuts=[5, 4, 3]) == policies != rj.LayerPolicies(policies.runs)
    # Runs that become equal stay separate scans.
    assert policies.map(lambda policy: DOTS).cuts == (3, 4, 5)


@pytest.mark.parametrize(
    ("text", "groups", "written"),
    [
        ("8 x full in groups of 4", [(0, 4), (4, 8)], "8 × full in groups of 4"),
        ("10 × full in groups of 4", [(0, 4), (4, 8), (8, 10)], "10 × full in groups of 4"),
        ("3 × full in groups of 8", [(0, 3)], "3 × full in groups of 3"),
        ("2 × save: a in  groups of 1", [(0, 1), (1, 2)], "2 × save: a in groups of 1"),
        ("4 × full in groups of 2 | 2 × full", [(0, 2), (2, 4)], None),
        ("3 × full in groups of 2 | 2 × full in groups of 2", [(0, 2), (2, 3), (3, 5)], None),
        # Both give the same scans.
        ("4 × off in groups of 4 || 2 × off in groups of 2", [(0, 4), (4, 6)], "6 × off in groups of 4"),
        ("4 × off in groups of 2 || 4 × off in groups of 2", [(0, 2), (2, 4), (4, 6), (6, 8)], None),
        ("1 × dots | 3 × full in groups of 2 || 1 × full in groups of 9", [(1, 3), (3, 4), (4, 5)], None),
        ("2 × full in groups of 2 | 3 × full in groups of 3", [(0, 2), (2, 5)], None),
    ],
)
def test_groups_are_read_and_written_back(text: str, groups: list[tuple[int, int]], written: str | None) -> None:
    policies = rj.LayerPolicies.parse(text)
    assert list(policies.groups) == groups
    assert written is None or str(policies) == written
    assert rj.LayerPolicies.parse(str(policies)) == policies == as_block_policy(text)
    assert rj.LayerPolicies.from_json(policies.to_json()) == policies
    assert policies.map(lambda policy: policy) == policies
    assert rj.LayerPolicies(policies.runs, policies.cuts, tuple(groups[::-1])) == policies


def test_a_group_is_a_part_of_its_run() -> None:
    policies = rj.LayerPolicies.parse("7 × full in groups of 3 | 5 × full | 1 × dots")
    assert policies.runs == ((12, FULL), (1, DOTS)) and policies.layers == 13
    assert policies != rj.LayerPolicies.parse("12 × full | 1 × dots")
    assert [policies.group_of(layer) for layer in (0, 5, 6, 7, 12)] == [range(3), range(3, 6), range(6, 7), None, None]
    assert [layers for layers, _ in policies.ranges] == [range(6), range(6, 7), range(7, 12), range(12, 13)]
    assert policies[6] == FULL and str(policies) == "7 × full in groups of 3 | 5 × full | 1 × dots"
    assert hash(policies) == hash(rj.LayerPolicies(policies.runs, (), policies.groups))
    assert rj.LayerPolicies.of(["full"] * 12 + ["dots"], groups=policies.groups) == policies


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: rj.LayerPolicies.parse("4 × full in groups of 0"), "'in groups of 0': a group needs 1 layer or more"),
        (lambda: rj.LayerPolicies.parse("full in groups of 4"), "the run 'full in groups of 4' is not 'N × policy'"),
        (lambda: as_policy("full in groups of 4"), "one policy is expected here"),
        (lambda: rj.LayerPolicies.parse("4 × offload_inputs in groups of 2"), "layers 0 to 1 offloads inside a group"),
        (lambda: rj.LayerPolicies(((4, FULL),), (), ((1, 3), (2, 4))), "layer 2 is in two groups"),
        (lambda: rj.LayerPolicies(((4, FULL), (4, DOTS)), (), ((2, 6),)), "layers 2 to 5: expected layers of one run"),
        (lambda: rj.LayerPolicies(((4, FULL),), (), ((2, 6),)), "layers 2 to 5: expected layers of one run"),
        (lambda: rj.LayerPolicies(((4, FULL),), (2,), ((1, 3),)), "a cut before layer 2 inside the group of layers 1 to 2"),
        (lambda: rj.LayerPolicies(((4, FULL),), (), ((True, 3),)), r"group=\(True, 3\): expected a pair"),
        (lambda: rj.LayerPolicies(((4, FULL),), (), ((2, 2),)), r"group=\(2, 2\): expected a pair"),
        (lambda: rj.LayerPolicies(((4, FULL),), (), "0 4"), "groups='0 4': expected pairs"),  # type: ignore[arg-type]
        (lambda: rj.LayerPolicies.of(["full"], groups=4), "groups=4: expected pairs"),  # type: ignore[arg-type]
        (lambda: rj.LayerPolicies.of(["save: a in groups of 2"]), "reads like groups of layers"),
        (lambda: rj.LayerPolicies(((2, FULL),), (0,)), "a cut before layer 0 of 2: expected 1 to 1"),
        (lambda: rj.LayerPolicies.of(["full"] * 4, 3), "cuts=3: expected the layers before which"),  # type: ignore[arg-type]
        (lambda: rj.LayerPolicies(((2, FULL),), 4), "cuts=4: expected the positions"),  # type: ignore[arg-type]
        (lambda: rj.LayerPolicies.parse("8 full | 4 dots"), r"the run '8 full \| 4 dots' is not 'N × policy'"),
        (lambda: rj.LayerPolicies.parse("0 x full"), "a run of 0 layers: expected 1 or more, at most 1000000"),
        (lambda: rj.LayerPolicies.parse("4 x full | 4 x"), r"the selector|is not the name|4 x"),
        (lambda: rj.LayerPolicies.parse("4 x save: | 4 x dots"), "is empty"),
        (lambda: rj.LayerPolicies.parse("4 x full | 4 x dotz"), "Did you mean 'dots'"),
        (lambda: rj.LayerPolicies.from_json("8 x full"), "is not JSON"),
        (lambda: rj.LayerPolicies(()), "LayerPolicies: runs="),
        (lambda: rj.LayerPolicies.of("full"), "one policy for each layer"),
        (lambda: rj.LayerPolicies((8, "full")), "expected a pair"),  # type: ignore[arg-type]
        (lambda: rj.LayerPolicies(((True, FULL),)), "a run of True layers"),
        (lambda: rj.LayerPolicies(((1, rj.Policy.parse("save: a|2 x b")),)), "which starts a run"),
        (lambda: rj.LayerPolicies.of([None]), "policy=None"),  # type: ignore[list-item]
        (lambda: as_policy(rj.LayerPolicies.parse("2 x full")), "for each layer.*checkpoint_blocks"),  # type: ignore[arg-type]
        (lambda: rj.remat(lambda x: x, "2 x full | 1 x dots"), "for each layer.*checkpoint_blocks"),
    ],
)
def test_what_are_no_policies_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        make()


RUN = {"layers": 1, "policy": FULL.to_dict()}


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (
            "8 x full | 3 x offload: @inputs; save: *up* | 1 x off",
            [{"version": 2}, {"version": True}, {"more": 1}, {"runs": []}, {"runs": [{"layers": 1}]}]
            + [{"runs": [RUN | wrong]} for wrong in ({"layers": "1"}, {"policy": {}})],
        ),
        ("3 x full || 1 x full | 1 x dots", [{"version": 1}, {"cuts": [6]}, {"cuts": [True]}, {"cuts": "4"}, {"cuts": None}]),
        (
            "4 × full in groups of 2",
            [{"version": 1}, {"version": 2}, {"groups": None}, {"groups": [[0]]}, {"groups": [[0, 9]]}, {"groups": ["02"]}],
        ),
    ],
)
def test_json_goes_there_and_back_and_is_checked(text: str, changes: list[dict[str, object]]) -> None:
    policies = rj.LayerPolicies.parse(text)
    data = policies.to_dict()
    assert rj.LayerPolicies.from_json(policies.to_json()) == policies
    assert data["version"] == 1 + ("cuts" in data) + 2 * ("groups" in data)
    for change in changes:
        with pytest.raises(PolicyError):
            rj.LayerPolicies.from_json(json.dumps(data | change))
