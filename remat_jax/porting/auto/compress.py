"""Merges rules for single names into equivalent rules with placeholders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from remat_jax.porting.links import fit
from remat_jax.porting.pattern import FlaxPattern, Pattern, Shape
from remat_jax.porting.rules import Rule, Rules

_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d{0,8})(?!\d)")
_LETTERS = "ijklmn"
_WORDS = ("name", "part", "block")

Names = list[list[str]]
"""The names of a rule, PyTorch's first, each split at its numbers: text, number, text, …"""


def compress(rules: Rules, tensors: Mapping[str, Shape], arrays: Mapping[str, Shape]) -> Rules:
    """The same map with placeholders: `{i}`, `{j}`, … for numbers, such as a layer's, and `{name}`, `{part}`, … for words.

    Rules that differ only in numbers are merged, then rules that differ only in a word, unless a merge changes the map.
    """
    tied = {name.text for _, name in rules.ties}
    untied = {name: shape for name, shape in tensors.items() if name not in tied}

    def links(candidate: Sequence[Rule]) -> tuple[set[tuple[object, ...]], list[str]]:
        good, problems = fit(replace(rules, rules=tuple(candidate)), untied, arrays)
        return {(link.torch, link.flax, str(link.rule.transform)) for link in good}, problems

    wanted = links(rules.rules)

    def is_same(candidate: Sequence[Rule]) -> bool:
        return links(candidate) == wanted

    with_placeholders = [rule for rule in rules.rules if rule.torch[0].placeholders]
    shorter = _with_words(_with_numbers(rules.rules, is_same), with_placeholders, is_same)
    return replace(rules, rules=tuple(shorter), extra=_globs(rules.extra, tensors))


def _globs(extra: Sequence[str], tensors: Mapping[str, Shape]) -> tuple[str, ...]:
    """`extra` with one glob for all names with the same last part, if no tensor outside `extra` has this last part."""
    globs = {name: f"*.{name.rpartition('.')[2]}" for name in extra if "." in name}
    for glob in set(globs.values()):
        alike = {name for name in tensors if fnmatchcase(name, glob)}
        if len(alike) < 2 or not alike <= set(extra):
            globs = {name: other for name, other in globs.items() if other != glob}
    return tuple(dict.fromkeys(globs.get(name, name) for name in extra))


def _with_numbers(rules: Sequence[Rule], is_same: Callable[[Sequence[Rule]], bool]) -> list[Rule]:
    groups: dict[object, list[Rule]] = {}
    for rule in rules:
        groups.setdefault(_skeleton(rule), []).append(rule)
    shorter = {key: list(_general(group)) for key, group in groups.items()}
    every = [rule for group in shorter.values() for rule in group]
    if is_same(every):
        return every
    # Some merged rule matches a name of another rule, so each merge is tried separately.
    for key in groups:
        trial = {**groups, key: shorter[key]}
        if len(shorter[key]) < len(groups[key]) and is_same([rule for group in trial.values() for rule in group]):
            groups = trial
    return [rule for group in groups.values() for rule in group]


def _with_words(rules: list[Rule], with_placeholders: Sequence[Rule], is_same: Callable[[Sequence[Rule]], bool]) -> list[Rule]:
    """Merge groups of rules that differ in one word, the largest group first, if the map stays the same."""
    refused = set[str]()
    while True:
        groups: dict[str, list[Rule]] = {}
        for rule in rules:
            for general in () if rule in with_placeholders else _with_a_word(rule):
                groups.setdefault(general, []).append(rule)
        groups = {general: group for general, group in groups.items() if len(group) > 1 and general not in refused}
        if not groups:
            return rules
        general = max(groups, key=lambda general: len(groups[general]))
        group = groups[general]
        others = [rule for rule in rules if rule not in group]
        first = rules.index(group[0])
        merged = Rule.parse(general)
        # As the last rule, the merged rule applies only to names that no other rule matches.
        trials = ([*others[:first], merged, *others[first:]], [*others, merged])
        rules = next((trial for trial in trials if is_same(trial)), rules)
        refused.add(general)


