"""`python examples/recompute.py`: one decoder layer trained with recomputation, in every form of PyTorch and JAX.

Prints losses, kept bytes and executed matrix products of each form. `--json` prints one JSON object instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; the exit status is 0, or 2 for bad usage."""
    if importlib.util.find_spec("torch") is None:
        print("error: this compares with PyTorch, which is not installed: pip install 'remat_jax[torch]'", file=sys.stderr)
        return 2
    if __package__:
        command = importlib.import_module(".recomputing", __package__)
    else:  # run as a file, which belongs to no package until the folder above is on the path
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        command = importlib.import_module("examples.recomputing")
    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
