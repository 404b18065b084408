"""Find which PyTorch module can become which Flax module, and by which rules, from kinds, shapes and names."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from remat_jax.errors import PortingError
from remat_jax.porting.auto.units import RECURRENT, FlaxUnit, TorchUnit, natural
from remat_jax.porting.pattern import Place, Shape
from remat_jax.porting.rules import Rule
from remat_jax.porting.transform import Transform

# A way to convert a PyTorch unit (one module's weights) to a Flax unit: rules that together use all its tensors.
Way = tuple[Rule, ...]
# `table[i][j]` lists the possible ways to convert PyTorch unit i to Flax unit j; it is empty if the units do not fit.
Table = list[list[list[Way]]]

_CONVOLUTION = {
    "Conv1d": ("conv1d", "o i 1 -> i o"),
    "Conv2d": ("conv2d", "o i 1 1 -> i o"),
    "Conv3d": ("conv3d", "o i 1 1 1 -> i o"),
    "ConvTranspose1d": ("conv_transpose1d", "flip(2) | i o w -> w i o"),
    "ConvTranspose2d": ("conv_transpose2d", "flip(2, 3) | i o h w -> h w i o"),
    "ConvTranspose3d": ("conv_transpose3d", "flip(2, 3, 4) | i o d h w -> d h w i o"),
}
_MATRIX = ("linear", "identity", "heads", "heads_out")
_INPUT_FIRST = ("identity", "linear", "e (h d) -> e h d", "(h d) e -> h d e")
_VECTOR = ("identity", "heads_bias", "o -> o 1", "o -> o 1 1", "o -> o 1 1 1")
_FUSED = ("in_proj_bias", "split(0)", "in_proj", "gpt2_qkv", "split(0) | linear", "split(1)")
_LOCAL = {
    "weight": ("kernel", "scale", "embedding", "weight", "w", "embeddings", ""),
    "in_proj_weight": ("kernel",),
    "in_proj_bias": ("bias",),
    "bias": ("bias", "b", "offset"),
    "running_mean": ("mean",),
    "running_var": ("var",),
    "": ("", "kernel", "scale", "embedding", "weight", "bias"),
}


def table(torch: Sequence[TorchUnit], flax: Sequence[FlaxUnit], *, partial: bool = False) -> Table:
    """The possible ways for every pair of units; the usual way for the module's kind comes first.

    If `partial`, a unit also fits a unit that lacks some of its arrays, such as the bias.
    """
    return [[_ways(torch_unit, flax_unit, partial) for flax_unit in flax] for torch_unit in torch]


@functools.lru_cache(maxsize=65536)  # different groupings of Flax's arrays share most units
def _ways(torch: TorchUnit, flax: FlaxUnit, partial: bool) -> list[Way]:
    if flax.children:
        return _cell(torch, flax) if torch.kind in RECURRENT else _fused(torch, flax)
    if torch.kind in RECURRENT or (len(torch.tensors) != len(flax.arrays) and not partial):
        return []
    places = {local: (place, shape) for local, place, shape in flax.arrays}
    choices = []
    for local, shape in torch.tensors:
        leaf = next((name for name in _LOCAL.get(local, (local,)) if name in places), None)
        if leaf is None:
            if partial:
                continue
            return []
        place, after = places.pop(leaf)
        fitting = [text for text in dict.fromkeys(_texts(torch.kind, local, shape)) if _fits(text, [shape], [after])]
        choices.append([_rule(torch, (local,), [place], text) for text in fitting])
    return [tuple(chosen) for chosen in itertools.product(*choices)] if choices else []


def _texts(kind: str, local: str, shape: Shape) -> Sequence[str]:
    if kind in _CONVOLUTION and local == "weight":
        return (*_CONVOLUTION[kind], "identity")  # Equinox keeps PyTorch's layout
    if kind == "Conv1D":
        return _INPUT_FIRST if len(shape) == 2 else _VECTOR
    if kind == "Embedding":
        return ("identity",)
    if local == "weight" and len(shape) == 1:
        return ("identity", "norm_plus_one")
    if len(shape) == 1:
        return _VECTOR
    if kind in ("Linear", "MultiheadAttention"):
        return _MATRIX
    return ("identity", *_MATRIX, "1 t d -> t d", "t d -> 1 t d", "1 1 d -> d", "d -> 1 1 d") if len(shape) > 1 else _VECTOR


def _is_usual(torch: TorchUnit, way: Way) -> bool:
    usual = {torch.full(local): next(iter(_texts(torch.kind, local, shape))) for local, shape in torch.tensors}
    return all(
        len(rule.flax) > 1
        or str(rule.transform) == usual[rule.torch[0].text]
        or rule.flax[0].path.text.endswith("/weight")  # Equinox keeps PyTorch's layout
        for rule in way
    )


def _fits(text: str, before: Sequence[Shape], after: Sequence[Shape]) -> bool:
    return _fits_shapes(text, tuple(before), tuple(after))


@functools.lru_cache(maxsize=65536)  # a large model has many modules, but few shapes
def _fits_shapes(text: str, before: tuple[Shape, ...], after: tuple[Shape, ...]) -> bool:
    try:
        return Transform.parse(text).before(list(after), len(before)) == list(before)
    except PortingError:
        return False


def _fused(torch: TorchUnit, flax: FlaxUnit) -> list[Way]:
    """The ways to split a weight into query, key and value, as for PyTorch's attention and GPT-2's."""
    places = {local: (place, shape) for local, place, shape in flax.arrays}
    choices = []
    for local, shape in torch.tensors:
        leaf = "bias" if local.endswith("bias") else "kernel"
        here = [places.get(f"{child}/{leaf}") for child in flax.children]
        if None in here or len(flax.arrays) != len(torch.tensors) * len(flax.children):
            return []
        targets, after = zip(*filter(None, here), strict=True)
        fitting = [text for text in _FUSED if _fits(text, [shape], list(after))]
        choices.append([_rule(torch, (local,), list(targets), text) for text in fitting])
    return [tuple(chosen) for chosen in itertools.product(*choices)]


def _cell(torch: TorchUnit, flax: FlaxUnit) -> list[Way]:
    """The way to convert a recurrent cell, if any: in Flax its gates are separate layers, or are fused into two layers."""
    places = {local: place for local, place, _ in flax.arrays}
    shapes = {local: shape for local, _, shape in flax.arrays} | dict(torch.tensors)
    layer = torch.tensors[0][0].removeprefix("weight_ih_")
    biases = (f"bias_ih_{layer}", f"bias_hh_{layer}")
    half = len(flax.children) // 2
    inside, state = flax.children[:half], flax.children[half:]
    entries: list[tuple[tuple[str, ...], tuple[str, ...], str]] = []
    for name, children in ((f"weight_ih_{layer}", inside), (f"weight_hh_{layer}", state)):
        entries.append(((name,), tuple(f"{child}/kernel" for child in children), "gates" if half > 1 else "linear"))
    if len(torch.tensors) == 4 and torch.kind == "GRU":
        entries.append((biases, tuple(f"{child}/bias" for child in (*inside, "hn")), "gru_bias"))
    elif len(torch.tensors) == 4:
        with_bias = tuple(f"{child}/bias" for child in (*inside, *state) if f"{child}/bias" in places)
        entries.append((biases, with_bias, "lstm_bias" if half > 1 else "sum"))
    wanted = [local for _, locals_, _ in entries for local in locals_]
    if sorted(wanted) != sorted(places):
        return []
    for names, locals_, text in entries:
        if not _fits(text, [shapes[name] for name in names], [shapes[local] for local in locals_]):
            return []
    return [tuple(_rule(torch, names, [places[local] for local in locals_], text) for names, locals_, text in entries)]


def _rule(torch: TorchUnit, names: tuple[str, ...], places: list[Place], text: str) -> Rule:
    return Rule(tuple(map(torch.full, names)), tuple(map(str, places)), text)  # type: ignore[arg-type]  # `Rule` accepts texts


# The words that different projects use for the same part.
_SYNONYMS = {
    "q": ("query", "queries", "wq"),
    "k": ("key", "keys", "wk"),
    "v": ("value", "values", "wv"),
    "attn": ("attention",),
    "norm": ("layernorm", "ln", "rmsnorm", "batchnorm", "bn"),
    "embed": ("embedding", "embeddings", "wte"),
    "position": ("positions", "pos", "wpe"),
    "ffn": ("mlp", "feed", "forward"),
    "out": ("output", "o"),
    "layer": ("block", "blocks", "layers", "h"),
}
_WORD_OF = {synonym: word for word, synonyms in _SYNONYMS.items() for synonym in synonyms}
_NOTHING = {"proj", "dense", "linear", "weight", "kernel", "model", "module", "base", "self"}


def by_names(
    torch: Sequence[TorchUnit],
    flax: Sequence[FlaxUnit],
    ways: Table,
    aside: tuple[set[int], set[int]] = (set(), set()),
    *,
    usual_first: bool = False,
) -> list[int | None]:
    """For every PyTorch unit, the index of a similarly named Flax unit, each used once; None if no unit is left that fits.

    `aside`: the units of PyTorch and of Flax on which no output depends; they are paired with each other, or left over. If
    `usual_first`, a unit whose weights fit in the usual way for its kind comes before a unit of a more similar name.
    """
    from scipy.optimize import linear_sum_assignment

    order = {index: rank for rank, index in enumerate(sorted(range(len(flax)), key=lambda i: natural(flax[i].name)))}
    cost = np.full((len(torch), len(flax)), _NEVER)
    for i, j in itertools.product(range(len(torch)), range(len(flax))):
        if ways[i][j]:
            # If names do not decide, prefer the order of definition.
            cost[i, j] = -likeness(torch[i].name, flax[j].name) + 1e-3 * abs(i - order[j]) / len(torch)
            cost[i, j] += 0 if (i in aside[0]) is (j in aside[1]) else _UNREAD
            unusual = _AVOIDED if usual_first else _UNUSUAL
            cost[i, j] += 0 if _is_usual(torch[i], ways[i][j][0]) else unusual
            cost[i, j] += 0 if len(torch[i].tensors) == sum(len(rule.torch) for rule in ways[i][j][0]) else _PARTIAL
    rows, columns = linear_sum_assignment(cost)
    pairs = {int(row): int(column) for row, column in zip(rows, columns, strict=True) if cost[row, column] < _NEVER}
    return [pairs.get(unit) for unit in range(len(torch))]


_NEVER = 1e6
"""The cost of two units that do not fit."""
_UNREAD = 10.0
"""The additional cost of two units if the outputs depend on only one of them."""
_UNUSUAL, _AVOIDED = 1.5, 10.0
"""The additional costs of two units whose weights fit only in an unusual way, such as a dense layer's without a transpose."""
_PARTIAL = 1.0
"""The additional cost of two units if only a part of their arrays fits."""


