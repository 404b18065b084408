"""A comparison as plain data: a row per tensor, the checks, and the memory of both frameworks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from remat_jax.parity.rule import relative_error


@dataclass
class TensorRow:
    """The verdict on one tensor, over all modes and dtypes.

    Attributes:
        kind: `output`, `gradient` (of a parameter, or of an input as `input:NAME`), `state` (written by the forward pass) or
            `update` (in float64 the change in the optimizer's first step; in narrower dtypes the updated parameter).
        name: the PyTorch name; for `state` and `update`, the Flax path.
        flax: the Flax paths that the PyTorch tensor `name` fills, separated by commas; else "".
        shape, norm: the shape and norm of PyTorch's tensor in float64; the norm is None if PyTorch has no such tensor.
        errors: mode → relative error in float64.
        ratios: dtype → mode → err_jax / max(err_torch, ε·g), with ε and g as in `judge`; the row fails above 4.
        caught: dtype → whether a sign flip and a doubling of this gradient would be detected.
        problems: why the row fails; empty if it passes.

    >>> row = TensorRow("gradient", "ffn.weight", errors={"off": 3e-16, "offload": 4e-16}, ratios={"float32": {"off": 0.9}})
    >>> row.passed, row.error, row.ratio("float32")
    (True, 4e-16, 0.9)
    >>> row.fail("5.1 times PyTorch's error", "offload")
    >>> row.passed, row.fails_in("off"), row.fails_in("offload")
    (False, False, True)
    """

    kind: str
    name: str
    flax: str = ""
    shape: tuple[int, ...] = ()
    norm: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    caught: dict[str, bool] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the tensor agrees in every mode and dtype."""
        return not self.problems and bool(self.errors or self.ratios)

    @property
    def error(self) -> float | None:
        """The largest relative error in float64 over all modes."""
        return max(self.errors.values(), default=None)

    def ratio(self, dtype: str) -> float | None:
        """The largest ratio of a dtype over all modes."""
        return max(self.ratios[dtype].values()) if dtype in self.ratios else None

    def fail(self, problem: str, mode: str) -> None:
        """Add a problem in a mode."""
        self.problems.append(f"{mode}: {problem}")

    def fails_in(self, mode: str) -> bool:
        """Whether the row has a problem in a mode."""
        return any(problem.startswith(f"{mode}: ") for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        largest = {dtype: self.ratio(dtype) for dtype in self.ratios}
        return {**asdict(self), "passed": self.passed, "error": self.error, "ratio": largest}


@dataclass(frozen=True)
class Check:
    """A check of the whole comparison, and a text of what it found.

    >>> Check("planted faults", passed=False, found="1 of 12 was not found").passed
    False
    """

    name: str
    passed: bool
    found: str


@dataclass(frozen=True)
class MemoryRow:
    """A framework's memory in one mode: the bytes of its residuals (no parameters, no inputs), and its peak memory.

    `peak_bytes` is the peak device memory of both passes, including parameters, inputs and gradients but no optimizer.
    `peak_from` is the figure's source, or the reason why it is None. docs/memory.md explains which figures are comparable.

    >>> MemoryRow("offload", "flax", device_bytes=0, host_bytes=4096).peak_bytes is None  # no peak was asked for
    True
    """

    mode: str
    framework: str
    device_bytes: int
    host_bytes: int
    peak_bytes: int | None = None
    peak_from: str = ""


@dataclass(frozen=True)
class KeptAlone:
    """Residuals of one framework that have no counterpart in the other framework; all have the same name and shape.

    `place` is `device` or `host`; `name` is `module/path:operator` for PyTorch, the residual's name for JAX. `shape` is the
    shape of a single array; `bytes` is the size of all `count` arrays.
    """

    mode: str
    framework: str
    place: str
    name: str
    shape: tuple[int, ...]
    count: int
    bytes: int


def module_name(path: str) -> str:
    """A module's path for a message; the empty path is "the whole model"."""
    return path or "the whole model"


def difference_text(difference: Mapping[str, Any]) -> str:
    """A setting in which two models differ, as one line.

    >>> difference_text({"path": "ln", "what": "epsilon", "torch": "1e-05", "flax": "1e-06"})
    'ln: epsilon is 1e-05 in PyTorch and 1e-06 in Flax'
    """
    values = f"{difference['torch']} in PyTorch and {difference['flax']} in Flax"
    return f"{module_name(difference['path'])}: {difference['what']} is {values}"


def divergence_text(direction: str, divergence: Mapping[str, Any]) -> str:
    """One line about the first module that differs in a pass.

    >>> ln = {"torch_path": "ln", "flax_path": "norm", "what": "output 0", "error": 1e-3, "reference": 10.0}
    >>> divergence_text("forward", ln)
    'first difference, forward: ln (norm in Flax), output 0 1.0e-04 off'
    """
    names = f"{module_name(divergence['torch_path'])} ({module_name(divergence['flax_path'])} in Flax)"
    note = f" ({divergence['note']})" if divergence.get("note") else ""
    error = relative_error(divergence["error"], divergence["reference"])
    return f"first difference, {direction}: {names}, {divergence['what']} {error:.1e} off{note}"


def hidden_text(hidden: Sequence[str]) -> str:
    """One line that lists the modules that could not be observed.

    >>> hidden_text(("solver/step",))
    'not observed, because they run in code whose arrays cannot be captured (a while loop, for example): solver/step'
    """
    where = "they run in code whose arrays cannot be captured (a while loop, for example)"
    return f"not observed, because {where}: {', '.join(map(module_name, hidden))}"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as text for tables.

    >>> shape_text((2, 3)), shape_text(())
    ('2×3', 'scalar')
    """
    return "×".join(map(str, shape)) or "scalar"
