"""A public report with its program, and how the outcome is judged."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from remat_jax import RematError
from torch_ref import TorchRefError

MOST_OFF = 2e-5
"""Gradients in float32 differ by rounding."""


@dataclass(frozen=True)
class Outcome:
    """What happens without remat_jax and with it, in words, and the verdict."""

    plain: str
    ours: str
    verdict: str


@dataclass(frozen=True)
class Report:
    """A public report: `owner/repository#number`, the complaint in a sentence, and its program."""

    issue: str
    complaint: str
    run: Callable[[], Outcome]


REPORTS: list[Report] = []
"""All reports, in the order of the modules that have them."""

NOT_RUN = "not run: "
"""Begins what is quoted from a report, where no program without remat_jax is run."""

FAULT = "FAULT"
"""The verdict where remat_jax is wrong, or raises an error that is not its own."""


def report(issue: str, complaint: str) -> Callable[[Callable[[], Outcome]], Callable[[], Outcome]]:
    """Register the decorated program under its report."""

    def registered(run: Callable[[], Outcome]) -> Callable[[], Outcome]:
        REPORTS.append(Report(issue, complaint, run))
        return run

    return registered


def compared(wanted: Any, plain: Callable[[], Any], ours: Callable[[], Any]) -> Outcome:
    """Whether `plain()` and `ours()` return `wanted`, a tree of arrays."""
    without, under = (_against(wanted, function) for function in (plain, ours))
    if isinstance(under, Exception):
        return Outcome(_text(without), _text(under), "refused" if isinstance(under, RematError | TorchRefError) else FAULT)
    if under > MOST_OFF:
        return Outcome(_text(without), _text(under), FAULT)
    gone = not isinstance(without, Exception) and without <= MOST_OFF
    return Outcome(_text(without), _text(under), "both right" if gone else "cured")


def shown(plain: str, ours: str, holds: bool) -> Outcome:
    """Figures or messages; `holds` is the claim that the user sees what is true."""
    return Outcome(plain, ours, "shown" if holds else FAULT)


def counted(plain: str, ours: str, holds: bool, *, cured: bool) -> Outcome:
    """Figures of which ours must be right (`holds`); `cured` if those without remat_jax are not."""
    return Outcome(plain, ours, FAULT if not holds else "cured" if cured else "both right")


def message(function: Callable[[], Any], *, most: int = 160) -> str:
    """What `function` returns, as text, or its error; `most` characters."""
    try:
        return str(function())[:most]
    except Exception as error:
        return _text(error, most)


def mib(count: float) -> str:
    """Bytes as MiB."""
    return f"{count / 2**20:.1f} MiB"


def _against(wanted: Any, function: Callable[[], Any]) -> float | Exception:
    try:
        return distance(function(), wanted)
    except Exception as error:
        return error


def distance(tree: Any, wanted: Any) -> float:
    """The largest difference of a leaf in norm, relative to the norm of the wanted one; infinite if the trees differ."""
    leaves, others = jax.tree.leaves(tree), jax.tree.leaves(wanted)
    if len(leaves) != len(others):
        return float("inf")
    worst = 0.0
    for leaf, other in zip(leaves, others, strict=True):
        one, two = (np.asarray(array).astype(np.complex128).ravel() for array in (leaf, other))
        if one.shape != two.shape or not np.isfinite(one).all():
            return float("inf")
        worst = max(worst, float(np.linalg.norm(one - two) / max(np.linalg.norm(two), 1e-30)))
    return worst


def _text(found: float | Exception, most: int = 160) -> str:
    """A distance in words, or the first sentence of an error, without what names a machine or an address."""
    if isinstance(found, Exception):
        line = re.sub(r"(The error occurred|See https?:|\(https?:).*|0x[0-9a-f]+| at /\S+", "", " ".join(str(found).split()))
        return f"{type(found).__name__}: {line[:most].strip()}{'…' if len(line) > most else ''}"
    return "right" if found <= MOST_OFF else f"wrong: off by {found:.2g}"