def _with_a_word(rule: Rule) -> list[str]:
    """For each word that PyTorch's name and the Flax path share: the rule with a placeholder for this word, as text."""
    word = next((word for word in _WORDS if word not in rule.torch[0].placeholders), None)
    torch, (flax, *rest) = rule.torch[0].text.split("."), str(rule.flax[0]).split("[")
    pieces = flax.split("/")
    if word is None or len(rule.torch) > 1 or len(rule.flax) > 1:
        return []
    general = []
    for text in reversed(torch):
        if text.isidentifier() and pieces.count(text) == 1 == torch.count(text):
            name = ".".join(f"{{{word}}}" if piece == text else piece for piece in torch)
            path = "[".join(["/".join(f"{{{word}}}" if piece == text else piece for piece in pieces), *rest])
            general.append(str(Rule((name,), (path,), rule.transform)))  # type: ignore[arg-type]  # `Rule` accepts texts
    return general


def _split(rule: Rule) -> Names:
    """The pieces of every name; the pieces at odd indices are the numbers."""
    return [_NUMBER.split(str(name)) for name in (*rule.torch, *rule.flax)]


def _skeleton(rule: Rule) -> object:
    """A key that is equal for rules that differ only in numbers; a rule with placeholders is never merged."""
    if rule.torch[0].placeholders:
        return rule
    return str(rule.transform), len(rule.torch), tuple(tuple(pieces[::2]) for pieces in _split(rule))


def _general(rules: Sequence[Rule]) -> Iterator[Rule]:
    """Rules that are equivalent to `rules`, but fewer if possible; `rules` must have equal skeletons (`_skeleton`)."""
    whole = [_split(rule) for rule in rules]
    varying = [place for place in _places(whole[0][0]) if len({names[0][place] for names in whole}) > 1]
    if len(rules) == 1 or not varying:
        yield from rules
        return
    placed = _with_placeholders(whole, varying)
    if placed:
        count = len(rules[0].torch)
        flax = tuple(FlaxPattern.parse(path) for path in placed[count:])
        yield Rule(tuple(Pattern(name) for name in placed[:count]), flax, rules[0].transform)
        return
    # No placeholders fit all rules, so one varying number stays a number, and each of its values gets rules of its own.
    parted = []
    for place in varying:
        parts: dict[str, list[Rule]] = {}
        for rule, names in zip(rules, whole, strict=True):
            parts.setdefault(names[0][place], []).append(rule)
        parted.append([rule for part in parts.values() for rule in _general(part)])
    yield from min(parted, key=len)


def _with_placeholders(whole: Sequence[Names], varying: Sequence[int]) -> list[str] | None:
    """The names with a placeholder for each varying number of the first name; None if another name varies differently."""
    letters: dict[str, list[int]] = {}
    for place in varying:
        values = [int(names[0][place]) for names in whole]
        if not _followed(values, letters)[0] and len(letters) < len(_LETTERS):
            letters[_LETTERS[len(letters)]] = values
    general = []
    for number, name in enumerate(whole[0]):
        pieces, used = list(name), set[str]()
        for place in _places(name):
            values = [int(names[number][place]) for names in whole]
            if len(set(values)) == 1:
                continue
            letter, offset = _followed(values, letters)
            if not letter:
                return None
            used.add(letter)
            pieces[place] = f"{{{letter}{f'{offset:+d}' if offset else ''}}}"
        if used != letters.keys():
            return None
        general.append("".join(pieces))
    return general


def _followed(values: list[int], letters: Mapping[str, list[int]]) -> tuple[str, int]:
    """The placeholder whose numbers differ from `values` by a constant offset, and the offset; ("", 0) if there is none."""
    for letter, others in letters.items():
        offsets = {value - other for value, other in zip(values, others, strict=True)}
        if len(offsets) == 1:
            return letter, offsets.pop()
    return "", 0


def _places(pieces: Sequence[str]) -> range:
    return range(1, len(pieces), 2)
