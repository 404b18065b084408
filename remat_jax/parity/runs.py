"""The runs of a comparison, one after the other, and the verdict on each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from remat_jax import porting
from remat_jax.errors import ArgumentError, PortingError
from remat_jax.parity.case import Arrays, Case, Run
from remat_jax.parity.checks import (
    gradients_check,
    losses_check,
    planted_checks,
    precision_check,
    statistics_check,
    weight_check,
)
from remat_jax.parity.explain import computed_otherwise, first_difference, with_random_weights
from remat_jax.parity.flax_side import FlaxSide, structure
from remat_jax.parity.kept import KeptAlone
from remat_jax.parity.ledger import Ledger
from remat_jax.parity.memory import memory_of
from remat_jax.parity.report import ParityReport
from remat_jax.parity.report_data import Check, MemoryRow, differs
from remat_jax.parity.rule import float64_errors
from remat_jax.parity.settings import settings
from remat_jax.parity.tolerances import TOLERANCES
from remat_jax.parity.torch_side import TorchSide
from remat_jax.porting.float64 import FLOAT32_REMEDY, keep_jax_float64
from remat_jax.porting.links import tied_pairs as pairs
from remat_jax.warning import silenced

Tell = Callable[[str, int, int], None]


class Comparison:
    """Runs both frameworks, one run after the other, and judges the runs."""

    def __init__(self, case: Case, tell: Tell) -> None:
        self.case = case
        made = functools.cache(lambda dtype: structure(case, dtype))
        self.ledger, self.checks = Ledger(), [precision_check()]
        self.memory: list[MemoryRow] = []
        self.kept_alone: list[KeptAlone] = []
        self.hidden: tuple[str, ...] = ()
        self._tell, self._done = tell, 0
        self._total = 3 + len(case.modes) * (len(case.dtypes) + 2)
        self.say("the settings of both models")
        self.differences, found = settings(case, made)
        self.checks.append(found)
        with _precision("float64", case.keep_float64):
            self.say("the PyTorch model in float64")
            self.torch = TorchSide(case)
            if case.rules is None:
                self.say("proposing a weight map")
            rules = case.rules or self._proposed()
            _refuse_parted(self.torch, rules)
            self.flax = FlaxSide(case, self.torch, rules, made)
            # Training steps need an optimizer.
            self.steps = case.steps if case.optimizer else 0
            self.wants_state = len(self.flax.sources) > len(self.flax.trained)
            self.exact = self.torch.run("float64", steps=self.steps, wants_state=self.wants_state)
            unused = self._set_aside(self.exact.unused)
            self.before = self.flax.weights(self.torch.weights, "float64")
            self.reference = self._mapped(self.exact, "float64", self.before)
            elsewhere = functools.partial(with_random_weights, case, self.torch, self.flax.rules)
            self.checks.append(gradients_check(self.reference, unused, elsewhere))

    def say(self, what: str) -> None:
        """Report the activity that begins."""
        self._tell(what, min(self._done, self._total), self._total)
        self._done += 1

    def report(self, *, memory: bool, target: str | None) -> ParityReport:
        """Run Flax in every dtype and mode, PyTorch in every mode, and report the verdicts."""
        for dtype in self.case.dtypes:
            with _precision(dtype, self.case.keep_float64):
                self._judge_dtype(dtype)
        self._torch_modes()
        if memory:
            self._measure(target)
        failed = [row for row in self.ledger.rows() if row.kind != "update" and not row.passed]
        where = next((mode for mode in self.case.modes if any(row.fails_in(mode) for row in failed)), None)
        divergences = {} if where is None else self.explain(where)
        for row in self.ledger.rows():
            row.flax = ", ".join(path for path, names in self.flax.sources.items() if row.name in names)
        return ParityReport(
            rows=self.ledger.rows(),
            checks=tuple(self.checks),
            memory=tuple(self.memory),
            kept_alone=tuple(self.kept_alone),
            torch=type(self.torch.make("float32") if self.case.builds else self.case.torch_module).__name__,
            flax=type(self.case.flax("float32")).__name__,
            rules=str(self.flax.rules),
            modes=self.case.modes,
            dtypes=self.case.dtypes,
            optimizer=self.case.optimizer.name if self.case.optimizer else None,
            divergences=divergences,
            hidden=self.hidden,
            differences=self.differences,
        )

    def explain(self, mode: str) -> dict[str, Any]:
        """The first module that differs in each pass, in a mode."""
        self.say("the first module that differs")
        with _precision("float64", self.case.keep_float64):
            model, variables = self.torch.make("float64"), self.flax.tree(self.before)
            divergences, self.hidden, checks = first_difference(
                self.case, model, variables, self.flax.rules, self.flax.applied(mode)
            )
            self.checks += checks
            # Nothing differs in the earlier modes.
            only = f"only in {mode}" if mode != self.case.modes[0] else ""
            for found in filter(None, divergences.values()):
                found["note"] = "; ".join(filter(None, (only, found["note"])))
            return divergences

    def _set_aside(self, candidates: frozenset[str]) -> list[str]:
        """Exclude, and return, the weights on which the results depend in neither framework; none if all weights are such."""
        if not candidates or len(candidates) == len(self.torch.trained):
            return []
        unused = self.flax.set_aside(candidates)
        self.torch.trained = [name for name in self.torch.trained if name not in unused]
        for name in unused:
            self.exact.run.gradients.pop(name)
        return sorted(unused)

    def _proposed(self) -> porting.Rules:
        try:
            with silenced():  # the gradients check reports unproven weights
                return _proposed(self.case, self.torch)
        except PortingError as error:
            told = "".join(f"\n  {one['path'] or 'the whole model'}: {differs(one)}" for one in self.differences)
            raise PortingError(f"{error}\nThe settings of the two models differ:{told}" if told else str(error)) from error

    # Tensors.

    def _judge_dtype(self, dtype: str) -> None:
        weights = self.before if dtype == "float64" else self.flax.weights(self.torch.weights, dtype)
        yardstick = self.reference
        if dtype != "float64":
            plain = self.torch.run(dtype, steps=self.steps, wants_state=self.wants_state)
            yardstick = self._mapped(plain, dtype, weights)
        for mode in self.case.modes:
            self.say(f"Flax in {dtype}, {mode}")
            steps = self.steps if mode == "off" else min(self.steps, 1)
            found = self.flax.run(dtype, mode, weights, steps=steps)
            found.run.updates = self._updates(found.after, weights, dtype)
            self._enter(dtype, mode, found.run, yardstick)
            if mode == self.case.modes[0]:
                self._plant(dtype, mode, yardstick, weights)
            if mode == "off" and self.steps > 1:
                self.checks += losses_check(self.reference.losses, yardstick.losses, found.run.losses, dtype)

    def _enter(self, dtype: str, mode: str, found: Run, yardstick: Run) -> None:
        for kind, field in KINDS.items():
            reference, candidate, measure = (_group(run, field) for run in (self.reference, found, yardstick))
            if kind == "state":
                # PyTorch updates a batch norm's statistics twice in a checkpoint.
                if mode != "off":
                    continue
                reference, measure = (
                    {path: x for path, x in side.items() if path in candidate} for side in (reference, measure)
                )
            if kind == "update" and dtype != "float64":
                reference = {path: x + np.asarray(self.before[path]) for path, x in reference.items()}
            if dtype == "float64":
                if kind == "state":
                    self.checks += statistics_check(self.before, reference, candidate)
                self.ledger.exact(kind, reference, candidate, mode, "float64_step" if kind == "update" else "float64")
            else:
                self.ledger.working(kind, reference, _cast(candidate, kind, dtype), _cast(measure, kind, dtype), dtype, mode)

    def _plant(self, dtype: str, mode: str, yardstick: Run, weights: Any) -> None:
        reference, measure = (_group(run, "gradients") for run in (self.reference, yardstick))
        planted = self.ledger.plant(reference, measure, dtype)
        self.checks += planted_checks(planted, dtype)
        agreed = not any(row.fails_in(mode) for row in self.ledger.rows() if row.kind == "output")
        self.checks.append(weight_check(self.flax, self.reference, yardstick, weights, dtype, mode, agreed=agreed))
        if dtype == "float64":
            self._casts()

    def _casts(self) -> None:
        if self.flax.down_casts:
            where = "; ".join(self.flax.down_casts[:4])
            self.checks.append(
                Check("Flax stays in float64", False, f"its float64 step casts to a smaller dtype: {where}; {FLOAT32_REMEDY}")
            )
        tables = self.torch.tables()
        if tables and any(not row.passed for row in self.ledger.rows()):
            text = (
                f"{', '.join(tables[:4])} were computed in float32 and keep this rounding in float64: give a function that "
                "builds the model for torch_module"
            )
            self.checks.append(Check("PyTorch's tables", False, text))

    def _mapped(self, found: Any, dtype: str, before: Any) -> Run:
        """A PyTorch run with gradients under the rules' names, and with state and updates as Flax arrays."""
        run, rules = found.run, self.flax.rules
        for one, other in list(pairs(rules, run.gradients)):
            if one not in run.gradients:
                run.gradients[one] = run.gradients.pop(other)
        if found.state:
            state = self.flax.weights(found.state, dtype)
            run.state = {path: np.asarray(x) for path, x in state.items() if path not in self.flax.trained}
        if found.after:
            after = self.flax.weights(found.after, dtype)
            run.updates = self._updates({path: after[path] for path in self.flax.trained}, before, dtype)
        return run

    def _updates(self, after: Any, before: Any, dtype: str) -> Arrays:
        """The change of each parameter in a step; below float64 the updated parameter, whose rounding is as large."""
        added = dtype == "float64"
        return {path: np.asarray(x) - np.asarray(before[path]) if added else np.asarray(x) for path, x in after.items()}

    # Around them.

    def _torch_modes(self) -> None:
        for mode in self.case.modes:
            if mode == "off":
                continue
            self.say(f"PyTorch in float64, {mode}")
            found = self.torch.run("float64", mode).run
            plain = self.exact.run
            errors = {**_errors(plain.outputs, found.outputs), **_errors(plain.gradients, self._named(found.gradients))}
            worst = max(errors, key=lambda name: errors[name])
            passed = errors[worst] <= TOLERANCES["float64"].value
            text = f"differs from PyTorch without checkpoints by at most {errors[worst]:.1e}, in {worst}"
            text = "; ".join(filter(None, (text, "" if passed else computed_otherwise(self.case, self.torch, mode))))
            self.checks.append(Check(f"PyTorch, {mode}", passed, text))

    def _named(self, gradients: Arrays) -> Arrays:
        found = dict(gradients)
        for one, other in list(pairs(self.flax.rules, found)):
            if one not in found:
                found[one] = found.pop(other)
        return found

    def _measure(self, target: str | None) -> None:
        dtype = next((dtype for dtype in self.case.dtypes if dtype != "float64"), "float64")
        for mode in self.case.modes:
            self.say(f"memory, {mode}")
            with _precision(dtype):
                rows, alone = memory_of(self.torch, self.flax, dtype, mode, target)
            self.memory += rows
            self.kept_alone += alone


