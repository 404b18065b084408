"""Compare every pair, plant faults, write docs/notes/pairs.md: `make test-pairs`, `python -m parity_tests.pairs [NAME …]`.

With names it compares only these pairs, and writes no note. It fails if a right pair does not pass, a wrong pair passes, a
fault is not found, or fewer than 95 % of the faults are named.
"""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import multiprocessing
import sys
from pathlib import Path

from parity_tests.pairs import models
from parity_tests.pairs.examining import WRONG, Planted, Result, examine

NOTE = Path(__file__).parents[2] / "docs" / "notes" / "pairs.md"
LEAST_NAMED = 0.95
PACKAGES = ("transformers", "torch", "jax", "flax")


TEXT = """# Third-party pairs of models

Does `rj.parity.compare` pass correct ports, and find and name the faults of wrong ports, in code that it has not seen? Here it
compares the Flax classes of `transformers` with its PyTorch classes: tiny models with random weights, on a CPU. This note is
written by

    make test-pairs

with {versions}. Every pair is compared in three modes, in float64 and float32, with
memory. `propose` finds the weight map, except for Mistral, whose two models differ in more than their weights.

{counts}

| pair | verdict | tensors | lines of the map | seconds |
| --- | --- | --- | --- | --- |
{pairs}

A proposed map has placeholders for numbers, such as a layer's index, and for words that both names contain:
`encoder.layer.{{i}}.attention.self.{{name}}.weight` stands for query, key and value.

The fault of Mistral is in `transformers`: Flax's sliding window is one token longer than PyTorch's.

## Planted faults

Each fault is planted in the Flax model. The comparison runs in float64, with the map that was proposed for the correct pair.

| pair | fault | planted in | found | reported difference | seconds |
| --- | --- | --- | --- | --- | --- |
{faults}
"""


def note(results: list[Result]) -> str:
    """The note: a table of the pairs, and one of the faults."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in PACKAGES)
    planted = [(result.name, one) for result in results for one in result.planted]
    found, named = sum(not one.passed for _, one in planted), sum(one.named for _, one in planted)
    right = [result for result in results if result.name not in WRONG]
    pairs = [
        f"| {one.name} | {'passes' if one.passed else f'{one.verdict}; {one.said}'} | {one.tensors} "
        f"| {one.lines}{'' if one.proposed else ', given'} | {one.seconds:.0f} |"
        for one in results
    ]
    rows = [
        f"| {name} | {one.name} | {one.expected} | {'no' if one.passed else 'named' if one.named else 'not named'} "
        f"| {one.said.partition(' off')[0]} off | {one.seconds:.0f} |"
        for name, one in planted
    ]
    return TEXT.format(
        versions=versions,
        counts=f"{sum(one.passed for one in right)} of {len(right)} correct pairs pass. Of {len(planted)} planted faults, "
        f"{found} are found, and {named} are reported in the right pass and module.",
        pairs="\n".join(pairs),
        faults="\n".join(rows),
    )


def main(names: list[str]) -> int:
    """Compare pairs, each in its own process, and print the results."""
    if not models.has_flax_classes():
        sys.exit("transformers has no Flax classes here: run make test-pairs, which installs 4.56.2 beside the project")
    if unknown := [name for name in names if name not in models.PAIRS]:
        sys.exit(f"no pair is named {', '.join(unknown)}; give some of {', '.join(models.PAIRS)}, or none for all of them")
    processes = multiprocessing.get_context("spawn")
    results = []
    with concurrent.futures.ProcessPoolExecutor(2, processes, max_tasks_per_child=1) as pool:
        for result in pool.map(examine, names or models.PAIRS):
            results.append(result)
            state = "ok" if result.is_right else "FAILED"
            print(f"{state:6} {result.name}: {result.verdict} {result.said} ({result.seconds:.0f} s)")
            for one in result.planted:
                state = "FAILED" if one.passed else "ok" if one.named else "unnamed"
                print(f"  {state:7} {one.name}, {one.expected}: {one.said}", flush=True)
    if not names:
        NOTE.write_text(note(results), encoding="utf-8")
    planted = [one for result in results for one in result.planted]
    fails = [one for one in (*results, *planted) if (one.passed if isinstance(one, Planted) else not one.is_right)]
    named = sum(one.named for one in planted)
    print(f"{len(results)} pairs; {len(planted)} faults, {named} named; {len(fails)} failed")
    return int(bool(fails) or named < LEAST_NAMED * len(planted))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
