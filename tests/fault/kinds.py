"""All kinds of cases: stacks of random programs, and the smaller families beside them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.fault import checks
from tests.fault.accumulation import accumulations
from tests.fault.decorated import decorated
from tests.fault.module_state import module_states
from tests.fault.tally import Tally

every_case: st.SearchStrategy[Any] = st.one_of(
    checks.cases(), checks.cases(), checks.cases(), accumulations, decorated(), module_states
)


def check(case: Any, tally: Tally) -> None:
    """Check a case of any kind."""
    if isinstance(case, checks.Case):
        checks.check(case, tally)
    else:
        case.check(tally)
