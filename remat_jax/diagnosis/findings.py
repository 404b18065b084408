"""The result of `doctor`: plain data, printable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.text import Text

from remat_jax.apply.blocks import replaced_text
from remat_jax.memory.advice import Advice
from remat_jax.report.tables import render


@dataclass(frozen=True)
class Finding:
    """A trap that is in the workload.

    Attributes:
      trap: the trap's name in the table of `doctor`.
      block: the paths or classes of the blocks (at most three are named); for some traps the workload or the policy.
      place: the line of the user's code, as `file:line (function)`; empty if unknown.
      problem: what happens, with the figures that show it.
      remedy: what to do.
    """

    trap: str
    block: str
    place: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        at = f" at {self.place}" if self.place else ""
        return f"{self.trap}: {self.block}{at}: {self.problem}. {self.remedy}."


@dataclass(frozen=True)
class Diagnosis:
    """The result of `doctor`; true if it has no findings.

    Attributes:
      workload, policy, target: the names of the workload, of its policy and of the target; `target` is None without a target.
      findings: the traps; empty if there are none.
      regions: the number of different checkpointed regions; equal blocks, and the layers of a scan, count once.
      replaced_checkpoints: the number of the model's own checkpoints that the policy replaced.
      advice: changes other than a policy that would reduce memory; empty without a target, or if the policy is refused.
      cut_short: whether a timeout ended the search for traps that only compiling shows. `doctor` raises instead.
    """

    workload: str
    policy: str
    target: str | None
    findings: tuple[Finding, ...]
    regions: int
    replaced_checkpoints: int = 0
    advice: tuple[Advice, ...] = ()
    cut_short: bool = False

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        data = asdict(self)
        return {**data, "ok": self.ok, "findings": list(data["findings"]), "advice": list(data["advice"])}

    def __rich__(self) -> Any:
        where = f"compiled for {self.target}" if self.target else "traced, not compiled"
        title = f"{self.workload} under {self.policy} ({where}): {_counted(len(self.findings), 'trap')}"
        remark = f"\n{replaced_text(self.replaced_checkpoints)}." if self.replaced_checkpoints else ""
        remark += "".join(f"\nbeyond the blocks: {advice}" for advice in self.advice)
        if self.ok:
            several = "one checkpointed region" if self.regions == 1 else f"{self.regions} different checkpointed regions"
            regions = several if self.regions else "nothing is checkpointed"
            more = "" if self.target else "\nName a GPU or TPU as the target to look for traps that only compiling shows."
            return f"{title}; {regions}.{remark}{more}"
        # Not a table: columns of text are too narrow for flags and names.
        texts = [
            f"{finding.trap} in {' at '.join(filter(None, (finding.block, finding.place)))}\n"
            f"{finding.problem.rstrip('.')}.\nRemedy: {finding.remedy.rstrip('.')}.\n"
            for finding in self.findings
        ]
        return Text("\n".join([f"{title}\n", *texts]) + remark)

    def __str__(self) -> str:
        return render(self)


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings; findings that differ only in their block are merged into one."""
    blocks_of: dict[Finding, list[str]] = {}
    for finding in findings:
        blocks = blocks_of.setdefault(replace(finding, block=""), [])
        if finding.block not in blocks:
            blocks.append(finding.block)
    return tuple(replace(finding, block=some(blocks)) for finding, blocks in blocks_of.items())


def some(names: Iterable[str], limit: int = 3) -> str:
    """The first `limit` names, and the number of further names.

    >>> some(["a", "b", "c", "d"], 2)
    'a, b and 2 more'
    """
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:limit]) + (f" and {len(shown) - limit} more" if len(shown) > limit else "")
