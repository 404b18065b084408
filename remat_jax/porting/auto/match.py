"""Matches PyTorch modules to Flax modules by name, among the pairs that shapes allow."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from remat_jax.porting.auto.recipes import Way, ways
from remat_jax.porting.auto.units import FlaxUnit, TorchUnit, natural

# Different projects' words for the same part.
_SAME = {
    "query": "q",
    "key": "k",
    "value": "v",
    "attention": "attn",
    "attn": "attn",
    "layernorm": "norm",
    "ln": "norm",
    "rmsnorm": "norm",
    "batchnorm": "norm",
    "bn": "norm",
    "embedding": "embed",
    "embeddings": "embed",
    "wte": "embed",
    "positions": "position",
    "pos": "position",
    "wpe": "position",
    "mlp": "ffn",
    "feed": "ffn",
    "forward": "ffn",
    "output": "out",
    "o": "out",
    "block": "layer",
    "blocks": "layer",
    "layers": "layer",
    "h": "layer",
    "1": "1",
}
_NOTHING = {"proj", "dense", "linear", "weight", "kernel", "model", "module", "base", "self"}

# The ways between every pair of units; empty if none fits.
Table = list[list[list[Way]]]


def table(torch: Sequence[TorchUnit], flax: Sequence[FlaxUnit]) -> Table:
    """The ways of every pair."""
    return [[ways(one, other) for other in flax] for one in torch]


def by_names(torch: Sequence[TorchUnit], flax: Sequence[FlaxUnit], found: Table) -> list[int] | None:
    """For every PyTorch unit the index of a Flax unit, each used once, by name; None if shapes allow no assignment."""
    from scipy.optimize import linear_sum_assignment

    if len(torch) != len(flax) or not torch:
        return None
    order = {index: rank for rank, index in enumerate(sorted(range(len(flax)), key=lambda i: natural(flax[i].name)))}
    cost = np.full((len(torch), len(flax)), 1e6)
    for i, one in enumerate(torch):
        for j, other in enumerate(flax):
            if found[i][j]:
                # Without help from names, prefer the order of definition.
                cost[i, j] = -likeness(one.name, other.name) + 1e-3 * abs(i - order[j]) / len(torch)
    rows, columns = linear_sum_assignment(cost)
    return None if cost[rows, columns].max() >= 1e6 else [int(column) for column in columns]


def likeness(torch: str, flax: str) -> float:
    """The similarity of two names, from 0; equal numbers count most, then the last words.

    >>> query = "layers_1/attention/query"
    >>> likeness("layers.1.attn.q_proj", query) > likeness("layers.1.attn.k_proj", query) > likeness("head", query)
    True
    """
    (words, numbers), (others, other_numbers) = _words(torch), _words(flax)
    shared = sum(min(words.count(word), others.count(word)) for word in set(words))
    score = 2 * shared / (len(words) + len(others)) if words and others else 0.0
    last = 1.0 if words and others and words[-1] == others[-1] else 0.0
    return score + last + (2.0 if numbers and numbers == other_numbers else 0.0)


def _words(name: str) -> tuple[list[str], list[str]]:
    pieces = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
    words = [_SAME.get(piece.lower(), piece.lower()) for piece in pieces if not piece.isdecimal()]
    return [word for word in words if word not in _NOTHING], [piece for piece in pieces if piece.isdecimal()]
