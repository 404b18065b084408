"""The description of an absent GPU for XLA's compiler: a ``GpuTargetConfigProto`` in text form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat_jax.errors import TargetError

KEYS = (
    "compute_capability",
    "core_count",
    "fpus_per_core",
    "clock_rate_ghz",
    "threads_per_core_limit",
    "shared_memory_per_core",
    "shared_memory_per_block_optin",
    "l2_cache_size",
)

# The same for every NVIDIA GPU from compute capability 8.0 on (CUDA C++ Programming Guide, technical specifications).
_COMMON = """\
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
"""


def describe(facts: Mapping[str, Any], compiler: Mapping[str, Any], name: str) -> str:
    """The description of one GPU from its entry in the table of targets.

    Raises:
        TargetError: a key of ``compiler`` is missing or unknown, or the entry lacks its memory or rate.
    """
    missing = [f"compiler.{key}" for key in KEYS if key not in compiler]
    missing += [key for key in ("memory_bytes", "hbm_bytes_per_s") if key not in facts]
    unknown = sorted(set(compiler) - set(KEYS))
    major, dot, minor = str(compiler.get("compute_capability", "")).partition(".")
    wrong = [key for key in KEYS[1:] if not _is_positive(compiler.get(key, 1), whole=key != "clock_rate_ghz")]
    if missing or unknown or wrong or not (dot and major.isdecimal() and minor.isdecimal()):
        raise TargetError(
            f"target table [{name}.compiler]: missing {missing}, unknown {unknown}, no positive number {wrong}; the keys are "
            f'{", ".join(KEYS)}, with compute_capability as a text such as "9.0" and numbers for the others, and the target '
            "needs memory_bytes and hbm_bytes_per_s."
        )
    own = "".join(f"  {key}: {compiler[key]}\n" for key in KEYS[1:])
    return (
        f"gpu_device_info {{\n{_COMMON}{own}"
        f"  memory_bandwidth: {int(facts['hbm_bytes_per_s'])}\n"
        f"  device_memory_size: {facts['memory_bytes']}\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n"
        "}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 27 }\n"
        "runtime_version { major: 13 minor: 0 }\n"
        f'device_description_str: "{facts["description"].partition(",")[0]}"\n'
    )


def _is_positive(value: object, *, whole: bool) -> bool:
    # Only numbers of the field's type may go into the description.
    kinds = int if whole else int | float
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < 2**31
