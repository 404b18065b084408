"""The exact cost of a `DeepMLP` cut into segments: saved bytes, peak memory, executions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .segments import edges_of, kept_activations, most_activations, recomputed_layers


@dataclass(frozen=True)
class SegmentCost:
    """The cost of a training step of a `DeepMLP`.

    Attributes:
        saved_bytes: held by the graph between the passes, without batch and parameters, as `saved_for_backward` counts.
        peak_activation_bytes: the maximum of activations and cotangents at any time.
        peak_bytes: the maximum of device memory in a step that ends with the gradients, as `peak_bytes` tracks it for a
            loss that sums the output.
        executions: forward executions of all layers, including the head.
        matmuls: matrix multiplications in both passes.

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
    """The cost of `DeepMLP(num_layers, …)` cut at `boundaries`, for a batch without gradient; no boundaries mean no cuts.

    An activation has a = batch · hidden_size · itemsize bytes: it is the result of a ReLU, shared by the ReLU's backward and
    the next layer's weight gradient. (A layer's product is not kept.) With L layers in k segments, the last of r layers:

    - saved_bytes = (k − 1 + r − 1) · a, `kept_activations`. The first segment's input is the batch.
    - peak_activation_bytes = (`most_activations` + 2) · a: the activations and two cotangents, of a layer's output and of
      its input.
    - peak_bytes: parameters, batch, 2 · itemsize for the loss and its cotangent, and the largest sum of activations *and*
      the gradients made so far, each as large as its parameters. When the ReLU of layer i of segment j runs backward, with
      n activations of that segment alive, the sum is (j − 1 + n + 2) · a plus the gradients of all layers after i. The sum
      is linear within a segment, so the maximum is at the first or the last ReLU of a segment, or at the end, with all
      gradients and one cotangent. If a layer has more parameters than its activation has elements
      (batch < hidden_size + 1), the maximum is at the end, and no cut lowers it.
    - executions = L + (L − r): every checkpointed layer runs twice.
    - matmuls = L + (2L − 1) + (L − r): one forward and two backward per layer, but only one backward for the first layer,
      because the batch needs no gradient. A segment ends with a ReLU whose result is kept, so stopping a recomputation
      early saves no product.

    The formulas hold for out_features ≤ hidden_size, so that the head's output never sets the maximum.

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
    # The head has no ReLU, so a last segment with only the head adds no moment.
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
