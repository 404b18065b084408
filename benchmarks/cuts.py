"""`python -m benchmarks.cuts mlp` (or `last`, `gpt2`, `gradients`): what a cut changes; tables of docs/notes/cutting_a_scan.md.

Six scanned layers, compiled for an H200. The tables have device memory in MiB; "4 + 1 + 1" is a scan cut into runs of 4, 1 and
1 layers. In `last`, one to three last layers of the MLP are under `everything`, in one scan or each in a scan of its own.
`gradients` has twelve layers of the MLP over 2048 rows, and compares with the planner's formula.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import jax

import remat_jax as rj
from benchmarks.figures import markdown
from benchmarks.plan.rivals import policies, roles_that_keep
from benchmarks.plan.workloads import Case, decoder_scanned, deep_mlp
from remat_jax import compat
from remat_jax.planning.fit_memory import predicted
from remat_jax.planning.problem import describe
from remat_jax.planning.translate import named_candidate, recut

LAYERS = 6
CUTS = ((6,), (5, 1), (4, 1, 1))
PRODUCTS = "MaxText minimal_with_context"


def text_of(runs: Sequence[tuple[int, str]]) -> str:
    """The text of policies by layer, with a cut after every run but the last.

    >>> text_of([(4, "full"), (1, "dots"), (1, "dots")])
    '4 × full || 1 × dots || 1 × dots'
    """
    return " || ".join(f"{count} × {policy}" for count, policy in runs)


def mebibytes(case: Case, runs: Sequence[tuple[int, str]]) -> str:
    """Device memory of the compiled step."""
    policy = rj.LayerPolicies.parse(text_of(runs))
    return f"{rj.measure(case.workload, policy, 'h200').device_bytes / 2**20:,.1f}"


def mlp() -> str:
    """Three policies of the deep MLP under every cut."""
    case, names = deep_mlp(LAYERS), ("full", "dots", "everything")
    cuts = (*CUTS, (1,) * LAYERS)
    rows = [(_shown(cut), *(mebibytes(case, [(count, name) for count in cut]) for name in names)) for cut in cuts]
    return markdown(["cut", *(f"`{name}`" for name in names)], rows)


def last() -> str:
    """The last layers of the deep MLP under `everything`, in one scan and one by one."""
    case, rows = deep_mlp(LAYERS), []
    for first, count in (("full", 1), ("full", 2), ("full", 3), ("dots", 2)):
        before = (LAYERS - count, first)
        one_scan = mebibytes(case, [before, (count, "everything")]) if count > 1 else ""
        rows.append((f"{before[0]} × `{first}`", count, one_scan, mebibytes(case, [before, *[(1, "everything")] * count])))
    return markdown(["first layers", "last under `everything`", "in one scan", "one by one"], rows)


def gpt2() -> str:
    """Policies of GPT-2 under every cut; P saves the matrix products."""
    case = decoder_scanned(LAYERS)
    products = policies(Case(case.workload, case.layers, roles_that_keep(case)))[PRODUCTS]
    columns = {"`full`": ("full",) * 2, "P": (products,) * 2, "`everything`": ("everything",) * 2}
    columns["4 × P, 2 × `everything`"] = (products, "everything")
    rows = []
    for cut in CUTS:
        pairs = [(first, second) for first, second in columns.values()]
        cells = [mebibytes(case, runs) if (runs := _runs(cut, *pair)) else "" for pair in pairs]
        rows.append((_shown(cut), *cells))
    return markdown(["cut", *columns], rows)


def few_rows(layers: int) -> rj.Workload:
    """The deep MLP over 2048 rows."""
    job = deep_mlp(layers).workload
    x = jax.ShapeDtypeStruct((2048, *job.batch[0].shape[1:]), job.batch[0].dtype)
    return rj.Workload(job.own_loss, job.params, (x,), tuple(job.blocks), optimizer=job.optimizer)


def gradients() -> str:
    """The deep MLP over fewer rows, so that a layer's gradients are as large as what it saves: compiled, and by the formula."""
    job = few_rows(12)
    described = describe(job, "h200")
    rows, whole = [], {}
    for cut in ((12,), (7, 5), (8, 4), (5, 4, 3), (6, 6), (4, 4, 4)):
        cells = []
        for name in ("full", "dots"):
            needed = rj.measure(job, rj.LayerPolicies.parse(text_of([(count, name) for count in cut])), "h200").device_bytes
            places = tuple(itertools.accumulate(cut))[:-1]
            formula = predicted(described.stack, recut(described, named_candidate(described, name), places).loads)
            most, most_formula = whole.setdefault(name, (needed, formula))
            cells += [f"{size / 2**20:,.1f}" for size in (needed, most - needed, most_formula - formula)]
        rows.append((_shown(cut), *cells))
    return markdown(
        ["cut", *(f"`{name}`{part}" for name in ("full", "dots") for part in ("", ", less", ", less by the formula"))], rows
    )


def _runs(cut: Sequence[int], first: str, last: str) -> list[tuple[int, str]]:
    """The runs of `cut`, with the last two layers under `last`; a single run is split. [] if a run would have both policies."""
    if first == last:
        return [(count, first) for count in cut]
    if len(cut) == 1:
        return [(LAYERS - 2, first), (2, last)]
    return [(cut[0], first), *((1, last) for _ in cut[1:])] if cut[0] == LAYERS - 2 else []


def _shown(cut: Sequence[int]) -> str:
    return " + ".join(map(str, cut))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"mlp": mlp, "last": last, "gpt2": gpt2, "gradients": gradients}
    parser.add_argument("table", choices=tables)
    options = parser.parse_args()
    compat.keep_to_cpu_without_gpu()
    print(tables[options.table]())


if __name__ == "__main__":
    main()
