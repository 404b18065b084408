"""`python -m tests.fault`: checks random programs, texts, files and selectors, and prints what is wrong."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded

import conftest
from tests.fault import ops
from tests.fault.files import check_files
from tests.fault.kinds import check, every_case
from tests.fault.selectors import check_selectors
from tests.fault.tally import Tally
from tests.fault.texts import check_texts

ATTACKS = {
    "names": ("tests/test_names_in_layers.py",),
    "vmap": ("tests/test_ties.py",),
    "cache": ("tests/test_memory_cache.py",),
    "files": ("tests/test_plan_files.py", "tests/fault/test_texts_and_files.py", "tests/fault/test_untrusted.py"),
    "terminal": ("tests/test_terminal.py",),
    "disks": ("tests/test_scratch.py", "tests/test_write_whole.py"),
    "eager": ("tests/test_shard_map.py",),
    "processes": ("tests/test_process.py", "tests/test_process_left.py"),
    "signals": ("tests/fault/test_interrupts.py",),
    "threads": ("tests/fault/test_threads.py",),
}
"""Former faults, and the tests that would find them again."""

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
    parser.add_argument("--selectors", type=int, default=0, help="random blocks, each of whose arrays is selected by its name")
    parser.add_argument(
        "--attacks", nargs="*", choices=sorted(ATTACKS), help="the tests of these attacks; of all if none is named"
    )
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
    wrong += check_selectors(asked.selectors, asked.seed, say)
    if asked.attacks is not None:
        wrong += pytest.main(["-q", *(path for name in asked.attacks or ATTACKS for path in ATTACKS[name])])
    return 1 if wrong + check_programs(asked) else 0


def say(line: str) -> None:
    """Print at once: a run takes long."""
    print(line, flush=True)


def check_programs(asked: argparse.Namespace) -> int:
    """The number of wrong programs, plus one if most programs were refused instead of compared."""
    tally, start = Tally.empty(), time.monotonic()
    for number, size in enumerate(_slices(asked.programs)):
        if time.monotonic() - start > asked.seconds:
            break
        _slice(size, 10_000 * asked.seed + number, asked.shrink, tally)
        conftest.forget_programs(MOST_LOWERED)
        compared = f"{tally.checked} compared, {tally.bit_equal} of these bit for bit"
        say(f"{tally.drawn} programs drawn, {compared}, {tally.wrong} wrong")
    if tally.drawn and asked.note:
        asked.note.write_text(note(asked, tally, time.monotonic() - start), encoding="utf-8")
    if tally.drawn:
        say(f"refused: {dict(tally.refused)}\nof these kinds: {dict(sorted(tally.kinds.items()))}")
    if tally.drawn >= SLICE and 3 * tally.checked < tally.drawn:
        say(f"TOO FEW: {tally.checked} of {tally.drawn} programs were compared")
        return tally.wrong + 1
    return tally.wrong


def note(asked: argparse.Namespace, tally: Tally, seconds: float) -> str:
    """The results of a run of programs, as a page."""
    kinds = "\n".join(f"| {name} | {count} |" for name, count in sorted(tally.kinds.items()))
    refused = "\n".join(f"| {name} | {count} |" for name, count in tally.refused.most_common())
    return f"""# Random programs under random policies

Do random programs have the same value and gradients under random policies as without? They do if the last row of the first
table is 0. Each program is a stack of layers of random operations. Its value and gradients under the policies are compared
with those of the plain program, in float64.
`python -m tests.fault --programs {asked.programs} --seed {asked.seed} --seconds {asked.seconds:g} --note …` wrote the next
three tables with JAX {jax.__version__}.

| programs | |
| --- | --- |
| requested | {asked.programs} |
| drawn in {seconds / 60:.0f} minutes | {tally.drawn} |
| compared | {tally.checked} |
| equal bit for bit | {tally.bit_equal} |
| wrong | {tally.wrong} |

Some programs are refused and not compared: JAX does not support them (`docs/limits.md`), or a random policy has no effect on a
random program.

| why | programs |
| --- | --- |
{refused}

The compared programs by kind: how the policy was applied, the loop around the layers, the transformation of the loss, and how
the program ran. A program has several kinds.

| kind | programs |
| --- | --- |
{kinds}
"""


def _slices(programs: int) -> Iterator[int]:
    for begin in range(0, programs, SLICE):
        yield min(SLICE, programs - begin)


def _slice(size: int, seed: int, shrink: bool, tally: Tally) -> None:
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @seeded(seed)
    @settings(
        max_examples=size,
        phases=phases,
        database=None,
        deadline=None,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(every_case)
    def every(case: Any) -> None:
        tally.drawn += 1
        try:
            check(case, tally)
        except Exception as error:
            say(f"WRONG: {case}\n{type(error).__name__}: {error}")
            if shrink:
                raise
            tally.wrong += 1

    every()


if __name__ == "__main__":
    sys.exit(main())
