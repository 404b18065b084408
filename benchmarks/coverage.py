"""`python -m benchmarks.coverage FILE`: the share of each package's statements that ran, from the JSON of `make coverage`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from benchmarks.figures import markdown

COLUMNS = ("files", "num_statements", "missing_lines")


def part_of(path: str) -> str:
    """The package of a file.

    >>> part_of("remat_jax/planning/changes/change.py"), part_of("remat_jax/mesh.py"), part_of("torch_ref/policy.py")
    ('planning', 'modules of the root', 'torch_ref')
    """
    root, *inside = Path(path).parts
    if root != "remat_jax":
        return root
    return inside[0] if len(inside) > 1 else "modules of the root"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parts: dict[str, Counter[str]] = {}
    for path, file in json.loads(parser.parse_args().file.read_text(encoding="utf-8"))["files"].items():
        counts = Counter({"files": 1, **{name: file["summary"][name] for name in COLUMNS[1:]}})
        for part in (part_of(path), "all"):
            parts[part] = parts.get(part, Counter()) + counts
    rows = []
    for part, counts in sorted(parts.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        share = 1 - counts["missing_lines"] / counts["num_statements"] if counts["num_statements"] else 1.0
        rows.append((part, *(f"{counts[name]:,}" for name in COLUMNS), f"{share:.1%}"))
    print(markdown(["part", "files", "statements", "that did not run", "covered"], rows))


if __name__ == "__main__":
    main()
