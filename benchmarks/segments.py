"""`python -m benchmarks.segments kept` (or `rules`): tables of docs/notes/segments.md, from fake tensors and traced steps."""

from __future__ import annotations

import argparse

from benchmarks.figures import markdown
from examples.segments.depths import kept_at, rule_at
from examples.segments.setting import Setting

DEPTHS = (16, 32, 64, 128, 256)


def kept(setting: Setting) -> str:
    kept_bytes = {depth: kept_at(setting, depth) for depth in DEPTHS}
    names = list(kept_bytes[DEPTHS[0]])
    columns = ["layers", *(name.removeprefix("PyTorch, ") for name in names)]
    return markdown(
        columns, [(depth, *(f"{kept_bytes[depth][name]['measured'] / 2**20:.1f}" for name in names)) for depth in DEPTHS]
    )


def rules(setting: Setting) -> str:
    compared = [rule_at(setting, depth, kept_at(setting, depth)) for depth in DEPTHS if depth != 32]
    columns = ["layers", "1 − √L/L", "saved, measured", "2√L/L", "FLOPs added, measured"]
    keys = ("claimed_saving", "measured_saving", "claimed_increase", "measured_increase")
    return markdown(columns, [(rule["num_layers"], *(f"{rule[key]:.1%}" for key in keys)) for rule in compared])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=("kept", "rules"))
    print({"kept": kept, "rules": rules}[parser.parse_args().table](Setting()))
