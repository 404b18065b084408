"""The provenance of a result: where, when and with which versions it was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remat_jax.hardware import gpus

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "flax", "optax", "numpy", "torch", "remat_jax")
FLAGS = ("XLA_FLAGS", "JAX_PLATFORMS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")


def provenance(commit: str | None = None) -> dict[str, Any]:
    """Everything about this run that a figure depends on; give `commit` if the sources have no git history."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(sys.orig_argv),
        "commit": commit or git_commit(),
        "gpus": gpus(),
        "versions": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "environment": {name: os.environ[name] for name in FLAGS if name in os.environ},
    }


def command(words: Sequence[str]) -> list[str]:
    """The command line, with every absolute path shortened to its last part.

    >>> command([os.path.abspath("python3"), "-m", "benchmarks.plan", "--output", os.path.abspath("mlp"), "--resume"])
    ['python3', '-m', 'benchmarks.plan', '--output', 'mlp', '--resume']
    """
    return [Path(word).name if word.startswith(("/", "~")) or ".venv" in word else word for word in words]


def versions() -> dict[str, str]:
    """The installed versions; packages that are not installed are left out."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def git_commit() -> str | None:
    """The commit of the sources, with `+` if a tracked file has changed since; None without git or a commit."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}{'+' if changed else ''}" if commit else None


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write_json(path: Path, data: Any) -> None:
    """Write `data` atomically: a reader finds the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A unique name: two runs may write the same file.
    new = path.with_name(f".{uuid.uuid4().hex}.new")
    try:
        new.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def text_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in plain text, the first column left-aligned, the others right-aligned.

    >>> print(text_table(("mode", "GB"), [("off", "72.9"), ("offload", "9.1")]))
    mode       GB
    off      72.9
    offload   9.1
    """
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = []
    for row in (columns, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
