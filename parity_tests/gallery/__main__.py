"""Checks the models of `examples/others` under policies, small: `python -m parity_tests.gallery NAME[=FOLDER[:FOLDER]] …`.

FOLDER holds the library's modules, as in PYTHONPATH; each file of `examples/others` names it. Each model is checked in its own
process. The command writes the named models' rows of docs/notes/gallery.md and keeps the other rows. It fails if a gradient, a
count or a residual table is wrong.

    python -m parity_tests.gallery equinox
    python -m parity_tests.gallery equinox maxtext=maxtext/src openpi=openpi/src easylm=EasyLM
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import jax

from parity_tests.gallery.checking import Row, check
from parity_tests.gallery.models import EXAMPLES
from parity_tests.upstream.checkouts import commit

ROOT = Path(__file__).parents[2]
NOTE = ROOT / "docs" / "notes" / "gallery.md"
BEGIN = "| model | version | policy | float64 | own dtypes | recomputed | expected | residuals by the table | kept |\n"
BEGIN += "| --- " * 9 + "|\n"
SHORTEST = 60
"""Characters of a plan's text in the note."""


def main(arguments: list[str]) -> int:
    """Check the named models, and write their rows into the note."""
    folders = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = [name for name in folders if name not in EXAMPLES]
    if unknown or not folders:
        print(f"NAME={' '.join(unknown) or 'nothing'}: choose among {', '.join(EXAMPLES)}; {__doc__}", file=sys.stderr)
        return 2
    failed = 0
    for name, folder in folders.items():
        rows = _in_a_process(name, folder)
        failed += not rows or not all(row.passed for row in rows)
        lines = [as_line(name, _version(name, folder), row) for row in rows]
        print("".join(lines) if rows else f"FAILED {name}: see above\n", end="", flush=True)
        if rows:
            NOTE.write_text(with_lines(NOTE.read_text(encoding="utf-8"), name, lines), encoding="utf-8")
    print(f"{len(folders)} models, {failed} failed")
    return int(bool(failed))


def _in_a_process(name: str, folder: str) -> list[Row]:
    """The rows that a model's process prints; empty if the process fails and prints the error itself."""
    path = os.pathsep.join(filter(None, (str(ROOT), folder, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-W", "ignore", "-m", "parity_tests.gallery", "--one", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    return [] if done.returncode else [Row(**record) for record in json.loads(done.stdout.splitlines()[-1])]


def as_line(name: str, version: str, row: Row) -> str:
    """A row of the note.

    >>> row = Row("full", 0.0, "w", 1.0, "w", 7, "7", True, (512, 0), (512, 0))
    >>> as_line("toy", "1.0", row)
    '| toy | 1.0 | `full` | 0.0e+00 | 1.00 | 7 | 7 | 512 | 512 |\\n'
    """
    policy = row.policy if len(row.policy) <= SHORTEST else f"{row.policy[:SHORTEST]}…"
    table, kept = (f"{device} + {host}" if host else str(device) for device, host in (row.table, row.kept))
    held = "" if row.passed else " **fails**"
    figures = f"{row.error64:.1e} | {row.ratio:.2f} | {row.again} | {row.expected} | {table} | {kept}"
    return f"| {name} | {version} | `{policy}`{held} | {figures} |\n"


def with_lines(note: str, name: str, lines: list[str]) -> str:
    """The note with `lines` instead of this model's rows, in the order of `EXAMPLES`.

    >>> with_lines(BEGIN + "| gemma | old |\\n| easylm | kept |\\nThe end.\\n", "gemma", ["| gemma | new |\\n"])[len(BEGIN):]
    '| easylm | kept |\\n| gemma | new |\\nThe end.\\n'
    """
    before, begin, rest = note.partition(BEGIN)
    rows = [line for line in rest.splitlines(keepends=True) if line.startswith("|")]
    after = rest[sum(map(len, rows)) :]
    others = [line for line in rows if not line.startswith(f"| {name} |")]
    order = {model: at for at, model in enumerate(EXAMPLES)}
    return before + begin + "".join(sorted(others + lines, key=lambda line: order[line.split(" ")[1]])) + after


def _version(name: str, folder: str) -> str:
    """The commit of a checkout, or the installed release."""
    folders = folder.split(os.pathsep) if folder else []
    for path in map(Path, folders):
        for root in (path.resolve(), path.resolve().parent):
            if (checkout := commit(root)) != "not known":
                return checkout
    package = EXAMPLES[name].package
    distributions = importlib.metadata.distributions(path=folders) if folders else ()
    return next(
        (distribution.version for distribution in distributions if distribution.name == package), None
    ) or importlib.metadata.version(package)


def _one(name: str) -> None:
    """Check one model in this process, and print its rows as JSON."""
    example = EXAMPLES[name]
    # This disables LLVM's passes alone. OpenPI's gradient takes 27 minutes and more to compile with them, 16 seconds without.
    jax.config.update("jax_disable_most_optimizations", True)
    print(json.dumps([dataclasses.asdict(row) for row in check(example.workload(), example.again, example.deviation)]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:]))
