"""The policy itself: ordered rules from residuals to actions, as plain frozen data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from remat_jax.errors import PolicyError
from remat_jax.policy.rule import (
    Action,
    Candidate,
    PolicyRule,
    first_unreachable,
    is_automatic_glob,
    is_catch_all,
    matches,
    to_action,
)
from remat_jax.policy.text import ALIASES, NAMED_TEXTS, OFF, not_a_policy, parse_json, parse_rules, unknown_name

VERSION = 1


@dataclass(frozen=True, repr=False)
class Policy:
    """Ordered rules that say what happens to each residual; the first rule that matches wins.

    A policy is written as text, ``action: selector[, selector]; …``, with the actions ``save`` (device memory),
    ``offload`` (host memory) and ``recompute``. A selector is a glob on residual names, ``@inputs``, ``@dots``,
    ``@dots_with_no_batch_dims``, ``@convs`` (convolutions) or ``@primitive:NAME``. For a comma or a semicolon in a residual
    name, write ``?`` in the glob.
    ``@dots`` and ``@dots_with_no_batch_dims`` select what JAX's ``dots_saveable`` and ``dots_with_no_batch_dims_saveable``
    save. ``@dots`` includes convolutions; ``@dots_with_no_batch_dims`` does not.

    Like ``jax.checkpoint``, every policy keeps the inputs of a block. For an input, ``recompute`` means ``save``; only
    ``offload`` moves an input.

    Attributes:
        rules: the rules, in order. Only the last rule can be ``*``, which matches every residual.
        default: the action for a residual that no rule but ``*`` matches. If the last rule is ``*``, its action is the default.
            Otherwise the default is added as a last rule ``*``, unless it is ``recompute`` and there are other rules.
        checkpoint: False for ``off``: no checkpointing and no rules.

    Raises:
        PolicyError: a rule that can never be reached, a default that contradicts the rules, or ``off`` with rules.

    >>> policy = Policy.parse("offload: *ffn/up*; save: @dots_with_no_batch_dims; recompute: *")
    >>> policy.action(Candidate("Block_0/ffn/up:dot_general#0", "dot_general")).value
    'offload'
    >>> policy.action(Candidate("Block_0/ffn:gelu#0", "gelu")).value
    'recompute'
    >>> Policy.parse("dots").name, str(Policy.parse("dots"))
    ('dots', 'save: @dots')
    """

    rules: tuple[PolicyRule, ...] = ()
    default: Action = Action.RECOMPUTE
    checkpoint: bool = True

    def __post_init__(self) -> None:
        rules, default = _checked_rules(self.rules), to_action(self.default)
        if not isinstance(self.checkpoint, bool):
            raise PolicyError(f"Policy: checkpoint={self.checkpoint!r} is not a bool; give True, or False for 'off'.")
        if not self.checkpoint:
            if rules or default is Action.OFFLOAD:
                raise PolicyError(
                    f"Policy: checkpoint=False is 'off', which has no rules, but rules={rules!r}, "
                    f"default={default.value!r} were given; leave them out, or leave out checkpoint=False."
                )
            default = Action.SAVE
        elif rules and is_catch_all(rules[-1].selectors[-1]):
            if default not in (Action.RECOMPUTE, rules[-1].action):
                raise PolicyError(
                    f"Policy: default={default.value!r} can never apply after the rule {str(rules[-1])!r}; "
                    "leave out one of the two."
                )
            default = rules[-1].action
        elif not rules or default is not Action.RECOMPUTE:
            rules += (PolicyRule(default, ("*",)),)
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "default", default)

    @classmethod
    def parse(cls, text: str, argument: str = "policy") -> Policy:
        """The policy with this text or name. ``argument`` is the name of ``text`` in error messages.

        Raises:
            UnknownPolicyError: ``text`` is a single word that is not a policy's name.
            PolicyError: ``text`` is not a string, or is malformed.

        >>> Policy.parse("offload: attention_out; save: @dots;")
        Policy.parse('offload: attention_out; save: @dots')
        """
        if not isinstance(text, str):
            raise not_a_policy(text, argument)
        word = text.strip()
        definition = NAMED_TEXTS.get(ALIASES.get(word, word), text)
        if definition == OFF:
            return cls(checkpoint=False)
        if word and definition is text and not any(mark in word for mark in ":;,") and len(word.split()) == 1:
            raise unknown_name(word, argument)
        return cls(parse_rules(definition, argument))

    def __str__(self) -> str:
        return "; ".join(map(str, self.rules)) if self.checkpoint else OFF

    def __repr__(self) -> str:
        return f"Policy.parse({str(self)!r})"

    @property
    def name(self) -> str | None:
        """The policy's name, or None if no named policy equals it."""
        text = str(self)
        return next((name for name, spelled in NAMED_TEXTS.items() if spelled == text), None)

    @property
    def selectors(self) -> tuple[str, ...]:
        """All selectors, in the order in which they are tried."""
        return tuple(selector for rule in self.rules for selector in rule.selectors)

    @property
    def offloads(self) -> bool:
        """Whether any rule offloads."""
        return any(rule.action is Action.OFFLOAD for rule in self.rules)

    @property
    def automatic_globs(self) -> tuple[str, ...]:
        """The selectors that need automatic residual names: neither ``@…``, nor ``*``, nor a plain name.

        >>> Policy.parse("save: @dots, attention_out; offload: *ffn/up*; recompute: *").automatic_globs
        ('*ffn/up*',)
        """
        return tuple(filter(is_automatic_glob, self.selectors))

    @property
    def kept_globs(self) -> tuple[str, ...]:
        """The `automatic_globs` of rules that save or offload."""
        kept = (rule.selectors for rule in self.rules if rule.action is not Action.RECOMPUTE)
        return tuple(filter(is_automatic_glob, itertools.chain.from_iterable(kept)))

    @property
    def kept_names(self) -> tuple[str, ...]:
        """The selectors of rules that save or offload, if all of them are plain names; else empty.

        >>> Policy.parse("save: attention_out, mlp_out").kept_names, Policy.parse("save: attention_out, @dots").kept_names
        (('attention_out', 'mlp_out'), ())
        """
        kept = [selector for rule in self.rules if rule.action is not Action.RECOMPUTE for selector in rule.selectors]
        plain = all(not selector.startswith("@") and not is_automatic_glob(selector) for selector in kept)
        return tuple(kept) if plain and not any(map(is_catch_all, kept)) else ()

    def action(self, candidate: Candidate) -> Action:
        """The action of the first rule that matches ``candidate``, else the default."""
        return next((rule.action for rule in self.rules if rule.matches(candidate)), self.default)

    def unmatched(self, candidates: Iterable[Candidate]) -> tuple[str, ...]:
        """The selectors that match none of ``candidates``. Each selector is tested alone, without the earlier rules.

        >>> Policy.parse("save: atention_out, @dots").unmatched([Candidate("q:dot_general#0", "dot_general")])
        ('atention_out',)
        """
        listed = tuple(candidates)
        return tuple(selector for selector in self.selectors if not any(matches(selector, candidate) for candidate in listed))

    def __or__(self, other: Policy | str) -> Policy:
        """This policy's rules, then the rules of ``other``; this policy decides where both match.

        Raises:
            PolicyError: either policy is ``off``, or this policy has a rule ``*``, which hides every rule of ``other``.

        >>> Policy.parse("save: @dots") | "offload: @inputs"
        Policy.parse('save: @dots; offload: @inputs')
        """
        if isinstance(other, str):
            other = Policy.parse(other)
        return _join(self, other) if isinstance(other, Policy) else NotImplemented

    def __ror__(self, other: str) -> Policy:
        return _join(Policy.parse(other), self) if isinstance(other, str) else NotImplemented

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: ``version``, ``checkpoint`` and ``rules``.

        >>> Policy.parse("save: @dots").to_dict()
        {'version': 1, 'checkpoint': True, 'rules': [{'action': 'save', 'selectors': ['@dots']}]}
        """
        rules = [{"action": rule.action.value, "selectors": list(rule.selectors)} for rule in self.rules]
        return {"version": VERSION, "checkpoint": self.checkpoint, "rules": rules}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Policy:
        """The policy that ``to_dict`` wrote as ``data``; `PolicyError` for anything else."""
        _check_keys(data, ("version", "checkpoint", "rules"), "a policy")
        if type(data["version"]) is not int or data["version"] != VERSION:
            raise PolicyError(
                f"a policy: version={data['version']!r}, and this release reads version {VERSION} only; "
                "write the file again with this release."
            )
        if not isinstance(data["rules"], list) or (data["checkpoint"] is True and not data["rules"]):
            raise PolicyError(
                f"a policy: rules={data['rules']!r} is not a list of rules; give one or more, "
                "or \"checkpoint\": false for 'off'."
            )
        for rule in data["rules"]:
            _check_keys(rule, ("action", "selectors"), "a rule of a policy")
        return cls(tuple(PolicyRule(**rule) for rule in data["rules"]), checkpoint=data["checkpoint"])

    def to_json(self) -> str:
        """``to_dict`` as one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """The policy that ``to_json`` wrote as ``text``; `PolicyError` for anything else.

        >>> Policy.from_json(Policy.parse("full").to_json()).name
        'full'
        """
        return cls.from_dict(parse_json(text, "a policy", "Policy.to_json"))


