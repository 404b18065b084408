"""Imports a checkout of another project in place, with placeholders for packages that it does not compute with."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from examples.others.shared import without


class CheckoutError(Exception):
    """A checkout cannot be used; the message says why, and the remedy."""


def use(path: str, folder: str, needs: Iterable[str], spared: Iterable[str]) -> Path:
    """Make the packages of the checkout at `path` importable from its `folder`.

    Args:
        needs: packages that must be installed.
        spared: packages that placeholders replace if they are not installed.

    Raises:
        CheckoutError: there is no such folder, or packages are not installed.
    """
    root = Path(path).expanduser().resolve()
    if not (root / folder).is_dir():
        raise CheckoutError(f"{path}: has no folder {folder!r}; give the root of a checkout")
    absent = [name for name in needs if importlib.util.find_spec(name) is None]
    if absent:
        raise CheckoutError(f"{path}: needs packages that are not installed: pip install {' '.join(absent)}")
    without(*(name for name in spared if importlib.util.find_spec(name) is None))
    sys.path.insert(0, str((root / folder).parent))
    return root


def commit(root: Path) -> str:
    """The commit of a checkout and its date, or "not known"."""
    command = ["git", "-C", str(root), "log", "-1", "--format=%h, %cs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    top = subprocess.run([*command[:3], "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=False)
    is_checkout = done.returncode == 0 and Path(top.stdout.strip()) == root
    return done.stdout.strip() if is_checkout else "not known"
