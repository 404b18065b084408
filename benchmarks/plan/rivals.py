"""The policies that plans are compared with: every named policy, and MaxText's remat policies by the tensors that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from benchmarks.plan.workloads import Case, Roles
from remat_jax import compat
from remat_jax.errors import NoEffectError, RematError
from remat_jax.memory.measure import measure_many
from remat_jax.memory.residuals import residuals
from remat_jax.planning.problem import Described, extra_seconds
from remat_jax.policy import NAMED

_QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj")
_ATTENTION = (*_QKV, "out_proj")
_MLP = ("mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo")
INPUT = "decoder_layer_input"

MAXTEXT: dict[str, dict[str, tuple[str, ...]]] = {
    "minimal_with_context": {"save": (*_ATTENTION, "context", *_MLP)},
    "minimal": {"save": (*_ATTENTION, *_MLP)},
    "save_dot_with_context_except_mlp": {"save": (*_ATTENTION, "context")},
    "save_dot_except_mlpwi": {"save": (*_ATTENTION, "mlpwo")},
    "save_dot_except_mlp": {"save": _ATTENTION},
    "save_qkv_proj": {"save": _QKV},
    "save_out_proj": {"save": ("out_proj",)},
    "qkv_proj_offloaded": {"offload": ("query_proj", "key_proj", "value_proj")},
    "minimal_offloaded": {"offload": (*_ATTENTION, *_MLP)},
    "custom, Llama 70B": {"offload": (INPUT, "query_proj", "key_proj", "value_proj")},
    "custom, Llama 405B": {"offload": (INPUT, "query_proj", "key_proj", "value_proj", "out_proj")},
    "full": {},
}
"""The tensors that each policy of MaxText's saves or offloads (`get_remat_policy` of its decoders). `minimal_flash` is another
name of `minimal_with_context`. A `custom` policy has an action for each tensor: these two are from MaxText's recipes for Llama
3.1. Names that a model does not have are ignored, as in `jax.checkpoint_policies`."""


@dataclass(frozen=True)
class Rival:
    """A policy and its figures; with a remark it has no figures.

    Attributes:
      names: all its names; policies of MaxText's are equal if they differ only in tensors that the model does not have.
      policy: one policy for all blocks, or a policy by block (in a file, by the block's name).
      device_bytes, host_bytes: of the compiled step.
      extra_seconds: the planner's traced estimate of the seconds to keep and recompute residuals.
      seconds: of the compiled step, estimated from its schedule; None if unknown.
      remark: why the policy cannot run here; empty if it can.
    """

    names: tuple[str, ...]
    policy: Any
    device_bytes: int | None = None
    host_bytes: int | None = None
    extra_seconds: float | None = None
    seconds: float | None = None
    remark: str = ""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; policies by block become texts by the block's name."""
        policy = self.policy
        if isinstance(policy, Mapping):
            # In a policy read from a file, the blocks are names already.
            policy = {getattr(block, "__name__", block): text for block, text in policy.items()}
        return vars(self) | {"policy": policy}


def in_words_of(roles: Roles, named: Mapping[str, tuple[str, ...]]) -> str:
    """The text of a policy that saves or offloads the tensors in `named`, except those that the model does not have.

    >>> in_words_of({"out_proj": "*out:add#0"}, {"offload": ("decoder_layer_input", "out_proj", "qkv_proj")})
    'offload: *:input#0, *out:add#0'
    """
    # Not `@inputs`: MaxText's layer input does not include a mask or table that all layers share.
    selectors = {INPUT: "*:input#0", **roles}
    rules = {action: [selectors[name] for name in names if name in selectors] for action, names in named.items()}
    return "; ".join(f"{action}: {', '.join(selected)}" for action, selected in rules.items() if selected) or "full"


def policies(case: Case) -> dict[str, Any]:
    """All policies by name. A policy of MaxText's is a text, or, if the blocks' texts differ, a text by block."""
    by_name: dict[str, Any] = dict.fromkeys(NAMED)
    by_name = {name: name for name in by_name}
    for name, named in MAXTEXT.items():
        texts = {block: in_words_of(roles, named) for block, roles in case.roles.items()}
        by_name[f"MaxText {name}"] = texts if len(set(texts.values())) > 1 else next(iter(texts.values()))
    return by_name


def rivals(case: Case, described: Described, target: str) -> list[Rival]:
    """Every policy with its compiled figures; equal policies are one rival. A policy that cannot run here has only a remark."""
    names_by_policy: dict[Any, list[str]] = {}
    for name, policy in policies(replace(case, roles=roles_that_keep(case))).items():
        names_by_policy.setdefault(tuple(policy.items()) if isinstance(policy, Mapping) else policy, []).append(name)
    asked = [(tuple(names), dict(key) if isinstance(key, tuple) else key) for key, names in names_by_policy.items()]
    remarks = [_remark(case, described, policy) for _, policy in asked]
    able = [policy for (_, policy), remark in zip(asked, remarks, strict=True) if not remark]
    # One call, so that the policies compile in parallel.
    reports = iter(measure_many(case.workload, able, target, timeout=3600))
    measured = []
    for (names, policy), remark in zip(asked, remarks, strict=True):
        if remark:
            measured.append(Rival(names, policy, remark=remark))
            continue
        report, extra = next(reports), extra_seconds(described, policy)
        measured.append(Rival(names, policy, report.device_bytes, report.host_bytes, extra, report.seconds))
    return measured


def roles_that_keep(case: Case) -> dict[Any, Roles]:
    """`case.roles` without tensors that no backward pass reads, as the last matmul's result: their selectors would raise."""
    return {
        block: {name: glob for name, glob in roles.items() if _keeps(case, block, glob)} for block, roles in case.roles.items()
    }


def _keeps(case: Case, block: Any, glob: str) -> bool:
    try:
        residuals(case.workload, dict.fromkeys(case.roles, "full") | {block: f"save: {glob}"})
    except NoEffectError:
        return False
    return True


def _remark(case: Case, described: Described, policy: Any) -> str:
    """Why a policy cannot run here; empty if it can."""
    if _offloads(policy) and any(kind.scanned for kind in described.kinds) and compat.miscompiles_scanned_offload():
        return f"JAX {jax.__version__} miscompiles offload inside scan"
    try:
        residuals(case.workload, policy)
    except RematError as error:
        return str(error).split("\n")[0]
    return ""


def _offloads(policy: Any) -> bool:
    texts = policy.values() if isinstance(policy, Mapping) else [policy]
    return any("offload" in text for text in texts)


def best_within(measured: list[Rival], budget: int) -> Rival | None:
    """The fastest policy that fits: by compiled time, or by traced estimate if none has one. Ties go to less memory."""
    fits = [rival for rival in measured if not rival.remark and rival.device_bytes is not None and rival.device_bytes <= budget]
    return min(
        fits, key=lambda rival: (rival.seconds is None, rival.seconds or rival.extra_seconds, rival.device_bytes), default=None
    )
