"""A summary of a workload: its blocks, arguments and optimizer, its target, and the package versions."""

from __future__ import annotations

import os
from typing import Any

import jax

from remat_jax import compat
from remat_jax.overview.gathered import Gathered
from remat_jax.planning.model import block_name
from remat_jax.planning.problem import Described
from remat_jax.report.tables import format_bytes
from remat_jax.workload import Workload

_PACKAGES = ("remat_jax", "jax", "jaxlib", "flax", "optax")
_RATES = {
    "flops": "operations",
    "hbm_bytes_per_s": "device memory",
    "out_bytes_per_s": "to the host",
    "in_bytes_per_s": "from the host",
    "hidden_share": "compute that copies can overlap",
    "launch_seconds": "latency of a kernel",
    "copy_seconds": "latency of a copy to or from the host",
    "device_link_bytes_per_s": "between devices of a host",
    "device_link_seconds": "latency between devices of a host",
    "network_bytes_per_s": "between hosts",
    "network_seconds": "latency between hosts",
}
_SHOWN = 6
"""The maximum number of the batch's arrays that are listed one by one."""


def facts(gathered: Gathered) -> list[tuple[str, str]]:
    """The summary, as pairs of name and text."""
    workload, target, described = gathered.workload, gathered.target, gathered.described
    pairs = [("workload", workload.name), ("one step", _step(workload)), ("blocks", _blocks(workload, described))]
    pairs += _arguments(workload)
    if workload.mesh is not None:
        axes = ", ".join(f"{name} {size}" for name, size in workload.mesh.shape.items())
        pairs.append(("mesh", f"{axes}: {target.devices} devices; memory is per device"))
    memory = f", {format_bytes(target.memory_bytes)} of memory" if target.memory_bytes else ""
    pairs.append(("target", f"{target.name}: {target.description}{memory}"))
    if described is not None:
        rates = "; ".join(f"{_RATES.get(name, name)}: {text}" for name, text in described.rates.source.items())
        pairs.append(("rates used for times", rates or "as given"))
    versions = (f"{name} {compat.installed_version(name) or '(run from its sources)'}" for name in _PACKAGES)
    pairs.append(("versions", ", ".join(versions)))
    if flags := os.environ.get("XLA_FLAGS"):
        pairs.append(("XLA_FLAGS", flags))
    return pairs


def _step(workload: Workload) -> str:
    if not workload.has_loss:
        return "a finished training step"
    return "the loss, its gradient" + (", and the optimizer's update" if workload.optimizer is not None else "; no optimizer")


def _blocks(workload: Workload, described: Described | None) -> str:
    texts = []
    for block in workload.blocks:
        kinds = [kind for kind in described.kinds if kind.block == block] if described else []
        calls = sum(len(kind.layers) for kind in kinds)
        scanned = ", scanned" if any(kind.scanned for kind in kinds) else ""
        texts.append(f"{block_name(block)} ({calls} call{'s' * (calls != 1)} a step{scanned})" if calls else block_name(block))
    return "; ".join(texts)


def _arguments(workload: Workload) -> list[tuple[str, str]]:
    """The arguments of the step, with sizes summed over all devices."""
    step = workload.step("off")
    pairs = []
    for name, tree in zip(step.labels, step.arguments, strict=True):
        leaves = jax.tree.leaves(tree)
        if not leaves:
            continue
        if name.startswith("batch") or (not step.names and len(leaves) <= _SHOWN):
            pairs.append((name, _shapes(leaves)))
            continue
        elements = sum(leaf.size for leaf in leaves)
        kinds = ", ".join(dict.fromkeys(str(leaf.dtype) for leaf in leaves))
        pairs.append((name, f"{elements:,} elements, {format_bytes(compat.tree_bytes(tree))} ({kinds})"))
    return pairs


def _shapes(leaves: list[Any]) -> str:
    more = f" and {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else ""
    return ", ".join(f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]" for leaf in leaves[:_SHOWN]) + more
