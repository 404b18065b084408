"""The fastest plan of any small program: an exact search, to judge other solvers by.

The question is Checkmate's (Jain et al., arXiv:1910.02653): which values to compute again, where any may be dropped at any
time. It is answered by a shortest path over sets of values (A*). There are as many as subsets of all values, so that it ends at
some twenty; it does not offload.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from functools import cache
from itertools import combinations

from remat_jax.errors import PlanningError, SolverError
from remat_jax.solver.problem import check_budget, check_count
from tests.solver_oracles.exact import infeasible
from tests.solver_oracles.program import Action, Compute, Free, Operation, Plan, Program

STATES = 500_000
"""The largest number of sets of values that are visited."""


def solve_graph(program: Program, budget: float = math.inf, *, states: int = STATES) -> Plan:
    """The fastest plan of ``program`` within ``budget`` that offloads nothing.

    Raises:
        InfeasibleBudget: nothing fits; the message says the least device memory that does.
        PlanningError: an argument is wrong, or the program has another number of goals than one, or values that
            may not be saved or change their size when recomputed, which this solver does not support.
        SolverError: more than ``states`` sets were looked at.

    >>> from tests.solver_oracles.program import Value
    >>> values = tuple(Value(name, 1.0) for name in "abcd")
    >>> chain = (("b", "a"), ("c", "b"), ("d", "ca"))
    >>> program = Program(values, tuple(Operation(w, 1.0, tuple(r), (w,)) for w, r in chain), ("a",), ("d",))
    >>> solve_graph(program, 3.0).seconds
    3.0
    """
    check_budget("budget", budget)
    check_count("states", states)
    search = _Search(program, states)
    answer = search.path(budget)
    if answer is None:
        raise infeasible(budget, math.inf, search.least())
    seconds, peak, actions = answer
    return Plan(program, actions, seconds, peak, lower_bound=seconds)


_Step = tuple[int, tuple[Action, ...], float]
"""The previous set, the step from it, and the peak of that step."""


class _Search:
    def __init__(self, program: Program, states: int) -> None:
        odd = [value.name for value in program.values if not value.may_save or value.again_bytes != value.bytes]
        if odd or len(program.goal) != 1:
            raise PlanningError(
                f"solve_graph: values {odd} may not be saved or change in size; goals {program.goal}, expected one."
            )
        self.program, self.states = program, states
        self.bit = {value.name: 1 << number for number, value in enumerate(program.values)}
        self.names = [value.name for value in program.values]
        self.size = [value.bytes for value in program.values]
        self.start, self.goal = self._mask(program.initial), self._mask(program.goal)
        self.makers = {name: [operation for operation in program.operations if name in operation.writes] for name in self.names}
        self.short = math.inf
        self.bytes = cache(self._bytes)

    def _mask(self, names: tuple[str, ...]) -> int:
        return sum(self.bit[name] for name in set(names))

    def _members(self, state: int) -> list[int]:
        return [number for number in range(len(self.names)) if state >> number & 1]

    def _bytes(self, state: int) -> float:
        return sum(self.size[number] for number in self._members(state))

    def least(self) -> float:
        """The least memory that reaches the goal: memory grows step by step until the search succeeds."""
        while True:
            budget = self.short
            if self.path(budget) is not None:
                return budget

    def path(self, budget: float) -> tuple[float, float, tuple[Action, ...]] | None:
        """Seconds, peak and actions; None if there are none, and ``short`` is then the next budget that changes anything."""
        self.short = math.inf
        best, came = {self.start: 0.0}, dict[int, _Step]()
        queue = [(self._ahead(self.start), self.start)]
        done: set[int] = set()
        while queue:
            _, state = heapq.heappop(queue)
            if state & self.goal:
                return self._trace(best[state], state, came)
            if state in done:
                continue
            done.add(state)
            if len(best) > self.states:
                raise SolverError(f"solve_graph: more than states={self.states} sets of values; it is for small programs.")
            for after, seconds, actions, peak in self._steps(state, budget):
                reached = best[state] + seconds
                if reached < best.get(after, math.inf):
                    best[after], came[after] = reached, (state, actions, peak)
                    done.discard(after)
                    heapq.heappush(queue, (reached + self._ahead(after), after))
        return None

    def _trace(self, seconds: float, state: int, came: dict[int, _Step]) -> tuple[float, float, tuple[Action, ...]]:
        peak, parts = self.program.fixed_bytes + self.bytes(self.start), list[tuple[Action, ...]]()
        while state != self.start:
            state, actions, during = came[state]
            peak = max(peak, during)
            parts.append(actions)
        return seconds, peak, tuple(action for part in reversed(parts) for action in part)

    def _ahead(self, state: int) -> float:
        """Seconds that are needed in any case: everything between this set and the goal, once."""
        wanted, seen, operations = list(self.program.goal), set[str](), set[str]()
        while wanted:
            name = wanted.pop()
            if name in seen or state & self.bit[name]:
                continue
            seen.add(name)
            if len(self.makers[name]) == 1:
                operations.add(self.makers[name][0].name)
                wanted += self.makers[name][0].reads
        return sum(self.program.operation[name].seconds for name in operations)

    def _steps(self, state: int, budget: float) -> Iterator[tuple[int, float, tuple[Action, ...], float]]:
        for operation in self.program.operations:
            reads = self._mask(operation.reads)
            new = [name for name in operation.writes if not state & self.bit[name]]
            if reads & ~state or not new:
                continue
            for count in range(1, len(new) + 1):
                for saved in combinations(new, count):
                    yield from self._run(operation, state, reads, saved, budget)

    def _run(
        self, operation: Operation, state: int, reads: int, saved: tuple[str, ...], budget: float
    ) -> Iterator[tuple[int, float, tuple[Action, ...], float]]:
        added = self._mask(saved)
        beside = self.program.fixed_bytes + operation.extra_bytes + (0.0 if operation.in_place else self.bytes(added))
        if beside + self.bytes(reads) > budget:
            self.short = min(self.short, beside + self.bytes(reads))
            return
        for dropped in self._drops(state & ~reads, beside + self.bytes(state), budget):
            frees = tuple(Free(self.names[number]) for number in self._members(dropped))
            left = state & ~dropped
            yield left | added, operation.seconds, (*frees, Compute(operation.name, saved)), beside + self.bytes(left)

    def _drops(self, free: int, need: float, budget: float) -> Iterator[int]:
        """The minimal sets of values to drop: without any one of them the step would not fit."""
        if need <= budget:
            yield 0
            return
        self.short = min(self.short, need)
        members = [number for number in self._members(free) if self.size[number]]
        for count in range(1, len(members) + 1):
            for chosen in combinations(members, count):
                left = need - sum(self.size[number] for number in chosen)
                if left > budget:
                    self.short = min(self.short, left)
                elif left + min(self.size[number] for number in chosen) > budget:
                    yield sum(1 << number for number in chosen)
