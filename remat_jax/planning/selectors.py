"""Turns residual names into selectors of a policy for several blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from remat_jax.policy import Action, Policy, PolicyRule


def selectors(chosen: Mapping[str, Sequence[str]], paths: Sequence[str], names: Sequence[str]) -> Policy:
    """The policy with the given action for each name in `chosen`; it recomputes the rest.

    Args:
      chosen: action → residual names in the block at the first of `paths`.
      paths: the module paths of all blocks of the policy.
      names: all residual names in that first block.

    >>> selectors({"save": ["a_0/up:add#0"], "offload": []}, ["a_0", "a_1"], ["a_0/up:add#0", "a_0/b/up:add#0"])
    Policy.parse('recompute: */b/up:add#0; save: */up:add#0')
    """
    action = {name: word for word, listed in chosen.items() for name in listed}
    if not action:
        return Policy.parse("full")
    open_ = [path for path in paths if path != paths[0]]
    wanted = [(_selector(name, paths[0]) if open_ else _escaped(name), word) for name, word in action.items()]
    if not open_:
        return _policy([(selector, word) for word in chosen for selector, other in wanted if other == word])
    # A selector that matches any path also matches deeper names with the same ending: their rule must come first.
    others = [name for name in names if name not in action and any(_matches(selector, name) for selector, _ in wanted)]
    wanted += [(_selector(name, paths[0]), "recompute") for name in others]
    full = {_selector(name, paths[0]): name for name in (*action, *others)}
    wide = {one for one, word in wanted if any(word != what and _matches(one, full[other]) for other, what in wanted)}
    plain = sorted((pair for pair in wanted if pair[0] not in wide and pair[1] != "recompute"), key=lambda pair: pair[1])
    guards = [pair for pair in wanted if pair[0] not in wide and pair[1] == "recompute"]
    return _policy([*plain, *guards, *sorted((pair for pair in wanted if pair[0] in wide), key=lambda pair: -len(pair[0]))])


def _policy(wanted: Sequence[tuple[str, str]]) -> Policy:
    rules: list[tuple[str, list[str]]] = []
    for selector, word in dict.fromkeys(wanted):
        if not rules or rules[-1][0] != word:
            rules.append((word, []))
        rules[-1][1].append(selector)
    return Policy(tuple(PolicyRule(Action(word), tuple(listed)) for word, listed in rules))


def _selector(name: str, path: str) -> str:
    inside = name.startswith((path + "/", path + ":"))
    return "*" + _escaped(name[len(path) :], glob=True) if inside and path else _escaped(name)


def _escaped(name: str, *, glob: bool = False) -> str:
    """A selector that matches the name: commas and semicolons would end the selector; in a glob, brackets would be a set."""
    if glob:
        name = re.sub(r"([*?[])", r"[\1]", name)
    return name.replace(",", "?").replace(";", "?")


def _matches(selector: str, name: str) -> bool:
    return selector == name or fnmatchcase(name, selector)
