"""A target's entry in a table: the checks that it must pass, and its description for XLA's compiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from remat_jax.errors import TargetError

TABLE = "targets.toml"
Kind = Literal["cpu", "gpu", "tpu"]
"""The kinds of hardware. Each has a backend (`memory.compile.backends`)."""
KINDS: tuple[Kind, ...] = get_args(Kind)
REQUIRED = ("kind", "description", "source")
FACTS = ("memory_bytes", "hbm_bytes_per_s", "host_link_bytes_per_s", "peak_flops", "compiler")
LINKS = ("device_link_bytes_per_s", "network_bytes_per_s")
OPTIONAL_FACTS = ("host_memory_bytes", *LINKS)
KEYS = (*REQUIRED, *FACTS, "device_kinds", "reached", "measured", *OPTIONAL_FACTS)
WHOLE = ("memory_bytes", "host_memory_bytes")
SIZES_AND_RATES = (*WHOLE, "hbm_bytes_per_s", "host_link_bytes_per_s", *LINKS)
SECONDS = ("launch_seconds", "copy_seconds", "device_link_seconds", "network_seconds")
REACHED = ("flops", "hbm_bytes_per_s", "out_bytes_per_s", "in_bytes_per_s", *LINKS, *SECONDS, "hidden_share")
"""The rates and latencies in the tables `reached` (published measurements) and `measured` (by `remat-jax calibrate`)."""
MEASURED = (*REACHED, "products", "source")
COMPILER_NUMBERS = (
    *("core_count", "fpus_per_core", "clock_rate_ghz", "threads_per_core_limit"),
    *("shared_memory_per_core", "shared_memory_per_block_optin", "l2_cache_size"),
)
COMPILER = ("compute_capability", *COMPILER_NUMBERS)
"""The keys of `compiler`."""
# Every NVIDIA GPU from compute capability 8.0 on has these limits (CUDA C++ Programming Guide, technical specifications).
_ALL_GPUS = """\
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
"""


def checked_entry(name: str, given: object) -> dict[str, Any]:
    """The entry `given` of the target `name`, unchanged. Raises TargetError if it is invalid."""
    entry = _as_table(name, given)
    unknown = sorted(set(entry) - set(KEYS))
    missing = sorted(set(REQUIRED) - set(entry))
    if unknown or missing or name != name.lower():
        raise TargetError(
            f"target table [{name}]: unknown keys {unknown!s:.400}, missing keys {missing}; the keys are {', '.join(KEYS)}, "
            "and names are in lower case."
        )
    for key in ("source", "peak_flops", "compiler"):
        _as_table(f"{name}.{key}", entry.get(key, {}))
    if entry["kind"] not in KINDS:
        raise TargetError(f"target table [{name}]: kind={entry['kind']!r:.200}; expected one of {', '.join(KINDS)}.")
    texts = {"description": entry["description"], **{f"source.{key}": text for key, text in entry["source"].items()}}
    # These texts become part of a text that XLA parses, so they cannot contain quotation marks.
    wrong = [
        key for key, text in texts.items() if not isinstance(text, str) or not text.isprintable() or set(text) & {'"', "\\"}
    ]
    if wrong:
        raise TargetError(f"target table [{name}]: {', '.join(wrong):.400}: write a text of one line, without quotation marks.")
    stated, sourced = set(entry) & {*FACTS, *OPTIONAL_FACTS}, set(entry["source"])
    if stated != sourced:
        raise TargetError(
            f"target table [{name}]: without a source: {sorted(stated - sourced)}; a source without a figure: "
            f"{sorted(sourced - stated)!s:.400}. State under [{name}.source] where each figure is from."
        )
    _check_measured(f"{name}.measured", _as_table(f"{name}.measured", entry.get("measured", {})))
    _check_reached(f"{name}.reached", _as_table(f"{name}.reached", entry.get("reached", {})))
    _check_figures(name, entry)
    return entry


def _as_table(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TargetError(
            f"target table [{name}]: {value!r:.200} is not a table; write its keys below a line [{name}], in the form of "
            f"{TABLE}."
        )
    return value


def _check_figures(name: str, entry: dict[str, Any]) -> None:
    figures: dict[str, Any] = {key: entry[key] for key in SIZES_AND_RATES if key in entry}
    figures |= {f"peak_flops.{dtype}": rate for dtype, rate in entry.get("peak_flops", {}).items()}
    wrong = _not_positive(figures)
    if wrong:
        raise TargetError(
            f"target table [{name}]: {wrong!s:.400}; sizes are positive numbers of bytes, written as integers, rates positive "
            "numbers per second."
        )
    kinds = entry.get("device_kinds", [])
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise TargetError(f"target table [{name}]: device_kinds={kinds!r:.200}; write a list of texts.")


def _check_measured(name: str, measured: dict[str, Any]) -> None:
    unknown = sorted(set(measured) - set(MEASURED))
    is_sourced = not measured or isinstance(measured.get("source"), str)
    if unknown or not isinstance(measured.get("flops", {}), dict) or not is_sourced:
        raise TargetError(
            f"target table [{name}]: unknown keys {unknown!s:.400}; the keys are {', '.join(MEASURED)}, where flops is a table "
            "of rates by dtype, products one of rates by dtype and size, and source a text that names who measured."
        )
    _check_rates(name, {key: value for key, value in measured.items() if key not in ("source", "products")})
    for dtype, curve in _as_table(f"{name}.products", measured.get("products", {})).items():
        wrong = _not_positive(_as_table(f"{name}.products.{dtype}", curve))
        wrong |= {size: rate for size, rate in curve.items() if not size.isdecimal()}
        if wrong:
            raise TargetError(
                f"target table [{name}.products.{dtype}]: {wrong!s:.400}; write the rate of square products by their size, "
                "such as 512 = 3.1e14."
            )


def _check_reached(name: str, reached: dict[str, Any]) -> None:
    source = _as_table(f"{name}.source", reached.get("source", {}))
    figures = {key: value for key, value in reached.items() if key != "source"}
    unknown, unpaired = set(figures) - set(REACHED), set(figures) ^ set(source)
    if unknown or unpaired or not isinstance(figures.get("flops", {}), dict):
        raise TargetError(
            f"target table [{name}]: unknown keys {sorted(unknown)!s:.400}, figures and sources without a partner "
            f"{sorted(unpaired)!s:.400}; the keys are {', '.join(REACHED)}, where flops is a table of rates by dtype, and each "
            f"has a text of the same name under [{name}.source]."
        )
    _check_rates(name, figures)


def _check_rates(table: str, figures: Mapping[str, Any]) -> None:
    """Raise for rates that `Rates` would reject, with the table's name in the message."""
    rates = {f"flops.{dtype}": rate for dtype, rate in figures.get("flops", {}).items()}
    rates |= {key: rate for key, rate in figures.items() if key not in ("flops", "hidden_share")}
    wrong = _not_positive(rates)
    share = figures.get("hidden_share", 1.0)
    if not is_figure(share) or not 0 <= share <= 1:
        wrong["hidden_share"] = share
    if wrong:
        raise TargetError(
            f"target table [{table}]: {wrong!s:.400}; rates are positive numbers per second, times positive numbers of "
            "seconds, hidden_share is from 0 to 1."
        )


