"""`python -m benchmarks.lines`: how many lines of remat_jax and its tests are code, imports, docstrings, comments or blank."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

from benchmarks.figures import markdown
from benchmarks.record import ROOT

KINDS = ("code", "import", "docstring", "comment", "blank")


def kinds_of_lines(text: str) -> Counter[str]:
    """The number of lines of each kind; a line that is partly code is code.

    >>> sorted(kinds_of_lines('# Why.\\nimport os\\n\\nX = 1\\n"The docstring of X."\\n').items())
    [('blank', 1), ('code', 1), ('comment', 1), ('docstring', 1), ('import', 1)]
    """
    kinds = ["blank" if not line.strip() else "code" for line in text.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            kinds[token.start[0] - 1] = "comment"
    for node in ast.walk(ast.parse(text)):
        kind = None
        if isinstance(node, ast.Import | ast.ImportFrom):
            kind = "import"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            kind = "docstring"
        if kind is not None and node.end_lineno is not None:
            kinds[node.lineno - 1 : node.end_lineno] = [kind] * (node.end_lineno - node.lineno + 1)
    return Counter(kinds)


def main() -> None:
    """Print the table."""
    package = ROOT / "remat_jax"
    parts: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        name = "modules of the root" if path.parent == package else path.relative_to(package).parts[0]
        parts.setdefault(name, []).append(path)
    parts["all of remat_jax"] = sorted(package.rglob("*.py"))
    for name in ("torch_ref", "tests", "parity_tests"):
        parts[name] = sorted((ROOT / name).rglob("*.py"))
    rows = []
    for name, paths in parts.items():
        counted = sum((kinds_of_lines(path.read_text(encoding="utf-8")) for path in paths), Counter[str]())
        rows.append((name, str(len(paths)), f"{counted.total():,}", *(f"{counted[kind]:,}" for kind in KINDS)))
    print(markdown(["part", "files", "lines", *KINDS], rows))


if __name__ == "__main__":
    main()
