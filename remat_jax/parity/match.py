"""Match the modules of a PyTorch and a Flax model, by names, order of execution and sizes, or by the user's mapping."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from remat_jax.errors import ArgumentError, nearest
from remat_jax.porting.links import Link
from remat_jax.porting.pattern import Place
from remat_jax.reading import read_limited

# Synonyms in module names; a word that maps to "" is ignored.
_SAME = {
    "h": "layers", "layer": "layers", "block": "layers", "blocks": "layers", "attn": "attention", "self": "",
    "q": "query", "k": "key", "v": "value", "o": "out", "output": "out", "proj": "", "projection": "", "dense": "",
    "linear": "",
    "ln": "norm", "layernorm": "norm", "rmsnorm": "norm", "batchnorm": "norm", "mlp": "ffn", "embeddings": "embed",
    "embedding": "embed", "tokens": "", "word": "words", "position": "positions", "fc": "ffn", "token": "", "type": "",
}  # fmt: skip
# (pattern of a class name, type of layer); the first match counts. Used only for modules that call no other module.
_SORTS = (
    ("norm", "norm"),
    ("drop", "dropout"),
    ("embed", "embedding"),
    ("conv", "convolution"),
    ("linear|dense|einsum", "linear"),
    ("relu|gelu|silu|swish|tanh|sigmoid|activation|identity", "activation"),
)
_MOVED = 0.75
"""The base score of an uncertain pair; a certain pair has 1. There are three kinds of uncertain pairs: a linear layer and
a convolution; two modules whose inner layers with weights are the same, and whose inner layers without weights differ; two
modules that share most of their inner layers with weights, and whose paths have the same words."""
_LINKED = 2.0
"""The base score of two leaves whose weights a weight map connects; names that are equal in other pairs count more."""
_LEAST = 0.35
"""A pair's score is its base score times this number, plus terms for the paths and the order. A pair whose score is not above
twice this number is dropped. The highest possible score is 2.35."""
MOST_BYTES = 64 * 2**20
"""The size in bytes of the largest mapping file that is read."""


@dataclass(frozen=True)
class MatchedModule:
    """The facts by which a module's counterpart is found.

    `kind` is the name of its class; `size` is the number of elements of its first output, or None if unknown. A leaf calls no
    other module. `has_weights` is False for modules such as a rotary position embedding or a dropout.
    """

    path: str
    kind: str
    size: int | None
    is_leaf: bool
    has_weights: bool = True


def match(
    torch: Sequence[MatchedModule],
    flax: Sequence[MatchedModule],
    mapping: Any = None,
    by_weights: Collection[tuple[str, str]] = (),
) -> dict[str, str]:
    """PyTorch path → Flax path, one to one; both sequences are in the order of execution.

    Leaves are matched first, by type (`sort_of`), size, name and order; then the modules that call the same leaves. `mapping`
    is a dict from PyTorch paths to Flax paths, or the path of a JSON file with such a dict. `mapping` takes precedence; None as
    a Flax path means that a module has no counterpart. `by_weights` are the pairs of paths whose weights a weight map connects;
    they need not have the same type.

    Raises:
        ArgumentError: `mapping` contains a path that no module has.

    >>> torch = [MatchedModule("h/0/fc", "Linear", 4, True),
    ...     MatchedModule("h/0", "Block", 4, False),
    ...     MatchedModule("", "Model", 4, False)]
    >>> flax = [MatchedModule("layers_0/up", "Dense", 4, True),
    ...     MatchedModule("layers_0", "Layer", 4, False),
    ...     MatchedModule("", "Net", 4, False)]
    >>> match(torch, flax)
    {'': '', 'h/0/fc': 'layers_0/up', 'h/0': 'layers_0'}
    """
    matched: dict[str, str | None] = {"": "", **read_mapping(mapping, torch, flax)}

    def unmatched(fits: Callable[[MatchedModule], bool]) -> tuple[list[MatchedModule], list[MatchedModule]]:
        theirs = [module for module in torch if module.path not in matched and fits(module)]
        taken = {*matched.values()}
        return theirs, [module for module in flax if module.path not in taken and fits(module)]

    def is_whole(module: MatchedModule) -> bool:
        # A leaf of one model, such as an attention module, may have inner modules in the other model, such as projections.
        return not module.is_leaf or sort_of(module.kind) == "other"

    def is_same_leaf(theirs: MatchedModule, ours: MatchedModule) -> float | None:
        return _LINKED if (theirs.path, ours.path) in by_weights else _same_sort(theirs, ours)

    matched |= _assigned(*unmatched(lambda module: module.is_leaf), is_same_leaf)
    leaves = [(leaf, other) for leaf in torch if leaf.is_leaf and (other := matched.get(leaf.path)) is not None]
    weighted = [(leaf, other) for leaf, other in leaves if leaf.has_weights]

    def within(leaves: Sequence[Any], theirs: MatchedModule, ours: MatchedModule) -> tuple[set[str], set[str]]:
        """The Flax paths of two sets of matched leaves: the leaves inside `theirs`, and the leaves inside `ours`."""
        inside = {other for leaf, other in leaves if _is_in(leaf.path, theirs.path)}
        return inside, {other for _, other in leaves if _is_in(other, ours.path)}

    def same(theirs: MatchedModule, ours: MatchedModule) -> float | None:
        inside = within(leaves, theirs, ours)
        if inside[0] == inside[1]:
            return 1.0 if inside[0] else 0.0
        # The models may call a leaf without weights, such as a rotary position embedding or a dropout, in different modules.
        inside = within(weighted, theirs, ours)
        return _MOVED if inside[0] and inside[0] == inside[1] else None

    def nearly_same(theirs: MatchedModule, ours: MatchedModule) -> float | None:
        """`_MOVED` if the paths have equal words and most of the inner leaves with weights are shared, else None.

        Sharing all leaves is not required: a leaf called by two modules has one path, so it counts as inside only one of them.
        """
        inside = within(weighted, theirs, ours)
        most = 2 * len(inside[0] & inside[1]) > len(inside[0] | inside[1])
        return _MOVED if most and words(theirs.path) == words(ours.path) else None

    matched |= _assigned(*unmatched(is_whole), same)
    matched |= _assigned(*unmatched(is_whole), nearly_same)
    return {path: other for path, other in matched.items() if other is not None}


def _same_sort(module: MatchedModule, other: MatchedModule) -> float | None:
    sorts = {sort_of(module.kind), sort_of(other.kind)}
    if len(sorts) == 1:
        return 1.0
    # A convolution of single pixels, or of patches that do not overlap, is a linear layer: libraries use either name. The class
    # of a user's own norm may have any name.
    is_own = "other" in sorts and module.has_weights and other.has_weights and words(module.path) == words(other.path)
    return _MOVED if is_own or sorts == {"linear", "convolution"} else None


def pairs_by_weights(links: Mapping[Place, Link], flax: Collection[str]) -> set[tuple[str, str]]:
    """(PyTorch path, Flax path) of the modules whose own weights are each other's by a weight map; `flax` are called paths."""
    called = {_with_index(path): path for path in flax}
    partners: dict[str, set[str]] = {}
    owners: dict[str, set[str]] = {}
    for place, link in links.items():
        parts = place.path.split("/")[1:-1]
        numbers = "".join(f"_{number}" for number in place.index if number is not None)
        # In a stack of layers, the trace has the layer's number behind one of the parts of the path.
        names = ["/".join((*parts[:depth], parts[depth] + numbers, *parts[depth + 1 :])) for depth in range(len(parts))]
        ours = next((called[name] for name in names if name in called), None)
        if ours is not None:
            theirs = {name.rpartition(".")[0].replace(".", "/") for name in link.torch}
            owners.setdefault(ours, set()).update(theirs)
            for path in theirs:
                partners.setdefault(path, set()).add(ours)
    single = [(path, *found) for path, found in partners.items() if len(found) == 1]
    return {(path, ours) for path, ours in single if len(owners[ours]) == 1}


