"""Checks of a target's entry in a table: every figure is a number with a source, and no key is unknown or missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat_jax.errors import TargetError

TABLE = "targets.toml"
FACTS = ("memory_bytes", "hbm_bytes_per_s", "host_link_bytes_per_s", "peak_flops", "compiler")
LINKS = ("device_link_bytes_per_s", "network_bytes_per_s")
OPTIONAL_FACTS = ("host_memory_bytes", *LINKS)
OPTIONAL = ("device_kinds", "reached", "measured", *OPTIONAL_FACTS)
SIZES_AND_RATES = ("memory_bytes", "host_memory_bytes", "hbm_bytes_per_s", "host_link_bytes_per_s", *LINKS)
WHOLE = ("memory_bytes", "host_memory_bytes")
SECONDS = ("launch_seconds", "copy_seconds", "device_link_seconds", "network_seconds")
REACHED = ("flops", "hbm_bytes_per_s", "out_bytes_per_s", "in_bytes_per_s", *LINKS, *SECONDS, "hidden_share")
"""The figures that programs reach: published ones (`reached`), or those of `remat-jax calibrate` (`measured`)."""
MEASURED = (*REACHED, "products", "source")


def checked_entry(name: str, given: object) -> dict[str, Any]:
    """The entry of the target `name`, checked and unchanged.

    Raises:
        TargetError: the entry is no table, a key or kind is unknown, a key is missing, or a figure is no number or has no
            source.
    """
    entry = _as_table(name, given)
    required = ("kind", "description", "source")
    unknown = sorted(set(entry) - {*required, *FACTS, *OPTIONAL})
    missing = sorted(set(required) - set(entry))
    if unknown or missing or name != name.lower():
        raise TargetError(
            f"target table [{name}]: unknown keys {unknown!s:.400}, missing keys {missing}; the keys are "
            f"{', '.join((*required, *FACTS, *OPTIONAL))}, and names are in lower case."
        )
    for key in ("source", "peak_flops", "compiler"):
        _as_table(f"{name}.{key}", entry.get(key, {}))
    if entry["kind"] not in ("cpu", "gpu"):
        raise TargetError(f'target table [{name}]: kind={entry["kind"]!r:.200}; write "cpu" or "gpu".')
    texts = {"description": entry["description"], **{f"source.{key}": one for key, one in entry["source"].items()}}
    # XLA parses the text that contains the description.
    wrong = [key for key, one in texts.items() if not isinstance(one, str) or not one.isprintable() or set(one) & {'"', "\\"}]
    if wrong:
        raise TargetError(f"target table [{name}]: {', '.join(wrong):.400}: write a text of one line, without quotation marks.")
    stated, sourced = set(entry) & {*FACTS, *OPTIONAL_FACTS}, set(entry["source"])
    if stated != sourced:
        raise TargetError(
            f"target table [{name}]: without a source: {sorted(stated - sourced)}; a source without a figure: "
            f"{sorted(sourced - stated)!s:.400}. State under [{name}.source] where each figure is from."
        )
    _check_measured(name, entry.get("measured", {}))
    _check_reached(name, entry.get("reached", {}))
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
    if not isinstance(kinds, list) or not all(isinstance(one, str) for one in kinds):
        raise TargetError(f"target table [{name}]: device_kinds={kinds!r:.200}; write a list of texts.")


def _check_measured(name: str, given: object) -> None:
    """Refuse figures that `Rates` refuses, with the table's name in the message."""
    measured = _as_table(f"{name}.measured", given)
    unknown = sorted(set(measured) - set(MEASURED))
    flops = measured.get("flops", {})
    if unknown or not isinstance(flops, dict) or (measured and not isinstance(measured.get("source"), str)):
        raise TargetError(
            f"target table [{name}.measured]: unknown keys {unknown!s:.400}; the keys are {', '.join(MEASURED)}, where flops "
            "is a table of rates by dtype, products one of rates by dtype and size, and source a text that names who "
            "measured."
        )
    _check_rates(f"{name}.measured", {key: value for key, value in measured.items() if key not in ("source", "products")})
    for dtype, curve in _as_table(f"{name}.measured.products", measured.get("products", {})).items():
        wrong = _not_positive(_as_table(f"{name}.measured.products.{dtype}", curve))
        wrong |= {size: rate for size, rate in curve.items() if not size.isdecimal()}
        if wrong:
            raise TargetError(
                f"target table [{name}.measured.products.{dtype}]: {wrong!s:.400}; write the rate of square products by their "
                "size, such as 512 = 3.1e14."
            )


def _check_reached(name: str, given: object) -> None:
    """Refuse a figure without its own source, and figures that `Rates` refuses."""
    reached = _as_table(f"{name}.reached", given)
    source = _as_table(f"{name}.reached.source", reached.get("source", {}))
    figures = {key: value for key, value in reached.items() if key != "source"}
    unknown, unpaired = set(figures) - set(REACHED), set(figures) ^ set(source)
    if unknown or unpaired or not isinstance(figures.get("flops", {}), dict):
        raise TargetError(
            f"target table [{name}.reached]: unknown keys {sorted(unknown)!s:.400}, figures and sources without a partner "
            f"{sorted(unpaired)!s:.400}; the keys are {', '.join(REACHED)}, where flops is a table of rates by dtype, and each "
            f"has a text of the same name under [{name}.reached.source]."
        )
    _check_rates(f"{name}.reached", figures)


def _check_rates(table: str, given: Mapping[str, Any]) -> None:
    rates = {f"flops.{dtype}": rate for dtype, rate in given.get("flops", {}).items()}
    rates |= {key: rate for key, rate in given.items() if key not in ("flops", "hidden_share")}
    wrong = _not_positive(rates)
    share = given.get("hidden_share", 1.0)
    if not _is_figure(share) or not 0 <= share <= 1:
        wrong["hidden_share"] = share
    if wrong:
        raise TargetError(
            f"target table [{table}]: {wrong!s:.400}; rates are positive numbers per second, times positive numbers of "
            "seconds, hidden_share is from 0 to 1."
        )


def _not_positive(figures: dict[str, Any]) -> dict[str, Any]:
    wrong = {key: one for key, one in figures.items() if not _is_figure(one) or not 0 < one < 1e30}
    wrong |= {key: one for key, one in figures.items() if key in WHOLE and isinstance(one, float)}
    return {key: "an integer of many digits" if isinstance(one, int) and one >= 1e30 else one for key, one in wrong.items()}


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
