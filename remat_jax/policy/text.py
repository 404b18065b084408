"""The text form of policies: ``action: selector[, selector]; …``, the texts of the named policies, and their aliases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from remat_jax.errors import PolicyError, UnknownPolicyError, nearest
from remat_jax.policy.rule import Action, PolicyRule, first_unreachable, to_action, what_is_wrong

OFF = "off"

# One difference from JAX: JAX's offload_dot_with_no_batch_dims ignores scaled_matmul_wrapper, which JAX's
# dots_with_no_batch_dims_saveable saves. Here the saving and the offloading policy select the same matmuls.
_NAMED: dict[str, tuple[str, str]] = {
    OFF: (OFF, "no checkpointing: JAX keeps what the backward pass reads"),
    "full": ("recompute: *", "keep a block's inputs, recompute everything else"),
    "offload_inputs": ("offload: @inputs", "as full, with the inputs in host memory"),
    "dots": ("save: @dots", "keep the results of matrix multiplications and convolutions, recompute the rest"),
    "dots_with_no_batch_dims": (
        "save: @dots_with_no_batch_dims",
        "save the results of matmuls with weights, recompute attention's matmuls and the rest",
    ),
    "offload_dot_with_no_batch_dims": (
        "offload: @dots_with_no_batch_dims",
        "what dots_with_no_batch_dims saves, in host memory",
    ),
    "everything": ("save: *", "keep every residual of a checkpointed block, recompute nothing"),
}
NAMED_TEXTS: dict[str, str] = {name: text for name, (text, _) in _NAMED.items()}
MEANINGS: dict[str, str] = {name: meaning for name, (_, meaning) in _NAMED.items()}

ALIASES: dict[str, str] = {
    "checkpoint": "full",
    "offload": "offload_inputs",
    "nothing_saveable": "full",
    "everything_saveable": "everything",
    "dots_saveable": "dots",
    "checkpoint_dots": "dots",
    "dots_with_no_batch_dims_saveable": "dots_with_no_batch_dims",
    "checkpoint_dots_with_no_batch_dims": "dots_with_no_batch_dims",
}

# For each function of jax.checkpoint_policies that returns a policy but is not a policy itself: what to write instead.
FACTORIES: dict[str, str] = {
    "save_only_these_names": "write 'save: first_name, second_name'",
    "save_any_names_but_these": "write 'recompute: first_name, second_name; save: ...' with the names or globs to save",
    "save_and_offload_only_these_names": "write 'save: first_name; offload: second_name'",
    "save_anything_except_these_names": "write 'recompute: first_name, second_name; save: *'",
    "save_from_both_policies": "join two policies with |",
    "offload_dot_with_no_batch_dims": "write 'offload_dot_with_no_batch_dims'",
}

_GRAMMAR = "'action: selector, selector; action: selector', as in 'offload: *ffn/up*; save: @dots'"
_CHOICES = f"The names are {', '.join(NAMED_TEXTS)}; aliases are {', '.join(ALIASES)}; or write {_GRAMMAR}."


def not_a_policy(value: object, argument: str) -> PolicyError:
    """The error for a value whose type cannot be a policy."""
    if value is None:
        return PolicyError(
            f"{argument}=None is read differently by different libraries: as full rematerialisation by JAX, as saving "
            "everything by others. Write 'full' to recompute everything, or 'off' for no checkpointing."
        )
    hint = ""
    if isinstance(value, bool):
        hint = " Write 'full' to recompute everything." if value else " Write 'off' for no checkpointing."
    return PolicyError(f"{argument}={value!r} is of type {type(value).__name__}, not a policy.{hint} {_CHOICES}")


def unknown_name(word: str, argument: str) -> UnknownPolicyError:
    """The error for a single word that is not a policy's name."""
    if word in FACTORIES:
        hint = f" In JAX this function makes a policy from arguments; here {FACTORIES[word]}."
    elif word in tuple(Action):
        hint = f" It is an action and needs selectors, as in '{word}: *'."
    else:
        hint = nearest(word, [*NAMED_TEXTS, *ALIASES])
    return UnknownPolicyError(f"{argument}={word!r} is not the name of a policy.{hint} {_CHOICES}")


def parse_json(text: str, kind: str, writer: str) -> Any:
    """The data in a JSON text that `writer` wrote. `kind` is the name of the data in messages."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise PolicyError(f"{kind}: {text!r} is not JSON ({error}); give what {writer} wrote.") from None


def parse_rules(text: str, argument: str = "policy") -> tuple[PolicyRule, ...]:
    """The rules in ``text``. A final semicolon and whitespace around the parts are allowed.

    An error quotes the malformed part and its position, counted from 1.

    >>> [str(rule) for rule in parse_rules("save: @dots ;recompute:*;")]
    ['save: @dots', 'recompute: *']
    """
    rules: list[PolicyRule] = []
    placed: list[tuple[str, int]] = []
    for part, at in _split(text.rstrip().removesuffix(";"), ";", 0):
        action, selectors = _parse_rule(part, at, text, argument)
        rules.append(PolicyRule(action, tuple(selector for selector, _ in selectors)))
        placed += selectors
    unreachable = first_unreachable([selector for selector, _ in placed])
    if unreachable:
        index, why = unreachable
        raise _malformed(text, argument, placed[index][1], why)
    return tuple(rules)


def _parse_rule(part: str, at: int, text: str, argument: str) -> tuple[Action, list[tuple[str, int]]]:
    if not part:
        raise _malformed(text, argument, at, f"the rule is empty; write {_GRAMMAR}.")
    # Only the first colon ends the action: residual names and @primitive:NAME contain colons too.
    word, colon, listed = part.partition(":")
    if not colon:
        named_text = NAMED_TEXTS.get(ALIASES.get(part, part))
        hint = f" {part!r} is a named policy; inside a text write {named_text!r}." if named_text and named_text != OFF else ""
        raise _malformed(text, argument, at, f"the rule {part!r} has no colon; write {_GRAMMAR}.{hint}")
    try:
        action = to_action(word.strip())
    except PolicyError as error:
        raise _malformed(text, argument, at, f"in the rule {part!r}, {error}") from None
    selectors = list(_split(listed, ",", at + len(word) + 1))
    for selector, place in selectors:
        wrong = what_is_wrong(selector)
        if wrong:
            raise _malformed(text, argument, place, f"in the rule {part!r}, the selector {selector!r} {wrong}")
    return action, selectors


def _split(text: str, separator: str, at: int) -> Iterator[tuple[str, int]]:
    """The stripped parts of ``text``, each with its offset; ``text`` itself begins at ``at``."""
    for part in text.split(separator):
        yield part.strip(), at + len(part) - len(part.lstrip())
        at += len(part) + len(separator)


def _malformed(text: str, argument: str, at: int, why: str) -> PolicyError:
    return PolicyError(f"{argument}={text!r}, at character {at + 1}: {why}")
