"""`compare` and `assert_parity`: whether a Flax model has the same outputs, gradients and training steps as a PyTorch model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat_jax.parity.case import Case
from remat_jax.parity.report import ParityReport
from remat_jax.parity.report_data import difference_text, divergence_text
from remat_jax.parity.runs import Runs, Tell


def compare(
    torch_module: Any,
    flax_module: Any,
    inputs: Any,
    *,
    rules: Any = "auto",
    variables: Any = None,
    loss: Any = None,
    torch_blocks: Any = None,
    flax_blocks: Any = None,
    modes: Any = ("off", "checkpoint", "offload"),
    optimizer: Any = None,
    dtypes: Any = ("float64", "float32"),
    steps: int = 3,
    torch_call: Callable[..., Any] | None = None,
    flax_call: Callable[..., Any] | None = None,
    excite: bool = True,
    keep_float64: bool | None = None,
    memory: bool = True,
    target: str | None = None,
    progress: Tell | None = None,
) -> ParityReport:
    """Compare a Flax model with a PyTorch model: outputs, gradients, training, and residuals.

    In float64, every Flax tensor of every mode is compared with a single PyTorch run. This run has no checkpoints, and casts to
    float32 are suppressed. Each working dtype is then judged by the parity rule of `judge`, relative to PyTorch's own error in
    the dtype. Faults are planted in the gradients in every dtype. The report fails if a fault is missed in a gradient whose
    norm is over twice the permitted error. Neither model is changed. Active dropout raises an error, because random results
    cannot be compared.

    Args:
        torch_module: the PyTorch model, set to training or evaluation mode, or a function that builds it. With a function,
            tables that the constructor computes in float32, such as rotary frequencies, are computed in float64.
        flax_module: a module of Linen, NNX, Equinox or Haiku (`haiku.transform`), or a function from a dtype's name to the
            module. A callable pytree, such as an Equinox module, is mapped over the first axis if it takes single examples.
        inputs: arrays or tensors for both models: a tuple of arguments, or a dictionary of keywords.
        rules: the weight map (`remat_jax.porting`); `"auto"` proposes and proves a map. `"auto"` as a line, or as an item of a
            sequence, proposes rules for what the other rules leave open. If no map is proven, the report does not pass, and
            compares under the map that names suggest.
        variables: a Linen module's variables. They are needed if `init` cannot make them, or if a `missing:` line of `rules`
            names arrays that no PyTorch tensor fills; these arrays keep the values given here.
        loss: a function from the output to a scalar that works in both frameworks, or a pair of functions, PyTorch's first.
            The default is the squared distance of every floating-point output from random numbers.
        torch_blocks, flax_blocks: the classes to checkpoint. By default the class of each outermost `ModuleList` or
            `Sequential` of two or more modules of one class, and the Flax classes that contain these modules' weights.
        modes: `off`, `checkpoint`, `offload`, or any policy's name or text. Without blocks only `off` is compared.
        optimizer: `sgd`, `adam`, `adamw`, an `Optimizer`, or a pair: a function from PyTorch's parameters to its
            optimizer, and an optax transformation.
        dtypes: `float64` and the working dtypes: float32, bfloat16, float16.
        steps: the number of training steps with the optimizer.
        torch_call, flax_call: run a model by `call(model, *inputs)` instead of `model(*inputs)`.
        excite: add noise to constant parameters and running statistics in both models: biases of 0, for example, hide faults.
        keep_float64: in float64 runs, prevent the Flax model's own casts to float32. By default this is on if float32 is
            hard-coded in the model; a narrower dtype, or a narrow `dtype` of some modules only, fails the report.
        memory: report the residuals and the peak memory of both frameworks.
        target: compile the JAX step for this target to report its peak memory there; slow. Implies `memory`.
        progress: called when a stage begins, as `progress(stage's name, number of finished stages, number of all stages)`.

    Raises:
        ArgumentError, PolicyError, PortingError: the message names the argument or the tensors that do not fit.
        UnsupportedError: PyTorch is not installed.

    >>> import flax.linen as nn, numpy as np, torch
    >>> report = compare(torch.nn.Linear(3, 2), nn.Dense(2), np.ones((4, 3)), modes="off", rules='''
    ...     weight -> params/kernel | linear
    ...     bias -> params/bias
    ... ''')
    >>> report.passed, report.proves, len(report.rows)
    (True, True, 5)
    """
    case = Case(
        torch_module,
        flax_module,
        inputs,
        rules=rules,
        variables=variables,
        loss=loss,
        torch_blocks=torch_blocks,
        flax_blocks=flax_blocks,
        modes=modes,
        optimizer=optimizer,
        dtypes=dtypes,
        steps=steps,
        torch_call=torch_call,
        flax_call=flax_call,
        excite=excite,
        keep_float64=keep_float64,
    )
    runs = Runs(case, progress or (lambda what, done, total: None))
    return runs.report(memory=memory or target is not None, target=target)


def assert_parity(torch_module: Any, flax_module: Any, inputs: Any, **options: Any) -> ParityReport:
    """Call `compare` with these arguments and return its report, or raise an error if the report did not pass.

    Raises:
        AssertionError: the report did not pass; the message has the verdict, and every check and tensor that failed.
        RematError: in the cases of `compare`.

    >>> import flax.linen as nn, numpy as np, torch
    >>> rules = "weight -> params/kernel | linear"
    >>> dense = nn.Dense(2, use_bias=False)
    >>> assert_parity(torch.nn.Linear(3, 2, bias=False), dense, np.ones((4, 3)), rules=rules, modes="off").passed
    True
    """
    __tracebackhide__ = True  # pytest shows the test's line instead of this function
    report = compare(torch_module, flax_module, inputs, **options)
    if not report.passed:
        raise AssertionError(failures(report))
    return report


def failures(report: ParityReport) -> str:
    """The verdict, and a line for every check and every tensor that failed.

    >>> failures(ParityReport((), (), (), "Linear", "Dense", "", ("off",), ("float64",)))
    'NOT PASSED: a planted fault was not found, so this comparison proves nothing'
    """
    lines = [report.verdict()]
    lines += [f"  {check.name}: {check.found}" for check in report.checks if not check.passed]
    lines += [f"  {difference_text(each)}" for each in report.differences]
    lines += [f"  {divergence_text(direction, first)}" for direction, first in report.divergences.items() if first]
    lines += [f"  {row.kind} {row.name}: {'; '.join(row.problems) or 'not compared'}" for row in report.failed_rows]
    return "\n".join(lines)
