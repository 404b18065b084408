"""Errors of wrong policies: each message names the value, the place, and what to write instead."""

from __future__ import annotations

import re

import pytest

from remat_jax.errors import PolicyError, UnknownPolicyError
from remat_jax.policy import ALIASES, NAMED, Action, Policy, PolicyRule, as_policy


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


def test_policies_and_jax_policies_are_returned_as_they_are() -> None:
    jax = pytest.importorskip("jax")
    names = jax.checkpoint_policies
    for value in (
        NAMED["dots"],
        names.dots_saveable,
        names.nothing_saveable,
        names.save_only_these_names("a"),
        names.offload_dot_with_no_batch_dims("device", "pinned_host"),
        lambda *_, **__: True,
    ):
        assert as_policy(value) is value


def test_a_jax_function_that_makes_policies_is_not_one() -> None:
    names = pytest.importorskip("jax").checkpoint_policies
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


@pytest.mark.parametrize("rules", ["save: @dots", ["save: @dots"], (("save", "@dots"),), None, 3])
def test_rules_of_another_kind_are_refused(rules: object) -> None:
    with pytest.raises(PolicyError, match=r"is not a sequence of PolicyRule; for a text, use Policy.parse"):
        Policy(rules)  # type: ignore[arg-type]


def test_unreachable_rules_are_refused_without_a_text_too() -> None:
    with pytest.raises(PolicyError, match="the selector 'a' is never reached"):
        Policy((PolicyRule("save", ["*"]), PolicyRule("offload", ["a"])))
