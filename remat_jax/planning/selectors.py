"""Turns residual names of one block into the selectors of a policy for several blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from remat_jax.policy import Action, Policy, PolicyRule


def selectors(chosen: Mapping[str, Sequence[str]], paths: Sequence[str], names: Sequence[str]) -> Policy:
    """The policy that applies the given action to each residual in `chosen` and recomputes the rest.

    Args:
      chosen: a dict from action to residual names, as in the block at `paths[0]`.
      paths: the module paths of all blocks that get the policy.
      names: all residual names of the block at `paths[0]`.

    >>> selectors({"save": ["a_0/up:add#0"], "offload": []}, ["a_0", "a_1"], ["a_0/up:add#0", "a_0/b/up:add#0"])
    Policy.parse('recompute: */b/up:add#0; save: */up:add#0')
    """
    actions = {name: action for action, listed in chosen.items() for name in listed}
    if not actions:
        return Policy.parse("full")
    if all(path == paths[0] for path in paths):
        return _policy((_escaped(name), action) for name, action in actions.items())
    chosen_selectors = [_selector(name, paths[0]) for name in actions]
    # The selector `*/up` also matches deeper names such as `a/b/up`, so the rules of these names must come first.
    matched = [name for name in names if any(_matches(selector, name) for selector in chosen_selectors)]
    actions = {**actions, **{name: "recompute" for name in matched if name not in actions}}
    rules = [(_selector(name, paths[0]), action) for name, action in actions.items()]
    wide = {
        selector
        for selector, action in rules
        if any(action != other and _matches(selector, name) for name, other in actions.items())
    }

    def rank(rule: tuple[str, str]) -> tuple[Any, ...]:
        selector, action = rule
        return (True, -len(selector)) if selector in wide else (False, action == "recompute", action)

    return _policy(sorted(rules, key=rank))


def _policy(rules: Iterable[tuple[str, str]]) -> Policy:
    by_action = groupby(dict.fromkeys(rules), key=lambda rule: rule[1])
    return Policy(tuple(PolicyRule(Action(action), tuple(selector for selector, _ in group)) for action, group in by_action))


def _selector(name: str, path: str) -> str:
    inside = name.startswith((path + "/", path + ":"))
    return "*" + _escaped(name[len(path) :], glob=True) if inside and path else _escaped(name)


def _escaped(name: str, *, glob: bool = False) -> str:
    """A selector that matches `name`. `?` replaces commas and semicolons, which end selectors; if `glob`, `*?[` are escaped."""
    if glob:
        name = re.sub(r"([*?[])", r"[\1]", name)
    return name.replace(",", "?").replace(";", "?")


def _matches(selector: str, name: str) -> bool:
    return selector == name or fnmatchcase(name, selector)
