"""Predicting the memory of a policy without compiling it, from a few compiled policies.

Between the passes a step keeps its residuals, whose bytes are known exactly from the traced program. The rest of its memory,
the working set, changes little from policy to policy. A `Predictor` compiles a few policies, subtracts their residuals, and
fits the working set as a linear function of the bytes that one layer saves and of the bytes that it offloads. The figures are
in `docs/notes/predicted_memory.md`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remat_jax.errors import ArgumentError, NoEffectError, PolicyError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.residuals import Residual, ResidualTable, residuals
from remat_jax.policy import Action, LayerPolicies, Policy, as_block_policy
from remat_jax.workload import Workload

NAMED = ("full", "everything", "dots")
DEFAULT_RANDOM = 9
DEFAULT_TIMEOUT = 600.0
_SMALLEST_SHARE = 0.01
"""Random policies choose among residuals of at least this share of the largest; smaller residuals are recomputed."""


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of a step under a policy, in bytes.

    Attributes:
      temp_bytes, device_bytes: as in a `MemoryReport`.
      host_bytes: the offloaded residuals; on a CPU, which has one memory, they are part of temp.
      compiled: whether this policy was compiled, so that the figures are the compiler's.
    """

    temp_bytes: int
    device_bytes: int
    host_bytes: int
    compiled: bool


class Predictor:
    """Predicts the compiled memory of any policy on `workload` from a few compiled policies.

    temp ≈ residuals kept on the device + a + b · (saved bytes of one layer) + c · (offloaded bytes of one layer). The
    coefficients a, b and c are fitted to the calibration by least absolute deviations, which are robust against single policies
    that the compiler treats oddly. The sum a + b · … + c · … is clipped to the calibration's range. Only scanned layers count
    as "one layer": if all layers are unrolled, the sum is a.

    A prediction cannot foresee the compiler's choices for a single policy; the note has the errors. So rank policies by their
    predictions, compile the best, and pass the results to `learn`.

    Args:
      target: the name of a target, or a `Target`.
      calibration: the policies to compile, or the number of random policies to compile in addition to `full`, `everything`
        and `dots`.
      seed: the seed of the random policies.
      timeout: seconds for all compilations.
      on_done: called with each policy once it is compiled.

    Raises:
      ArgumentError: too few policies to calibrate with.
      UnsupportedError: the workload was made by `Workload.from_step`, or has a mesh.
      TargetError, CompileError, PolicyError, BlockError, NoEffectError: as `measure` raises them.

    >>> import jax, jax.numpy as jnp, flax.linen as nn
    >>> model, x = nn.Sequential([nn.Dense(8), nn.tanh]), jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> params = jax.eval_shape(model.init, jax.random.key(0), x)
    >>> job = Workload(lambda p, x: (model.apply(p, x) ** 2).mean(), params, (x,), blocks=nn.Sequential)
    >>> predictor = Predictor(job, "cpu", calibration=["full", "everything"])
    >>> predictor.predict("full").compiled, predictor.predict("dots").compiled
    (True, False)
    """

    def __init__(
        self,
        workload: Workload,
        target: str | Target = "cpu",
        calibration: Sequence[Any] | int = DEFAULT_RANDOM,
        *,
        seed: int = 0,
        timeout: float = DEFAULT_TIMEOUT,
        on_done: Callable[[str], None] | None = None,
    ) -> None:
        self.workload = workload
        self.target = target if isinstance(target, Target) else target_named(target)
        if workload.mesh is not None:
            raise UnsupportedError(
                f"workload={workload.name!r} has a mesh, but a Predictor supports only one device. Use rj.measure or rj.plan"
            )
        self._known: dict[tuple[Any, ...], int] = {}
        self._points: list[tuple[tuple[float, ...], float]] = []
        policies = _calibration(workload, calibration, seed)
        tables = {policy: residuals(workload, policy) for policy in policies}
        sizes = compile_policies(workload, policies, self.target, timeout=timeout, on_done=on_done)
        first = sizes[policies[0]]
        self._beside_temp = first.device - first.temp
        for policy, table in tables.items():
            self._add(table, sizes[policy].temp)
        self._fit()

    def predict(self, policy: Any) -> Prediction:
        """The predicted memory of a step under `policy`; nothing is compiled, the workload is traced once or twice.

        Raises:
          UnsupportedError: `policy` has groups of layers, and its compiled memory is unknown.
        """
        table = residuals(self.workload, policy)
        checked = [as_block_policy(given) for given in (policy.values() if isinstance(policy, dict) else [policy])]
        if _key(table) not in self._known and any(isinstance(each, LayerPolicies) and each.groups for each in checked):
            raise UnsupportedError(
                f"policy={table.policy!r}: residuals do not show what a group of layers needs during its backward pass. Use "
                "rj.measure, or give its result to Predictor.learn"
            )
        return self.predict_from(table)

    def predict_from(self, table: ResidualTable) -> Prediction:
        """The predicted memory of a step with the residuals of `table`; nothing is traced."""
        compiled_temp = self._known.get(_key(table))
        beyond = float(np.clip(np.dot(self._features(table), self._coefficients), *self._range))
        temp = compiled_temp if compiled_temp is not None else self._kept(table) + round(beyond)
        host = 0 if self.target.kind == "cpu" else table.host_bytes
        return Prediction(temp, temp + self._beside_temp, host, compiled_temp is not None)

    def learn(self, policy: Any, temp_bytes: int) -> None:
        """Add the compiled temp bytes of a policy to the fit; predictions for this policy return them from then on."""
        if isinstance(temp_bytes, bool) or not isinstance(temp_bytes, int) or temp_bytes < 0:
            raise ArgumentError(f"temp_bytes={temp_bytes!r}: expected a number of bytes, such as MemoryReport.temp_bytes")
        self._add(residuals(self.workload, policy), temp_bytes)
        self._fit()

    def _kept(self, table: ResidualTable) -> int:
        return table.device_bytes + (table.host_bytes if self.target.kind == "cpu" else 0)

    def _features(self, table: ResidualTable) -> tuple[float, ...]:
        if self.target.kind == "cpu":
            # A CPU has one memory: an offloaded residual stays there and costs as much as a saved one.
            return 1.0, _of_a_layer(table, Action.SAVE, Action.OFFLOAD), 0.0
        return 1.0, _of_a_layer(table, Action.SAVE), _of_a_layer(table, Action.OFFLOAD)

    def _add(self, table: ResidualTable, temp: int) -> None:
        self._known[_key(table)] = temp
        self._points.append((self._features(table), float(temp - self._kept(table))))

    def _fit(self) -> None:
        rows, beyond = (np.asarray(column, float) for column in zip(*self._points, strict=True))
        self._coefficients = least_absolute_deviations(rows, beyond)
        self._range = float(beyond.min()), float(beyond.max())


