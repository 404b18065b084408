"""Every mode, framework, form and dtype computes what plain PyTorch computes; a comparison that cannot fail proves nothing."""

from __future__ import annotations

import pytest

from parity_tests import matrix
from parity_tests import support as s


@pytest.mark.parametrize("case", matrix.RUN, ids=str)
def test_outputs_gradients_and_an_adam_step_agree(case: matrix.Case) -> None:
    assert matrix.problems(case, matrix.result(case)) == []


# One case per mode, so that a fault shows under every policy.
CONTROLS = [
    matrix.Case("linen", "ByteDecoder", "scan", "off", "float64"),
    matrix.Case("linen", "ByteDecoder", "unrolled", "checkpoint", "float32"),
    matrix.Case("nnx", "DecoderStack", "unrolled", "offload", "float32"),
]


@pytest.mark.parametrize("case", CONTROLS, ids=str)
@pytest.mark.parametrize("group", ["gradients", "after_adam"])
def test_a_flipped_sign_of_any_tensor_and_a_missed_transpose_of_a_square_one_are_seen(group: str, case: matrix.Case) -> None:
    result = matrix.result(case)
    tensors = getattr(result, group)
    square = [name for name in tensors if name.endswith("out_proj.weight")]
    assert len(tensors) >= 24 and len(square) == s.LAYERS
    for name, wrong_tensor in [*((name, -tensors[name]) for name in tensors), *((name, tensors[name].T) for name in square)]:
        wrong = matrix.problems(case, result._replace(**{group: tensors | {name: wrong_tensor}}))
        assert len(wrong) == 1 and wrong[0].startswith(f"{group}: {name} "), wrong
