"""The rows of the result: cases, their order, their fields, and their table."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from benchmarks.record import text_table


@dataclasses.dataclass(frozen=True)
class Case:
    """The subject of a row: framework, form of the layers, mode or policy."""

    framework: str
    form: str
    mode: str

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case written as `framework/form/mode`.

        >>> Case.parse("jax/scan/offload").mode
        'offload'
        """
        case = cls(*text.split("/")) if text.count("/") == 2 else None
        if case not in ORDER:
            raise ValueError(f"{text!r} is no case: choose from {', '.join(map(str, ORDER))}")
        return case

    def __str__(self) -> str:
        return f"{self.framework}/{self.form}/{self.mode}"

    @property
    def is_reference(self) -> bool:
        """Whether other cases' gradients are compared with this case's."""
        return self in (JAX_REFERENCE, TORCH_REFERENCE)

    @property
    def reference(self) -> Case | None:
        """The case that this case's gradients are compared with: the framework's `off` case; for PyTorch's `off`, JAX's.

        >>> str(Case.parse("jax/scan/offload").reference)
        'jax/unrolled/off'
        """
        if self == JAX_REFERENCE:
            return None
        return JAX_REFERENCE if self.framework == "jax" or self == TORCH_REFERENCE else TORCH_REFERENCE


JAX_REFERENCE = Case("jax", "unrolled", "off")
TORCH_REFERENCE = Case("torch", "eager", "off")

# The most important cases come first, in case time runs out; each framework's reference before its other cases.
ORDER: tuple[Case, ...] = tuple(
    Case(*text.split("/"))
    for text in (
        "jax/unrolled/off",
        "jax/unrolled/offload",
        "jax/unrolled/checkpoint",
        "torch/eager/off",
        "torch/eager/offload",
        "torch/eager/checkpoint",
        "jax/scan/offload",
        "jax/unrolled/offload_dot_with_no_batch_dims",
        "jax/unrolled/offload+unlinked",
        "jax/unrolled/offload_dot_with_no_batch_dims+unlinked",
        "jax/scan/offload_dot_with_no_batch_dims",
        "jax/scan/off",
        "jax/scan/checkpoint",
        "jax/scan/dots",
        "jax/unrolled/dots",
        "torch/eager/dots",
        "torch/eager/offload_dot_with_no_batch_dims",
        "jax/unrolled/checkpoint+host_optimizer",
        "torch/eager/checkpoint+host_optimizer",
        "jax/unrolled/checkpoint+accumulate",
        "torch/eager/checkpoint+accumulate",
    )
)


@dataclasses.dataclass
class Row:
    """One measured case. Memory is in bytes, time in seconds; a figure that was not measured is None.

    Attributes:
        status: `done`, `failed` (then `error` says why) or `skipped` (no time was left).
        predicted_device_bytes, predicted_host_bytes: by `rj.measure` for `predicted_target`, without the GPU.
        compiled_device_bytes, compiled_host_bytes: the compiler's figures for the executable that ran.
        measured_peak_bytes: the allocator's peak (JAX: `peak_bytes_in_use`; PyTorch: `max_memory_allocated`).
        host_peak_bytes: the highest resident memory of the process.
        seconds, step_seconds: the seconds per step of each series of steps after the warm-up, and their median.
        relative_time: the step's time divided by that of `off` in the same framework and form.
        link_bytes_per_second: the rates of a copy of 1 GiB to the host and of a copy back; only for modes of JAX that offload.
        losses: the loss before each step, warm-up included.
        gradient_error: the largest norm-wise error of a tensor of the first step's gradients against `gradient_reference`;
            `gradient_worst` is that tensor's name, and `gradient_global_error` the error of all tensors together.
        gradients_agree: whether rounding explains `gradient_global_error`.
    """

    framework: str
    form: str
    mode: str
    status: str = "skipped"
    error: str | None = None
    predicted_target: str | None = None
    predicted_device_bytes: int | None = None
    predicted_host_bytes: int | None = None
    predicted_warnings: list[str] = dataclasses.field(default_factory=list)
    predicted_error: str | None = None
    compiled_device_bytes: int | None = None
    compiled_host_bytes: int | None = None
    measured_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    compile_seconds: float | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    step_seconds: float | None = None
    relative_time: float | None = None
    tokens_per_second: float | None = None
    link_bytes_per_second: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    gradient_reference: str | None = None
    gradient_error: float | None = None
    gradient_worst: str | None = None
    gradient_global_error: float | None = None
    gradients_agree: bool | None = None
    wall_seconds: float | None = None

    @property
    def case(self) -> Case:
        return Case(self.framework, self.form, self.mode)

    def take(self, answer: dict[str, Any], tokens: int) -> None:
        """Store the answer of a child."""
        self._enter(answer)
        self.status = "failed" if self.error else "done"
        if self.seconds:
            self.step_seconds = statistics.median(self.seconds)
            self.tokens_per_second = tokens / self.step_seconds

    def foretell(self, answer: dict[str, Any]) -> None:
        """Store the prediction."""
        self._enter({key: value for key, value in answer.items() if key.startswith("predicted_")})

    def _enter(self, answer: dict[str, Any]) -> None:
        unknown = answer.keys() - {field.name for field in dataclasses.fields(self)}
        if unknown:
            raise ValueError(f"{self.case}: a row has no {', '.join(sorted(unknown))}")
        for key, value in answer.items():
            setattr(self, key, value)

    @property
    def holds(self) -> bool:
        """Whether nothing failed and all compared gradients agree; a skipped row holds."""
        return self.status != "failed" and self.gradients_agree is not False and self.predicted_error is None


def relate(rows: list[Row]) -> None:
    """Set each row's time relative to `off` of the same framework and form."""
    plain = {(row.framework, row.form): row.step_seconds for row in rows if row.mode == "off"}
    for row in rows:
        base = plain.get((row.framework, row.form))
        row.relative_time = row.step_seconds / base if row.step_seconds and base else None


def table(rows: list[Row]) -> str:
    """The rows in plain text, with the failures below."""
    columns = ("case", "predicted GB", "compiled GB", "measured GB", "host GB", "step ms", "× off", "tokens/s")
    columns += ("last loss", "worst gradient", "all gradients")
    lines = [
        (
            str(row.case),
            gigabytes(row.predicted_device_bytes),
            gigabytes(row.compiled_device_bytes),
            gigabytes(row.measured_peak_bytes),
            gigabytes(row.compiled_host_bytes),
            number(row.step_seconds and row.step_seconds * 1e3, ".1f"),
            number(row.relative_time, ".2f"),
            number(row.tokens_per_second, ".0f"),
            number(row.losses[-1] if row.losses else None, ".4f"),
            number(row.gradient_error, ".1e"),
            number(row.gradient_global_error, ".1e") + ("" if row.gradients_agree is not False else " WRONG"),
        )
        for row in rows
    ]
    notes = [f"{row.case}: {row.status}: {row.error or 'no time was left'}" for row in rows if row.status != "done"]
    notes += [f"{row.case}: not predicted: {row.predicted_error}" for row in rows if row.predicted_error]
    notes += [f"{row.case}: {warning}" for row in rows for warning in row.predicted_warnings]
    return "\n".join([text_table(columns, lines), *notes])


def gigabytes(size: int | None) -> str:
    """Bytes in units of 10⁹, or a dash."""
    return number(None if size is None else size / 1e9, ".2f")


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
