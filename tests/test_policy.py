"""Policies as data: text, JSON, matching, names, composition and errors."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from fnmatch import fnmatchcase

import hypothesis.strategies as st
import pytest
from hypothesis import given

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


@given(policies(selectors | odd_names))
def test_text_and_json_give_the_policy_back(policy: Policy) -> None:
    same = [Policy.parse(str(policy)), Policy.from_json(policy.to_json()), eval(repr(policy))]
    same += [pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)]
    assert same == [policy] * 5 and set(same) == {policy}
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.rules = ()  # type: ignore[misc]


@given(policies(), st.sampled_from(["", " ", "\n", "\t  "]), st.booleans())
def test_whitespace_and_a_closing_semicolon_do_not_count(policy: Policy, space: str, closed: bool) -> None:
    if not policy.checkpoint:
        return
    rules = [
        f"{space}{rule.action.value}{space}:{space}" + f"{space},{space}".join(rule.selectors) + space for rule in policy.rules
    ]
    assert Policy.parse(";".join(rules) + (f";{space}" if closed else "")) == policy


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


def test_what_is_no_json_object_is_refused() -> None:
    for text in ("", "save: *", "[]", "3", None):
        with pytest.raises(PolicyError, match=r"is not JSON|expected an object"):
            Policy.from_json(text)  # type: ignore[arg-type]


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


def test_the_dots_agree_with_the_installed_jax() -> None:
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    def run(x, w, image, filters):
        batched = jnp.einsum("bij,bjk->bik", x[None], w[None])
        return x @ w, batched, jax.lax.conv(image, filters, (1, 1), "SAME"), jnp.exp(x)

    shapes = [(2, 3), (3, 4), (1, 1, 4, 4), (1, 1, 3, 3)]
    counts = {"dots": 0, "dots_with_no_batch_dims": 0}
    for equation in jax.make_jaxpr(run)(*map(jnp.zeros, shapes)).eqns:
        batch = equation.primitive.name == "dot_general" and bool(equation.params["dimension_numbers"][1][0])
        candidate = Candidate("a", equation.primitive.name, has_batch_dims=batch)
        for name in counts:
            rule = getattr(jax.checkpoint_policies, f"{name}_saveable")
            saved = rule(equation.primitive, *(v.aval for v in equation.invars), **equation.params)
            assert (NAMED[name].action(candidate) is Action.SAVE) == saved, equation.primitive
            counts[name] += saved
    assert counts == {"dots": 3, "dots_with_no_batch_dims": 1}


def test_globs_match_the_whole_name_and_case_counts() -> None:
    def matches(glob: str, name: str = "Block_0/ffn/Up:dot_general#0") -> bool:
        return Policy.parse(f"save: {glob}").action(Candidate(name, "dot_general")) is Action.SAVE

    globs = ("*/Up:*", "*/up:*", "ffn/Up", "Block_?/ffn/Up:dot_general#0", "Block_[1-9]/*")
    assert list(map(matches, globs)) == [True, False, False, True, False]
    assert matches("layers[12]/q:dot_general#0", name="layers[12]/q:dot_general#0"), "a name with brackets matches itself"


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


def test_aliases() -> None:
    expected = {
        "checkpoint": "full",
        "offload": "offload_inputs",
        "nothing_saveable": "full",
        "everything_saveable": "everything",
        "dots_saveable": "dots",
        "checkpoint_dots": "dots",
        "dots_with_no_batch_dims_saveable": "dots_with_no_batch_dims",
        "checkpoint_dots_with_no_batch_dims": "dots_with_no_batch_dims",
    }
    assert expected.items() <= ALIASES.items()
    assert all(as_policy(alias) == NAMED[name] for alias, name in ALIASES.items())


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
    assert [name for name, policy in NAMED.items() if not policy.checkpoint] == ["off"]
    assert NAMED["off"] == Policy(checkpoint=False) and (NAMED["off"].rules, NAMED["off"].default) == ((), Action.SAVE)
    for rules, default in (((PolicyRule("save", ["*"]),), "recompute"), ((), "offload")):
        with pytest.raises(PolicyError, match="'off', which has no rules"):
            Policy(rules, default, checkpoint=False)


def test_flags() -> None:
    assert [name for name, policy in NAMED.items() if policy.offloads] == ["offload_inputs", "offload_dot_with_no_batch_dims"]


def test_automatic_globs_are_what_only_automatic_names_can_satisfy() -> None:
    text = "save: @dots, @primitive:exp*, attn_out, attn.out-2; offload: ffn*, a?, [ab], a/b, q:dot, k#0; recompute: *"
    assert Policy.parse(text).automatic_globs == ("ffn*", "a?", "[ab]", "a/b", "q:dot", "k#0")


def test_a_default_becomes_a_last_rule() -> None:
    rule, closed = PolicyRule("offload", ["@dots"]), Policy.parse("offload: @dots; save: *")
    assert Policy((rule,), default="save") == closed and closed.default is Action.SAVE
    assert [str(closed), str(Policy((rule,)))] == ["offload: @dots; save: *", "offload: @dots"]
    assert Policy() == NAMED["full"] and Policy(default="save") == NAMED["everything"]
    with pytest.raises(PolicyError, match=re.escape("default='offload' can never apply after the rule 'save: *'")):
        Policy((PolicyRule("save", ["*"]),), default="offload")


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "policy='', at character 1: the rule is empty"),
        (" ; ", "at character 2: the rule is empty"),
        ("save: a;;", "policy='save: a;;', at character 9: the rule is empty"),
        ("save: a; ; save: b", "at character 10: the rule is empty"),
        ("save @dots", "at character 1: the rule 'save @dots' has no colon"),
        ("save: a; dots", "at character 10: the rule 'dots' has no colon"),
        ("save: a; dots", "inside a text write 'save: @dots'"),
        ("save: a;  sav: b", "at character 11: in the rule 'sav: b', 'sav' is not an action"),
        ("save: a;  sav: b", "Did you mean 'save'?"),
        ("ffn/up:dot_general", "'ffn/up' is not an action; write one of save, offload, recompute"),
        (": a", "'' is not an action"),
        ("save:", "in the rule 'save:', the selector '' is empty"),
        ("save: a,, b", "at character 9: in the rule 'save: a,, b', the selector '' is empty"),
        ("save: a,", "the selector '' is empty"),
        ("save: a; offload: @dotz", "at character 19: in the rule 'offload: @dotz', the selector '@dotz' is not"),
        ("save: @dotz", "Did you mean '@dots'?"),
        ("save: @primitive:", "the selector '@primitive:' names no primitive"),
        ("save: a, b, a", "at character 13: 'a' is never reached: the same selector comes before it"),
        ("save: a; recompute: a", "at character 21: 'a' is never reached"),
        ("save: *; offload: x", "at character 19: 'x' is never reached: the earlier selector '*' matches every residual"),
        ("save: **, x", "at character 11: 'x' is never reached: the earlier selector '**' matches every residual"),
    ],
)
def test_malformed_text_is_quoted_with_its_place(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)) as caught:
        as_policy(text)
    assert not isinstance(caught.value, UnknownPolicyError)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("dot", "Did you mean 'dots'?"),
        ("OFF", "Did you mean 'off'?"),
        ("dots_savable", "Did you mean 'dots_saveable'?"),
        ("offload_dots_with_no_batch_dims", "Did you mean 'offload_dot_with_no_batch_dims'?"),
        ("save", "It is an action and needs selectors, as in 'save: *'."),
        ("save_only_these_names", "here write 'save: first_name, second_name'"),
    ],
)
def test_unknown_names_list_the_choices_and_the_nearest(word: str, hint: str) -> None:
    with pytest.raises(UnknownPolicyError, match=re.escape(hint)) as caught:
        as_policy(word, argument="use_policy")
    text = str(caught.value)
    assert text.startswith(f"use_policy={word!r} is not the name of a policy.")
    assert all(name in text for name in [*NAMED, *ALIASES])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "blocks=None is read differently by different libraries"),
        (None, "Write 'full' to recompute everything, or 'off' for no checkpointing."),
        (True, "blocks=True is of type bool, not a policy. Write 'full'"),
        (False, "blocks=False is of type bool, not a policy. Write 'off'"),
        ([], "blocks=[] is of type list, not a policy. The names are off, full"),
        ({"a": "full"}, "blocks={'a': 'full'} is of type dict, not a policy."),
        (1, "blocks=1 is of type int, not a policy. The names are"),
        (Policy, "is of type type, not a policy"),
    ],
)
def test_what_is_not_a_policy_is_refused(value: object, message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)):
        as_policy(value, argument="blocks")  # type: ignore[arg-type]


def test_policies_of_jax_are_returned_as_they_are_and_functions_that_make_them_are_refused() -> None:
    names = pytest.importorskip("jax").checkpoint_policies
    for value in (NAMED["dots"], names.dots_saveable, names.save_only_these_names("a"), lambda *_, **__: True):
        assert as_policy(value) is value
    for factory in (names.save_only_these_names, names.offload_dot_with_no_batch_dims, names.save_from_both_policies):
        with pytest.raises(PolicyError, match="is not a JAX policy but a function that makes one: call it, or"):
            as_policy(factory)


@pytest.mark.parametrize(
    ("selectors", "message"),
    [
        ((), "selectors=() for 'save'"),
        ("dots", "selectors='dots' is not a sequence of texts; write ('dots',)."),
        (None, "selectors=None is not a sequence of texts"),
        (("a,b",), "selector 'a,b' has a comma, a semicolon or outer whitespace"),
        (("a;b",), "selector 'a;b' has a comma, a semicolon or outer whitespace"),
        ((" a",), "selector ' a' has a comma, a semicolon or outer whitespace"),
        (("@typo",), "selector '@typo' is not a known selector"),
        ((" ",), "selector ' ' is empty"),
    ],
)
def test_rules_refuse_what_no_text_could_say(selectors: object, message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)):
        PolicyRule(Action.SAVE, selectors)  # type: ignore[arg-type]


def test_rules_without_a_text_are_checked_too() -> None:
    with pytest.raises(PolicyError, match="the selector 'a' is never reached"):
        Policy((PolicyRule("save", ["*"]), PolicyRule("offload", ["a"])))
    for rules in ("save: @dots", ["save: @dots"], (("save", "@dots"),), None, 3):
        with pytest.raises(PolicyError, match=r"is not a sequence of PolicyRule; for a text, use Policy.parse"):
            Policy(rules)  # type: ignore[arg-type]