def _with_index(path: str) -> str:
    """A path in which a number is appended to the name before it: `layers_0`, as in the paths of variables."""
    return re.sub(r"/(\d+)(?=/|$)", r"_\1", path)


def read_mapping(mapping: object, torch: Sequence[MatchedModule], flax: Sequence[MatchedModule]) -> dict[str, str | None]:
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
            f"mapping={mapping!r:.400}: expected a dict of PyTorch path → Flax path, or the path of a JSON file with a dict"
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
    """The assignment (PyTorch path → Flax path) with the largest sum of scores, without pairs whose score is too small."""
    from scipy.optimize import linear_sum_assignment

    scores = np.zeros((len(torch), len(flax)))
    for i, module in enumerate(torch):
        for j, other in enumerate(flax):
            start = base(module, other)
            if start is None or (module.size is not None and other.size is not None and module.size != other.size):
                continue
            apart = abs((i + 0.5) / len(torch) - (j + 0.5) / len(flax))
            scores[i, j] = start * _LEAST + similarity(module.path, other.path) + 0.5 * (1 - apart)
    rows, columns = linear_sum_assignment(scores, maximize=True)
    good = [(i, j) for i, j in zip(rows, columns, strict=True) if scores[i, j] > 2 * _LEAST]
    return {torch[i].path: flax[j].path for i, j in good}


def similarity(one: str, other: str) -> float:
    """How similar two module paths are, from 0 to 1.5: the share of common words, plus half the share in the last components.

    >>> similarity("h/0/attn/c_proj", "layers_0/attention/c_proj"), similarity("h/0/attn/c_proj", "layers_1/mlp/c_proj")
    (1.5, 1.0)
    """
    last = _alike(words(one.rpartition("/")[2]), words(other.rpartition("/")[2]))
    return _alike(words(one), words(other)) + 0.5 * last


def _alike(counts: Counter[str], other: Counter[str]) -> float:
    total = counts.total() + other.total()
    return 2 * (counts & other).total() / total if total else 1.0


def words(path: str) -> Counter[str]:
    """The words and numbers of a module path, with synonyms replaced by a common word."""
    parts = (part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", path))
    return Counter(filter(None, (_SAME.get(part, part) for part in parts)))


def sort_of(kind: str) -> str:
    """The type of layer of a module, read from the name of its class: "linear", "norm", …, or "other".

    >>> sort_of("LlamaRMSNorm"), sort_of("Dense"), sort_of("Block")
    ('norm', 'linear', 'other')
    """
    if kind == "Conv1D":  # a linear layer in transformers, unlike torch.nn.Conv1d
        return "linear"
    return next((sort for pattern, sort in _SORTS if re.search(pattern, kind.lower())), "other")


def _is_in(path: str, container: str) -> bool:
    return not container or path.startswith(container + "/")
