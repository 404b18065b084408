"""The forms in JAX, their measurements, and their closed forms."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.parity.compiling import compile_options

from .. import pytorch
from ..demo.jax_rows import KEEP_BARRIERS
from ..models import deep_mlp_linen, deep_mlp_scan, weights
from .setting import Setting

FRAMEWORK = "JAX Linen"


class Form(NamedTuple):
    """A form: its forward pass, the conversion of its parameters from Linen's tree and of its gradients back, and its closed
    forms.
    """

    apply: Callable[[Any, jax.Array], jax.Array]
    stacked: bool
    fold: Callable[[Any], Any]
    unfold: Callable[[Any], Any]
    saved_bytes: int
    recomputed: int


def same(tree: Any) -> Any:
    """The tree itself."""
    return tree


def divisor_nearest_to_root(number: int) -> int:
    """The divisor of `number` that is nearest to its square root.

    >>> divisor_nearest_to_root(60), divisor_nearest_to_root(64)
    (6, 8)
    """
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - math.sqrt(number)))


def forms(setting: Setting, num_layers: int | None = None) -> dict[str, Form]:
    """The forms by name: plain, `checkpoint_sequential` unrolled, and scans.

    For a plain layer JAX keeps more than PyTorch: the ReLU's result (`a` bytes), its mask (one byte per element), and the
    zeros that its derivative selects from (also `a` bytes; XLA makes them where it needs them). Under `scan` the zeros are
    one array for all iterations. Besides the stacked inputs, a scan keeps the last output, which the head reads.
    """
    layers = num_layers or setting.num_layers
    hidden, sqrt, best = layers - 2, pytorch.sqrt_segments(layers), pytorch.optimal_segments(layers)
    elements = setting.batch * setting.hidden_size
    a, mask = 4 * elements, elements
    unrolled = deep_mlp_linen.DeepMLP(layers, **setting.widths)
    scanned = deep_mlp_linen.DeepMLP(layers, **setting.widths, scan=True)
    nested = divisor_nearest_to_root(hidden)

    def sequential(segments: int) -> Form:
        boundaries = pytorch.uniform_boundaries(layers, segments)
        again = pytorch.recomputed_layers(layers, boundaries)
        kept = (segments - 1) * a + (layers - again - 1) * (2 * a + mask)
        return Form(lambda p, x: unrolled.apply({"params": p}, x, segments=segments), False, same, same, kept, again)

    return {
        "plain": sequential(1),
        "checkpoint_sequential, 3": sequential(3),
        f"√L uniform, {sqrt}": sequential(sqrt),
        f"best uniform, {best}": sequential(best),
        "scan, plain": Form(
            lambda p, x: scanned.apply({"params": p}, x), True, same, same, hidden * (a + mask) + 3 * a + mask, 0
        ),
        f"nested scan, {nested}": Form(
            deep_mlp_scan.nested_scan,
            True,
            lambda tree: deep_mlp_scan.fold_layers(tree, nested),
            deep_mlp_scan.unfold_layers,
            (nested + 2) * a + mask,
            hidden,
        ),
    }


def parameters(setting: Setting, form: Form, state: dict[str, Any], dtype: str = "float32") -> Any:
    """PyTorch's weights in the form's own tree, in `dtype`."""
    arrays = {name: weights.as_numpy(tensor).astype(dtype) for name, tensor in state.items()}
    return form.fold(weights.from_torch(arrays, "DeepMLP", scan=form.stacked))


def loss_of(form: Form) -> Callable[..., jax.Array]:
    """The weighted sum of the outputs."""
    return lambda params, x, weights: jnp.sum(form.apply(params, x) * weights)


def gradients(setting: Setting, form: Form, state: dict[str, Any]) -> dict[str, np.ndarray]:
    """All gradients in float64, in PyTorch's form."""
    with jax.enable_x64(True):
        params = parameters(setting, form, state, "float64")
        data = setting.data("float64")
        step = jax.jit(jax.grad(loss_of(form))).lower(params, *data).compile(compiler_options=compile_options("float64"))
        found = step(params, *data)
        return weights.gradients_to_torch(form.unfold(found), "DeepMLP")


def workload(setting: Setting, form: Form, num_layers: int | None = None) -> rj.Workload:
    """The gradient step on shapes alone: nothing is allocated."""
    model = deep_mlp_linen.DeepMLP(num_layers or setting.num_layers, **setting.widths, scan=form.stacked)
    x, out = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in setting.data())
    tree = jax.eval_shape(lambda x: form.fold(model.init(jax.random.key(0), x)["params"]), x)
    return rj.Workload(loss_of(form), tree, (x, out), deep_mlp_linen.MlpLayer)


def saved_bytes(setting: Setting, form: Form, num_layers: int | None = None) -> int:
    """The bytes that JAX keeps between the passes; the form has its own checkpoints, so no policy is applied."""
    return rj.residuals(workload(setting, form, num_layers), "off").device_bytes


def peak_bytes(setting: Setting, form: Form) -> int | None:
    """The memory of the step compiled for the target; None without a target."""
    return None if setting.target is None else rj.measure(workload(setting, form), "off", target=setting.target).device_bytes


def matmul_count(setting: Setting, form: Form, num_layers: int | None = None) -> int:
    """The matrix products of a step that computes the loss and the gradients, after dead-code elimination."""
    job = workload(setting, form, num_layers)
    return matmuls(jax.value_and_grad(loss_of(form)), job.params, *job.batch)


class Stepper:
    """Runs steps and measures the time of each."""

    def __init__(self, setting: Setting, form: Form, state: dict[str, Any]) -> None:
        self._params = jax.tree.map(jnp.asarray, parameters(setting, form, state))
        self._data = [jnp.asarray(array) for array in setting.data()]
        lowered = jax.jit(jax.value_and_grad(loss_of(form))).lower(self._params, *self._data)
        self._step = lowered.compile(compiler_options=KEEP_BARRIERS)
        self._stacked = form.stacked

    def compiled_matmuls(self) -> int | None:
        """The number of matrix products in the compiled program; None for a scan, whose body appears once."""
        return None if self._stacked else len(re.findall(r" dot\(", self._step.as_text()))

    def step(self, batch: object) -> tuple[float, float]:
        """The loss, and the seconds of the step."""
        start = time.perf_counter()
        loss, gradient = jax.block_until_ready(self._step(self._params, *self._data))
        return float(loss), time.perf_counter() - start