def full_plus_residuals(full: ResidualTable, full_temp_bytes: int, table: ResidualTable) -> int:
    """The temp bytes of a policy by a rule of thumb: those of `full` plus the policy's additional residuals on the device.

    Needs one compilation, of `full`, for all policies; good for ranking policies.

    >>> kept = lambda n: ResidualTable((Residual("b:tanh#0", (n,), "uint8", n, "save", ""),), "save: *")
    >>> full_plus_residuals(kept(10), 100, kept(70))
    160
    """
    return full_temp_bytes + table.device_bytes - full.device_bytes


def compile_policies(
    workload: Workload,
    policies: Sequence[Any],
    target: Target,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    on_done: Callable[[str], None] | None = None,
) -> dict[Any, Sizes]:
    """The compiler's sizes under each policy. Unlike `measure_many` it compiles no reference for offloads."""
    programs = [export_step(str(policy), workload.step(policy), target) for policy in policies]
    sizes = compile_programs(programs, target, timeout=timeout, on_done=on_done)
    return {policy: sizes[str(policy)] for policy in policies}


def random_policies(workload: Workload, count: int, seed: int = 0) -> list[str]:
    """`count` different policies; each saves some residuals of the blocks by name, offloads some, and recomputes the rest.

    The shares of kept and of offloaded residuals are random too, so that policies with little and with much memory occur.

    Raises:
      UnsupportedError: the blocks have too few residuals for `count` policies.
    """
    names = _names(workload)
    draw = random.Random(seed)
    policies: dict[str, None] = {}
    for _ in range(8 * count + 8):
        if len(policies) == count:
            return list(policies)
        text = _drawn(names, draw)
        try:
            residuals(workload, text)
        except NoEffectError:
            continue  # the backward pass does not read the offloaded residuals if the others are saved
        policies[text] = None
    raise UnsupportedError(
        f"workload={workload.name!r}: its blocks have {len(names)} residuals that are large enough to matter, too few for "
        f"{count} different policies; ask for fewer policies"
    )


