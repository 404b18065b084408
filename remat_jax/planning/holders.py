"""The largest memory holders of a step that does not fit, and how to reduce them."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax

from remat_jax import compat
from remat_jax.errors import InfeasibleBudget
from remat_jax.hardware import Target
from remat_jax.memory.advice import largest_advice
from remat_jax.memory.compile.compiler import Sizes
from remat_jax.planning.candidate import Tried
from remat_jax.report.stacked import merged_layers, without_common_root
from remat_jax.report.tables import format_bytes
from remat_jax.train.parameters import device_bytes
from remat_jax.workload import Workload

_SHOWN = 5
_ARGUMENTS = ("parameters", "frozen parameters", "optimizer state", "batch")
_XLA_DTYPES = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "complex": "c", "bool": "pred"}


def check_arguments_fit(workload: Workload, budget: int) -> None:
    """Refuse a budget below the step's arguments: parameters, batch, and an optimizer's state on the device.

    Raises:
      InfeasibleBudget: the arguments exceed the budget; the message lists their bytes. Nothing was compiled.
    """
    sizes = _arguments(workload)
    if sizes.total() > budget:
        held = {name: size for name, size in sizes.most_common() if size}
        raise InfeasibleBudget(
            f"budget={budget} ({format_bytes(budget)}) is less than the arguments of a step of {workload.name!r}, before it "
            f"computes anything: {format_bytes(sizes.total())}, of which {_listed(held)}. "
            f"{remedy(held, on_mesh=workload.mesh is not None)}",
            sizes.total(),
            held,
        )


def argument_bytes(workload: Workload) -> int:
    """The bytes of a step's arguments on the device, the same under every policy."""
    return _arguments(workload).total()


def _arguments(workload: Workload) -> Counter[str]:
    step = workload.step("off")
    sizes: Counter[str] = Counter()
    for name, argument in zip(step.names, step.local_arguments, strict=True):
        sizes[_argument(name) or name] += device_bytes(argument)
    return sizes


def infeasible(workload: Workload, least: Tried, budget: int, host_budget: int | None, target: Target) -> InfeasibleBudget:
    """The error with the least memory reached, by the compiled step `least`, and with what occupies it."""
    if host_budget is not None and least.compiled.host_bytes > host_budget:
        return InfeasibleBudget(
            f"host_budget={host_budget} ({format_bytes(host_budget)}): no policy of {workload.name!r} fits; the least is "
            f"{format_bytes(least.compiled.host_bytes)} in host memory, including an offloaded optimizer's state. Allow more, "
            "or offload a smaller share of the state: rj.offload_optimizer(tx, fraction=…).",
            least.compiled.device_bytes,
        )
    held = held_by(workload, least.compiled.sizes) if isinstance(least.compiled.sizes, Sizes) else {}
    sizes = least.compiled.sizes
    beyond = largest_advice(workload, sizes, target.devices) if isinstance(sizes, Sizes) else None
    host = f" with host_budget={host_budget} ({format_bytes(host_budget)})" if host_budget is not None else ""
    name = least.candidate.name or "a plan of its own"
    return InfeasibleBudget(
        f"budget={budget} ({format_bytes(budget)}){host}: no policy of {workload.name!r} fits on {target.name}. The least "
        f"reached by compiling is {format_bytes(least.compiled.device_bytes)}, by {name}. Its largest parts: {_listed(held)}. "
        f"{beyond or remedy(held, on_mesh=workload.mesh is not None)}",
        least.compiled.device_bytes,
        held,
    )


def held_by(workload: Workload, sizes: Sizes) -> dict[str, int]:
    """The bytes on the device at a compiled step's peak, by category, the largest first."""
    if not sizes.live:
        return _without_text(workload, sizes)
    # The first argument and the frozen parameters.
    step = workload.step("off")
    there = [one for name, one in zip(step.names, step.local_arguments, strict=True) if "parameters" in name]
    params = {_xla_shape(leaf) for leaf in jax.tree.leaves(there) if _sized(leaf)}
    paths = dict.fromkeys(one.module for one in sizes.live)
    short = dict(zip(paths, without_common_root(merged_layers(paths)), strict=True))
    found: Counter[str] = Counter()
    for one in sizes.live:
        argument = _argument(one.module)
        if argument:
            found[argument] += one.nbytes
        elif one.phase in ("backward", "other") and one.shape.partition("{")[0] in params:
            found["gradients and updated parameters"] += one.nbytes
        else:
            what = "kept between the passes" if one.phase == "forward" else "working set"
            found[f"{what}: {short[one.module] or 'of no module'}"] += one.nbytes
    return dict(found.most_common())


def remedy(held: dict[str, int], *, on_mesh: bool = False) -> str:
    """How to reduce the largest holder."""
    largest = next(iter(held), "")
    advice = {
        "parameters": "Ask for more, take a smaller dtype for the parameters, or more devices",
        "optimizer state": "Ask for more, or keep the state in host memory: rj.offload_optimizer(optimizer)",
        "batch": "Ask for more, or take a smaller batch",
        "gradients and updated parameters": "Ask for more, train fewer parameters, or take a smaller dtype for them",
    }
    if on_mesh:
        advice["optimizer state"] = (
            "Ask for more, keep the state in host memory (rj.offload_optimizer(optimizer)), or divide the parameters over "
            "more devices: the state is partitioned like the parameters"
        )
    fallback = "Ask for more, or take a smaller batch: rj.accumulate_gradients adds up the gradients of several"
    return f"{advice.get(largest, fallback)}."


def _without_text(workload: Workload, sizes: Sizes) -> dict[str, int]:
    """The holders if the compiler lists no single buffers: the step's arguments, and the rest as one."""
    step = workload.step("off")
    found: Counter[str] = Counter()
    # With one memory, an array in host memory is on the device too.
    taken = device_bytes if sizes.host_argument else compat.tree_bytes
    for name, argument in zip(step.names, step.local_arguments, strict=True):
        found[_argument(name) or name] += taken(argument)
    found["working set and residuals"] = sizes.temp
    found["outputs: gradients, or updated parameters"] = max(0, sizes.output - sizes.alias)
    return {name: size for name, size in found.most_common() if size}


def _listed(held: dict[str, int]) -> str:
    shown = [f"{name} {format_bytes(size)}" for name, size in list(held.items())[:_SHOWN]]
    rest = sum(list(held.values())[_SHOWN:])
    return ", ".join([*shown, *([f"the rest {format_bytes(rest)}"] if rest else [])]) or (
        "memory that the compiler does not explain"
    )


def _argument(name: str) -> str | None:
    bare = re.sub(r"\[\d+\]$", "", name)
    return bare if bare in _ARGUMENTS else None


def _sized(leaf: Any) -> bool:
    # An RNG key has an extended dtype; it is small.
    return not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)


def _xla_shape(leaf: Any) -> str:
    """The shape as XLA writes it.

    >>> _xla_shape(jax.ShapeDtypeStruct((2, 3), "bfloat16"))
    'bf16[2,3]'
    """
    name, bits = re.fullmatch(r"([a-z]+)(\d*)(?:_.*)?", str(leaf.dtype)).groups()  # type: ignore[union-attr]
    return f"{_XLA_DTYPES.get(name, name)}{bits}[{','.join(map(str, leaf.shape))}]"
