"""The runs of a comparison, one after the other, and the verdict on each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np

from remat_jax import porting
from remat_jax.errors import ArgumentError, PortingError
from remat_jax.parity.case import Arrays, Case, Run
from remat_jax.parity.checks import (
    Ledger,
    gradients_check,
    losses_check,
    map_check,
    precision_check,
    statistics_check,
    weight_check,
)
from remat_jax.parity.explain import (
    computed_otherwise,
    first_difference,
    settings,
    settings_check,
    with_random_weights,
    without_effect,
)
from remat_jax.parity.flax_side import FlaxSide, structure
from remat_jax.parity.memory import memory_of
from remat_jax.parity.report import ParityReport
from remat_jax.parity.report_data import Check, KeptAlone, MemoryRow
from remat_jax.parity.rule import float64_errors
from remat_jax.parity.semantics import Difference
from remat_jax.parity.tolerances import TOLERANCES
from remat_jax.parity.torch_side import TorchSide
from remat_jax.parity.trees import is_floating
from remat_jax.parity.widening import widening
from remat_jax.porting.auto.propose import Proposal, search
from remat_jax.porting.float64 import FLOAT32_REMEDY, keep_jax_float64
from remat_jax.porting.foreign import name_of
from remat_jax.porting.links import links_of_tensors, tied_pairs

Tell = Callable[[str, int, int], None]


class Runs:
    """Runs both frameworks, one run after the other, and judges the runs."""

    def __init__(self, case: Case, tell: Tell) -> None:
        self.case = case
        structure_in = functools.cache(lambda dtype: structure(case, dtype))
        self.ledger, self.checks = Ledger(), [precision_check()]
        self.memory: list[MemoryRow] = []
        self.kept_alone: list[KeptAlone] = []
        self.hidden: tuple[str, ...] = ()
        self._tell, self._done = tell, 0
        self.say("the settings of both models")
        self.settings, self.unread = settings(case, structure_in)
        self.checks.append(settings_check(self.settings, self.unread))
        self.say("the PyTorch model in float64")
        with _precision("float64"):
            self.torch = TorchSide(case)
            case.keep_float64, checks = widening(case, structure_in, torch_narrows=self.torch.narrows)
            self.checks += checks
        with _precision("float64", case.keep_float64):
            self.proposal = self._proposed() if case.auto else None
            rules = self.proposal.rules if self.proposal else case.rules
            _refuse_parted(self.torch, rules)
            self._leave_out_modes("PyTorch", self.torch.blocks)
            self.torch.excite_mapped(links_of_tensors(rules, self.torch.weights))
            self.flax = FlaxSide(case, self.torch, rules, structure_in)
            self._leave_out_modes("Flax", self.flax.blocks)
            # Training steps need an optimizer.
            self.steps = case.steps if case.optimizer else 0
            exact = self.torch.run("float64", steps=self.steps)
            unused = self._set_aside(exact)
            self.before = self.flax.weights(self.torch.weights, "float64")
            self.reference = self._mapped(exact, "float64", self.before)
            elsewhere = functools.partial(with_random_weights, case, self.torch, self.flax.rules)
            self.checks.append(gradients_check(self.reference, unused, elsewhere))

    @property
    def _total(self) -> int:
        return 3 + len(self.case.modes) * (len(self.case.dtypes) + 2)

    def _leave_out_modes(self, side: str, blocks: tuple[type, ...]) -> None:
        """Leave out all modes but `off` if a model has no blocks, and say so; the runs of the other modes raise an error."""
        modes = [mode for mode in self.case.modes if mode != "off"]
        if blocks or not modes or "off" not in self.case.modes:
            return
        self.case.modes = ("off",)
        text = f"{', '.join(modes)} left out: the {side} model has no repeated modules that are called; name the classes to "
        self.checks.append(Check("modes", True, f"{text}checkpoint with torch_blocks and flax_blocks"))

    def say(self, what: str) -> None:
        """Report to the progress callback that a stage begins."""
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
        rows = tuple(self.ledger.rows.values())
        failed = [row for row in rows if row.kind != "update" and not row.passed]
        where = next((mode for mode in self.case.modes if any(row.fails_in(mode) for row in failed)), None)
        divergences = {} if where is None else self.explain(where)
        if where is None:
            self._restate([each for each in self.settings if not without_effect(each, [each.path])])
        for row in rows:
            row.flax = ", ".join(path for path, names in self.flax.sources.items() if row.name in names)
        return ParityReport(
            rows=rows,
            checks=tuple(self.checks),
            memory=tuple(self.memory),
            kept_alone=tuple(self.kept_alone),
            torch=type(self.torch.make("float32") if self.case.builds else self.case.torch_module).__name__,
            flax=name_of(self.case.flax("float32")),
            rules=str(self.flax.rules),
            modes=self.case.modes,
            dtypes=self.case.dtypes,
            optimizer=self.case.optimizer.name if self.case.optimizer else None,
            weight_map="given" if self.proposal is None else self.proposal.state,
            crossed=tuple(map(" and ".join, self.proposal.crossed)) if self.proposal else (),
            unlike=self.proposal.unlike if self.proposal else (),
            divergences=divergences,
            hidden=self.hidden,
            differences=tuple({**asdict(each), "torch": str(each.torch), "flax": str(each.flax)} for each in self.settings),
        )

    def explain(self, mode: str) -> dict[str, Any]:
        """The first module that differs in each pass, in a mode."""
        self.say("the first module that differs")
        with _precision("float64", self.case.keep_float64):
            model, variables = self.torch.make("float64"), self.flax.tree(self.before)
            explanation = first_difference(self.case, model, variables, self.flax.rules, self.flax.applied(mode))
        self.checks += explanation.checks
        divergences, found = explanation.divergences, explanation.found
        if found:
            self.hidden = found.hidden
            settings = [each for each in self.settings if not without_effect(each, found.agreeing)]
            self._restate([*settings, *found.differences])
        # `mode` is the first mode in which a tensor differs.
        only = f"only in {mode}" if mode != self.case.modes[0] else ""
        for divergence in filter(None, divergences.values()):
            divergence["note"] = "; ".join(filter(None, (only, divergence["note"])))
        return divergences

    def _restate(self, settings: list[Difference]) -> None:
        """Replace the settings that differ, and the check that lists them."""
        before = settings_check(self.settings, self.unread)
        self.settings = settings
        self.checks[self.checks.index(before)] = settings_check(settings, self.unread)

    def _set_aside(self, exact: Run) -> list[str]:
        """Exclude the weights on which neither framework's results depend, and return their names in PyTorch.

        If PyTorch's backward pass reaches no weight at all, exclude none: the gradients check then fails.
        """
        if not exact.unused or len(exact.unused) == len(self.torch.trained):
            return []
        unused = self.flax.set_aside(exact.unused)
        self.torch.trained = [name for name in self.torch.trained if name not in unused]
        for name in unused:
            exact.gradients.pop(name)
        return sorted(unused)

    def _proposed(self) -> Proposal:
        self.say("proposing a weight map")
        case = self.case
        try:
            proposal = search(
                self.torch.make("float64"),
                case.flax_module,
                dict(case.inputs.arrays),
                variables=case.variables,
                rules=case.rules,
                calls=(case.by_name(case.torch_call), case.by_name(case.flax_call)),
                tell=lambda what: self._tell(f"proposing a weight map: {what}", self._done, self._total),
            )
            self.checks.insert(0, map_check(proposal))
            return proposal
        except PortingError as error:
            lines = "".join(f"\n  {each}" for each in self.settings)
            hint = f"\nThe settings of the two models differ:{lines}" if lines else ""
            raise PortingError(f"{error}{hint}") from error

    # Tensors.

    def _judge_dtype(self, dtype: str) -> None:
        weights = self.before if dtype == "float64" else self.flax.weights(self.torch.weights, dtype)
        yardstick = self.reference
        if dtype != "float64":
            yardstick = self._mapped(self.torch.run(dtype, steps=self.steps), dtype, weights)
        for mode in self.case.modes:
            self.say(f"Flax in {dtype}, {mode}")
            steps = self.steps if mode == "off" else min(self.steps, 1)
            run = self.flax.run(dtype, mode, weights, steps=steps)
            run.updates = _updates(run.after, weights, dtype)
            self._enter(dtype, mode, run, yardstick)
            if mode == self.case.modes[0]:
                self._plant(dtype, mode, yardstick, weights)
            if mode == "off" and self.steps > 1:
                self.checks.append(losses_check(self.reference.losses, yardstick.losses, run.losses, dtype))

    def _enter(self, dtype: str, mode: str, run: Run, yardstick: Run) -> None:
        for kind in ("output", "gradient", "state", "update"):
            reference, candidate, measure = (_tensors(each, kind) for each in (self.reference, run, yardstick))
            if kind == "state":
                reference, measure = (
                    {path: x for path, x in side.items() if path in candidate} for side in (reference, measure)
                )
                if (dtype, mode) == ("float64", self.case.modes[0]):
                    self.checks += statistics_check(self.before, reference, candidate)
            if kind == "update" and dtype != "float64":
                reference = {path: x + np.asarray(self.before[path]) for path, x in reference.items()}
            if kind == "output":
                # `_tensors` gives the loss and integers in float64, but `judge` fails arrays that are not of `dtype`.
                candidate, measure = (
                    {name: x.astype(dtype) if x.dtype == np.float64 else x for name, x in side.items()}
                    for side in (candidate, measure)
                )
            self.ledger.enter(kind, reference, candidate, measure, dtype, mode)

    def _plant(self, dtype: str, mode: str, yardstick: Run, weights: Any) -> None:
        self.checks.append(self.ledger.plant(_tensors(self.reference, "gradient"), _tensors(yardstick, "gradient"), dtype))
        agreed = not any(row.fails_in(mode) for row in self.ledger.rows.values() if row.kind == "output")
        self.checks.append(weight_check(self.flax, self.reference, yardstick, weights, dtype, mode, agreed=agreed))
        if dtype == "float64":
            self._casts()

    def _casts(self) -> None:
        if self.flax.down_casts:
            casts = "; ".join(self.flax.down_casts[:4])
            text = f"its float64 step casts to a smaller dtype: {casts}; {FLOAT32_REMEDY}"
            self.checks.append(Check("Flax stays in float64", False, text))
        tables = self.torch.tables()
        if tables and any(not row.passed for row in self.ledger.rows.values()):
            text = (
                f"{', '.join(tables[:4])} were computed in float32 and keep that rounding error in float64: pass a function "
                "that builds the model as torch_module"
            )
            self.checks.append(Check("PyTorch's tables", False, text))

    def _mapped(self, run: Run, dtype: str, before: Any) -> Run:
        """A PyTorch run with gradients under the names that the rules use, and with state and updates as Flax arrays."""
        after = self.flax.weights(run.after, dtype) if run.after else {}
        return replace(
            run,
            gradients=self._under_rules_names(run.gradients),
            state=self._mapped_state(run, dtype),
            updates=_updates({path: x for path, x in after.items() if path in self.flax.trained}, before, dtype),
        )

    def _mapped_state(self, run: Run, dtype: str) -> Arrays:
        """The variables that PyTorch's forward pass wrote, as Flax arrays."""
        has_state = len(self.flax.sources) > len(self.flax.trained)
        state = self.flax.weights(run.state, dtype) if has_state else {}
        return {path: np.asarray(x) for path, x in state.items() if path not in self.flax.trained}

    def _under_rules_names(self, gradients: Arrays) -> Arrays:
        renamed = dict(gradients)
        for name, other in list(tied_pairs(self.flax.rules, renamed)):
            if name not in renamed:
                renamed[name] = renamed.pop(other)
        return renamed

    # The modes of PyTorch, and memory.

    def _torch_modes(self) -> None:
        for mode in self.case.modes:
            if mode == "off":
                continue
            self.say(f"PyTorch in float64, {mode}")
            run, plain = self.torch.run("float64", mode), self.reference
            errors = _errors(plain.outputs, run.outputs)
            errors |= _errors(plain.gradients, self._under_rules_names(run.gradients))
            with _precision("float64"):
                errors |= _errors(plain.state, self._mapped_state(run, "float64"))
            worst = max(errors, key=lambda name: errors[name])
            passed = errors[worst] <= TOLERANCES["float64"].value
            text = f"differs from PyTorch without checkpoints by at most {errors[worst]:.1e}, in {worst}"
            text = "; ".join(filter(None, (text, "" if passed else computed_otherwise(self.case, self.torch, mode))))
            self.checks.append(Check(f"PyTorch, {mode}", passed, text))

    def _measure(self, target: str | None) -> None:
        dtype = next((dtype for dtype in self.case.dtypes if dtype != "float64"), "float64")
        for mode in self.case.modes:
            self.say(f"memory, {mode}")
            with _precision(dtype):
                rows, alone = memory_of(self.torch, self.flax, dtype, mode, target)
            self.memory += rows
            self.kept_alone += alone


