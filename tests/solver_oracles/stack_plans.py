"""Plans of a stack as actions for the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat_jax.solver import BlockPolicy, Choice, HostLink, Stack, stack_plan
from tests.solver_oracles.lowering import labels, stack_program
from tests.solver_oracles.program import Action, Compute, Fetch, Free, Plan, Wait


@dataclass(frozen=True)
class Range:
    """Consecutive blocks of one kind under one policy; ``first`` is counted within the kind."""

    block: str
    first: int
    count: int
    policy: BlockPolicy


def ranges(policies: Sequence[BlockPolicy]) -> tuple[Range, ...]:
    """Consecutive blocks of one kind under one policy, joined."""
    joined: list[Range] = []
    for policy in policies:
        name, last = policy.block.name, joined[-1] if joined else None
        if last is None or last.block != name:
            joined.append(Range(name, 0, 1, policy))
        elif last.policy.choices == policy.choices:
            joined[-1] = Range(name, last.first, last.count + 1, last.policy)
        else:
            joined.append(Range(name, last.first + last.count, 1, policy))
    return tuple(joined)


@dataclass(frozen=True)
class ExecutablePlan(Plan):
    """A plan for a stack.

    Attributes:
        ranges: what each block does, in the order of the forward pass.
        extra_seconds: over saving everything; ``lower_bound`` is on ``seconds``, which has the rest too.
        variables: how many integer variables the solver had.
        timed_out: whether its time limit ended the search, so that another run may find another plan.
    """

    ranges: tuple[Range, ...] = ()
    extra_seconds: float = 0.0
    variables: int = 0
    timed_out: bool = False


def executable(stack: Stack, policies: Sequence[BlockPolicy], *, bound: float = 0.0, variables: int = 0) -> ExecutablePlan:
    """The plan in which each block follows its entry of ``policies``, with its actions.

    ``bound`` is the least extra time that the solver left possible, ``variables`` how many it had.
    """
    plan = stack_plan(stack, policies, bound=bound)
    return ExecutablePlan(
        stack_program(stack, [_kept_seconds(policy, stack.link) for policy in plan.policies]),
        _actions(stack, plan.policies),
        seconds=plan.seconds,
        peak_bytes=plan.peak_bytes,
        host_bytes=plan.host_bytes,
        lower_bound=plan.lower_bound,
        ranges=ranges(plan.policies),
        extra_seconds=plan.extra_seconds,
        variables=variables,
    )


def _kept_seconds(policy: BlockPolicy, link: HostLink | None) -> float:
    return policy.kept_seconds + (0.0 if link is None else link.seconds_per_byte * policy.host_bytes)


def _actions(stack: Stack, policies: Sequence[BlockPolicy]) -> tuple[Action, ...]:
    names = labels(stack)
    actions: list[Action] = []
    before = "input"
    for label, policy in zip(names, policies, strict=True):
        kept = _named(label, policy, Choice.SAVE)
        actions.append(
            Compute(f"forward {label}", (f"{label}:output", f"{label}:input", *kept), _named(label, policy, Choice.OFFLOAD))
        )
        actions += [Free(before), Wait()]
        before = f"{label}:output"
    actions += [Compute("loss", (f"{names[-1]}:cotangent",)), Free(before)]
    for index in reversed(range(len(names))):
        after = f"{names[index - 1]}:cotangent" if index else "input cotangent"
        actions += _backward(names[index], policies[index], after)
    return tuple(actions)


def _backward(label: str, policy: BlockPolicy, after: str) -> list[Action]:
    order = [policy.block.residuals[index].name for index in policy.block.order]
    again = [f"{label}/{name}" for name in order if policy.of[name] is Choice.RECOMPUTE]
    offloaded = _named(label, policy, Choice.OFFLOAD)
    actions: list[Action] = [Fetch(name) for name in offloaded]
    actions += [Compute(f"recompute {name}", (name,)) for name in again]
    actions.append(Compute(f"backward {label}", (after,)))
    gone = (f"{label}:cotangent", f"{label}:input", *_named(label, policy, Choice.SAVE), *offloaded, *again)
    return [*actions, *map(Free, gone), Wait()]


def _named(label: str, policy: BlockPolicy, wanted: Choice) -> tuple[str, ...]:
    return tuple(f"{label}/{name}" for name, choice in policy.of.items() if choice is wanted)
