"""Compare every pair, plant faults, write docs/notes/pairs.md: `python -m parity_tests.pairs [NAME …]`.

With names it compares only these pairs, and writes no note. Results are kept in build/pairs, and with `--resume` those that an
earlier run has kept are not computed again. It fails if a right pair does not pass, a wrong pair passes, a fault is not found,
or too few of the faults are named: 97 % with the map of the right pair, 90 % with rules="auto".
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.metadata
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from parity_tests.pairs import models
from parity_tests.pairs.examining import WRONG, Planted, Result, examine, plant

ROOT = Path(__file__).parents[2]
NOTE, KEPT = ROOT / "docs" / "notes" / "pairs.md", ROOT / "build" / "pairs"
LEAST_NAMED = {"given": 0.97, "auto": 0.9}
TASKS = 6
"""The number of pairs for each process."""
PACKAGES = ("transformers", "torch", "jax", "flax")


TEXT = """# Third-party pairs of models

Does `rj.parity.compare` pass correct ports, and find and name the faults of wrong ports, in code that it has not seen? Here it
compares the Flax classes of `transformers` with its PyTorch classes, and pairs of kinds without such classes that are written
by hand (LoRA, experts, Mamba, a UNet, recurrent nets): tiny models with random weights, on a CPU. This note is written by

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


def named_by_rules(results: list[Result]) -> dict[str, list[bool]]:
    """For the right map and for proposed maps: whether each fault is named."""
    planted = [fault for result in results for fault in result.planted or ()]
    return {rules: [fault.named for fault in planted if fault.rules == rules] for rules in LEAST_NAMED}


def note(results: list[Result]) -> str:
    """The note: a table of the pairs, and one of the faults."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in PACKAGES)
    planted = [(result.name, fault) for result in results for fault in result.planted or ()]
    detected, named = sum(not fault.passed for _, fault in planted), sum(fault.named for _, fault in planted)
    examined = sum(bool(result.planted) for result in results)
    by_rules = "; ".join(f"{sum(each)} of {len(each)} with rules {rules}" for rules, each in named_by_rules(results).items())
    right = [result for result in results if result.name not in WRONG]
    pairs = [
        f"| {result.name} | {'passes' if result.passed else f'{result.verdict}; {result.said}'} | {result.tensors} "
        f"| {len(result.rules.splitlines())}{'' if result.proposed else ', given'} | {result.seconds:.0f} |"
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
        counts=f"{sum(result.passed for result in right)} of {len(right)} correct pairs pass. In {examined} of {len(results)} "
        f"pairs, {len(planted)} faults are planted; {detected} are found, and {named} are reported in the right pass and "
        f"module: {by_rules}.",
        pairs="\n".join(pairs),
        faults="\n".join(rows),
    )


def kept(name: str) -> Result | None:
    """A pair's result that an earlier run has kept."""
    file = KEPT / f"{name}.json"
    if not file.exists():
        return None
    data = json.loads(file.read_text(encoding="utf-8"))
    planted = data["planted"] and [Planted(**fault) for fault in data["planted"]]
    return Result(**{**data, "planted": planted})


def computed(run: Callable[[Any], Result], tasks: list[Any], processes: int) -> Iterator[Result]:
    """The results of the tasks, each kept as soon as it is computed; new processes begin after some tasks, to free memory."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["parity_tests.pairs.examining", "remat_jax.parity"])
    for first in range(0, len(tasks), TASKS * processes):
        # `max_tasks_per_child` would do this, but it makes the executor of Python 3.11 wait forever.
        with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
            several = tasks[first : first + TASKS * processes]
            for future in concurrent.futures.as_completed([pool.submit(run, task) for task in several]):
                result = future.result()
                KEPT.mkdir(parents=True, exist_ok=True)
                (KEPT / f"{result.name}.json").write_text(json.dumps(dataclasses.asdict(result)), encoding="utf-8")
                yield result


def main(arguments: list[str]) -> int:
    """Compare pairs, then plant faults in them, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m parity_tests.pairs")
    parser.add_argument("names", nargs="*", help="the pairs; without names, all of them, and the note is written")
    parser.add_argument("--resume", action="store_true", help="do not compute again what an earlier run has kept")
    parser.add_argument("--note", action="store_true", help="write the note from the kept results, and compute nothing")
    parser.add_argument("--processes", type=int, default=2, help="how many pairs are compared at a time")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in models.NAMES]:
        sys.exit(f"no pair is named {', '.join(unknown)}; give some of {', '.join(models.NAMES)}, or none for all of them")
    if options.note:
        NOTE.write_text(note([result for name in models.NAMES if (result := kept(name))]), encoding="utf-8")
        return 0
    names = list(dict.fromkeys(options.names or models.NAMES))
    if not models.has_flax_classes() and models.PAIRS.keys() & set(names):
        sys.exit("transformers has no Flax classes here: run make test-pairs, which installs 4.56.2 beside the project")
    done = {name: result for name in names if options.resume and (result := kept(name))}
    for result in computed(examine, [name for name in names if name not in done], options.processes):
        done[result.name] = result
        state = "ok" if result.is_right else "FAILED"
        print(f"{state:6} {result.name}: {result.verdict} {result.said} ({result.seconds:.0f} s)", flush=True)
    right = [done[name] for name in names if name not in WRONG and done[name].planted is None]
    for result in computed(plant, right, options.processes):
        done[result.name] = result
        print(result.name)
        for fault in result.planted or ():
            state = "FAILED" if fault.passed else "ok" if fault.named else "unnamed"
            print(f"  {state:7} {fault.rules:5} {fault.name}, {fault.expected}: {fault.said}", flush=True)
    results = [done[name] for name in names]
    if not options.names:
        NOTE.write_text(note(results), encoding="utf-8")
    planted = [fault for result in results for fault in result.planted or ()]
    fails = sum(not result.is_right for result in results) + sum(fault.passed for fault in planted)
    named = named_by_rules(results)
    counts = "; ".join(f"{len(each)} faults with rules {rules}, {sum(each)} named" for rules, each in named.items())
    print(f"{len(results)} pairs; {counts}; {fails} failed")
    return int(bool(fails) or any(sum(each) < LEAST_NAMED[rules] * len(each) for rules, each in named.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
