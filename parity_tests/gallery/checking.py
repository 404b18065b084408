"""Checks one workload under the policies: its gradients, matrix products and residuals, against the model as written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import remat_jax as rj
from parity_tests.gallery.models import DEVIATION, POLICIES
from parity_tests.gallery.widened import widened
from remat_jax.core.matmuls import MATMULS, eqn_flops
from remat_jax.cost.count import count
from remat_jax.parity.rule import float64_error, judge
from remat_jax.parity.tolerances import TOLERANCES


@dataclass(frozen=True)
class Row:
    """The results of one policy.

    Attributes:
      policy: its name, or `plan` with its text.
      error64, tensor64: the largest relative error of a gradient in float64, and the tensor that has it.
      ratio, tensor: the largest error in the model's own dtypes, as a multiple of the error of the model as written, by the
        parity rule, and the tensor that has it; infinite where the rule does not hold for another reason.
      again, expected: the number of matrix products that a step recomputes, and the required number as text.
      again_is_right: whether `again` is as required.
      table, kept: device and host bytes by the residual table, and of the arrays that a run kept between the passes.
    """

    policy: str
    error64: float
    tensor64: str
    ratio: float
    tensor: str
    again: int
    expected: str
    again_is_right: bool
    table: tuple[int, int]
    kept: tuple[int, int]

    @property
    def passed(self) -> bool:
        """Whether all four checks pass."""
        exact = self.error64 <= TOLERANCES["float64"].value and self.ratio <= TOLERANCES["error_ratio"].value
        return exact and self.again_is_right and tuple(self.table) == tuple(self.kept)


class Step:
    """The loss of a workload under a policy, with its gradients traced."""

    def __init__(self, workload: rj.Workload, policy: Any) -> None:
        self.mesh, (self.loss, *parameters) = workload.mesh, workload.split_loss(policy)
        self.arguments = (*parameters, *workload.batch)
        self.jaxpr = jax.make_jaxpr(self.gradient)(*self.arguments)
        self.products = count(self.jaxpr, lambda eqn: eqn.primitive.name in MATMULS)
        self.flops = count(self.jaxpr, eqn_flops)

    def gradient(self, trained: Any, frozen: Any, *batch: Any) -> Any:
        """The gradients by parameter."""
        return jax.grad(self.loss)(trained, frozen, *batch)

    def gradients(self, arguments: Any) -> dict[str, np.ndarray]:
        """The results of one call, by the paths of the parameters."""
        return _by_path(jax.jit(self.gradient)(*arguments))

    def gradients64(self, arguments: Any) -> dict[str, np.ndarray]:
        """The same in float64."""
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(jax.eval_shape(self.gradient, *arguments))]
        with jax.enable_x64(True):
            gradients = jax.jit(widened(self.jaxpr))(*jax.tree.leaves(arguments))
        return {name: np.asarray(gradient) for name, gradient in zip(names, gradients, strict=True)}

    def kept(self, arguments: Any) -> list[Any]:
        """The arrays that live between the passes, without the arguments."""
        if self.mesh is not None:
            # Without compilation, a constraint on a mesh takes only arrays that are on one.
            mesh = jax.make_mesh(self.mesh.axis_sizes, self.mesh.axis_names, axis_types=self.mesh.axis_types)
            arguments = jax.device_put(arguments, NamedSharding(mesh, PartitionSpec()))
        trained, *rest = arguments
        _, pullback = jax.vjp(lambda trained: self.loss(trained, *rest), trained)
        given = {id(leaf) for leaf in jax.tree.leaves(arguments)}
        leaves = {id(leaf): leaf for leaf in jax.tree.leaves(pullback) if id(leaf) not in given}
        return [leaf for leaf in leaves.values() if hasattr(leaf, "sharding")]


def kept_bytes(table: rj.ResidualTable, step: Step, arguments: Any, others: Any) -> tuple[int, int]:
    """Device and host bytes of the arrays that `step` keeps: those in the table, and the others that are neither constants nor
    copies.

    The table counts a transposed or cast parameter as an argument, and an array that enters several inner `jit`s once; without
    compilation each is a separate array. A constant has the same values for `others` as for `arguments`.
    """
    kept, given = step.kept(arguments), jax.tree.leaves(arguments)
    in_table = Counter(dict.fromkeys(map(_kind, kept), 0))
    for row in table:
        if row.action != "recompute":
            in_table[row.shape, row.dtype, row.action == "offload"] += row.count
    pairs = list(zip(kept, step.kept(others), strict=True))
    first = {(_kind(leaf), _numbers(leaf).tobytes()): at for at, (leaf, _) in reversed(list(enumerate(pairs)))}
    total = [0, 0]
    # Duplicates come last; they are residuals only as often as the table has them.
    for at in sorted(range(len(pairs)), key=lambda at: at not in first.values()):
        array, again = pairs[at]
        kind, is_constant = _kind(array), np.array_equal(_numbers(array), _numbers(again))
        if in_table[kind] <= 0 and (at not in first.values() or is_constant or any(_is_copy(array, leaf) for leaf in given)):
            continue
        in_table[kind] -= 1
        total[kind[2]] += array.nbytes
    return total[0], total[1]


def _numbers(array: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array)


def _kind(array: Any) -> tuple[tuple[int, ...], str, bool]:
    return array.shape, str(array.dtype), array.sharding.memory_kind == "pinned_host"


def _is_copy(array: Any, argument: Any) -> bool:
    """Whether `array` has the numbers of `argument`, or of some of its rows, in any order and dtype."""
    keys = any(jnp.issubdtype(value.dtype, jax.dtypes.prng_key) for value in (array, argument))
    if keys or not argument.size or not argument.ndim or not array.size:
        return False
    rows = np.asarray(argument.astype(array.dtype)).reshape(argument.shape[0], -1)
    count = array.size // rows.shape[1]
    if count * rows.shape[1] != array.size:
        return False
    numbers = np.sort(np.asarray(array), axis=None)
    # An embedding table has a quarter of a million rows, so only rows of equal sums are sorted.
    before = np.concatenate([[0.0], np.cumsum(rows.sum(axis=1, dtype=np.float64))])
    sums = before[count:] - before[:-count]
    near = np.abs(sums - numbers.sum(dtype=np.float64)) <= 1e-9 * np.abs(rows).sum(dtype=np.float64)
    return any(np.array_equal(np.sort(rows[start : start + count], axis=None), numbers) for start in np.flatnonzero(near))


def _by_path(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def randomised(arguments: Any, seed: int = 0, deviation: float = DEVIATION) -> Any:
    """Arrays for shapes, with random numbers, so that no gradient is 0 because a parameter is."""
    random = np.random.default_rng(seed)

    def array(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(seed), leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(deviation * random.normal(size=leaf.shape), leaf.dtype)
        return jnp.asarray(np.ones(leaf.shape) if leaf.dtype == bool else random.integers(0, 16, leaf.shape), leaf.dtype)

    return jax.tree.map(array, arguments)


class Beside:
    """A workload as written, and the step that keeps everything: the references of the rows."""

    def __init__(self, workload: rj.Workload, deviation: float = DEVIATION) -> None:
        self.workload = workload
        written, self.everything = Step(workload, "off"), Step(workload, "everything")
        self.arguments, self.others = (randomised(written.arguments, seed, deviation) for seed in (0, 1))
        self.own, self.exact = written.gradients(self.arguments), written.gradients64(self.arguments)

    def row(self, policy: str, workload: rj.Workload, again: int, *, table: rj.ResidualTable | None = None) -> Row:
        """A named policy, which must recompute `again` products."""
        step = Step(workload, policy)
        recomputed = step.products - self.everything.products
        return self._row(policy, step, str(again), recomputed == again, table or rj.residuals(workload, policy))

    def planned(self, plan: rj.Plan, most: int) -> Row:
        """A plan, which recomputes at most as much as `full`, and as much as it reports."""
        step = Step(self.workload.with_loss(plan.apply(self.workload.own_loss or self.workload.loss)), "off")
        recomputed, flops = step.products - self.everything.products, step.flops - self.everything.flops
        text = f"plan: {' and '.join(dict.fromkeys(plan.texts.values()))}"
        table = rj.residuals(self.workload, "off" if plan.is_off else dict(plan.policies))
        return self._row(text, step, f"0 to {most}", 0 <= recomputed <= most and flops == plan.recompute_flops, table)

    def _row(self, policy: str, step: Step, expected: str, is_right: bool, table: rj.ResidualTable) -> Row:
        error64, tensor64 = float64_error(self.exact, step.gradients64(self.arguments))
        ratio, tensor = self._worst_ratio(step.gradients(self.arguments))
        again = step.products - self.everything.products
        kept = kept_bytes(table, step, self.arguments, self.others)
        sizes = (table.device_bytes, table.host_bytes), kept
        return Row(policy, error64, tensor64, ratio, tensor, again, expected, is_right, *sizes)

    def _worst_ratio(self, gradients: dict[str, Any]) -> tuple[float, str]:
        """The largest ratio of the parity rule over all dtypes, and its tensor."""
        worst = (0.0, "")
        for dtype in {gradient.dtype.name for gradient in gradients.values()}:
            names = [name for name, gradient in gradients.items() if gradient.dtype.name == dtype]
            sides = ({name: side[name] for name in names} for side in (self.exact, gradients, self.own))
            for row in judge(*sides, dtype):
                worst = max(worst, (math.inf if row.problem else row.ratio, f"{row.name} {row.problem}".strip()))
        return worst


def check(workload: rj.Workload, again: Mapping[str, int], deviation: float = DEVIATION) -> list[Row]:
    """A row for each policy and one for a plan.

    Args:
      again: the number of products that each policy must recompute.
      deviation: the standard deviation of the random parameters and inputs, whose mean is 0.
    """
    beside = Beside(workload, deviation)
    rows = [beside.row(policy, workload, again[policy]) for policy in POLICIES]
    return [*rows, beside.planned(plan_of(workload), again["full"])]


def plan_of(workload: rj.Workload) -> rj.Plan:
    """A plan for the CPU, within the mean of the bytes that `full` and `everything` need."""
    full, kept = (rj.measure(workload, policy, "cpu").device_bytes for policy in ("full", "everything"))
    return rj.plan(workload, (full + kept) // 2, "cpu")
