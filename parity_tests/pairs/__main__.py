"""Compare every pair, plant faults, write docs/notes/pairs.md: `make test-pairs`, `python -m parity_tests.pairs [NAME …]`.

With names it compares only these pairs, and writes no note. It fails if a right pair does not pass, a wrong pair passes, a
fault is not found, or too few of the faults are named: 97 % with the map of the right pair, 90 % with rules="auto".
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
LEAST_NAMED = {"given": 0.97, "auto": 0.9}
PACKAGES = ("transformers", "torch", "jax", "flax")


TEXT = """# Third-party pairs of models

Does `rj.parity.compare` pass correct ports, and find and name the faults of wrong ports, in code that it has not seen? Here it
compares the Flax classes of `transformers` with its PyTorch classes: tiny models with random weights, on a CPU. This note is
written by

    make test-pairs

with {versions}. Every pair is compared in three modes, in float64 and float32, with
memory, by the default call without options. `propose` finds the weight map, except for Mistral, whose two models
differ in more than their weights: Mistral is compared under the map that names suggest.

{counts}

| pair | verdict | tensors | lines of the map | seconds |
| --- | --- | --- | --- | --- |
{pairs}

A proposed map has placeholders for numbers, such as a layer's index, and for words that both names contain:
`encoder.layer.{{i}}.attention.self.{{name}}.weight` stands for query, key and value.

The fault of Mistral is in `transformers`: Flax's sliding window is one token longer than PyTorch's.

## Planted faults

Each fault is planted in the Flax model. The comparison runs in float64, with the map that was proposed for the correct pair
("given"), and with `rules="auto"`.

| pair | fault | rules | planted in | found | reported difference | seconds |
| --- | --- | --- | --- | --- | --- | --- |
{faults}
"""


def note(results: list[Result]) -> str:
    """The note: a table of the pairs, and one of the faults."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in PACKAGES)
    planted = [(result.name, fault) for result in results for fault in result.planted]
    detected, named = sum(not fault.passed for _, fault in planted), sum(fault.named for _, fault in planted)
    right = [result for result in results if result.name not in WRONG]
    pairs = [
        f"| {result.name} | {'passes' if result.passed else f'{result.verdict}; {result.said}'} | {result.tensors} "
        f"| {result.lines}{'' if result.proposed else ', given'} | {result.seconds:.0f} |"
        for result in results
    ]
    rows = [
        f"| {name} | {fault.name} | {fault.rules} | {fault.expected} "
        f"| {'no' if fault.passed else 'named' if fault.named else 'not named'} "
        f"| {fault.said.partition(' off')[0]} off | {fault.seconds:.0f} |"
        for name, fault in planted
    ]
    return TEXT.format(
        versions=versions,
        counts=f"{sum(result.passed for result in right)} of {len(right)} correct pairs pass. Of {len(planted)} planted "
        f"faults, {detected} are found, and {named} are reported in the right pass and module.",
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
            for fault in result.planted:
                state = "FAILED" if fault.passed else "ok" if fault.named else "unnamed"
                print(f"  {state:7} {fault.rules:5} {fault.name}, {fault.expected}: {fault.said}", flush=True)
    if not names:
        NOTE.write_text(note(results), encoding="utf-8")
    planted = [fault for result in results for fault in result.planted]
    fails = [
        outcome
        for outcome in (*results, *planted)
        if (outcome.passed if isinstance(outcome, Planted) else not outcome.is_right)
    ]
    named = {rules: [fault.named for fault in planted if fault.rules == rules] for rules in LEAST_NAMED}
    counts = "; ".join(f"{len(each)} faults with rules {rules}, {sum(each)} named" for rules, each in named.items())
    print(f"{len(results)} pairs; {counts}; {len(fails)} failed")
    return int(bool(fails) or any(sum(each) < LEAST_NAMED[rules] * len(each) for rules, each in named.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
