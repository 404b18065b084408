"""The fastest persistent schedule of a chain of different stages within a budget: a dynamic programme.

From Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains" (arXiv:1911.13214,
rotor), with any number of options for each stage. Persistent means that what is kept stays until its own backward pass;
schedules that are not can be faster (`graph.solve_graph` finds them in small chains).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from remat_jax.solver.problem import check_budget, check_count
from tests.solver_oracles.chain_problem import Chain
from tests.solver_oracles.chain_tables import Cut, Fastest, Keep, Least, Sizes, State
from tests.solver_oracles.exact import infeasible
from tests.solver_oracles.lowering import chain_program
from tests.solver_oracles.program import Action, Compute, Fetch, Free, Plan, Wait

SLOTS = 500
"""The number of equal parts of memory if the sizes have no common measure that gives fewer."""

_HOST_SLOTS = 32


def solve_chain(chain: Chain, budget: float = math.inf, host_budget: float = math.inf, *, slots: int = SLOTS) -> Plan:
    """The fastest persistent schedule within both budgets.

    Exact where all sizes are multiples of a unit of which saving everything takes at most ``slots``; otherwise each size is
    rounded up to a ``slots``-th part of that, and the plan fits all the same. Host memory likewise, in 32 parts. That some plan
    fits is decided without rounding of device memory.

    Args:
        budget, host_budget: in bytes; infinite means no limit.

    Raises:
        InfeasibleBudget: nothing fits; the message says the least device memory that does.
        PlanningError: an argument is wrong.

    >>> from tests.solver_oracles.chain_problem import Option, Stage
    >>> stages = tuple(Stage(f"s{i}", 1.0, 1.0, (Option("all", 3.0, 1.0, 2.0),)) for i in range(4))
    >>> [solve_chain(Chain(stages, 1.0), budget).seconds for budget in (6, 8, 14)]
    [18.0, 15.0, 12.0]
    """
    return ChainSolver(chain, host_budget, slots=slots).plan(budget)


class ChainSolver:
    """`solve_chain` for many budgets: the table is filled once.

    Raises:
        PlanningError: an argument is wrong.

    >>> from tests.solver_oracles.chain_problem import Option, Stage
    >>> solver = ChainSolver(Chain((Stage("s", 1.0, 1.0, (Option("all", 3.0, 1.0, 2.0),)),), 1.0))
    >>> solver.least_bytes, solver.plan(5).seconds
    (5.0, 3.0)
    """

    def __init__(self, chain: Chain, host_budget: float = math.inf, *, slots: int = SLOTS) -> None:
        check_budget("host_budget", host_budget)
        check_count("slots", slots)
        self.chain, self.host_budget = chain, host_budget
        sizes = Sizes(chain)
        host = sum(max(option.host_bytes for option in stage.options) for stage in chain.stages)
        self._unlimited = host <= host_budget
        self._host_unit = 0.0 if self._unlimited else _unit([size for row in sizes.host for size in row], host, _HOST_SLOTS)
        rows = 1 if self._unlimited else 1 + math.floor(host_budget / self._host_unit)
        host_slots = [[0 if self._unlimited else math.ceil(size / self._host_unit) for size in row] for row in sizes.host]
        self._unit = _unit(sizes.all_sizes(), sizes.everything(), slots)
        self._most = math.ceil(sizes.everything() / self._unit)
        self._rows = rows
        self._sizes = sizes
        self._least = Least(sizes, host_slots, rows)
        self._fastest = Fastest(sizes, host_slots, rows, self._unit, self._most)

    @property
    def least_bytes(self) -> float:
        """The least device memory of any persistent schedule; infinite if the host memory alone forbids every schedule."""
        return self.chain.fixed_bytes + self.chain.input_bytes + self._least.need()

    def plan(self, budget: float = math.inf) -> Plan:
        """The fastest persistent schedule within ``budget``.

        Raises:
            InfeasibleBudget: nothing fits.
            PlanningError: the budget is no number of bytes.
        """
        check_budget("budget", budget)
        if not self.least_bytes <= budget or math.isinf(self.least_bytes):
            raise infeasible(budget, self.host_budget, None if math.isinf(self.least_bytes) else self.least_bytes)
        room = (budget - self.chain.fixed_bytes - self.chain.input_bytes) / self._unit
        slots = self._most if room >= self._most else math.floor(room * (1 + 1e-12))
        plans = [self._build(self._least.decide, (self._rows - 1, 0))]
        if math.isfinite(self._fastest.seconds(slots)):
            plans.append(self._build(self._fastest.decide, (self._rows - 1, slots)))
        return min(plans, key=lambda plan: (plan.seconds, plan.peak_bytes))

    def _build(self, decide: Callable[[int, int, State], tuple[Cut | Keep, Any]], start: State) -> Plan:
        writer = _Writer(self.chain, self._sizes)
        todo: list[Any] = [(1, len(self.chain.stages) + 1, start, writer.start)]
        while todo:
            task = todo.pop()
            if callable(task):
                task()
                continue
            first, last, state, held = task
            if first > len(self.chain.stages):
                writer.loss()
                continue
            step, after = decide(first, last, state)
            todo += (
                writer.keep(first, last, step, after, held)
                if isinstance(step, Keep)
                else writer.cut(first, last, step, after, held)
            )
        return writer.plan()


class _Writer:
    """Writes the actions of a schedule, and adds up their exact cost."""

    def __init__(self, chain: Chain, sizes: Sizes) -> None:
        self.chain, self.sizes = chain, sizes
        self.actions: list[Action] = []
        self.seconds = 0.0
        # Bytes on the device and the host that are kept throughout a part of the schedule, its input included.
        self.start = (chain.fixed_bytes + chain.input_bytes, 0.0)
        self.peak, self.host_peak = self.start

    def run(self, compute: Compute, *then: Action) -> None:
        self.actions += [compute, *then, *([Wait()] if self.chain.link else [])]

    def loss(self) -> None:
        self.run(Compute("loss", (f"a{len(self.chain.stages)} cotangent",)))

    def cut(self, first: int, last: int, step: Cut, after: tuple[State, State], held: tuple[float, float]) -> list[Any]:
        """Run forward to a checkpoint, do the part after it, then the part before it."""
        output, seconds = self.sizes.output, self.sizes.forward
        for number in range(first, step.at):
            self.run(Compute(f"forward {number}", (f"a{number}",)), *([Free(f"a{number - 1}")] if number > first else []))
            self.seconds += seconds[number]
            source = output[number - 1] if number > first else 0.0
            self.peak = max(self.peak, held[0] + output[last] + source + output[number])
        mark = step.at - 1
        behind = (step.at, last, after[0], (held[0] + output[mark], held[1]))
        return [(first, mark, after[1], held), lambda: self.actions.append(Free(f"a{mark}")), behind]

    def keep(self, first: int, last: int, step: Keep, after: State, held: tuple[float, float]) -> list[Any]:
        """Run a stage under one of its options, do the part after it, and run the stage backward."""
        option = self.chain.stages[first - 1].options[step.option]
        kept = f"{first}:{option.name}"
        offloaded = (f"{kept} on host",) if option.host_bytes else ()
        self.run(Compute(f"forward {kept}", (f"a{first}", kept), offloaded))
        self.seconds += self.sizes.cost(option)
        inside = held[0] + option.kept_bytes, held[1] + option.host_bytes
        output = self.sizes.output
        need = max(output[last] + option.forward_bytes, output[first] + option.backward_bytes)
        self.peak, self.host_peak = max(self.peak, inside[0] + need), max(self.host_peak, inside[1])

        def backward() -> None:
            self.actions += map(Fetch, offloaded)
            gone = map(Free, (f"a{first} cotangent", kept, f"a{first}", *offloaded))
            self.run(Compute(f"backward {kept}", (f"a{first - 1} cotangent",)), *gone)

        return [backward, *([(first + 1, last, after, inside)] if first < last else [])]

    def plan(self) -> Plan:
        return Plan(chain_program(self.chain), tuple(self.actions), self.seconds, self.peak, self.host_peak)


def _unit(sizes: list[float], total: float, slots: int) -> float:
    """The largest common measure of all sizes if it divides the total into few enough slots; else a part of the total."""
    exact = [Fraction(size) for size in sizes if size]
    if not exact:
        return 1.0
    below = math.lcm(*(fraction.denominator for fraction in exact))
    common = Fraction(math.gcd(*(int(fraction * below) for fraction in exact)), below)
    return float(common) if Fraction(total) / common <= slots else total / slots