def _checked_rules(rules: object) -> tuple[PolicyRule, ...]:
    if not isinstance(rules, Sequence) or not all(isinstance(rule, PolicyRule) for rule in rules):
        raise PolicyError(f"Policy: rules={rules!r} is not a sequence of PolicyRule; for a text, use Policy.parse.")
    unreachable = first_unreachable([selector for rule in rules for selector in rule.selectors])
    if unreachable:
        raise PolicyError(f"Policy: the selector {unreachable[1]}")
    return tuple(rules)


def _join(first: Policy, second: Policy) -> Policy:
    if not (first.checkpoint and second.checkpoint):
        raise PolicyError(f"'{first} | {second}': 'off' means no checkpointing and cannot be joined; leave it out.")
    taken = set(first.selectors)
    kept = [(rule.action, [selector for selector in rule.selectors if selector not in taken]) for rule in second.rules]
    rest = tuple(PolicyRule(action, tuple(selectors)) for action, selectors in kept if selectors)
    if rest and is_catch_all(first.selectors[-1]):
        raise PolicyError(
            f"'{first} | {second}': the left policy's selector {first.selectors[-1]!r} matches every residual, so the policy "
            "on the right has no effect; put the left policy last."
        )
    return Policy(first.rules + rest)


def _check_keys(data: object, keys: tuple[str, ...], subject: str) -> None:
    if not isinstance(data, dict):
        raise PolicyError(f"{subject}: {data!r} is a {type(data).__name__}, expected an object with {', '.join(keys)}.")
    unknown, missing = [key for key in data if key not in keys], [key for key in keys if key not in data]
    if unknown or missing:
        wrong = [
            f"{word} {', '.join(map(repr, names))}" for word, names in (("unknown", unknown), ("missing", missing)) if names
        ]
        raise PolicyError(f"{subject}: {' and '.join(wrong)} in {data!r}; the keys are {', '.join(keys)}.")
