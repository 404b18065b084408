"""Runs a plan action by action and reports legality, time and peaks. It knows no solver."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from remat_jax.errors import PlanningError
from tests.solver_oracles.program import Action, Compute, Fetch, Free, Operation, Plan, Program, Value, Wait

TOLERANCE = 1e-9
"""The allowed relative difference of a claim from the simulation: floating-point sums in another order."""


@dataclass(frozen=True)
class Outcome:
    """The results of running a plan.

    Attributes:
        seconds: compute, and the copies that it did not hide.
        compute_seconds: of the operations alone.
        exposed_out_seconds, exposed_in_seconds: copying to the host and back, as far as compute did not hide it. Where both
            are exposed in one window they run side by side, and ``seconds`` has the longer of them.
        out_bytes, in_bytes: copied.
        peak_bytes: on the device, fixed bytes included; looked at while an operation runs.
        host_peak_bytes: in host memory.
        executions: how often each operation ran.
    """

    seconds: float
    compute_seconds: float
    exposed_out_seconds: float
    exposed_in_seconds: float
    out_bytes: float
    in_bytes: float
    peak_bytes: float
    host_peak_bytes: float
    executions: Counter[str] = field(default_factory=Counter)


def simulate(program: Program, actions: Iterable[Action]) -> Outcome:
    """Run ``actions`` on ``program``.

    Raises:
        PlanningError: an action is not possible where it stands (the message has its number), or the goal is not reached.

    >>> program = Program((Value("a", 3.0), Value("b", 4.0)), (Operation("f", 2.0, ("a",), ("b",)),), ("a",), ("b",))
    >>> outcome = simulate(program, [Compute("f", save=("b",)), Free("a")])
    >>> outcome.seconds, outcome.peak_bytes
    (2.0, 7.0)
    """
    machine = _Machine(program)
    for number, action in enumerate(actions):
        try:
            machine.run(action)
        except _Illegal as error:
            raise PlanningError(f"action {number}, {action}: {error}.") from None
    machine.wait()
    missing = [name for name in program.goal if name not in machine.computed]
    if missing:
        raise PlanningError(f"the plan ends before {missing} is computed.")
    return machine.outcome()


def verify(plan: Plan) -> Outcome:
    """Run a plan, and compare its solver's claims with the results.

    Raises:
        PlanningError: an action is not possible, or a claim is off by more than the order of additions explains.
    """
    outcome = simulate(plan.program, plan.actions)
    claims = {
        "seconds": (plan.seconds, outcome.seconds),
        "peak_bytes": (plan.peak_bytes, outcome.peak_bytes),
        "host_bytes": (plan.host_bytes, outcome.host_peak_bytes),
    }
    for name, (claimed, simulated) in claims.items():
        if not math.isclose(claimed, simulated, rel_tol=TOLERANCE, abs_tol=TOLERANCE * TOLERANCE):
            raise PlanningError(f"the plan claims {name}={claimed!r}, and running it gives {simulated!r}.")
    return outcome


class _Illegal(Exception):
    """An illegal action; `simulate` adds its number."""


class _Machine:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.device = {name: program.value[name].bytes for name in program.initial}
        self.resident = program.fixed_bytes + sum(self.device.values())
        self.leaving: dict[str, float] = {}
        self.host: dict[str, float] = {}
        self.computed: set[str] = set(program.initial)
        self.window = {"compute": 0.0, "out": 0.0, "in": 0.0}
        self.seconds = self.compute_seconds = self.exposed_out = self.exposed_in = 0.0
        self.out_bytes = self.in_bytes = self.host_peak = 0.0
        self.peak = self.resident
        self.executions: Counter[str] = Counter()

    def run(self, action: Action) -> None:
        if isinstance(action, Compute):
            self.compute(action)
        elif isinstance(action, Fetch):
            self.fetch(action.value)
        elif isinstance(action, Free):
            self.free(action.value)
        elif isinstance(action, Wait):
            self.wait()
        else:
            raise _Illegal("this is no action; the actions are Compute, Fetch, Free and Wait")

    def compute(self, action: Compute) -> None:
        operation = self.program.operation.get(action.operation)
        if operation is None:
            raise _Illegal(f"there is no operation {action.operation!r}")
        absent = [name for name in operation.reads if name not in self.device]
        if absent:
            raise _Illegal(f"it reads {absent}, not on the device")
        kept = self.kept(operation, action)
        leaving = {name: self.program.value[name].in_transit_bytes for name in action.offload}
        new = sum(kept.values()) + sum(leaving.values())
        during = self.resident + operation.extra_bytes + (0.0 if operation.in_place else new)
        self.peak = max(self.peak, during)
        self.device |= kept
        self.leaving |= leaving
        self.resident += new
        self.computed |= {*operation.writes}
        self.send(action.offload)
        self.window["compute"] += operation.seconds
        self.executions[operation.name] += 1

    def kept(self, operation: Operation, action: Compute) -> dict[str, float]:
        for name in (*action.save, *action.offload):
            if name not in operation.writes:
                raise _Illegal(f"it does not write {name!r}")
            if name in self.device or name in self.leaving or name in self.host:
                raise _Illegal(f"{name!r} is there already")
        if set(action.save) & set(action.offload):
            raise _Illegal("a value is saved or offloaded, not both")
        return {name: self.saved_bytes(self.program.value[name]) for name in action.save}

    def saved_bytes(self, value: Value) -> float:
        if value.name in self.computed:
            return value.again_bytes
        if not value.may_save:
            raise _Illegal(f"{value.name!r} may not be saved")
        return value.bytes

    def send(self, names: Iterable[str]) -> None:
        for name in names:
            value = self.program.value[name]
            if not value.may_offload or self.program.link is None:
                raise _Illegal(f"{name!r} may not be offloaded" if self.program.link else "there is no link to the host")
            self.host[name] = value.bytes
            self.out_bytes += value.bytes
            self.window["out"] += value.bytes
        self.host_peak = max(self.host_peak, sum(self.host.values())) if names else self.host_peak

    def fetch(self, name: str) -> None:
        if name not in self.host or name in self.leaving:
            raise _Illegal(f"{name!r} is not in host memory")
        size = self.host.pop(name)
        self.in_bytes += size
        self.window["in"] += size
        self.device[name] = self.program.value[name].in_transit_bytes
        self.resident += self.device[name]

    def free(self, name: str) -> None:
        if name not in self.device:
            raise _Illegal(f"{name!r} is not on the device")
        self.resident -= self.device.pop(name)

    def wait(self) -> None:
        compute, link = self.window["compute"], self.program.link
        out = link.exposed_out(self.window["out"], compute) if link else 0.0
        back = link.exposed_in(self.window["in"], compute) if link else 0.0
        self.seconds += compute + max(out, back)
        self.compute_seconds += compute
        self.exposed_out += out
        self.exposed_in += back
        self.resident -= sum(self.leaving.values())
        self.leaving.clear()
        self.window = dict.fromkeys(self.window, 0.0)

    def outcome(self) -> Outcome:
        return Outcome(
            self.seconds, self.compute_seconds, self.exposed_out, self.exposed_in, self.out_bytes, self.in_bytes,
            self.peak, self.host_peak, self.executions,
        )  # fmt: skip
