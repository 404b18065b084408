"""Searches whose compiler is a formula: random stacks, what the compiler really needs, and failing compilations."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from remat_jax.planning.candidate import FAILED, Choices, Compiled, Cuts, KeptArrays, Load, StepCandidate, Tried, block_policies
from remat_jax.planning.fit_memory import Fit, predicted
from remat_jax.planning.known import Known
from remat_jax.planning.loop import Ended, search
from remat_jax.planning.solved import Solved
from remat_jax.planning.times import Times
from remat_jax.solver import Block, Choice, HostLink, ResidualCosts, Stack, stack_plan

SAVE, OFFLOAD, AGAIN = Choice.SAVE, Choice.OFFLOAD, Choice.RECOMPUTE
X, UP, ACT = ResidualCosts("x", 100.0), ResidualCosts("up", 400.0, 0.5, ("x",)), ResidualCosts("act", 300.0, 0.05, ("up",))
LAYER = Block("layer", (X, UP, ACT), 1.0, 2.0, working_bytes=500.0, repeats=6)
STACK = Stack((LAYER,), fixed_bytes=1000.0)
TRUTH = replace(STACK, fixed_bytes=1700.0, blocks=(replace(LAYER, recomputed_share=0.4, fetched_share=2.0),))
NAMED = {"off": (SAVE, SAVE, SAVE), "everything": (SAVE, SAVE, SAVE), "dots": (SAVE, SAVE, AGAIN), "full": (SAVE, AGAIN, AGAIN)}


def made(choices: Choices, stack: Stack = STACK, name: str = "") -> StepCandidate:
    """The candidate of choices, priced by the solver."""
    policies = block_policies(stack, choices)
    kept, loads = [], []
    for policy in policies:
        of = {
            action: [r for r, c in zip(policy.block.residuals, policy.choices, strict=True) if c is action] for action in Choice
        }
        kept.append(KeptArrays(*(frozenset(r.name for r in of[action]) for action in (SAVE, OFFLOAD)), name != "off"))
        loads.append(Load(*(round(sum(r.bytes for r in of[action])) for action in (SAVE, AGAIN, OFFLOAD))))
    seconds = stack_plan(stack, policies).extra_seconds
    return StepCandidate(
        tuple(kept), name=name, loads=tuple(loads), seconds=seconds, choices=choices if name != "off" else None
    )


def named(stack: Stack = STACK, policies: Any = None) -> list[StepCandidate]:
    """The named policies, each for all layers of a stack of one kind."""
    return [made((choices,) * stack.blocks[0].repeats, stack, name) for name, choices in (policies or NAMED).items()]


def cut(candidate: StepCandidate, cuts: Cuts) -> StepCandidate:
    """The candidate with cuts between layers that keep the same."""
    places = tuple(at for at in cuts if at and candidate.kept[at - 1] == candidate.kept[at])
    loads = tuple(replace(load, cut=at in places) for at, load in enumerate(candidate.loads))
    return replace(candidate, cuts=places, loads=loads)


@dataclass
class Searched:
    """A search and its compiler.

    `size` gives a step's device bytes, `more` what it needs in addition with other kernels, `pace` its seconds (CPU: None).
    """

    stack: Stack
    budget: float
    size: Callable[[StepCandidate], float]
    candidates: Sequence[StepCandidate]
    host: float = math.inf
    pace: Callable[[StepCandidate], float] | None = None
    arguments: float = 0.0
    scanned: bool = False
    more: Callable[[StepCandidate], int | None] = lambda candidate: None
    asked: list[list[StepCandidate]] = field(default_factory=list)
    known: Known = field(init=False)

    def __post_init__(self) -> None:
        fit = Fit(self.stack, self.budget, self.host, self.arguments)
        solved = Solved(fit, self.candidates, lambda choices: made(choices, self.stack), recut=cut)
        times = Times(fit, self.stack.base_seconds)
        self.known = Known(fit, times, solved, tuple(self.candidates), cut, self.scanned, has_times=self.pace is not None)

    def compile_them(self, candidates: Sequence[StepCandidate], best: Tried | None = None) -> list[Compiled]:
        self.asked.append(list(candidates))
        return [self.compiled(candidate) for candidate in candidates]

    def compiled(self, candidate: StepCandidate) -> Compiled:
        size, seconds = self.size(candidate), None
        if self.pace is not None:
            seconds = self.pace(candidate) * (self.stack.base_seconds + candidate.seconds)
        sizes = SimpleNamespace(seconds=seconds, time=None)
        return (
            Compiled(round(size), candidate.host_bytes, size < FAILED, sizes) if size < FAILED else Compiled(FAILED, 0, False)
        )

    def learn(self, *candidates: StepCandidate) -> Searched:
        self.known.fit.learn(candidates, self.compile_them(candidates))
        return self

    def run(self) -> Ended:
        return search(self.known, self.compile_them, compile_otherwise=lambda tried: self.more(tried.candidate))


def drawn(seed: int) -> Searched:
    """A random stack of up to two kinds, a budget, and a compiler that needs other bytes than the stack predicts."""
    draw = random.Random(seed)
    blocks, true_blocks = [], []
    late = draw.choice([0.0, 50.0, 400.0])
    for kind in range(draw.choice([1, 1, 2])):
        residuals = [ResidualCosts("x", draw.uniform(50, 150))]
        for index in range(draw.randint(2, 7)):
            parents = tuple({draw.choice(residuals).name for _ in range(draw.randint(1, 2))})
            cost = draw.choice([0.002, 0.01, 0.05, 0.2]) * draw.uniform(0.3, 2)
            residuals.append(ResidualCosts(f"r{index}", draw.uniform(20, 500), cost, parents))
        forward = sum(residual.seconds or 0.0 for residual in residuals) * draw.uniform(1, 1.5) + 0.1
        working, repeats = draw.uniform(100, 1500), draw.choice([3, 6, 12])
        sizes = {"working_bytes": working, "late_bytes": late}
        blocks.append(Block(f"b{kind}", tuple(residuals), forward, 2 * forward, repeats=repeats, **sizes))
        shares = {"recomputed_share": draw.uniform(0.2, 1.2), "fetched_share": draw.uniform(0.5, 3)}
        shares["late_bytes"] = draw.choice([0.0, 0.8, 1.0]) * late
        true_blocks.append(replace(blocks[-1], working_bytes=working * draw.uniform(0.5, 1.5), **shares))
    link, fixed = draw.choice([None, HostLink(5e4, 5e4), HostLink(5e3, 5e3)]), draw.uniform(500, 20000)
    stack, truth = Stack(tuple(blocks), link, fixed), Stack(tuple(true_blocks), link, fixed * draw.uniform(0.9, 1.3))
    names = sorted({residual.name for block in blocks for residual in block.residuals[1:]})
    saved = {"off": set(names), "everything": set(names), "full": set[str]()}
    saved |= {name: {each for each in names if draw.random() < 0.5} for name in ("dots", "attention")}
    candidates = [
        made(
            tuple(
                tuple(SAVE if residual.name == "x" or residual.name in names else AGAIN for residual in block.residuals)
                for block in blocks
                for _ in range(block.repeats)
            ),
            stack,
            name,
        )
        for name, names in saved.items()
    ]
    sizes = [predicted(truth, candidate.loads) for candidate in candidates]
    budget = draw.uniform(0.95 * min(sizes), 1.02 * max(sizes))
    noise, fails, less = draw.uniform(0, 0.02), draw.random() < 0.3, draw.choice([0.75, 1.0])
    paces = {family: draw.uniform(0.9, 1.1) for family in ("off", "named", "mix")}
    host = draw.choice([math.inf, 0.0, 500.0])

    def size(candidate: StepCandidate) -> float:
        wave = math.sin(candidate.saved_bytes / 97.0)
        if fails and wave > 0.8:
            return FAILED
        return predicted(truth, candidate.loads) * (1 + noise * wave) * (1.0 if candidate.checkpoints else less)

    timed = draw.random() < 0.5
    pace = (lambda candidate: paces.get(candidate.family, 1.0)) if timed else None
    share = draw.choice([None, None, 0.0, 0.01, 0.05])

    def more(candidate: StepCandidate) -> int | None:
        wave = math.cos(candidate.saved_bytes / 97.0)
        return (
            None if share is None else round(share * (1 + 0.2 * wave) * size(candidate) * (1 if candidate.checkpoints else 4))
        )

    return Searched(stack, budget, size, candidates, host, pace, 0.5 * fixed, draw.random() < 0.5, more)
