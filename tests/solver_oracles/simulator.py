"""Runs a plan of a stack array by array and reports time and peaks. It knows no solver and no formula of a policy's costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from remat_jax.solver import Block, BlockPolicy, Choice, Stack, StackPlan


@dataclass(frozen=True)
class Outcome:
    """Seconds of the step, peak bytes on the device (fixed bytes included), and peak bytes in host memory."""

    seconds: float
    peak_bytes: float
    host_peak_bytes: float


def simulate(stack: Stack, policies: Sequence[BlockPolicy], cuts: Sequence[int] = ()) -> Outcome:
    """Run the forward and the backward pass of a stack whose blocks follow these policies.

    Equal blocks with late bytes and one policy are one scan unless it is cut: all that they save is there from the scan's
    forward pass until its backward pass has ended, which begins with the late bytes of all of them. A residual that is
    saved stays on the device until its block's backward pass has run. A residual that is offloaded is copied beside its
    block's forward pass, and back beside its backward pass. A recomputed residual needs its parents on the device.
    """
    machine = _Machine(stack)
    blocks = stack.positions()
    scans: list[list[int]] = []
    for number, (block, policy) in enumerate(zip(blocks, policies, strict=True)):
        last = scans[-1][-1] if scans else None
        if (
            last is None
            or not block.late_bytes
            or number in cuts
            or (block.name, policy.choices)
            != (
                blocks[last].name,
                policies[last].choices,
            )
        ):
            scans.append([])
        scans[-1].append(number)
    for scan in scans:
        for number in scan:
            machine.keep(number, blocks[number], policies[number])
        for number in scan:
            machine.forward(number, blocks[number], policies[number])
    for scan in reversed(scans):
        machine.begin(scan, scans, blocks)
        for number in reversed(scan):
            machine.backward(number, blocks[number], policies[number])
        machine.end(scan)
    assert not machine.device and not machine.host
    return Outcome(machine.seconds, machine.peak, machine.host_peak)


def verify(stack: Stack, plan: StackPlan) -> Outcome:
    """Run a plan, and compare its claims with the results."""
    outcome = simulate(stack, plan.policies, plan.cuts)
    claims = plan.seconds, plan.peak_bytes, plan.host_bytes
    assert claims == pytest.approx((outcome.seconds, outcome.peak_bytes, outcome.host_peak_bytes), rel=1e-9, abs=1e-18)
    assert plan.lower_bound <= plan.seconds == pytest.approx(stack.base_seconds + plan.extra_seconds)
    return outcome


class _Machine:
    def __init__(self, stack: Stack) -> None:
        self.fixed_bytes = stack.fixed_bytes - sum(block.repeats * block.late_bytes for block in stack.blocks)
        self.link = stack.link
        self.device: dict[tuple[int, str], float] = {}
        self.host: dict[tuple[int, str], float] = {}
        self.seconds = self.host_peak = 0.0
        self.peak = self.fixed_bytes
        self.begun: set[int] = set()

    def keep(self, number: int, block: Block, policy: BlockPolicy) -> None:
        self.device[number, "the input"] = block.input_bytes
        for residual, choice in zip(block.residuals, policy.choices, strict=True):
            if choice is Choice.SAVE:
                assert residual.may_save
                self.device[number, residual.name] = residual.bytes

    def forward(self, number: int, block: Block, policy: BlockPolicy) -> None:
        leaving = []
        for residual, choice in zip(block.residuals, policy.choices, strict=True):
            if choice is Choice.OFFLOAD:
                assert residual.may_offload and self.link is not None
                self.device[number, residual.name] = block.fetched_share * residual.bytes
                self.host[number, residual.name] = residual.bytes
                leaving.append(residual.name)
        self.run(block.working_bytes, block.forward_seconds, sum(self.host[number, name] for name in leaving), out=True)
        for name in leaving:
            del self.device[number, name]

    def begin(self, scan: Sequence[int], scans: Sequence[Sequence[int]], blocks: Sequence[Block]) -> None:
        """Allocate the late bytes of a scan, and of the earlier scans of the same kind and length, unless they are there."""
        for other in scans[: scans.index(scan) + 1]:
            same = (blocks[other[0]].name, len(other)) == (blocks[scan[0]].name, len(scan)) and len(scan) > 1
            if (other is scan or same) and other[0] not in self.begun:
                self.begun.add(other[0])
                self.fixed_bytes += sum(blocks[number].late_bytes for number in other)

    def end(self, scan: Sequence[int]) -> None:
        self.device = {key: size for key, size in self.device.items() if key[0] not in scan}

    def backward(self, number: int, block: Block, policy: BlockPolicy) -> None:
        seconds, copied = block.backward_seconds, 0.0
        for residual, choice in zip(block.residuals, policy.choices, strict=True):
            if choice in (Choice.SAVE, Choice.OFFLOAD):
                seconds += residual.kept_seconds
            if choice is Choice.OFFLOAD:
                size = self.host.pop((number, residual.name))
                self.device[number, residual.name] = block.fetched_share * size
                copied += size
        for at in block.order:
            residual = block.residuals[at]
            if policy.choices[at] is Choice.RECOMPUTE:
                assert residual.seconds is not None
                assert all((number, parent) in self.device for parent in residual.parents)
                self.device[number, residual.name] = block.recomputed_share * residual.bytes
                seconds += residual.seconds
            assert not residual.needed or (number, residual.name) in self.device
        if self.link is not None:
            seconds += 2 * copied / self.link.memory_bytes_per_s
        self.run(block.working_bytes, seconds, copied, out=False)
        stacked = {
            residual.name for residual, choice in zip(block.residuals, policy.choices, strict=True) if choice is Choice.SAVE
        }
        for key in [key for key in self.device if key[0] == number and key[1] not in stacked | {"the input"}]:
            del self.device[key]

    def run(self, working_bytes: float, seconds: float, copied: float, *, out: bool) -> None:
        """Compute beside the copies of one pass, of which the compute hides a share of its time."""
        self.peak = max(self.peak, self.fixed_bytes + working_bytes + sum(self.device.values()))
        self.host_peak = max(self.host_peak, sum(self.host.values()))
        self.seconds += seconds
        if copied and self.link is not None:
            rate = self.link.out_bytes_per_s if out else self.link.in_bytes_per_s
            self.seconds += max(0.0, copied / rate - self.link.hidden_share * seconds)
