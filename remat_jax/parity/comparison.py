"""`compare`: whether a Flax model computes, trains and keeps in memory what a PyTorch model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat_jax.parity.case import make_case
from remat_jax.parity.report import ParityReport
from remat_jax.parity.runs import Comparison, Tell


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
    keep_float64: bool = False,
    memory: bool = True,
    target: str | None = None,
    progress: Tell | None = None,
) -> ParityReport:
    """Say whether a Flax model computes what a PyTorch model does: outputs, gradients, training, and what they keep.

    Float64 proves the mapping: plain PyTorch, kept from falling to float32 inside, against Flax in every mode, tensor by
    tensor. Each working dtype is then judged against that float64 run by the parity rule of `judge`, PyTorch's own error in
    the dtype being the measure. Faults are planted in every comparison, and one that is not found makes the report fail.
    Neither model is changed. What is random cannot be compared: a PyTorch model that drops out is refused.

    Args:
        torch_module: the PyTorch model, as it is to be run (in training or in evaluation); or a function that builds it, which
            lets tables that a constructor computes in float32, such as rotary frequencies, be computed in float64.
        flax_module: a Linen or NNX module, or a function of a dtype's name that makes one.
        inputs: arrays or tensors for both: a tuple of arguments, or a dictionary of keywords.
        rules: the weight map (`remat_jax.porting`); `"auto"` proposes and proves one.
        variables: those of a Linen module that `init` cannot make, or with the values of what the rules name as missing.
        loss: a function of the output to a scalar that takes both frameworks' arrays, or a pair, PyTorch's and JAX's. By
            default the squared distance of every floating-point output from random numbers.
        torch_blocks, flax_blocks: the classes that are checkpointed; by default what stands in PyTorch's lists of modules, and
            the Flax classes that hold the same weights.
        modes: `off`, `checkpoint`, `offload`, or any policy's name or text.
        optimizer: `sgd`, `adam`, `adamw`, an `Optimizer`, or a pair (function that makes PyTorch's of the parameters, optax's).
        dtypes: `float64` and the working dtypes: float32, bfloat16, float16.
        steps: of training with the optimizer.
        torch_call, flax_call: run a model otherwise than `model(*inputs)`: `call(model, *inputs)`.
        excite: give parameters that are constant, such as biases at 0, other values in both models, lest they hide faults.
        keep_float64: in float64, make the Flax model compute in it where it asks for float32 by a cast or a dtype, as PyTorch
            always is; without it such a fall is a fault.
        memory: count what both frameworks keep between the passes.
        target: compile the JAX step for this target too, for its peak memory; slow.
        progress: told `(what, done, total)`.

    Raises:
        ArgumentError, PolicyError, PortingError: naming the argument, or the tensors, that do not fit.
        UnsupportedError: PyTorch is not installed.

    >>> import flax.linen as nn, numpy as np, torch
    >>> report = compare(torch.nn.Linear(3, 2), nn.Dense(2), np.ones((4, 3)), modes="off", rules='''
    ...     weight -> params/kernel | linear
    ...     bias -> params/bias
    ... ''')
    >>> report.passed, report.proves, len(report.rows)
    (True, True, 5)
    """
    case = make_case(
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
    comparison = Comparison(case, progress or (lambda what, done, total: None))
    return comparison.report(memory=memory or target is not None, target=target)
