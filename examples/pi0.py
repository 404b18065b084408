"""`python examples/pi0.py`: π0 trained on photographs in PyTorch and in Flax, with and without checkpoints and offload.

Prints the losses, the kept bytes and the executed matrix products of every form, and the findings of `torch_ref.doctor` on
OpenPI's own checkpoints. `--adaptive` trains π0.5; `--json` prints one JSON object instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

NEEDED = {"torch": "pip install 'remat_jax[torch]'", "sklearn": "pip install scikit-learn"}


def main(arguments: list[str] | None = None) -> int:
    """Train and compare; the exit status is 0, 1 if the forms differ or nothing is learnt, 2 for bad usage."""
    for name, remedy in NEEDED.items():
        if importlib.util.find_spec(name) is None:
            print(f"error: this needs {name}, which is not installed: {remedy}", file=sys.stderr)
            return 2
    if __package__:
        command = importlib.import_module(".robot.command", __package__)
    else:  # run as a file, which belongs to no package until the folder above is on the path
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        command = importlib.import_module("examples.robot.command")
    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