def _updates(after: Any, before: Any, dtype: str) -> Arrays:
    """Path → a parameter's change in a step; in dtypes narrower than float64, the updated parameter itself.

    In a narrower dtype the change would contain the parameter's rounding error.
    """
    changes = dtype == "float64"
    return {path: np.asarray(x) - np.asarray(before[path]) if changes else np.asarray(x) for path, x in after.items()}


def _tensors(run: Run, kind: str) -> Arrays:
    """The tensors of one kind, which are judged together. Outputs include the loss; gradients include the inputs' gradients."""
    if kind == "state":
        return run.state
    if kind == "update":
        return run.updates
    if kind == "gradient":
        return run.gradients | {f"input:{name}": x for name, x in run.input_gradients.items()}
    # Integers, such as predictions, are compared as numbers.
    outputs = {name: x if is_floating(x) else x.astype(np.float64) for name, x in run.outputs.items()}
    return outputs | {"loss": np.asarray(run.losses[0], np.float64)}


def _errors(reference: Arrays, candidate: Arrays) -> dict[str, float]:
    floating = {name: x for name, x in reference.items() if is_floating(x)}
    return float64_errors(floating, {name: candidate[name] for name in floating if name in candidate}) if floating else {}


def _refuse_parted(torch: TorchSide, rules: porting.Rules) -> None:
    """Refuse a tie of two separate parameters of PyTorch: training would make them differ, but Flax has only one array."""
    names = {*torch.trained, *torch.ties}
    for name, other in tied_pairs(rules, dict.fromkeys(names)):
        if {name, other} <= names and torch.ties.get(name, name) != torch.ties.get(other, other):
            raise ArgumentError(
                f"rules: 'tie: {name} = {other}', but these are two parameters in the PyTorch model: share one parameter "
                "in PyTorch, or map each to its own Flax variable"
            )


@contextlib.contextmanager
def _precision(dtype: str, widens: bool | None = False) -> Iterator[None]:
    """Set full matmul precision, unless the user chose another precision; for float64, also enable 64-bit types.

    If `widens`, also prevent the Flax model's casts from float64 to float32.
    """
    chosen = jax.config.jax_default_matmul_precision
    kept = keep_jax_float64() if widens and dtype == "float64" else contextlib.nullcontext()
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision(chosen or "highest"), kept:
        yield