def _not_positive(figures: dict[str, Any]) -> dict[str, Any]:
    wrong = {
        key: value
        for key, value in figures.items()
        if not is_figure(value) or not 0 < value < 1e30 or (key in WHOLE and isinstance(value, float))
    }
    return {
        key: "an integer of many digits" if isinstance(value, int) and value >= 1e30 else value for key, value in wrong.items()
    }


def is_figure(value: object) -> bool:
    """Whether a value is a number, not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def compiler_description(facts: Mapping[str, Any], compiler: Mapping[str, Any], name: str) -> str:
    """XLA's description of a GPU, a `GpuTargetConfigProto` as text. With it XLA can compile for a GPU that is not attached."""
    missing = [f"compiler.{key}" for key in COMPILER if key not in compiler]
    missing += [key for key in ("memory_bytes", "hbm_bytes_per_s") if key not in facts]
    unknown = sorted(set(compiler) - set(COMPILER))
    major, dot, minor = str(compiler.get("compute_capability", "")).partition(".")
    # XLA parses these fields as 32-bit integers, and the clock rate as a float.
    wrong = [
        key
        for key, value in compiler.items()
        if key in COMPILER_NUMBERS
        and not (is_figure(value) and 0 < value < 2**31 and (isinstance(value, int) or key == "clock_rate_ghz"))
    ]
    if missing or unknown or wrong or not (dot and major.isdecimal() and minor.isdecimal()):
        raise TargetError(
            f"target table [{name}.compiler]: missing {missing}, unknown {unknown}, no positive number {wrong}; the keys are "
            f'{", ".join(COMPILER)}, with compute_capability as a text such as "9.0" and the other keys as numbers; '
            "the target needs memory_bytes and hbm_bytes_per_s."
        )
    stated = "".join(f"  {key}: {compiler[key]}\n" for key in COMPILER_NUMBERS)
    return (
        f"gpu_device_info {{\n{_ALL_GPUS}{stated}"
        f"  memory_bandwidth: {int(facts['hbm_bytes_per_s'])}\n"
        f"  device_memory_size: {facts['memory_bytes']}\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n"
        "}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 27 }\n"
        "runtime_version { major: 13 minor: 0 }\n"
        f'device_description_str: "{facts["description"].partition(",")[0]}"\n'
    )
