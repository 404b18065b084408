"""What `DeepMLP` costs under a cut into segments, as integers: bytes kept, peak memory, executions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_ref.segments import edges_of, kept_activations, most_activations, recomputed_layers


@dataclass(frozen=True)
class SegmentCost:
    """What one training step of a `DeepMLP` costs.

    Attributes:
        saved_bytes: kept by the graph between the passes, batch and parameters excluded: what `saved_for_backward` counts.
        peak_activation_bytes: the most that activations and cotangents come to at any moment.
        peak_bytes: the most that the device holds at any moment of a step that ends with the gradients: what `peak_bytes`
            tracks, for a loss that sums the output.
        executions: how often a layer runs forward, the head included.
        matmuls: matrix multiplications in both passes.

    >>> from torch_ref import deep_mlp_cost
    >>> plain, cut = deep_mlp_cost(16, batch=32, hidden_size=64), deep_mlp_cost(16, (8,), batch=32, hidden_size=64)
    >>> plain.saved_bytes > cut.saved_bytes, cut.executions - plain.executions  # the first segment again
    (True, 8)
    """

    saved_bytes: int
    peak_activation_bytes: int
    peak_bytes: int
    executions: int
    matmuls: int


def deep_mlp_cost(
    num_layers: int,
    boundaries: Sequence[int] = (),
    *,
    batch: int,
    hidden_size: int = 512,
    in_features: int = 1024,
    out_features: int = 10,
    itemsize: int = 4,
) -> SegmentCost:
    """The cost of `DeepMLP(num_layers, …)` cut at `boundaries`, for a batch that needs no gradient; without cuts, plain.

    One activation has a = batch · hidden_size · itemsize bytes: the result of a ReLU, which the ReLU's own backward and the
    next layer's weight gradient share. (A layer's own product is not kept.) With L layers, k segments, the last of r layers:

    - saved_bytes = (k − 1 + r − 1) · a, `kept_activations`. The first segment's input is the batch.
    - peak_activation_bytes = (`most_activations` + 2) · a: beside what is kept there are two cotangents, the one that comes
      into a layer and the one that goes out of it.
    - peak_bytes: parameters, batch, the peak of the activations *and* the gradients that are made by then, each as large as its
      parameters; 2 · itemsize more for the loss and its cotangent. When the ReLU of layer i of segment j runs backward, with
      n activations of that segment alive, that is (j − 1 + n + 2) · a and the gradients of all layers behind i. Within a
      segment this is linear, so the highest is at the first or the last ReLU of a segment, or at the very end, when all
      gradients and one cotangent are there. Where one layer has more parameters than its activation has elements
      (batch < hidden_size + 1), the end wins, and no cut lowers it.
    - executions = L + (L − r): every checkpointed layer twice.
    - matmuls = L + (2L − 1) + (L − r): one forward, two backward, but one for the first layer, as the batch needs no gradient.
      A segment ends on a ReLU whose result is kept, so that stopping a recomputation early saves no product.

    It holds where out_features ≤ hidden_size: the head's output is not what decides.

    Raises:
        InvalidArgumentError: if the boundaries do not fit the number of layers.

    >>> cost = deep_mlp_cost(16, (4, 8, 12), batch=32, hidden_size=64)
    >>> cost.saved_bytes, cost.executions, cost.matmuls  # 6 activations of 8192 bytes
    (49152, 28, 59)
    """
    edges = edges_of(num_layers, boundaries)
    activation = batch * hidden_size * itemsize
    first, hidden, head = (
        (rows + 1) * columns * itemsize
        for rows, columns in ((in_features, hidden_size), (hidden_size, hidden_size), (hidden_size, out_features))
    )
    # The head has no ReLU; a last segment of nothing else has no moment of its own.
    relus = [*zip(edges[:-2], edges[1:-1], strict=True), *([(edges[-2], num_layers - 1)] if edges[-2] < num_layers - 1 else [])]
    moments = [
        (index + relu - start + 1 + 2) * activation + (num_layers - 2 - relu) * hidden + head
        for index, (start, end) in enumerate(relus)
        for relu in (start, end - 1)
    ]
    gradients = first + (num_layers - 2) * hidden + head
    fixed = gradients + batch * in_features * itemsize + 2 * itemsize
    again = recomputed_layers(num_layers, boundaries)
    return SegmentCost(
        saved_bytes=kept_activations(num_layers, boundaries) * activation,
        peak_activation_bytes=(most_activations(num_layers, boundaries) + 2) * activation,
        peak_bytes=fixed + max(*moments, gradients + activation),
        executions=num_layers + again,
        matmuls=3 * num_layers - 1 + again,
    )
