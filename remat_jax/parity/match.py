"""Match the modules of a PyTorch and a Flax model, by names, order of execution and sizes, or by the user's mapping."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from remat_jax.errors import ArgumentError, nearest
from remat_jax.reading import read_limited

# Synonyms in module names; "" marks a word without meaning.
_SAME = {
    "h": "layers", "layer": "layers", "block": "layers", "blocks": "layers", "attn": "attention", "self": "",
    "q": "query", "k": "key", "v": "value", "o": "out", "output": "out", "proj": "", "projection": "", "dense": "",
    "linear": "",
    "ln": "norm", "layernorm": "norm", "rmsnorm": "norm", "batchnorm": "norm", "mlp": "ffn", "embeddings": "embed",
    "embedding": "embed", "tokens": "", "word": "words", "position": "positions", "fc": "ffn", "token": "", "type": "",
}  # fmt: skip
# The sort of a module by the name of its class; used only for modules that call no other module.
_SORTS = (
    ("norm", "norm"),
    ("drop", "dropout"),
    ("embed", "embedding"),
    ("conv", "convolution"),
    ("linear|dense|einsum", "linear"),
    ("relu|gelu|silu|swish|tanh|sigmoid|activation|identity", "activation"),
)
_MOVED = 0.75
"""The base score of two modules with the same weights but different functions, or of a linear layer and a convolution."""
_LEAST = 0.35  # of at most about 2.5: the names share no word and the positions are far apart
MOST_BYTES = 64 * 2**20
"""A larger file is no mapping."""


@dataclass(frozen=True)
class MatchedModule:
    """The facts by which a module's counterpart is found.

    `kind` is the name of its class, `size` the number of elements of its first result, None if unknown. A leaf calls no other
    module. A rotation or a dropout has no weights.
    """

    path: str
    kind: str
    size: int | None
    is_leaf: bool
    has_weights: bool = True


def match(torch: Sequence[MatchedModule], flax: Sequence[MatchedModule], mapping: Any = None) -> dict[str, str]:
    """PyTorch path → Flax path, one to one; both sequences are in the order of execution.

    Leaves are matched first, by sort, size, name and order; then the modules that call the same leaves. `mapping` is a dict
    from PyTorch paths to Flax paths, or the path of a JSON file with such a dict. It takes precedence, and its None means that
    a module has no counterpart.

    Raises:
        ArgumentError: `mapping` contains a path without a module.

    >>> torch = [MatchedModule("h/0/fc", "Linear", 4, True),
    ...     MatchedModule("h/0", "Block", 4, False),
    ...     MatchedModule("", "Model", 4, False)]
    >>> flax = [MatchedModule("layers_0/up", "Dense", 4, True),
    ...     MatchedModule("layers_0", "Layer", 4, False),
    ...     MatchedModule("", "Net", 4, False)]
    >>> match(torch, flax)
    {'': '', 'h/0/fc': 'layers_0/up', 'h/0': 'layers_0'}
    """
    given = read_mapping(mapping, torch, flax)
    found = {path: other for path, other in {"": "", **given}.items() if other is not None}
    taken = {*given, ""}, {*found.values()}
    free = [[module for module in side if module.path not in used] for side, used in zip((torch, flax), taken, strict=True)]
    leaves = [[module for module in side if module.is_leaf] for side in free]
    found |= _assigned(leaves[0], leaves[1], _same_sort)

    # A leaf on one side may have modules inside on the other, such as an attention with its projections.
    whole = [[m for m in side if not m.is_leaf or (sort_of(m.kind) == "other" and m.path not in used)]
             for side, used in zip(free, (found.keys(), {*found.values()}), strict=True)]  # fmt: skip
    leaves_found = [module for module in torch if module.is_leaf and module.path in found]
    weighted = [module for module in leaves_found if module.has_weights]

    def within(some: Sequence[MatchedModule], one: MatchedModule, other: MatchedModule) -> tuple[set[str], set[str]]:
        """The Flax paths of the leaves inside each of the two modules."""
        theirs = {found[leaf.path] for leaf in some if _is_in(leaf.path, one.path)}
        return theirs, {found[leaf.path] for leaf in some if _is_in(found[leaf.path], other.path)}

    def same(one: MatchedModule, other: MatchedModule) -> float | None:
        theirs, ours = within(leaves_found, one, other)
        if theirs == ours:
            return 1.0 if theirs else 0.0
        # A leaf without weights, such as a rotation or a dropout, may be in a different module.
        theirs, ours = within(weighted, one, other)
        return _MOVED if theirs and theirs == ours else None

    def nearly_same(one: MatchedModule, other: MatchedModule) -> float | None:
        """Equal names, and most leaves inside are common: a table shared by two modules is inside only one of them."""
        theirs, ours = within(weighted, one, other)
        alike = words(one.path) == words(other.path) and 2 * len(theirs & ours) > len(theirs | ours)
        return _MOVED if alike else None

    found |= _assigned(whole[0], whole[1], same)
    mine = [module for module in whole[0] if module.path not in found]
    others = [module for module in whole[1] if module.path not in found.values()]
    return found | _assigned(mine, others, nearly_same)


def _same_sort(one: MatchedModule, other: MatchedModule) -> float | None:
    sorts = {sort_of(one.kind), sort_of(other.kind)}
    if len(sorts) == 1:
        return 1.0
    # A convolution of single pixels, or of patches that do not overlap, is a linear layer: libraries use either name.
    return _MOVED if sorts == {"linear", "convolution"} else None


def read_mapping(mapping: Any, torch: Sequence[MatchedModule], flax: Sequence[MatchedModule]) -> dict[str, str | None]:
    """The user's mapping, checked."""
    if isinstance(mapping, str | Path):
        try:
            mapping = json.loads(read_limited(mapping, MOST_BYTES).decode("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ArgumentError(f"mapping={str(mapping)[:400]!r} cannot be read ({error}): expected a JSON file") from None
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        raise ArgumentError(
            f"mapping={mapping!r:.400}: expected a dict of PyTorch path → Flax path, or the path of a JSON file with one"
        )
    wrong = [path for path in mapping.values() if path is not None and not isinstance(path, str)]
    if wrong:
        raise ArgumentError(
            f"mapping: {wrong[0]!r:.400} is not a called module of the Flax model. Write the path as a text, or None for no "
            "counterpart."
        )
    for paths, side, name in ((mapping, torch, "PyTorch"), (filter(None, mapping.values()), flax, "Flax")):
        called = [module.path for module in side]
        for path in paths:
            if path not in called:
                raise ArgumentError(
                    f"mapping: {path!r:.400} is not a called module of the {name} model.{nearest(str(path)[:400], called)}"
                )
    return dict(mapping)


def _assigned(
    torch: Sequence[MatchedModule], flax: Sequence[MatchedModule], base: Callable[[MatchedModule, MatchedModule], float | None]
) -> dict[str, str]:
    """The assignment with the largest sum of scores, without its pairs whose score is too small."""
    from scipy.optimize import linear_sum_assignment

    scores = np.zeros((len(torch), len(flax)))
    for i, one in enumerate(torch):
        for j, other in enumerate(flax):
            start = base(one, other)
            if start is None or (one.size is not None and other.size is not None and one.size != other.size):
                continue
            apart = abs((i + 0.5) / len(torch) - (j + 0.5) / len(flax))
            scores[i, j] = start * _LEAST + similarity(one.path, other.path) + 0.5 * (1 - apart)
    rows, columns = linear_sum_assignment(scores, maximize=True)
    good = [(i, j) for i, j in zip(rows, columns, strict=True) if scores[i, j] > 2 * _LEAST]
    return {torch[i].path: flax[j].path for i, j in good}


def similarity(one: str, other: str) -> float:
    """How similar two module paths are, from 0 to 1.5: the common words, and half as much again for the last parts.

    >>> similarity("h/0/attn/c_proj", "layers_0/attention/c_proj"), similarity("h/0/attn/c_proj", "layers_1/mlp/c_proj")
    (1.5, 1.0)
    """
    last = _alike(words(one.rpartition("/")[2]), words(other.rpartition("/")[2]))
    return _alike(words(one), words(other)) + 0.5 * last


def _alike(one: Counter[str], other: Counter[str]) -> float:
    total = one.total() + other.total()
    return 2 * (one & other).total() / total if total else 1.0


def words(path: str) -> Counter[str]:
    """The words and numbers of a module path, with synonyms replaced by a common word."""
    parts = (part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", path))
    return Counter(filter(None, (_SAME.get(part, part) for part in parts)))


def sort_of(kind: str) -> str:
    """The sort of a module, by the name of its class: "linear", "norm", …, or "other".

    >>> sort_of("LlamaRMSNorm"), sort_of("Dense"), sort_of("Block")
    ('norm', 'linear', 'other')
    """
    if kind == "Conv1D":  # a linear layer in transformers, unlike torch.nn.Conv1d
        return "linear"
    return next((sort for pattern, sort in _SORTS if re.search(pattern, kind.lower())), "other")


def _is_in(path: str, container: str) -> bool:
    return not container or path.startswith(container + "/")
