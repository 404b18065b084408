"""Policies for `torch_ref`, with an independent parser of `remat_jax`'s policy texts.

A policy decides what happens to each array of a block between the forward and the backward pass. Its text is
`action: selector[, selector]; …`; the first matching rule wins, and arrays without a matching rule are recomputed.

| part | possible values |
| --- | --- |
| action | `save` (on the device), `offload` (in host memory), `recompute` |
| selector | a glob on names, `@inputs`, `@dots`, `@dots_with_no_batch_dims`, `@convs`, `@primitive:NAME` |
| instead of a text | one of `NAMED`, or one of JAX's spellings in `ALIASES` |
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch_ref.errors import PolicyError

SAVE, OFFLOAD, RECOMPUTE = ACTIONS = ("save", "offload", "recompute")
NAMED = {
    "off": "off",
    "full": "recompute: *",
    "offload_inputs": "offload: @inputs",
    "dots": "save: @dots",
    "dots_with_no_batch_dims": "save: @dots_with_no_batch_dims",
    "offload_dot_with_no_batch_dims": "offload: @dots_with_no_batch_dims",
    "everything": "save: *",
}
ALIASES = {
    "checkpoint": "full",
    "offload": "offload_inputs",
    "nothing_saveable": "full",
    "everything_saveable": "everything",
    "dots_saveable": "dots",
    "checkpoint_dots": "dots",
    "dots_with_no_batch_dims_saveable": "dots_with_no_batch_dims",
    "checkpoint_dots_with_no_batch_dims": "dots_with_no_batch_dims",
}
INPUTS, PRIMITIVE = "@inputs", "@primitive:"
# The primitives of JAX's dots_saveable; JAX's dots_with_no_batch_dims_saveable leaves out convolutions.
_DOTS = ("dot_general", "conv_general_dilated", "scaled_matmul_wrapper")
_GRAMMAR = "'action: selector, selector; action: selector', as in 'offload: *ffn*; save: @dots'"


@dataclass(frozen=True)
class Candidate:
    """One array that a policy can select.

    Attributes:
        name: `module/path:primitive#k`.
        primitive: JAX's name for the operation that computes the array, else ATen's; `input` for an argument of the block.
        is_input: whether the array is an argument of the block.
        has_batch_dims: whether the array is the result of a matmul with batch dimensions.
    """

    name: str
    primitive: str
    is_input: bool = False
    has_batch_dims: bool = False


@dataclass(frozen=True)
class Rule:
    """An action, and the selectors of the arrays that get this action."""

    action: str
    selectors: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.action}: {', '.join(self.selectors)}"


@dataclass(frozen=True)
class Policy:
    """Ordered rules, made by `Policy.parse`. A policy without rules is `off`: no checkpointing at all.

    >>> policy = Policy.parse("offload: *ffn*:dot_general*; save: @dots")
    >>> policy.action(Candidate("ffn/0:dot_general#0", "dot_general"))
    'offload'
    >>> policy.action(Candidate("ffn/1:relu#0", "relu"))
    'recompute'
    >>> Policy.parse("dots_saveable").name, Policy.parse("off").is_off
    ('dots', True)
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        text = str(self)
        if self.rules and _read_rules(text, "Policy") != self.rules:
            raise PolicyError(f"Policy has rules that cannot be written: {self.rules!r}. Use Policy.parse, as for {text!r}.")

    @classmethod
    def parse(cls, text: Policy | str, argument: str = "policy") -> Policy:
        """Read a policy's text or name; a `Policy` is returned unchanged.

        Raises:
            PolicyError: if the text is malformed; the message names `argument`, the wrong part, and the expected form.
        """
        if isinstance(text, Policy):
            return text
        if not isinstance(text, str):
            raise PolicyError(f"{argument} is {text!r}, of type {type(text).__name__}, expected a text. {choices()}")
        word = text.strip()
        meant = NAMED.get(ALIASES.get(word, word), text)
        return cls() if meant == "off" else cls(_read_rules(meant, argument))

    def __str__(self) -> str:
        return "; ".join(map(str, self.rules)) or "off"

    @property
    def name(self) -> str | None:
        """The name of the named policy with the same rules; None if there is none."""
        return next((name for name, text in NAMED.items() if text == str(self)), None)

    @property
    def is_off(self) -> bool:
        """Whether the policy is `off`: no checkpointing at all."""
        return not self.rules

    @property
    def offloads(self) -> bool:
        """Whether any rule offloads."""
        return any(rule.action == OFFLOAD for rule in self.rules)

    @property
    def looks_inside(self) -> bool:
        """Whether rules select arrays that the block computes; rules on `@inputs` and a final `recompute: *` do not count."""
        selectors = [selector for rule in self.rules for selector in rule.selectors if selector != INPUTS]
        return bool(selectors) and not (len(selectors) == 1 and is_catch_all(selectors[0]) and self._recomputes_the_rest)

    @property
    def _recomputes_the_rest(self) -> bool:
        return self.rules[-1].action == RECOMPUTE

    def action(self, candidate: Candidate) -> str:
        """The action of the first rule that matches; `recompute` if no rule matches."""
        return _action(self, candidate)


