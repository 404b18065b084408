"""Every mode, framework, form and dtype computes what plain PyTorch computes."""

from __future__ import annotations

import pytest

from parity_tests import matrix


@pytest.mark.parametrize("case", matrix.RUN, ids=str)
def test_outputs_gradients_and_an_adam_step_agree(case: matrix.Case) -> None:
    assert matrix.problems(case, matrix.result(case)) == []
