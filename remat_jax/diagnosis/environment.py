"""This machine, its packages and their limits, for bug reports."""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from remat_jax import compat
from remat_jax.errors import TargetError
from remat_jax.hardware import gpus
from remat_jax.memory.compile.devices import device_kind
from remat_jax.report.tables import render

_PACKAGES = (
    *("remat_jax", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    *("libtpu", "flax", "optax", "numpy", "scipy", "torch"),
)
_PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "REMAT_JAX_", "CUDA_VISIBLE_DEVICES", "PYTORCH_")
_WITHOUT_TORCH = "parity, porting.propose and torch_ref need PyTorch, which is not installed: pip install 'remat-jax[torch]'"


@dataclass(frozen=True)
class Environment:
    """The environment that a bug report must describe.

    Attributes:
      python, platform: the Python version and the platform of this process.
      versions: package → version; None if the package is not installed.
      gpus: a dict for each GPU, with the name, driver version and memory that NVIDIA's driver reports.
      attached: JAX's name of the GPU, or the reason why JAX finds no GPU; None if the driver finds no GPU.
      flags: name → value of the environment variables that affect JAX, XLA, PyTorch or remat_jax.
      limits: a text for each unavailable feature, with reason and remedy.
    """

    python: str
    platform: str
    versions: dict[str, str | None]
    gpus: tuple[dict[str, str], ...]
    attached: str | None
    flags: dict[str, str]
    limits: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        return {**asdict(self), "gpus": list(self.gpus), "limits": list(self.limits)}

    def __rich__(self) -> Any:
        rows = [("Python", self.python), ("platform", self.platform)]
        rows += [(name, version or "not installed") for name, version in self.versions.items()]
        rows += [("GPU", ", ".join(gpu.values())) for gpu in self.gpus] or [("GPU", "none")]
        rows += [("JAX's GPU", self.attached)] if self.attached else []
        rows += list(self.flags.items())
        rows += [("cannot", limit) for limit in self.limits]
        return Text("\n".join(["This environment:", *(f"{what}: {found}" for what, found in rows)]))

    def __str__(self) -> str:
        return render(self.__rich__())


def environment() -> Environment:
    """Describe this machine, its packages and their limits. This process starts no device: a child process looks for the GPU.

    >>> found = environment()
    >>> found.python == platform.python_version(), "jax" in found.versions
    (True, True)
    """
    devices = tuple(gpus())
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        versions={name: compat.installed_version(name) for name in _PACKAGES},
        gpus=devices,
        attached=_attached() if devices else None,
        flags={name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
        limits=(*compat.limits(), *(() if importlib.util.find_spec("torch") else (_WITHOUT_TORCH,))),
    )


def _attached() -> str:
    try:
        return device_kind()
    except TargetError as error:
        return str(error)
