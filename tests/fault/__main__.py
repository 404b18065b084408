"""`python -m tests.fault`: checks random programs, texts and files, and prints what is wrong."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from hypothesis import strategies as st

import conftest
from tests.fault import ops
from tests.fault.checks import cases
from tests.fault.files import check_files
from tests.fault.module_state import module_states
from tests.fault.tally import Tally, for_each
from tests.fault.texts import check_texts

every_case: st.SearchStrategy[Any] = st.one_of(cases(), cases(), cases(), module_states)
SLICE = 25
"""Programs drawn with one seed."""
MOST_LOWERED = 6000
"""Random programs share most of their operations, so JAX's caches are kept longer than in the tests."""


def main() -> int:
    """Check and print; 1 if anything was wrong, or if fewer than a third of the programs could be compared."""
    parser = argparse.ArgumentParser(prog="python -m tests.fault", description=__doc__)
    parser.add_argument("--programs", type=int, default=0, help="random programs under random policies")
    parser.add_argument("--texts", type=int, default=0, help="malformed texts: policies, budgets, targets, meshes")
    parser.add_argument("--files", type=int, default=0, help="malformed files: plans, targets, weights")
    parser.add_argument("--devices", type=int, default=1, help="over how many devices sharding constraints divide")
    parser.add_argument("--flags", default="", help="JAX's upgrade flags to switch on, as in `remat3,custom_jvp3`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no slice of programs after this time")
    parser.add_argument("--note", type=Path, help="write the results of the programs as a note")
    parser.add_argument("--shrink", action="store_true", help="look for the smallest wrong program; takes long")
    asked = parser.parse_args()
    if asked.devices > 1:
        jax.config.update("jax_num_cpu_devices", asked.devices)
        ops.DEVICES = asked.devices
    for flag in filter(None, asked.flags.split(",")):
        jax.config.update(f"jax_{flag}", True)
    # As the tests do: with few optimizations, and each program compiled once. Compiling takes most of the time.
    conftest.pytest_configure()
    wrong = check_texts(asked.texts, asked.seed, say)
    with tempfile.TemporaryDirectory() as folder:
        wrong += check_files(asked.files, asked.seed, Path(folder), say)
    return 1 if wrong + check_programs(asked) else 0


def say(line: str) -> None:
    """Print at once: a run takes long."""
    print(line, flush=True)


def check_programs(asked: argparse.Namespace) -> int:
    """The number of wrong programs, plus one if most programs were refused instead of compared."""
    tally, start = Tally.empty(), time.monotonic()

    def count(case: Any) -> None:
        tally.drawn += 1
        try:
            case.check(tally)
        except Exception as error:
            say(f"WRONG: {case}\n{type(error).__name__}: {error}")
            if asked.shrink:
                raise
            tally.wrong += 1

    for number, begin in enumerate(range(0, asked.programs, SLICE)):
        if time.monotonic() - start > asked.seconds:
            break
        size = min(SLICE, asked.programs - begin)
        for_each(every_case, size, 10_000 * asked.seed + number, count, shrink=asked.shrink)
        conftest.forget_programs(MOST_LOWERED)
        compared = f"{tally.checked} compared, {tally.bit_equal} of these bit for bit"
        say(f"{tally.drawn} programs drawn, {compared}, {tally.wrong} wrong")
    if tally.drawn and asked.note:
        asked.note.write_text(note(tally), encoding="utf-8")
    if tally.drawn:
        say(f"refused: {dict(tally.refused)}\nof these kinds: {dict(sorted(tally.kinds.items()))}")
    if tally.drawn >= SLICE and 3 * tally.checked < tally.drawn:
        say(f"TOO FEW: {tally.checked} of {tally.drawn} programs were compared")
        return tally.wrong + 1
    return tally.wrong


def note(tally: Tally) -> str:
    """The results of a run of programs, as tables."""
    numbers = {"drawn": tally.drawn, "compared": tally.checked, "equal bit for bit": tally.bit_equal, "wrong": tally.wrong}
    tables = {"programs": numbers.items(), "why refused": tally.refused.most_common(), "kind": sorted(tally.kinds.items())}
    return "\n".join(
        f"| {head} | |\n| --- | --- |\n" + "".join(f"| {name} | {count} |\n" for name, count in rows)
        for head, rows in tables.items()
    )


if __name__ == "__main__":
    sys.exit(main())
