"""Finds this machine's TPUs, and silences libtpu on a machine without a TPU.

The extra `tpu-compile` installs libtpu. When JAX starts, libtpu looks for TPUs: it asks the metadata server of Google Cloud,
and prints several lines if it finds none. On a machine without a TPU, environment variables skip the search.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",  # ask no metadata server
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # any: libtpu warns if it is unset
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",  # libtpu would write its log to the temporary folder
}
"""With these environment variables libtpu looks for no TPU and prints nothing."""

MARK = "REMAT_JAX_QUIET_LIBTPU"
"""This environment variable names the variables of `QUIET` that this package set; the others are the user's."""

_GOOGLE, _OTHERS = "0x1ae0", ("0x01", "0x02")
"""The PCI vendor, and the beginnings of the PCI classes of disks and network cards, which the vendor makes too."""


def has_tpu(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether a TPU is on this machine's PCI bus; unlike JAX's list of device numbers, this includes TPUs of the future."""

    def content(device: Path, name: str) -> str:
        try:
            return (device / name).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""

    found = devices.iterdir() if devices.is_dir() else ()
    return any(content(each, "vendor") == _GOOGLE and not content(each, "class").startswith(_OTHERS) for each in found)


def quiet_without_tpu() -> None:
    """Keep libtpu from looking for TPUs if there is none. Call this before JAX starts its backends.

    With a TPU, remove the variables that this package set: a job may inherit them from the machine that submitted the job.
    Variables that the user set are not changed.
    """
    if has_tpu():
        for name in filter(None, os.environ.pop(MARK, "").split(",")):
            os.environ.pop(name, None)
    elif importlib.util.find_spec("libtpu") is not None:
        unset = [name for name in QUIET if name not in os.environ]
        os.environ.update({name: QUIET[name] for name in unset})
        if unset:
            os.environ[MARK] = ",".join(unset)
