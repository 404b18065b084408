"""Rules for single names as rules with placeholders, where these say the same."""

from __future__ import annotations

import re
from collections.abc import Mapping

from remat_jax.porting.links import Shape, fit
from remat_jax.porting.pattern import Pattern, Target
from remat_jax.porting.rule import Rule
from remat_jax.porting.rules import Rules

_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)|^(\d+)(?=\.)")


def compress(rules: Rules, tensors: Mapping[str, Shape], arrays: Mapping[str, Shape]) -> Rules:
    """The same map with `{i}` for the number of a layer; as it is where that would say something else."""
    shorter = tuple(dict.fromkeys(_general(rule) for rule in rules.rules))
    result = Rules(shorter, rules.ties, rules.extra, rules.missing)
    tied = {other.text for _, other in rules.ties}
    names = {name: shape for name, shape in tensors.items() if name not in tied}
    before, after = (fit(each, names, arrays) for each in (rules, result))
    same = [sorted((link.torch, link.flax, str(link.rule.transform)) for link in each[0]) for each in (before, after)]
    return result if same[0] == same[1] and not after[1] else rules


def _general(rule: Rule) -> Rule:
    """The rule with its first number that stands in all names as a placeholder."""
    if any(name.placeholders for name in rule.torch) or any(target.placeholders for target in rule.flax):
        return rule
    for match in _NUMBER.finditer(rule.torch[0].text):
        number = match[0]
        torch = [_put(_NUMBER, name.text, number) for name in rule.torch]
        flax = [_in_target(target, number) for target in rule.flax]
        if None not in torch and None not in flax:
            return Rule(tuple(Pattern(name) for name in torch if name), tuple(t for t in flax if t), rule.transform)
    return rule


def _put(pattern: re.Pattern[str], text: str, number: str) -> str | None:
    places = [match for match in pattern.finditer(text) if match[0] == number]
    return f"{text[: places[0].start()]}{{i}}{text[places[0].end() :]}" if places else None


def _in_target(target: Target, number: str) -> Target | None:
    if target.index and target.index[0] == Pattern(number):
        return Target(target.path, (Pattern("{i}"), *target.index[1:]))
    path = _put(re.compile(r"(?<=_)\d+(?=/)"), target.path.text, number)
    return Target(Pattern(path), target.index) if path else None