def least_absolute_deviations(rows: Any, values: Any, rounds: int = 60) -> Any:
    """The coefficients c that minimise Σ |values − rows · c|, by reweighted least squares; the smallest of several optima.

    >>> least_absolute_deviations(np.array([[1.0], [1.0], [1.0]]), np.array([2.0, 2.0, 90.0])).round(1).tolist()
    [2.0]
    """
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    unit = max(float(np.abs(values).max()), 1e-300)
    weights = np.ones(len(values))
    coefficients = np.zeros(rows.shape[1])
    for _ in range(rounds):
        root = np.sqrt(weights)
        coefficients = np.linalg.lstsq(rows / scale * root[:, None], values / unit * root, rcond=1e-10)[0]
        # Without a floor the first exact fit would get all the weight.
        weights = 1 / np.maximum(np.abs(values / unit - rows / scale @ coefficients), 1e-4)
    return coefficients / scale * unit


def _calibration(workload: Workload, calibration: Sequence[Any] | int, seed: int) -> list[Any]:
    if isinstance(calibration, int) and not isinstance(calibration, bool) and calibration >= 0:
        return [*NAMED, *random_policies(workload, calibration, seed)]
    if isinstance(calibration, str | int) or len(calibration) < 2:
        raise ArgumentError(
            f"calibration={calibration!r}: expected at least two policies, or the number of random policies to add to "
            f"{', '.join(NAMED)}"
        )
    for policy in calibration:
        if not isinstance(policy, str | Policy | LayerPolicies):
            raise PolicyError(f"calibration holds {policy!r}: expected policies, their names or texts")
    return list(dict.fromkeys(calibration))


def _names(workload: Workload) -> list[str]:
    """The names that random policies choose from: large residuals under `everything`, and outputs of products."""
    sizes: dict[str, int] = {}
    for policy in ("everything", "dots"):
        for row in residuals(workload, policy):
            if "#" in row.name and ":carry#" not in row.name:
                sizes[row.name] = max(sizes.get(row.name, 0), row.bytes)
    return [name for name, size in sizes.items() if size >= _SMALLEST_SHARE * max(sizes.values())]


def _drawn(names: Sequence[str], draw: random.Random) -> str:
    kept_share, offload_share = draw.random(), 0.5 * draw.random()
    chosen: dict[str, list[str]] = {"save": [], "offload": []}
    for name in names:
        if draw.random() < kept_share:
            # A comma or a semicolon would end the selector.
            chosen["offload" if draw.random() < offload_share else "save"].append(name.replace(",", "?").replace(";", "?"))
    if draw.random() < 0.3:
        chosen["offload"].append("@inputs")
    return "; ".join(f"{action}: {', '.join(selected)}" for action, selected in chosen.items() if selected) or "full"


def _of_a_layer(table: ResidualTable, *actions: Action) -> float:
    """The bytes of one scanned layer's residuals under `actions`; the largest layer's if layers have different policies."""
    rows = [row for row in table if row.scanned and row.action in actions and row.shape]
    runs = {row.layers for row in rows} - {None} or {None}
    return max(sum(row.bytes / row.shape[0] for row in rows if row.layers in (None, run)) for run in runs)


def _key(table: ResidualTable) -> tuple[Any, ...]:
    """A key that is equal for policies that keep the same arrays in the same memory, whatever their texts."""

    def kept(row: Residual) -> tuple[Any, ...]:
        return row.name, row.shape, row.dtype, row.action, row.count, row.layers

    return tuple(sorted((kept(row) for row in table if row.action != Action.RECOMPUTE.value), key=repr))
