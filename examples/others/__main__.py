"""Write the table of README.md from the printed figures in the files' docstrings: `python -m examples.others`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
README = HERE / "README.md"
FILES = (
    "maxtext_llama",
    "openpi_pi0",
    "easylm_llama",
    "levanter_llama",
    "axlearn_fuji",
    "big_vision_vit",
    "bonsai_vit",
    "transformers_gpt2",
    "gemma3",
    "alphafold_evoformer",
    "maxdiffusion_wan",
    "tunix_qwen3",
    "equinox_decoder",
)
BEGIN = (
    "| file | model | version | as written or `off` | `full` | `dots_with_no_batch_dims` | plan | found in | first fit | "
    "best named policy that fits | as written |\n" + "| --- " * 11 + "|\n"
)
FIGURES = (
    r"(?:off|as written): (.+)",
    r"full: (.+)",
    r"dots_with_no_batch_dims: (.+)",
    r"plan within (.+)",
    r"  found in (.+?), .+",
    r"  found in .+ after (.+)",
    r"  best named policy that fits: (.+)",
    r"  as written: (.+)",
)


def row(name: str) -> str:
    """The row of one file: the figures in its docstring, and a dash for missing figures.

    >>> row("equinox_decoder").split(" | ")[1:3]
    ['a decoder written with Equinox', 'Equinox 0.13.2']
    """
    text = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""
    version = re.search(r"Printed\s(?:by\scommit\s(\w+)|with\s(\S+ \S+) and)", text)
    found = [re.search(rf"^    {figure}$", text, re.MULTILINE) for figure in FIGURES]
    model = re.split(r", one H200|: ", text.splitlines()[0])[0].rstrip(".")
    cells = [f"[{name}.py]({name}.py)", model[0].lower() + model[1:] if model.startswith("A ") else model]
    cells += [next(filter(None, version.groups())) if version else "–", *(one.group(1) if one else "–" for one in found)]
    return f"| {' | '.join(cells)} |\n"


def table() -> str:
    """The table of all files."""
    return BEGIN + "".join(map(row, FILES))


def with_table(text: str) -> str:
    """README.md with the new table instead of its old one."""
    before, _, rest = text.partition("| file |")
    after = rest.partition("\n\n")[2]
    return f"{before}{table()}\n{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
