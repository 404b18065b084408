"""Cut a list of layers into checkpointed segments: where to cut, how to run the segments, and their cost.

A checkpointed segment keeps its input and recomputes its interior in the backward pass. The last segment is not
checkpointed, as in PyTorch's `checkpoint_sequential`, because its recomputation would directly follow its forward pass.
The boundaries of a cut are the indices at which the segments after the first begin. `rj.checkpoint_sequential` cuts by the
rule of `uniform_boundaries`; `parity_tests/test_deep_mlp_segments.py` compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_ref.checkpoint import gradient_checkpoint_forward
from torch_ref.errors import InvalidArgumentError


def uniform_boundaries(layers: int, segments: int) -> tuple[int, ...]:
    """Cut like `checkpoint_sequential`: `layers // segments` layers per segment, and the last segment takes the remainder.

    The remainder can be large: 255 layers in 16 segments are 15 segments of 15 layers and one of 30.

    Raises:
        InvalidArgumentError: unless `segments` is an integer from 1 to `layers`.

    >>> uniform_boundaries(20, 3)
    (6, 12)
    """
    check_segments(layers, segments)
    size = layers // segments
    return tuple(range(size, size * segments, size))


def sqrt_segments(layers: int) -> int:
    """The number of segments of the √L rule, rounded down.

    From Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).

    >>> sqrt_segments(16), sqrt_segments(20)
    (4, 4)
    """
    check_segments(layers, 1)
    return math.isqrt(layers)


def kept_activations(layers: int, boundaries: Sequence[int]) -> int:
    """The number of activations of a list of `layers` layers that are kept between the passes.

    Each layer but the last gives an activation that the next layer reads in the backward pass. The kept activations are
    the input of every segment but the first, whose input is the batch, and the interior of the last segment. If there
    are k segments and the last one has r layers, (k − 1) + (r − 1) activations are kept.

    Raises:
        InvalidArgumentError: if the boundaries do not fit the number of layers.

    >>> kept_activations(16, ()), kept_activations(16, (4, 8, 12))
    (15, 6)
    """
    edges = edges_of(layers, boundaries)
    return len(boundaries) + layers - edges[-2] - 1


def most_activations(layers: int, boundaries: Sequence[int]) -> int:
    """The maximum number of activations of a list of `layers` layers that are alive at once in the backward pass.

    Let segment j (counted from 1) have s layers. While it runs backward, the inputs of segments 2 to j are alive; later
    inputs are freed already. The recomputed outputs of its s layers are alive too; the last of them is the input of the
    next segment. For the last segment only s − 1 outputs are alive. The result is the maximum of j − 1 + s over the
    segments, where s − 1 replaces s for the last segment.
    With `checkpoint_sequential`'s rule it equals `kept_activations`, because no segment is longer than the last.

    Raises:
        InvalidArgumentError: if the boundaries do not fit the number of layers.

    >>> most_activations(16, (4, 8, 12)), most_activations(16, (5, 9, 12, 14)), most_activations(16, (12,))
    (6, 5, 12)
    """
    edges = edges_of(layers, boundaries)
    edges[-1] -= 1
    return max(index + end - start for index, (start, end) in enumerate(zip(edges, edges[1:], strict=False)))


def recomputed_layers(layers: int, boundaries: Sequence[int]) -> int:
    """The number of layers that run twice: all layers before the last segment.

    Raises:
        InvalidArgumentError: if the boundaries do not fit the number of layers.

    >>> recomputed_layers(16, (4, 8, 12))
    12
    """
    return edges_of(layers, boundaries)[-2]


def optimal_segments(layers: int) -> int:
    """The number of segments with which `checkpoint_sequential`'s rule keeps the fewest activations.

    With k segments of ⌊L / k⌋ layers it keeps k + L − (k − 1)⌊L / k⌋ − 2 activations; every k is tried. If √L is an integer,
    it is optimal; otherwise the remainder in the last segment can make it bad. Ties go to the fewest recomputed layers, and
    then to the smallest number of segments.

    >>> [(k, kept_activations(256, uniform_boundaries(256, k))) for k in (sqrt_segments(256), optimal_segments(256))]
    [(16, 30), (16, 30)]
    >>> [(k, kept_activations(62, uniform_boundaries(62, k))) for k in (sqrt_segments(62), optimal_segments(62))]
    [(7, 19), (6, 16)]
    """
    check_segments(layers, 1)

    def cost(segments: int) -> tuple[int, int, int]:
        boundaries = uniform_boundaries(layers, segments)
        return kept_activations(layers, boundaries), recomputed_layers(layers, boundaries), segments

    return min(range(1, layers + 1), key=cost)


def decreasing_boundaries(layers: int) -> tuple[int, ...]:
    """The cut with the lowest possible peak: segments become shorter towards the loss; the first has about √(2L) layers.

    A segment's input is freed after its backward pass. With room for m activations, segment j may therefore have m − j + 1
    layers, and the last segment one more, because the model's output is not kept. k segments contain at most
    km − k(k − 1) / 2 + 1 layers. The peak is the smallest m for which some k suffices for all layers; the smallest such k
    recomputes the fewest layers. Uniform segments need about 2√L activations, decreasing segments √(2L).

    >>> decreasing_boundaries(16), most_activations(16, decreasing_boundaries(16))
    ((5, 9, 12, 14), 5)
    """
    check_segments(layers, 1)
    room = next(room for room in range(layers) if _reach(room, room) >= layers)
    segments = next(count for count in range(1, layers + 1) if _reach(room, count) >= layers)
    boundaries: list[int] = []
    start = layers
    for index in range(segments, 1, -1):
        start -= room - index + 1 + (index == segments)
        boundaries.insert(0, start)
    return tuple(boundaries)


def _reach(room: int, segments: int) -> int:
    return segments * room - segments * (segments - 1) // 2 + 1


def checkpoint_segments(
    layers: Sequence[Callable[..., torch.Tensor]], boundaries: Sequence[int], x: torch.Tensor
) -> torch.Tensor:
    """`layers[-1](…layers[0](x))`, cut before the indices `boundaries`; each segment but the last is checkpointed.

    All segments are part of one graph, so gradients reach all layers. Without boundaries this is a plain call.

    Raises:
        InvalidArgumentError: if there are no layers, or the boundaries do not fit them.

    >>> from examples.pytorch import DeepMLP
    >>> model = DeepMLP(num_layers=6, hidden_size=4, in_features=3)
    >>> x = torch.ones(2, 3)
    >>> bool((checkpoint_segments(model.layers, (2, 5), x) == model(x)).all())
    True
    """
    functions = list(layers)
    edges = edges_of(len(functions), boundaries)
    for start, end in zip(edges[:-2], edges[1:-1], strict=True):
        x = gradient_checkpoint_forward(_joined(functions[start:end]), True, False, x)
    return _joined(functions[edges[-2] :])(x)


def _joined(layers: list[Callable[..., torch.Tensor]]) -> Callable[..., torch.Tensor]:
    # A function joins the layers: `MemTracker` still looks up modules in the backward pass, and a temporary `nn.Sequential`
    # would be deleted by then.
    def segment(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return segment


def check_segments(layers: int, segments: int) -> None:
    """Check that a list of `layers` layers can be cut into `segments`.

    Raises:
        InvalidArgumentError: unless both are integers, and `segments` is from 1 to `layers`.
    """
    if not _is_integer(layers) or layers < 1:
        raise InvalidArgumentError(f"layers is {layers!r}, expected the number of layers: an integer, at least 1.")
    if not _is_integer(segments) or not 1 <= segments <= layers:
        raise InvalidArgumentError(f"segments is {segments!r}, expected an integer from 1 to the number of layers, {layers}.")


def edges_of(layers: int, boundaries: Sequence[int]) -> list[int]:
    """The boundaries, preceded by the start of the first segment and followed by the end of the last.

    Raises:
        InvalidArgumentError: unless they are integers that increase and lie between 1 and `layers` - 1.
    """
    check_segments(layers, 1)
    edges = [0, *boundaries, layers]
    if not all(map(_is_integer, edges)) or any(a >= b for a, b in zip(edges, edges[1:], strict=False)):
        raise InvalidArgumentError(
            f"boundaries is {tuple(boundaries)!r}, expected the indices at which segments after the first begin: integers"
            f" that increase, from 1 to {layers - 1}, for {layers} layers."
        )
    return edges


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
