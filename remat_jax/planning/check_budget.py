"""Memory budgets: parsing them, refusing budgets below a step's arguments, and explaining why no step fits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from remat_jax import compat
from remat_jax.errors import InfeasibleBudget, PlanningError
from remat_jax.hardware import Target
from remat_jax.hardware.amounts import amount, device_amount
from remat_jax.memory.advice import largest_advice
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.planning.candidate import Tried
from remat_jax.report.stacked_bars import ARGUMENT, merged_layers, without_common_root
from remat_jax.report.tables import format_bytes
from remat_jax.train.parameters import device_bytes
from remat_jax.workload import Workload

_SHOWN = 5
_ARGUMENTS = ("parameters", "frozen parameters", "optimizer state", "batch")
_XLA_DTYPES = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "complex": "c", "bool": "pred"}
_REMEDIES = {
    "parameters": "Raise the budget, take a smaller dtype for the parameters, or more devices",
    "optimizer state": "Raise the budget, or keep the state in host memory: rj.offload_optimizer(optimizer)",
    "batch": "Raise the budget, or take a smaller batch",
    "gradients and updated parameters": "Raise the budget, train fewer parameters, or take a smaller dtype for them",
}
_REMEDY = "Raise the budget, or take a smaller batch: rj.accumulate_gradients adds up the gradients of micro-batches"
_STATE_ON_MESH = (
    "Raise the budget, keep the state in host memory (rj.offload_optimizer(optimizer)), or shard the parameters over more "
    "devices: the state is partitioned like the parameters"
)


def budget_bytes(budget: str | float, target: Target, argument: str = "budget") -> int:
    """A budget of device memory on `target` in bytes, parsed by `device_amount`.

    Raises:
      PlanningError: the budget is malformed, not positive, above the target's memory, or a share of an unknown memory.

    >>> from remat_jax.hardware import target
    >>> budget_bytes("40GiB", target("h200")) == 40 * 2**30, budget_bytes(0.5, target("h200"))
    (True, 75377410048)
    """
    return device_amount(budget, target, argument, PlanningError)


def host_budget_bytes(budget: str | float | None) -> int | None:
    """A budget of host memory in bytes; None means no limit, 0 means no host memory.

    Raises:
      PlanningError: the budget is malformed, or a share: only device memory allows shares.

    >>> host_budget_bytes("1.5 kB"), host_budget_bytes(None)
    (1500, None)
    """
    return None if budget is None else amount(budget, None, "host_budget", PlanningError)


def check_arguments_fit(workload: Workload, budget: int) -> None:
    """Raise if the step's arguments on the device exceed the budget, before anything is compiled.

    Raises:
      InfeasibleBudget: the arguments exceed the budget. The message lists their bytes.
    """
    sizes = _arguments(workload)
    if sizes.total() > budget:
        held = {name: size for name, size in sizes.most_common() if size}
        raise InfeasibleBudget(
            f"budget={budget} ({format_bytes(budget)}) is less than the arguments of a step of {workload.name!r}, "
            f"which take {format_bytes(sizes.total())}: {_listed(held)}. "
            f"{remedy(held, on_mesh=workload.mesh is not None)}",
            sizes.total(),
            held,
        )


def argument_bytes(workload: Workload) -> int:
    """The bytes of a step's arguments on the device, which are the same under every policy."""
    return _arguments(workload).total()


def _arguments(workload: Workload, size_of: Callable[[Any], int] = device_bytes) -> Counter[str]:
    step = workload.step("off")
    sizes: Counter[str] = Counter()
    for name, leaf in zip(step.array_names, jax.tree.leaves(step.local_arguments), strict=True):
        owner = name.partition("/")[0]
        sizes[_argument(owner) or owner] += size_of(leaf)
    return sizes