KINDS = {"output": "outputs", "gradient": "gradients", "state": "state", "update": "updates"}


def _group(run: Run, field: str) -> Arrays:
    """The tensors of one kind, which are judged together: outputs include the loss, gradients those of inputs."""
    found = dict(getattr(run, field))
    if field == "gradients":
        found |= {f"input:{name}": x for name, x in run.input_gradients.items()}
    if field == "outputs":
        found["loss"] = np.asarray(run.losses[0])
        # Integers, such as predictions, must be equal.
        found = {name: x if _is_float(x) else x.astype(np.float64) for name, x in found.items()}
    return found


def _is_float(x: Any) -> bool:
    return np.issubdtype(x.dtype, np.floating) or x.dtype.name == "bfloat16"


def _cast(tensors: Arrays, kind: str, dtype: str) -> Arrays:
    """The loss and integers in the working dtype, because Python numbers have no dtype."""
    if kind != "output":
        return tensors
    return {name: x.astype(dtype) if x.dtype == np.float64 else x for name, x in tensors.items()}


def _errors(reference: Arrays, candidate: Arrays) -> dict[str, float]:
    floating = {name: x for name, x in reference.items() if _is_float(x)}
    return float64_errors(floating, {name: candidate[name] for name in floating if name in candidate}) if floating else {}


