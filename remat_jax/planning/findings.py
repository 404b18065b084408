"""What a search found out beside the plan, as data: findings with a kind, a severity and a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat_jax.memory.compile.options import GRAPHS

KINDS = {
    "left_out": "a candidate could not be compiled",
    "not_shown": "a promise that was not shown for this plan",
    "cut_short": "the timeout ended the search, or a compilation",
    "preferred": "the plan is not the fastest compiled step",
    "cut": "layers under one policy are in several scans",
    "no_offload": "why nothing may be offloaded",
    "blocks": "the blocks were found, not given",
    "replaced": "the policies replace checkpoints of the model's own",
    "options": "how the step has to be compiled",
    "kernels": "memory with other kernels than those compiled",
    "host": "host memory that a machine may not have",
    "miscompiled": "a program that must not be run",
    "beyond": "what else takes memory, and how to reduce it",
    "old_file": "what a file of an older form does not say",
    "note": "a note of a file of an older form",
}
"""The kinds of findings."""
SEVERITIES = ("info", "warning")
CUT = (
    "A scan is cut between layers under one policy: XLA runs a scan of one layer without a loop, which is faster, and shorter "
    "scans allocate fewer gradients at once"
)
FITS_WITH_CUBLAS = "whether the step fits if XLA chooses cuBLAS for the matmuls"


@dataclass(frozen=True)
class PlanFinding:
    """One thing that a reader of a plan should know.

    Attributes:
      kind: one of `KINDS`.
      severity: `warning` if it concerns running the plan's step, else `info`.
      text: a sentence.
    """

    kind: str
    severity: str
    text: str


def info(kind: str, text: str) -> PlanFinding:
    """A finding about the search."""
    return PlanFinding(kind, "info", text)


def warning(kind: str, text: str) -> PlanFinding:
    """A finding about the plan's step, which is also issued as a warning."""
    return PlanFinding(kind, "warning", text)


def listed(texts: Sequence[str]) -> str:
    """The texts in a row, each once.

    >>> listed(["A", "B", "A", "C"]), listed(["A"])
    ('A, B and C', 'A')
    """
    *first, last = dict.fromkeys(texts)
    return f"{', '.join(first)} and {last}" if first else last


def not_shown(begin: str, claims: Sequence[str], why: str) -> list[PlanFinding]:
    """One finding with all claims that were not shown. `begin` says why the search ended early; empty if it did not.

    >>> [finding.text for finding in not_shown("", ["that A fits", "that B is faster"], "no compilations were left")]
    ['Not shown: that A fits; that B is faster; no compilations were left']
    """
    severity = "warning" if FITS_WITH_CUBLAS in claims else "info"
    if begin:
        return [PlanFinding("cut_short", severity, f"{begin}. Not shown: {'; '.join(claims)}" if claims else begin)]
    return [PlanFinding("not_shown", severity, f"Not shown: {'; '.join([*claims, *([why] if why else [])])}")] if claims else []


def option_findings(is_limited: bool, options: Mapping[str, Any], has_loss: bool) -> list[PlanFinding]:
    """The compiler options that the plan's step needs. A finished step, which has no loss of its own, gets them from `apply`.

    >>> [finding.text for finding in option_findings(True, {}, has_loss=False)]
    ["The step fits only with the budget as XLA's memory limit, which plan.apply sets if the step has a jit"]
    """
    findings = []
    if is_limited:
        how = ": give plan.compiler_options to its jax.jit" if has_loss else ", which plan.apply sets if the step has a jit"
        findings.append(warning("options", f"The step fits only with the budget as XLA's memory limit{how}"))
    if GRAPHS in options:
        how = ": give them to the jax.jit of the step" if has_loss else ", which plan.apply sets if the step has a jit"
        findings.append(warning("options", f"The copies in loops overlap compute only with plan.compiler_options{how}"))
    return findings
