"""The table behind the parity tests: framework × model × layers × mode × dtype. A new mode is a new entry.

Every case is one training step. Its results have PyTorch's names and shapes, so stacked and unrolled layers, Linen and NNX are
all compared tensor by tensor with the plain PyTorch model in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import torch

import remat_jax as rj
import torch_ref
from examples import pytorch
from examples.models import weights as w
from examples.models.functions import cross_entropy
from parity_tests import support as s
from remat_jax.cost.count import count

MODES = torch_ref.MODES  # the equivalent policies of `remat_jax`
DTYPES = ("float64", "float32")
LEARNING_RATE = 1e-2
# Adam divides a gradient by its own size. Some gradients are zero up to rounding (attention does not depend on the bias of its
# keys). With the default epsilon of 1e-8 this rounding would become steps: 1e-11 in float64, and as large as a real step
# in float32.
ADAM_EPSILON = 1e-4
ADAM = optax.adam(LEARNING_RATE, eps=ADAM_EPSILON)


@dataclass(frozen=True)
class Case:
    """One line of the table; `layers` is "unrolled" or "scan"."""

    framework: str
    model: str
    layers: str
    mode: str
    dtype: str

    def __str__(self) -> str:
        return "-".join((self.model, self.framework, self.layers, self.mode, self.dtype))

    @property
    def reference(self) -> Case:
        """Plain PyTorch in the same dtype."""
        return replace(self, framework="torch", layers="unrolled", mode="off")


def _parity(case: Case) -> int:
    """Differs between two cases that differ in one of their fields."""
    forms = ("linen-unrolled", "linen-scan", "nnx-scan", "nnx-unrolled")
    columns = (tuple(s.SIZES), forms, MODES, DTYPES)
    fields = (case.model, f"{case.framework}-{case.layers}", case.mode, case.dtype)
    return sum(column.index(field) for column, field in zip(columns, fields, strict=True)) % 2


def _cases() -> Iterator[Case]:
    for model, sizes in s.SIZES.items():
        for framework in ("torch", "linen", "nnx"):
            scannable = framework != "torch" and "num_layers" in sizes
            for layers in ("unrolled", "scan") if scannable else ("unrolled",):
                for mode in MODES:
                    yield from (Case(framework, model, layers, mode, dtype) for dtype in DTYPES)


CASES = tuple(_cases())
# The cases that are compiled and run: every form in every mode, in one of the dtypes, which alternates.
RUN = tuple(case for case in CASES if case.framework == "torch" or _parity(case) == 0)


class Result(NamedTuple):
    """The results of one training step: PyTorch's name → array; the input's gradient is called `input`."""

    outputs: Mapping[str, np.ndarray]
    gradients: Mapping[str, np.ndarray]
    after_adam: Mapping[str, np.ndarray]


# PyTorch.


def torch_forward(case: Case, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run a model in the case's mode: stacks take the mode's flags, a bare block is called through the mode's function."""
    flags = torch_ref.mode_flags(case.mode)
    if "num_layers" in s.SIZES[case.model]:
        return model(x, **flags)
    return torch_ref.gradient_checkpoint_forward(model, **flags, x=x)


