"""`python examples/deep_mlp.py`: what cutting a deep perceptron into checkpointed segments saves and costs.

Prints a table of every form in PyTorch and in JAX, memory against depth, and two rules of thumb beside the measured shares,
and draws pictures into build/deep_mlp. `--json` prints one JSON object instead; `--quick` uses a small model.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment; the exit status is 0, 1 if a figure differs from its closed form, 2 for bad usage."""
    if importlib.util.find_spec("torch") is None:
        print(
            "error: the experiment compares with PyTorch, which is not installed: pip install 'remat_jax[torch]'",
            file=sys.stderr,
        )
        return 2
    if __package__:
        command = importlib.import_module(".segments.command", __package__)
    else:  # run as a file, which belongs to no package until the folder above is on the path
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        command = importlib.import_module("examples.segments.command")
    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
