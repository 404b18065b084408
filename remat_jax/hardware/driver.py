"""The GPUs of this machine according to NVIDIA's driver, without JAX or PyTorch."""

from __future__ import annotations

import subprocess

_FIELDS = ("name", "driver_version", "memory.total")


def gpus() -> list[dict[str, str]]:
    """Name, driver and memory of each NVIDIA GPU according to the driver; empty if there is none."""
    try:
        asked = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [dict(zip(_FIELDS, line.split(", "), strict=True)) for line in lines if line.count(", ") == len(_FIELDS) - 1]