def infeasible(workload: Workload, least: Tried, budget: int, host_budget: int | None, target: Target) -> InfeasibleBudget:
    """The error that states the memory of `least`, the compiled step with the least memory, and what occupies it."""
    compiled = least.compiled
    if host_budget is not None and compiled.host_bytes > host_budget:
        return InfeasibleBudget(
            f"host_budget={host_budget} ({format_bytes(host_budget)}): no policy of {workload.name!r} fits; the least is "
            f"{format_bytes(compiled.host_bytes)} in host memory, including an offloaded optimizer's state. Allow more, "
            "or offload a smaller share of the state: rj.offload_optimizer(tx, fraction=…).",
            compiled.device_bytes,
        )
    sizes: Sizes | None = compiled.sizes
    held = {} if sizes is None else held_by(workload, sizes)
    advice = None if sizes is None else largest_advice(workload, sizes, target)
    host = f" with host_budget={host_budget} ({format_bytes(host_budget)})" if host_budget is not None else ""
    return InfeasibleBudget(
        f"budget={budget} ({format_bytes(budget)}){host}: no policy of {workload.name!r} fits on {target.name}. The least "
        f"memory of a compiled step is {format_bytes(compiled.device_bytes)}, under "
        f"{least.candidate.name or 'a mix of policies'}. Its largest parts: {_listed(held)}. "
        f"{advice or remedy(held, on_mesh=workload.mesh is not None)}",
        compiled.device_bytes,
        held,
    )


def held_by(workload: Workload, sizes: Sizes) -> dict[str, int]:
    """A dict from category to device bytes at a compiled step's peak, the largest category first."""
    if not sizes.live:
        return _without_text(workload, sizes)
    # Both the trained and the frozen parameters.
    step = workload.step("off")
    parameters = [value for name, value in zip(step.labels, step.local_arguments, strict=True) if "parameters" in name]
    parameters += [] if workload.has_loss else [step.local_like(workload.parameters)]
    shapes = {_xla_shape(leaf) for leaf in jax.tree.leaves(parameters) if _sized(leaf)}
    paths = dict.fromkeys(buffer.module for buffer in sizes.live)
    short = dict(zip(paths, without_common_root(merged_layers(paths)), strict=True))
    held: Counter[str] = Counter()
    for buffer in sizes.live:
        category = _argument(buffer.module)
        if category is None and buffer.phase in ("backward", "other") and buffer.shape.partition("{")[0] in shapes:
            category = "gradients and updated parameters"
        elif category is None:
            role = "kept between the passes" if buffer.phase == "forward" else "working set"
            category = f"{role}: {short[buffer.module] or 'of no module'}"
        held[category] += buffer.nbytes
    return dict(held.most_common())


def _without_text(workload: Workload, sizes: Sizes) -> dict[str, int]:
    """Like `held_by`, if the compiler lists no buffers. The categories are arguments, temporary memory and outputs."""
    # A target without separate host memory has all arguments on the device.
    held = _arguments(workload, device_bytes if sizes.host_argument else compat.tree_bytes)
    held["working set and residuals"] = sizes.temp
    held["outputs: gradients, or updated parameters"] = max(0, sizes.output - sizes.alias)
    return {name: size for name, size in held.most_common() if size}


def remedy(held: dict[str, int], *, on_mesh: bool = False) -> str:
    """A sentence on how to reduce the largest category."""
    largest = next(iter(held), "")
    if on_mesh and largest == "optimizer state":
        return f"{_STATE_ON_MESH}."
    return f"{_REMEDIES.get(largest, _REMEDY)}."


def _listed(held: dict[str, int]) -> str:
    shown = [f"{name} {format_bytes(size)}" for name, size in list(held.items())[:_SHOWN]]
    rest = sum(list(held.values())[_SHOWN:])
    shown += [f"the rest {format_bytes(rest)}"] if rest else []
    return ", ".join(shown) or "memory that the compiler does not explain"


def _argument(name: str) -> str | None:
    """The category of an argument with this name, or None. Each argument of a finished step is a category."""
    bare = re.sub(r"\[\d+\]$", "", name)
    return bare if bare in _ARGUMENTS or bare.startswith(ARGUMENT) else None


def _sized(leaf: jax.ShapeDtypeStruct) -> bool:
    # RNG keys have an extended dtype. They are small, so they are left out.
    return not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)


def _xla_shape(leaf: jax.ShapeDtypeStruct) -> str:
    """The shape as XLA writes it.

    >>> _xla_shape(jax.ShapeDtypeStruct((2, 3), "bfloat16"))
    'bf16[2,3]'
    """
    name, bits = re.fullmatch(r"([a-z]+)(\d*)(?:_.*)?", str(leaf.dtype)).groups()  # type: ignore[union-attr]
    return f"{_XLA_DTYPES.get(name, name)}{bits}[{','.join(map(str, leaf.shape))}]"
