"""One policy text, two parsers: `remat_jax.policy` and `torch_ref.policy` agree on every text and every array."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remat_jax import policy as jax_side
from remat_jax.errors import PolicyError as JaxPolicyError
from remat_jax.policy.text import NAMED_TEXTS
from torch_ref import policy as torch_side

Rules = list[tuple[str, tuple[str, ...]]]

PRIMITIVES = ["dot_general", "conv_general_dilated", "scaled_matmul_wrapper", "exp", "input", "name", "native_layer_norm"]
PATHS = ["", "Block_0", "decoder/layers/0/self_attn", "decoder/layers/10/ffn/0", "a[0]"]
NAMES = [f"{path}:{primitive}#{k}" for path in PATHS for primitive in PRIMITIVES[:5] for k in (0, 1, 12)]
GLOBS = ["*", "**", "*ffn*", "*self_attn*:dot_general*", "attention_out", "?", "[ab]*", "[!d]*", "a[0]:exp#0", "*#1", "A*"]
AT = ["@inputs", "@dots", "@dots_with_no_batch_dims", "@primitive:exp", "@primitive:dot*", "@primitive:", "@dot", "@", "@Dots"]
NAMED = [*NAMED_TEXTS, *jax_side.ALIASES, "offload_dot", "none", "None", "Full", "save"]

selectors = st.sampled_from([*GLOBS, *AT, *NAMES[:6]]) | st.text(alphabet="*?[]!@:#/.,; abe", max_size=6)
blanks = st.sampled_from(["", "", "", " ", "\n", "\t "])


@st.composite
def rules(draw: Any) -> str:
    action = draw(st.sampled_from(["save", "offload", "recompute"]) | st.sampled_from(["Save", "keep", "", "off", "@dots"]))
    listed = ",".join(draw(blanks) + selector + draw(blanks) for selector in draw(st.lists(selectors, max_size=3)))
    return draw(blanks) + action + draw(blanks) + draw(st.sampled_from([":", ":", ":", "", "::"])) + listed


wrong_texts = st.lists(rules(), max_size=4).map(";".join) | st.text(max_size=8)
# Most texts of `rules` are malformed; these are mostly well-formed, so that their selections are compared too.
good_selectors = st.sampled_from([*GLOBS, *AT[:5], *NAMES[:6]])
good_rules = st.tuples(st.sampled_from(["save", "offload", "recompute"]), st.lists(good_selectors, min_size=1, max_size=3))
good_texts = st.lists(good_rules.map(lambda rule: f"{rule[0]}: {', '.join(rule[1])}"), min_size=1, max_size=3).map("; ".join)
texts = good_texts | wrong_texts | st.tuples(blanks, st.sampled_from(NAMED), blanks, st.sampled_from(["", ";"])).map("".join)
candidates = st.builds(
    dict,
    name=st.sampled_from(NAMES) | st.text(alphabet="abde/:#01[]*?", max_size=8),
    primitive=st.sampled_from(PRIMITIVES) | st.text(alphabet="dotexp_", max_size=8),
    is_input=st.booleans(),
    has_batch_dims=st.booleans(),
)


def of_jax(text: Any) -> Rules | None:
    try:
        policy = jax_side.Policy.parse(text)
    except JaxPolicyError:
        return None
    return [(rule.action.value, rule.selectors) for rule in policy.rules]


def of_torch(text: Any) -> Rules | None:
    try:
        policy = torch_side.Policy.parse(text)
    except torch_side.PolicyError:
        return None
    return [(rule.action, rule.selectors) for rule in policy.rules]


@settings(max_examples=500, deadline=None)
@given(texts)
@example("save: *; ")
@example("save: @primitive: exp")
@example("recompute: *; save: x")
@example("")
@example(";")
@example("off;")
def test_both_readers_find_the_same_rules_or_both_refuse(text: str) -> None:
    assert of_jax(text) == of_torch(text)


@settings(max_examples=500, deadline=None)
@given(good_texts, st.lists(candidates, min_size=1, max_size=5))
@example("save: a[0]:exp#0", [{"name": "a[0]:exp#0", "primitive": "exp"}, {"name": "a0:exp#0", "primitive": "exp"}])
def test_both_decide_the_same_for_every_array(text: str, arrays: list[dict[str, Any]]) -> None:
    if of_jax(text) is None:
        return
    jax_policy, torch_policy = jax_side.Policy.parse(text), torch_side.Policy.parse(text)
    assert str(jax_policy) == str(torch_policy)
    assert (jax_policy.name, jax_policy.offloads) == (torch_policy.name, torch_policy.offloads)
    for array in arrays:
        action = torch_policy.action(torch_side.Candidate(**array))
        assert action == jax_policy.action(jax_side.Candidate(**array)).value, array


def test_the_names_the_aliases_and_what_they_stand_for() -> None:
    assert torch_side.NAMED == NAMED_TEXTS and torch_side.ALIASES == jax_side.ALIASES
    for word in [*NAMED_TEXTS, *jax_side.ALIASES]:
        assert of_torch(word) == of_jax(word) is not None
        assert torch_side.Policy.parse(word).name == jax_side.Policy.parse(word).name
        assert torch_side.Policy.parse(word).is_off is not jax_side.Policy.parse(word).checkpoint


def test_what_is_no_text_is_refused_by_both() -> None:
    for value in (None, True, 3, b"full", ["dots"], lambda: "dots"):
        assert of_jax(value) is of_torch(value) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dotz", "policy is 'dotz', where 'dotz' is neither a name nor a rule. Give one of off, full, "),
        ("dots; save: x", "Inside a text the policy 'dots' is written 'save: @dots'"),
        ("keep: x", "the action is 'keep', expected one of save, offload, recompute"),
        ("save: x,, y", "'' is not a selector, expected a glob on names"),
        ("save: @dot", "'@dot' is not a selector, .* @dots_with_no_batch_dims, @convs, @primitive:NAME"),
        ("save: x; offload: x", "'x' is never reached, as it occurs twice"),
        ("save: *, x", "'x' is never reached, as '\\*' before it matches every array"),
        (None, "policy is None, of type NoneType, expected a text"),
    ],
)
def test_a_wrong_policy_says_what_is_wrong(text: Any, says: str) -> None:
    with pytest.raises(torch_side.PolicyError, match=says):
        torch_side.Policy.parse(text)


def test_a_policy_made_of_rules_is_checked_like_a_text() -> None:
    rule = torch_side.Rule
    assert torch_side.Policy((rule("save", ("@dots", "x")),)) == torch_side.Policy.parse("save: @dots, x")
    wrong = [("keep", ("x",)), ("save", ("x, y",)), ("save", ()), ("save", ("x; save: y",)), ("save", (" x",))]
    for action, selectors in wrong:
        with pytest.raises(torch_side.PolicyError):
            torch_side.Policy((rule(action, selectors),))


def test_only_a_policy_for_what_a_block_computes_looks_inside() -> None:
    inside = ["everything", "recompute: *ffn*", "offload: @inputs; save: @dots", "offload: @inputs; save: *"]
    texts = ["full", "offload: @inputs", "save: @inputs; recompute: *", *inside]
    assert [text for text in texts if torch_side.Policy.parse(text).looks_inside] == inside
