"""Policies as data: text, JSON, matching, names, composition and errors."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

import remat_jax.policy
from remat_jax.errors import PolicyError, UnknownPolicyError
from remat_jax.policy import ALIASES, NAMED, Action, Candidate, Policy, PolicyRule, as_policy

AT_SELECTORS = ["@inputs", "@dots", "@dots_with_no_batch_dims", "@primitive:exp", "@primitive:cum*"]
PRIMITIVES = ["dot_general", "conv_general_dilated", "scaled_matmul_wrapper", "exp", "cumsum", "name", "input"]

candidates = st.builds(
    Candidate,
    name=st.text("abAB/:#0[]", min_size=1, max_size=4),
    primitive=st.sampled_from(PRIMITIVES),
    is_input=st.booleans(),
    has_batch_dims=st.booleans(),
    user_named=st.booleans(),
)
globs = st.text("abAB/:#0*?[]", min_size=1, max_size=4).filter(lambda text: set(text) != {"*"})
odd_names = st.text("aé😀 \t\n:\\\"'#/*?[]@{}\u00a0\x00", min_size=1, max_size=8).filter(
    lambda text: text == text.strip() and text[0] != "@" and set(text) != {"*"}
)
selectors = globs | st.sampled_from(AT_SELECTORS)


@st.composite
def policies(draw: st.DrawFn, selectors: st.SearchStrategy[str] = selectors) -> Policy:
    """Policies of any number of rules, some with a final catch-all, and some `off`."""
    if draw(st.integers(0, 19)) == 0:
        return NAMED["off"]
    chosen = draw(st.lists(selectors, unique=True, max_size=6))
    rules = []
    while chosen:
        size = draw(st.integers(1, len(chosen)))
        rules.append(PolicyRule(draw(st.sampled_from(Action)), tuple(chosen[:size])))
        chosen = chosen[size:]
    return Policy(tuple(rules), default=draw(st.sampled_from(Action)))


def oracle(text: str, candidate: Candidate) -> str:
    """The action by the definition, from the text alone: the first selector that matches, else recompute."""
    in_batch_free = candidate.primitive in ("dot_general", "scaled_matmul_wrapper") and not candidate.has_batch_dims
    in_dots = candidate.primitive in ("dot_general", "scaled_matmul_wrapper", "conv_general_dilated")
    special = {"@inputs": candidate.is_input, "@dots": in_dots, "@dots_with_no_batch_dims": in_batch_free}
    for rule in text.split("; "):
        action, selectors = rule.split(": ", 1)
        for selector in selectors.split(", "):
            if selector in special:
                hit = special[selector]
            elif selector.startswith("@primitive:"):
                hit = fnmatchcase(candidate.primitive, selector.removeprefix("@primitive:"))
            else:
                hit = candidate.name == selector or fnmatchcase(candidate.name, selector)
            if hit:
                return action
    return "recompute"


# Round trips


@given(policies(selectors | odd_names))
def test_text_and_json_give_the_policy_back(policy: Policy) -> None:
    assert Policy.parse(str(policy)) == policy
    assert Policy.from_json(policy.to_json()) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(copy.deepcopy(policy)) == hash(policy)
    assert eval(repr(policy)) == policy


@given(policies(), st.sampled_from(["", " ", "\n", "\t  "]), st.booleans())
def test_whitespace_and_a_closing_semicolon_do_not_count(policy: Policy, space: str, closed: bool) -> None:
    if not policy.checkpoint:
        return
    rules = [
        f"{space}{rule.action.value}{space}:{space}" + f"{space},{space}".join(rule.selectors) + space for rule in policy.rules
    ]
    assert Policy.parse(";".join(rules) + (f";{space}" if closed else "")) == policy


def test_only_the_first_colon_of_a_rule_ends_its_action() -> None:
    policy = Policy.parse("save: Block_0/attn/q:dot_general#0, @primitive:exp; recompute: *:add#*")
    assert policy.rules == (
        PolicyRule(Action.SAVE, ("Block_0/attn/q:dot_general#0", "@primitive:exp")),
        PolicyRule(Action.RECOMPUTE, ("*:add#*",)),
    )


def test_policies_are_frozen_hashable_and_equal_by_value() -> None:
    policy = Policy((PolicyRule("save", ["@dots"]),))
    assert {policy, Policy.parse("dots"), NAMED["dots"]} == {policy}
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.rules = ()  # type: ignore[misc]


def test_json_has_a_version_and_nothing_else_than_the_rules() -> None:
    assert Policy.parse("offload: a, b; save: *").to_dict() == {
        "version": 1,
        "checkpoint": True,
        "rules": [{"action": "offload", "selectors": ["a", "b"]}, {"action": "save", "selectors": ["*"]}],
    }
    assert NAMED["off"].to_dict() == {"version": 1, "checkpoint": False, "rules": []}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": []}, "unknown 'rule'"),
        ({"version": 2}, "version=2, and this release reads version 1 only"),
        ({"version": True}, "version=True"),
        ({"version": None}, "missing 'version'"),
        ({"rules": None}, "missing 'rules'"),
        ({"rules": []}, "give one or more"),
        ({"rules": "save: *"}, "is not a list of rules"),
        ({"rules": ["save: *"]}, "'save: *' is a str, expected an object with action, selectors"),
        ({"rules": [{"action": "save", "selectors": ["a"], "comment": ""}]}, "unknown 'comment'"),
        ({"rules": [{"action": "save"}]}, "missing 'selectors'"),
        ({"rules": [{"action": "sav", "selectors": ["a"]}]}, "Did you mean 'save'?"),
        ({"rules": [{"action": "save", "selectors": "ab"}]}, "selectors='ab' is not a sequence of texts"),
        ({"rules": [{"action": "save", "selectors": [1]}]}, "selector 1 is not a text"),
        ({"checkpoint": False}, "'off', which has no rules"),
        ({"checkpoint": "no"}, "checkpoint='no' is not a bool"),
    ],
)
def test_json_is_read_strictly(change: dict[str, object], message: str) -> None:
    data = {**NAMED["dots"].to_dict(), **change}
    data = {key: value for key, value in data.items() if value is not None}
    with pytest.raises(PolicyError, match=re.escape(message)):
        Policy.from_dict(data)


@pytest.mark.parametrize("text", ["", "save: *", "[]", "3", None])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(PolicyError, match=r"is not JSON|expected an object"):
        Policy.from_json(text)


# Matching


@given(policies(), candidates)
def test_the_first_match_wins(policy: Policy, candidate: Candidate) -> None:
    expected = oracle(str(policy), candidate) if policy.checkpoint else "save"
    assert policy.action(candidate).value == expected


@given(policies(), st.lists(candidates, max_size=4))
def test_unmatched_asks_each_selector_by_itself(policy: Policy, seen: list[Candidate]) -> None:
    alone = [oracle(f"save: {selector}", each) == "save" for selector in policy.selectors for each in seen]
    rows = [alone[i * len(seen) : (i + 1) * len(seen)] for i in range(len(policy.selectors))]
    expected = tuple(selector for selector, row in zip(policy.selectors, rows, strict=True) if not any(row))
    assert policy.unmatched(iter(seen)) == expected


def test_unmatched_does_not_blame_a_selector_that_an_earlier_rule_shadows() -> None:
    seen = [Candidate("ffn/up:dot_general#0", "dot_general")]
    assert Policy.parse("offload: *up*; save: @dots, typo").unmatched(seen) == ("typo",)


@pytest.mark.parametrize(
    ("primitive", "batch", "dots", "without"),
    [
        ("dot_general", False, True, True),
        ("dot_general", True, True, False),
        ("conv_general_dilated", False, True, False),
        ("scaled_matmul_wrapper", False, True, True),
        ("scaled_matmul_wrapper", True, True, False),
        ("ragged_dot_general", False, False, False),
        ("exp", False, False, False),
    ],
)
def test_the_dots_are_those_of_jax(primitive: str, batch: bool, dots: bool, without: bool) -> None:
    candidate = Candidate("a", primitive, has_batch_dims=batch)
    assert (NAMED["dots"].action(candidate) is Action.SAVE) is dots
    assert (NAMED["dots_with_no_batch_dims"].action(candidate) is Action.SAVE) is without
    assert (NAMED["offload_dot_with_no_batch_dims"].action(candidate) is Action.OFFLOAD) is without


def test_the_dots_agree_with_the_installed_jax() -> None:
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    def run(x, w, image, filters):
        batched = jnp.einsum("bij,bjk->bik", x[None], w[None])
        return x @ w, batched, jax.lax.conv(image, filters, (1, 1), "SAME"), jnp.exp(x)

    shapes = [(2, 3), (3, 4), (1, 1, 4, 4), (1, 1, 3, 3)]
    equations = jax.make_jaxpr(run)(*(jnp.zeros(shape) for shape in shapes)).eqns
    counts = {"dots": 0, "dots_with_no_batch_dims": 0}
    for equation in equations:
        dims = equation.params.get("dimension_numbers")
        batch = equation.primitive.name == "dot_general" and bool(dims[1][0])
        candidate = Candidate("a", equation.primitive.name, has_batch_dims=batch)
        for name in counts:
            rule = getattr(jax.checkpoint_policies, f"{name}_saveable")
            saved = rule(equation.primitive, *(v.aval for v in equation.invars), **equation.params)
            assert (NAMED[name].action(candidate) is Action.SAVE) == saved, equation.primitive
            counts[name] += saved
    assert counts == {"dots": 3, "dots_with_no_batch_dims": 1}


def test_inputs_are_selected_by_their_flag_and_by_the_catch_all() -> None:
    given_in, made = Candidate("Block_0:input#0", "input", is_input=True), Candidate("Block_0:exp#0", "exp")
    assert [NAMED["offload_inputs"].action(each).value for each in (given_in, made)] == ["offload", "recompute"]
    assert [NAMED["everything"].action(each).value for each in (given_in, made)] == ["save", "save"]
    assert [NAMED["full"].action(each).value for each in (given_in, made)] == ["recompute", "recompute"]


def test_globs_match_the_whole_name_and_case_counts() -> None:
    up = Candidate("Block_0/ffn/Up:dot_general#0", "dot_general")
    hits = [
        Policy.parse(f"save: {glob}").action(up) is Action.SAVE
        for glob in ("*/Up:*", "*/up:*", "ffn/Up", "Block_?/ffn/Up:dot_general#0", "Block_[1-9]/*")
    ]
    assert hits == [True, False, False, True, False]


def test_a_name_with_brackets_matches_itself() -> None:
    listed = Candidate("layers[12]/q:dot_general#0", "dot_general")
    assert Policy.parse("save: layers[12]/q:dot_general#0").action(listed) is Action.SAVE


# Names


def test_the_named_policies_and_their_texts() -> None:
    assert {name: str(policy) for name, policy in NAMED.items()} == {
        "off": "off",
        "full": "recompute: *",
        "offload_inputs": "offload: @inputs",
        "dots": "save: @dots",
        "dots_with_no_batch_dims": "save: @dots_with_no_batch_dims",
        "offload_dot_with_no_batch_dims": "offload: @dots_with_no_batch_dims",
        "everything": "save: *",
    }
    assert [policy.name for policy in NAMED.values()] == list(NAMED)
    assert all(Policy.parse(name) is not None and as_policy(f" {name}\n") == NAMED[name] for name in NAMED)
    assert Policy.parse("save: @dots, x").name is None


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("checkpoint", "full"),
        ("offload", "offload_inputs"),
        ("nothing_saveable", "full"),
        ("everything_saveable", "everything"),
        ("dots_saveable", "dots"),
        ("checkpoint_dots", "dots"),
        ("dots_with_no_batch_dims_saveable", "dots_with_no_batch_dims"),
        ("checkpoint_dots_with_no_batch_dims", "dots_with_no_batch_dims"),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    assert ALIASES[alias] == name
    assert as_policy(alias) == NAMED[name]


def test_every_policy_that_jax_names_is_taken_or_explained() -> None:
    jax = pytest.importorskip("jax")
    for name, policy in vars(jax.checkpoint_policies).items():
        if isinstance(policy, type):  # returned by factories in later JAX
            continue
        if name in NAMED or name in ALIASES:
            assert isinstance(as_policy(name), Policy)
        else:
            with pytest.raises(UnknownPolicyError, match="makes a policy from arguments"):
                as_policy(name)


def test_off_is_the_only_policy_without_checkpointing() -> None:
    off = NAMED["off"]
    assert [name for name, policy in NAMED.items() if not policy.checkpoint] == ["off"]
    assert off == Policy(checkpoint=False) and (off.rules, off.default) == ((), Action.SAVE)
    for rules, default in (((PolicyRule("save", ["*"]),), "recompute"), ((), "offload")):
        with pytest.raises(PolicyError, match="'off', which has no rules"):
            Policy(rules, default, checkpoint=False)


def test_flags() -> None:
    flags = {name: (policy.offloads, policy.saves_everything) for name, policy in NAMED.items()}
    assert [name for name, (offloads, _) in flags.items() if offloads] == [
        "offload_inputs",
        "offload_dot_with_no_batch_dims",
    ]
    assert [name for name, (_, everything) in flags.items() if everything] == ["off", "everything"]
    assert Policy.parse("save: @dots; save: *").saves_everything
    assert not Policy.parse("recompute: x; save: *").saves_everything


def test_automatic_globs_are_what_only_automatic_names_can_satisfy() -> None:
    text = "save: @dots, @primitive:exp*, attn_out, attn.out-2; offload: ffn*, a?, [ab], a/b, q:dot, k#0; recompute: *"
    assert Policy.parse(text).automatic_globs == ("ffn*", "a?", "[ab]", "a/b", "q:dot", "k#0")


# The default


def test_a_default_becomes_a_last_rule() -> None:
    rule = PolicyRule("offload", ["@dots"])
    assert str(Policy((rule,), default="save")) == "offload: @dots; save: *"
    assert Policy((rule,), default="save") == Policy.parse("offload: @dots; save: *")
    assert Policy.parse("offload: @dots; save: *").default is Action.SAVE
    assert str(Policy((rule,))) == "offload: @dots"
    assert Policy() == NAMED["full"] and Policy(default="save") == NAMED["everything"]


def test_a_default_that_contradicts_the_last_rule_is_refused() -> None:
    with pytest.raises(PolicyError, match=re.escape("default='offload' can never apply after the rule 'save: *'")):
        Policy((PolicyRule("save", ["*"]),), default="offload")


# Composition


@given(policies(), policies(), candidates)
def test_joined_policies_ask_the_left_one_first(left: Policy, right: Policy, candidate: Candidate) -> None:
    closed = bool(left.selectors) and left.selectors[-1] == "*" and set(right.selectors) - set(left.selectors)
    if closed or not (left.checkpoint and right.checkpoint):
        with pytest.raises(PolicyError, match=r"put the left policy last|cannot be joined"):
            left | right
        return
    joined = left | right
    asked = left if any(rule.matches(candidate) for rule in left.rules) else right
    assert joined.action(candidate) is asked.action(candidate)
    assert Policy.parse(str(joined)) == joined


def test_joining_says_what_jax_cannot() -> None:
    joined = NAMED["dots"] | "offload: attention_out, @dots" | "everything"
    assert str(joined) == "save: @dots; offload: attention_out; save: *"
    assert "offload: @inputs" | NAMED["dots"] == Policy.parse("offload: @inputs; save: @dots")
    assert NAMED["dots"] | NAMED["dots"] == NAMED["dots"]
    with pytest.raises(TypeError):
        NAMED["dots"] | 3  # type: ignore[operator]


def test_policies_know_nothing_of_jax() -> None:
    # A stub of the package avoids its root's imports.
    root = Path(remat_jax.policy.__file__).parents[1]
    program = (
        "import sys, types\n"
        "package = types.ModuleType('remat_jax')\n"
        f"package.__path__ = [{str(root)!r}]\n"
        "sys.modules['remat_jax'] = package\n"
        "import remat_jax.policy, remat_jax.errors\n"
        "assert remat_jax.policy.as_policy('full').name == 'full'\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'jax', 'jaxlib', 'flax', 'torch', 'numpy'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