def torch_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy for integer targets, else the mean squared error."""
    if target.is_floating_point():
        return s.mean_squared(output, target)
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def torch_step(case: Case, model: torch.nn.Module) -> Result:
    """One step of a PyTorch model, which changes the model."""
    x, target = (torch.tensor(s.in_dtype(array, case.dtype)) for array in s.data(case.model))
    x.requires_grad_(x.is_floating_point())
    output = torch_forward(case, model, x)
    torch_loss(output, target if target.is_floating_point() else target.long()).backward()
    named = dict(model.named_parameters())
    gradients = {name: w.as_numpy(parameter.grad) for name, parameter in named.items()}
    if x.requires_grad:
        gradients["input"] = w.as_numpy(x.grad)
    if named:
        torch.optim.Adam(named.values(), lr=LEARNING_RATE, eps=ADAM_EPSILON).step()
    return Result({"output": w.as_numpy(output)}, gradients, {name: w.as_numpy(p) for name, p in named.items()})


# JAX.


class Step(NamedTuple):
    """A jitted function and its arguments: the parameters, the input, the target."""

    function: Any
    arguments: tuple[Any, ...]
    tree: Callable[[Any], dict[str, Any]]


@functools.cache
def jax_step(case: Case, policy: Any = None) -> Step:
    """The gradient and the output of a Flax model under the case's mode, or under another policy."""
    scan, (x, target) = case.layers == "scan", s.data(case.model)
    twin = s.twin(case.model, case.framework, scan, s.parameters(case.model, scan, case.dtype))
    block = s.block_of(case.model, case.framework)

    def loss(parameters: Any, x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = twin.apply(parameters, x)
        return (s.mean_squared if target.dtype.kind == "f" else cross_entropy)(output, target), output

    wanted = (0, 1) if x.dtype.kind == "f" else (0,)
    applied = rj.checkpoint_blocks(loss, {block: case.mode if policy is None else policy})
    arrays = (s.in_dtype(x, case.dtype), s.in_dtype(target, case.dtype))
    return Step(jax.jit(jax.grad(applied, wanted, has_aux=True)), (twin.parameters, *arrays), twin.tree)


@functools.cache
def compiled(case: Case) -> Any:
    """The case's step, compiled."""
    with precision(case):
        step = jax_step(case)
        return s.quick(step.function, *step.arguments)


def jax_result(case: Case, step: Step, executable: Any) -> Result:
    """Run a compiled step, and Adam's update after it."""
    gradients, output = executable(*step.arguments)
    torch_gradients = w.gradients_to_torch(step.tree(gradients[0]), case.model)
    before = w.gradients_to_torch(step.tree(step.arguments[0]), case.model)
    after = s.on_one_vector(s.first_step(ADAM), torch_gradients, before) if before else {}
    inputs = {"input": np.asarray(gradients[1])} if len(gradients) == 2 else {}
    return Result({"output": np.asarray(output)}, torch_gradients | inputs, after)


# Both.


def precision(case: Case) -> Any:
    """JAX's 64-bit types on for float64 and off for float32, as a user sets them."""
    return jax.enable_x64(case.dtype == "float64")


@functools.cache
def result(case: Case) -> Result:
    """The results of the case."""
    if case.framework == "torch":
        return torch_step(case, s.make_torch(case.model, case.dtype))
    with precision(case):
        return jax_result(case, jax_step(case), compiled(case))


def problems(case: Case, outcome: Result) -> list[str]:
    """The differences of a case's result from plain PyTorch."""
    exact, single = result(replace(case.reference, dtype="float64")), result(case.reference)
    return s.differences(exact, outcome, single, case.dtype)


class Cost(NamedTuple):
    """The executions of one training step, and the bytes that it moves to host memory and back."""

    matmuls: int
    block_executions: int
    to_host: int
    back: int


def expected_cost(case: Case) -> Cost:
    """The cost of a case in closed form; `test_counts` derives the numbers."""
    blocks = s.SIZES[case.model].get("num_layers", 1)
    per_block = 0 if case.model == "ToyModel" else 6
    executions = 1 if case.mode == "off" else 2
    head = 3 if case.model == "ByteDecoder" else 0
    batch, length = s.data(case.model).x.shape[:2]
    moved = blocks * batch * length * 16 * np.dtype(case.dtype).itemsize if case.mode == "offload" else 0
    return Cost(blocks * per_block * (executions + 2) + head, blocks * executions, moved, moved)


def cost(case: Case, policy: Any = None) -> Cost:
    """The measured cost of a case, or of another policy of `remat_jax` instead of its mode."""
    if case.framework == "torch":
        return torch_cost(case)
    with precision(case):
        step = jax_step(case, policy)
        jaxpr = jax.make_jaxpr(step.function)(*step.arguments)
    weights = (s.is_matmul, _is_block_execution, s.bytes_to_host, s.bytes_back)
    return Cost(*(count(jaxpr, weight) for weight in weights))


def torch_cost(case: Case) -> Cost:
    """Count while PyTorch runs."""
    blocks = (pytorch.DecoderLayer, pytorch.ToyModel)
    with torch_ref.count_matmuls() as matmuls, torch_ref.count_calls(*blocks) as calls, torch_ref.receipt() as receipt:
        torch_step(case, s.make_torch(case.model, case.dtype))
    return Cost(matmuls.total, calls.total, receipt.bytes_on_host, receipt.bytes_brought_back)


def _is_block_execution(eqn: Any) -> bool:
    """Whether this is the toy's sigmoid, or the exponential that a decoder layer computes once."""
    softmax = eqn.primitive.name == "exp" and "softmax" in str(eqn.source_info.name_stack)
    return softmax or eqn.primitive.name == "logistic"