@functools.lru_cache(maxsize=1 << 16)
def _action(policy: Policy, candidate: Candidate) -> str:
    hits = (rule.action for rule in policy.rules if any(matches(selector, candidate) for selector in rule.selectors))
    return next(hits, RECOMPUTE)


def matches(selector: str, candidate: Candidate) -> bool:
    """Whether a selector selects an array. A glob must match the whole name, and is case-sensitive.

    >>> matches("*/out_proj:*", Candidate("self_attn/out_proj:dot_general#0", "dot_general"))
    True
    """
    if selector == INPUTS:
        return candidate.is_input
    if selector == "@dots":
        return candidate.primitive in _DOTS
    if selector == "@convs":
        return candidate.primitive == _DOTS[1]
    if selector == "@dots_with_no_batch_dims":
        return candidate.primitive in _DOTS and candidate.primitive != _DOTS[1] and not candidate.has_batch_dims
    if selector.startswith(PRIMITIVE):
        return fnmatchcase(candidate.primitive, selector.removeprefix(PRIMITIVE))
    return selector == candidate.name or fnmatchcase(candidate.name, selector)


def is_catch_all(selector: str) -> bool:
    """Whether a selector is the glob that matches every array, including arguments."""
    return set(selector) == {"*"}


def choices() -> str:
    """For error messages: a sentence that lists the valid policies."""
    return f"Give one of {', '.join(NAMED)} (also {', '.join(ALIASES)}), or write {_GRAMMAR}."


@functools.lru_cache(maxsize=1024)
def _read_rules(text: str, argument: str) -> tuple[Rule, ...]:
    rules = tuple(_read_rule(part.strip(), text, argument) for part in text.rstrip().removesuffix(";").split(";"))
    _check_reached([selector for rule in rules for selector in rule.selectors], text, argument)
    return rules


def _read_rule(part: str, text: str, argument: str) -> Rule:
    # Names and @primitive:NAME contain colons too; the first colon ends the action.
    action, colon, listed = part.partition(":")
    if not colon:
        hint = f" Inside a text the policy {part!r} is written {NAMED[part]!r}." if part in NAMED and part != text else ""
        raise PolicyError(f"{argument} is {text!r}, where {part!r} is neither a name nor a rule.{hint} {choices()}")
    action = action.strip()
    if action not in ACTIONS:
        raise PolicyError(f"{argument} is {text!r}, where the action is {action!r}, expected one of {', '.join(ACTIONS)}.")
    selectors = tuple(selector.strip() for selector in listed.split(","))
    for selector in selectors:
        _check_selector(selector, text, argument)
    return Rule(action, selectors)


def _check_selector(selector: str, text: str, argument: str) -> None:
    selectors = (INPUTS, "@dots", "@dots_with_no_batch_dims", "@convs")
    named = selector.startswith(PRIMITIVE) and selector.removeprefix(PRIMITIVE)
    # A selector with a blank between the colon and the name would match nothing.
    if selector and (not selector.startswith("@") or selector in selectors or (named and named == named.strip())):
        return
    raise PolicyError(
        f"{argument} is {text!r}, where {selector!r} is not a selector, expected a glob on names such as '*ffn*', or one of "
        f"{', '.join(selectors)}, {PRIMITIVE}NAME."
    )


def _check_reached(selectors: Iterable[str], text: str, argument: str) -> None:
    before: set[str] = set()
    for selector in selectors:
        caught = next(filter(is_catch_all, before), None)
        if selector in before or caught:
            why = "it occurs twice" if selector in before else f"{caught!r} before it matches every array"
            raise PolicyError(f"{argument} is {text!r}, where {selector!r} is never reached, as {why}; remove one of them.")
        before.add(selector)
