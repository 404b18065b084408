"""Every case of the matrix: results as those of plain PyTorch; executions as integers, equal in both frameworks.

A decoder layer multiplies matrices six times: q/k/v, scores, values, output, and the two of its feed-forward network.
Backward takes two for each, one per operand. Mode off therefore executes 6 + 12 = 18 per layer, checkpoint and offload
12 + 12 = 24: the layer runs twice. The decoder's head adds 1 + 2 outside the blocks. The toy has none; its sigmoid is
counted as the block execution.

Where the frameworks may differ is the end of a recomputation. If a block's last product is its output, there is no need to
recompute it: backward reads its operands, not its value. PyTorch's `early_stop` ends the recomputation as soon as the last
tensor that autograd saved is recomputed. JAX removes every recomputed equation that backward does not read, wherever it stands.

| block | forward | backward | checkpoint, all again | PyTorch with `early_stop` | JAX |
| --- | --- | --- | --- | --- | --- |
| W₂ relu(W₁x) | 2 | 4 | 8 | 7 (W₂ is after the last saved) | 7 (W₂ is not read) |
| W₂ relu(W₁x) + V₂ relu(V₁x) | 4 | 8 | 16 | 15 (V₂; W₂ is before relu(V₁x)) | 14 (W₂ and V₂) |
| norm(W₁x) | 1 | 2 | 4 | 4 (the norm saves last) | 4 (its statistics need W₁x) |

The decoder layer ends in a norm, like the third block: neither framework saves a product, and the counts are equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint_sequential, set_checkpoint_early_stop

import remat_jax as rj
import torch_ref
from parity_tests import matrix
from parity_tests import support as s
from remat_jax.cost.count import matmuls


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", matrix.RUN, ids=str)
def test_outputs_gradients_and_an_adam_step_agree(case: matrix.Case) -> None:
    assert matrix.problems(case, matrix.result(case)) == []


SINGLE = [case for case in matrix.CASES if case.dtype == "float32"]


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_matmuls_block_executions_and_bytes_moved(case: matrix.Case) -> None:
    assert matrix.cost(case) == matrix.expected_cost(case)


@pytest.mark.parametrize(("framework", "mode"), [("linen", "off"), ("linen", "offload"), ("nnx", "checkpoint")])
def test_under_scan_the_compiled_program_multiplies_as_often_as_the_jaxpr_says(framework: str, mode: str) -> None:
    """A loop's body is compiled once. (Unrolled, XLA for CPU merges part of the last block's recomputation: 44 instead of
    48.)
    """
    case = matrix.Case(framework, "DecoderStack", "scan", mode, "float32")
    compiled = matrix.compiled(case).as_text()
    assert len(re.findall(r"= \S+ dot\(", compiled)) * s.LAYERS == matrix.expected_cost(case).matmuls


# The blocks of the table above, written once for both frameworks: `@` is a product in both.
def perceptron(x: Any, weights: Any) -> Any:
    return _relu(x @ weights[0]) @ weights[1]


def branches(x: Any, weights: Any) -> Any:
    return _relu(x @ weights[0]) @ weights[1] + _relu(x @ weights[2]) @ weights[3]


def norm_last(x: Any, weights: Any) -> Any:
    product = x @ weights[0]
    if isinstance(product, torch.Tensor):
        return torch.nn.functional.layer_norm(product, product.shape[-1:])
    return jax.nn.standardize(product)


def _relu(x: Any) -> Any:
    return torch.relu(x) if isinstance(x, torch.Tensor) else jax.nn.relu(x)


TABLE = [
    (perceptron, {"off": 6, "all again": 8, "torch": 7, "jax": 7}),
    (branches, {"off": 12, "all again": 16, "torch": 15, "jax": 14}),
    (norm_last, {"off": 3, "all again": 4, "torch": 4, "jax": 4}),
]


@pytest.mark.parametrize(("block", "expected"), TABLE, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("mode", matrix.MODES)
def test_early_stop_accounts_for_the_difference(mode: str, block: Callable[..., Any], expected: dict[str, int]) -> None:
    flags = tuple(torch_ref.mode_flags(mode).values())
    x, *weights = np.random.default_rng(0).normal(size=(5, 4, 4)).astype("float32")

    def torch_count(early_stop: bool) -> int:
        leaves = [torch.tensor(array, requires_grad=True) for array in (x, *weights)]
        with set_checkpoint_early_stop(early_stop), torch_ref.count_matmuls() as count:
            forward = torch_ref.gradient_checkpoint_forward
            (forward(block, *flags, leaves[0], weights=leaves[1:]) ** 2).sum().backward()
        return count.total

    def loss(x: Any, weights: Any) -> Any:
        return (rj.gradient_checkpoint_forward(block, *flags, x, weights=weights) ** 2).sum()

    counts = {
        "all again": torch_count(early_stop=False),
        "torch": torch_count(early_stop=True),
        "jax": matmuls(jax.grad(loss, (0, 1)), x, weights),
    }
    assert counts == ({name: expected[name] for name in counts} if mode != "off" else dict.fromkeys(counts, expected["off"]))


@pytest.mark.parametrize(("segments", "again"), [(1, 0), (2, 2), (3, 2), (4, 3), (5, 4)])
def test_pytorchs_checkpoint_sequential_runs_the_layers_again_that_ours_does(segments: int, again: int) -> None:
    """Of five layers, all but the last segment's; tests/test_pytorch_style.py has the same numbers for JAX."""
    layers = [torch.nn.Linear(4, 4) for _ in range(5)]
    x = torch.ones(3, 4, requires_grad=True)
    # Without early stop, so that a recomputed segment is counted in full.
    with set_checkpoint_early_stop(False), torch_ref.count_calls(torch.nn.Linear) as calls:
        checkpoint_sequential(layers, segments, x, use_reentrant=False).sum().backward()
    assert [calls.per_module[layer] for layer in layers] == [2] * again + [1] * (5 - again)