def likeness(torch: str, flax: str) -> float:
    """The similarity of two module names, 0 or more; equal numbers count most, then equal last words.

    >>> query = "layers_1/attention/query"
    >>> likeness("layers.1.attn.q_proj", query) > likeness("layers.1.attn.k_proj", query) > likeness("head", query)
    True
    """
    (words, numbers), (others, other_numbers) = _words(torch), _words(flax)
    shared = sum(min(words.count(word), others.count(word)) for word in set(words))
    score = 2 * shared / (len(words) + len(others)) if words and others else 0.0
    last = 1.0 if words and others and words[-1] == others[-1] else 0.0
    if numbers == other_numbers:
        return score + last + (2.0 if numbers else 0.0)
    equal = sum(one == other for one, other in zip(numbers, other_numbers, strict=False))
    return score + last + equal / max(len(numbers), len(other_numbers))


@functools.lru_cache(maxsize=65536)
def _words(name: str) -> tuple[list[str], list[str]]:
    pieces = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
    words = [_WORD_OF.get(piece.lower(), piece.lower()) for piece in pieces if not piece.isdecimal()]
    return [word for word in words if word not in _NOTHING], [piece for piece in pieces if piece.isdecimal()]


def tokens(name: str) -> Counter[str]:
    """The words and numbers of a module's name, with synonyms replaced by a common word."""
    words, numbers = _words(name)
    return Counter((*words, *numbers))
