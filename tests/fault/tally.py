"""How cases are drawn and attempted, and their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis.strategies import SearchStrategy

from remat_jax.errors import RematError
from remat_jax.parity.tolerances import TOLERANCES


def for_each(
    strategy: SearchStrategy[Any], number: int, seed: int, check: Callable[[Any], None], *, shrink: bool = False
) -> None:
    """Call `check` with a number of random cases; in one call Hypothesis repeats itself, so draw many with several seeds."""

    @seeded(seed)
    @settings(
        max_examples=number,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        database=None,
        deadline=None,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def every(case: Any) -> None:
        check(case)

    every()


@dataclass
class Tally:
    """The numbers of cases, of their kinds, and of their results."""

    kinds: Counter[str]
    refused: Counter[str]
    drawn: int = 0
    wrong: int = 0
    bit_equal: int = 0
    checked: int = 0

    @classmethod
    def empty(cls) -> Tally:
        return cls(Counter(), Counter())

    def compared(self, *kinds: str) -> None:
        """Count a case that is compared."""
        self.checked += 1
        self.kinds.update(kinds)


def attempted(ours: Callable[[], Any], without: Callable[[], Any], tally: Tally) -> Any:
    """The result of `ours`; None if it is refused, by an error of ours or because the program fails `without` us too."""
    try:
        return ours()
    except RematError as error:
        tally.refused[type(error).__name__] += 1
    except Exception as error:
        if works(without):
            raise
        tally.refused[f"also without a policy: {type(error).__name__}"] += 1
    return None


def works(program: Callable[[], Any]) -> bool:
    """Whether `program` ends without an error."""
    try:
        program()
    except Exception:  # whatever it raises: only whether it works is asked
        return False
    return True


def close(wanted: Any, found: Any) -> None:
    """Raise AssertionError unless both trees have equal structure, and leaves equal to rounding in float64."""
    structures = [jax.tree.structure(tree) for tree in (wanted, found)]
    assert structures[0] == structures[1], f"the result is {structures[1]}, not {structures[0]}"
    for (path, one), other in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert one.dtype == other.dtype, f"{jax.tree_util.keystr(path)} is {other.dtype}, not {one.dtype}"
        # Statistics and random masks of NNX are in float32.
        most = TOLERANCES["float64"].value if one.dtype == np.float64 else 1e-6
        first, second = (np.asarray(leaf).astype(np.complex128) for leaf in (one, other))
        off = np.linalg.norm((first - second).ravel()) / max(float(np.linalg.norm(first.ravel())), 1e-3)
        assert off <= most, f"{jax.tree_util.keystr(path)} is off by {off:.3g}"