def _proposed(case: Case, torch: TorchSide) -> porting.Rules:
    return porting.propose(
        torch.make("float64"),
        case.flax_module,
        dict(case.inputs.arrays),
        variables=case.variables,
        torch_call=case.by_name(case.torch_call),
        flax_call=case.by_name(case.flax_call),
    )


def _refuse_parted(torch: TorchSide, rules: porting.Rules) -> None:
    """Refuse ties of separate tensors: a tie is one tensor under two names; equal but separate tensors part in training."""
    names = {*torch.trained, *torch.ties}
    for one, other in pairs(rules, dict.fromkeys(names)):
        if {one, other} <= names and torch.ties.get(one, one) != torch.ties.get(other, other):
            raise ArgumentError(
                f"rules: 'tie: {one} = {other}', but these are two parameters in the PyTorch model: share one there, or give "
                "each its own place in Flax"
            )


@contextlib.contextmanager
def _precision(dtype: str, widens: bool = False) -> Iterator[None]:
    """Enable JAX's 64-bit types only for float64; full matmul precision unless the user sets another.

    With `widens`, casts to float32 inside a float64 run stay in float64.
    """
    chosen = jax.config.jax_default_matmul_precision
    kept = keep_jax_float64() if widens and dtype == "float64" else contextlib.nullcontext()
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision(chosen or "highest"), kept:
        yield
