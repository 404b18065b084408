"""The ways to convert the tensors of a PyTorch module into the arrays of a Flax module, by its kind and by shapes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from remat_jax.errors import PortingError
from remat_jax.porting.auto.units import FlaxUnit, Shape, TorchUnit
from remat_jax.porting.links import Place
from remat_jax.porting.pattern import FlaxPattern, Pattern
from remat_jax.porting.rules import Rule
from remat_jax.porting.transform import Transform

# One way: a rule for every tensor of the unit.
Way = tuple[Rule, ...]

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
_VECTOR = ("identity", "heads_bias")
_LOCAL = {
    "weight": ("kernel", "scale", "embedding", "weight", ""),
    "in_proj_weight": ("kernel",),
    "in_proj_bias": ("bias",),
    "bias": ("bias",),
    "running_mean": ("mean",),
    "running_var": ("var",),
    "": ("", "kernel", "scale", "embedding", "weight", "bias"),
}


def ways(torch: TorchUnit, flax: FlaxUnit) -> list[Way]:
    """Every way that fits, the usual way for the module's kind first."""
    if flax.children:
        return _cell(torch, flax) if torch.kind in ("LSTM", "GRU") else _fused(torch, flax)
    if torch.kind in ("LSTM", "GRU") or len(torch.tensors) != len(flax.arrays):
        return []
    places = {local: (place, shape) for local, place, shape in flax.arrays}
    choices = []
    for local, shape in torch.tensors:
        found = next((name for name in _LOCAL.get(local, (local,)) if name in places), None)
        if found is None:
            return []
        place, after = places.pop(found)
        choices.append(
            [_rule(torch, (local,), [place], text) for text in _fitting(_texts(torch.kind, local, shape), shape, after)]
        )
    return [tuple(chosen) for chosen in itertools.product(*choices)]


def _texts(kind: str, local: str, shape: Shape) -> Sequence[str]:
    if kind in _CONVOLUTION and local == "weight":
        return _CONVOLUTION[kind]
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


def _fitting(texts: Sequence[str], shape: Shape, after: Shape) -> list[str]:
    return [text for text in dict.fromkeys(texts) if _fits(text, [shape], [after])]


def _fits(text: str, before: list[Shape], after: list[Shape]) -> bool:
    try:
        return Transform.parse(text).before(after, len(before)) == before
    except PortingError:
        return False


def _fused(torch: TorchUnit, flax: FlaxUnit) -> list[Way]:
    """The ways for one weight with query, key and value, as in PyTorch's attention and GPT-2's."""
    places = {local: (place, shape) for local, place, shape in flax.arrays}
    choices = []
    for local, shape in torch.tensors:
        leaf = "bias" if local.endswith("bias") else "kernel"
        here = [places.get(f"{child}/{leaf}") for child in flax.children]
        if None in here or len(flax.arrays) != len(torch.tensors) * len(flax.children):
            return []
        targets, after = zip(*filter(None, here), strict=True)
        fused = (
            "in_proj_bias",
            "split(0)",
            "in_proj",
            "gpt2_qkv",
            "split(0) | linear",
            "split(1)",
        )
        fitting = [text for text in fused if _fits(text, [shape], list(after))]
        choices.append([_rule(torch, (local,), list(targets), text) for text in fitting])
    return [tuple(chosen) for chosen in itertools.product(*choices)]


def _cell(torch: TorchUnit, flax: FlaxUnit) -> list[Way]:
    """The ways for a recurrent cell: gates one by one, or fused into two layers."""
    places = {local: place for local, place, _ in flax.arrays}
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
        entries.append((biases, tuple(f"{child}/bias" for child in state), "lstm_bias" if half > 1 else "sum"))
    wanted = [local for _, locals_, _ in entries for local in locals_]
    if sorted(wanted) != sorted(places):
        return []
    return [tuple(_rule(torch, names, [places[local] for local in locals_], text) for names, locals_, text in entries)]


def _rule(torch: TorchUnit, names: tuple[str, ...], places: list[Place], text: str) -> Rule:
    targets = tuple(
        FlaxPattern(Pattern(place.path), tuple(None if i is None else Pattern(str(i)) for i in place.index)) for place in places
    )
    return Rule(tuple(Pattern(torch.full(name)) for name in names), targets, Transform.parse(text))
