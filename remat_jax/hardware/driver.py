"""The GPUs of this machine, as NVIDIA's driver tells them: neither JAX nor PyTorch is asked."""

from __future__ import annotations

import subprocess

_FIELDS = ("name", "driver_version", "memory.total")


def gpus() -> list[dict[str, str]]:
    """Name, driver and memory of each NVIDIA GPU, as the driver says; empty where there is none."""
    try:
        asked = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [dict(zip(_FIELDS, line.split(", "), strict=True)) for line in lines if line.count(", ") == len(_FIELDS) - 1]
