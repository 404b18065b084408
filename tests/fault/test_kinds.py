"""One case of each family beside the stacks of random programs; `python -m tests.fault` draws the others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fault.accumulation import Accumulation
from tests.fault.decorated import Decorated
from tests.fault.kinds import every_case
from tests.fault.module_state import ModuleState
from tests.fault.tally import Tally


@pytest.mark.parametrize(
    "case",
    [
        Accumulation("bfloat16", "bfloat16", "mask", 300, 2, "full"),
        Accumulation("complex64", "bool", "none", 3, 2, "off"),
        Decorated(("remat", "jit"), True, None, "full", "checkpoint_blocks", True, False),
        Decorated(("vmap",), True, None, "dots", "checkpoint_blocks", True, False),
        Decorated((), True, 4, "full", "checkpoint_blocks", True, False),
        Decorated(
            ("remat",), True, None, "offload_inputs", "checkpoint_blocks", True, False, (("jit",), "offload: *sin*"), True
        ),
        ModuleState(("swap", "alias"), "full", "checkpoint_blocks", "nnx.jit", 1, False),
        ModuleState(("dropout", "new data"), "everything", "enable", "jax.jit", 2, False),
    ],
    ids=str,
)
def test_each_family_keeps_results_and_state(case: Any) -> None:
    tally = Tally.empty()
    case.check(tally)
    assert tally.checked == 1, tally


def test_every_family_is_drawn() -> None:
    drawn: Counter[str] = Counter()

    @seed(0)
    @settings(max_examples=40, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(every_case)
    def count(case: Any) -> None:
        drawn.update([type(case).__name__])

    count()
    assert drawn.keys() == {"Case", "Accumulation", "Decorated", "ModuleState"}
