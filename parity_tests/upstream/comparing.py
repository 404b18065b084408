"""One training step of another project's model and of its port with the same weights, in every mode, compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

import remat_jax as rj
from remat_jax import porting
from remat_jax.parity.rule import global_norm, judge
from remat_jax.parity.tolerances import TOLERANCES

MODES = {"off": "off", "checkpoint": "full", "offload": "offload_inputs"}
"""Every mode, and the port's policy in it."""
LIMITS = {"float32": 1e-6, "float64": 1e-12}
"""The largest allowed relative error of the output and of the whole gradient; in float64 also of every tensor."""
FLOOR = 1e-3
"""A share of the whole gradient's norm: a tensor's error is never relative to less, because some gradients are exactly 0."""

Arrays = Mapping[str, np.ndarray]


class Step(NamedTuple):
    """The results of one step: the output, and the gradients under the names of the original."""

    output: np.ndarray
    gradients: Arrays


@dataclass(frozen=True, eq=False)
class Pair:
    """A model of another project and its port.

    Attributes:
        name: what the table calls it.
        original: gives the original's step in a mode and a dtype.
        modes: the modes that the original has a switch for.
        dtypes: the dtypes that the original computes in.
        tensors: the original's weights in float32, by its names.
        make_flax: gives the port: `make_flax(scan=…, param_dtype=…)`.
        blocks: the classes that are checkpointed in the port.
        rules: gives the weight map: `rules(scan)`.
        arguments: the port's arguments after its variables, in any floating dtype.
        loss: maps the port's result to the output, in the original's order of axes, and to the loss.
        limits: `LIMITS`, or others if the original itself has larger errors.
        everywhere: whether all modes are compared, or `off` alone.
    """

    name: str
    original: Callable[[str, str], Step]
    modes: tuple[str, ...]
    dtypes: tuple[str, ...]
    tensors: Mapping[str, Any]
    make_flax: Callable[..., Any]
    blocks: tuple[type, ...]
    rules: Callable[[bool], porting.Rules]
    arguments: tuple[Any, ...]
    loss: Callable[[Any], tuple[Any, Any]]
    limits: Mapping[str, float] = field(default_factory=lambda: LIMITS)
    everywhere: bool = True

    def exact(self) -> Step:
        """The step in float64: the original's, or the port's if the original has none."""
        return self.original("off", "float64") if "float64" in self.dtypes else self.port(True, "off", "float64")

    def port(self, scan: bool, mode: str, dtype: str) -> Step:
        """The port's step, from the weights of the original."""
        with jax.enable_x64(True) if dtype == "float64" else nullcontext():
            model, rules = self.make_flax(scan=scan, param_dtype=np.dtype(dtype)), self.rules(scan)
            arguments = jax.tree.map(lambda x: x.astype(dtype) if x.dtype.kind == "f" else x, self.arguments)
            shapes = jax.eval_shape(model.init, jax.random.key(0), *arguments)
            variables = porting.from_torch(self.tensors, shapes, rules, dtype=dtype)

            def loss(variables: Any, *arguments: Any) -> Any:
                output, loss = self.loss(model.apply(variables, *arguments))
                return loss, output

            step = jax.grad(rj.checkpoint_blocks(loss, dict.fromkeys(self.blocks, MODES[mode])), has_aux=True)
            gradients, output = jax.jit(step)(variables, *arguments)
            return Step(np.asarray(output), porting.gradients_to_torch(gradients, rules, numpy=True))


class Errors(NamedTuple):
    """Relative errors of the output and of the whole gradient."""

    output: float
    gradient: float


class Row(NamedTuple):
    """The errors of a port relative to its original.

    Attributes:
        tensor: the largest error of a tensor of the gradient.
        name: this tensor's name.
        original, port: the errors of each relative to the step in float64; None in float64.
        ratio: a tensor's largest ratio by the parity rule, which allows 4; infinite where the rule cannot judge a tensor.
    """

    pair: str
    dtype: str
    mode: str
    layers: str
    output: float
    gradient: float
    tensor: float
    name: str
    limit: float
    original: Errors | None = None
    port: Errors | None = None
    ratio: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the errors are within the limits, and every tensor within the parity rule."""
        errors = (self.output, self.gradient, self.tensor if self.dtype == "float64" else 0.0)
        return max(errors) <= self.limit and self.ratio <= TOLERANCES["error_ratio"].value


def compare(pair: Pair) -> list[Row]:
    """Compare all modes in float32 with layers unrolled and stacked; in float64, if the original has it, one of these."""
    rows, exact = [], pair.exact()
    for dtype in pair.dtypes:
        for mode in MODES if dtype == "float32" and pair.everywhere else ("off",):
            original = exact if dtype == "float64" else pair.original(mode if mode in pair.modes else "off", dtype)
            for scan in (False, True) if dtype == "float32" else (True,):
                rows.append(_row(pair, dtype, mode, scan, original, exact))
    return rows


def _row(pair: Pair, dtype: str, mode: str, scan: bool, original: Step, exact: Step) -> Row:
    port = pair.port(scan, mode, dtype)
    strange = set(original.gradients) ^ set(port.gradients)
    if strange:
        raise AssertionError(f"{pair.name}: only one side has a gradient of {', '.join(sorted(strange))}")
    norms = {name: _norm(gradient) for name, gradient in original.gradients.items()}
    apart = {name: _norm(port.gradients[name] - gradient) for name, gradient in original.gradients.items()}
    whole = _norm(np.array(list(norms.values())))
    relative = {name: apart[name] / max(norm, FLOOR * whole) for name, norm in norms.items()}
    worst = max(relative, key=lambda name: relative[name])
    layers = "scanned" if scan else "unrolled"
    row = Row(pair.name, dtype, mode, layers, *_errors(original, port), relative[worst], worst, pair.limits[dtype])
    if dtype == "float64":
        return row
    return row._replace(original=_errors(exact, original), port=_errors(exact, port), ratio=_ratio(exact, port, original))


def _errors(reference: Step, candidate: Step) -> Errors:
    apart = [_norm(candidate.gradients[name] - gradient) for name, gradient in reference.gradients.items()]
    output = _norm(candidate.output - reference.output) / _norm(reference.output)
    return Errors(output, _norm(np.array(apart)) / global_norm(reference.gradients))


def _ratio(exact: Step, port: Step, original: Step) -> float:
    """The largest ratio by the parity rule, of the output and of every tensor of the gradient."""
    steps = (exact, port, original)
    rows = judge(*({"output": step.output} for step in steps), "float32")
    rows += judge(*(step.gradients for step in steps), "float32")
    return max(math.inf if row.problem else row.ratio for row in rows)


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))
