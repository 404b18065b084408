"""A workload as a planning problem: kinds of blocks, their residuals, and the cost of keeping or recomputing each residual."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import jax

from remat_jax import compat, solver
from remat_jax.core.marks import Block
from remat_jax.cost.cost import jaxpr_cost
from remat_jax.errors import PlanningError
from remat_jax.hardware.rates import Rates
from remat_jax.hardware.target import Target
from remat_jax.hardware.target import target as target_named
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT
from remat_jax.memory.residuals import residuals
from remat_jax.planning.blocks import Call, calls
from remat_jax.planning.division import Shares, divided, gathered_bytes, residual_shares
from remat_jax.planning.nodes import Node, nodes, residual
from remat_jax.planning.program import BlockProgram, Price, block_program
from remat_jax.policy import Action, LayerPolicies, Policy, as_block_policy
from remat_jax.report.activity import activity
from remat_jax.step import TrainingStep
from remat_jax.train.parameters import device_bytes
from remat_jax.workload import Workload

KEEP_ALL = ("off", "everything")
"""The named policies that keep all residuals."""


@dataclass(frozen=True)
class Kind:
    """Consecutive equal blocks, which run the same jaxpr on the same types.

    Attributes:
      name: the name of the solver's block.
      block: the key in the workload's blocks, such as a class or a glob.
      layers: the blocks' positions in forward order among all calls of the key.
      paths: the module path of each block; iterations of a scan share one path.
      residuals: the names of the solver's residuals, as in the first block.
      members: for each residual, the names of all arrays that share its choice, the largest array first.
      program: the program of the first block; it prices policies.
    """

    name: str
    block: Block
    layers: range
    scanned: bool
    paths: tuple[str, ...]
    residuals: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]
    program: BlockProgram = field(repr=False, compare=False)


@dataclass(frozen=True)
class Described:
    """A workload as a planning problem: a `stack` for the solver, and one kind for each block of the stack.

    Attributes:
      outside_seconds: the time of the work outside the blocks: embedding, head, loss, optimizer.
      traced_seconds, written_seconds: in the traced step, which is not divided over devices, the time of the blocks, and
        the time to write their residuals.
    """

    stack: solver.Stack
    kinds: tuple[Kind, ...]
    outside_seconds: float
    rates: Rates
    micro_batches: int = 1
    traced_seconds: float = 0.0
    written_seconds: float = 0.0

    @property
    def base_seconds(self) -> float:
        """The time of a step without keeping, recomputing or copying residuals."""
        return self.stack.base_seconds + self.outside_seconds


def describe(
    workload: Workload,
    target: Target | str,
    *,
    rates: Rates | None = None,
    working: float | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Described:
    """The planning problem of `workload` on `target`. Nothing is executed; a step is compiled only if the workload has a mesh.

    On a mesh, bytes and times are per device, and one compiled step shows how the compiler partitions the residuals. Kinds
    that alternate in one scan are treated as if all layers of one kind came before the next kind. The times are estimates of
    the cost model (`docs/how/cost_model.md`).

    Args:
      rates: by default, the rates of `target`.
      working: the bytes that a block's backward pass needs in addition to its residuals; by default estimated by
        `BlockProgram.working_bytes`.

    Raises:
      TargetError: the target's rates are unknown.
      UnsupportedError: a block is inside another block or in a `while` loop.
      BlockError: a block is never called.

    >>> import flax.linen as nn, jax.numpy as jnp
    >>> class Layer(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return x + nn.Dense(8, name="down")(jnp.sin(nn.Dense(32, name="up")(x)))
    >>> model, x = nn.Sequential([Layer(), Layer()]), jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> params = jax.eval_shape(model.init, jax.random.key(0), x)
    >>> job = Workload(lambda p, x: (model.apply(p, x * p["params"]["layers_0"]["down"]["bias"])).sum(), params, (x,), Layer)
    >>> [(kind.layers, kind.residuals) for kind in describe(job, "cpu").kinds]
    [(range(0, 2), ('layers_0:input#0', 'layers_0/up:add#0', 'layers_0:sin#0'))]
    """
    target = target if isinstance(target, Target) else target_named(target)
    rates = Rates.of(target) if rates is None else rates
    # A micro-batch is described, and each of its operations runs once for each micro-batch.
    gradients = workload.gradients
    of_blocks = rates.slower(gradients) if gradients > 1 else rates
    shares = residual_shares(workload, target, timeout=timeout) if workload.mesh is not None else None
    kinds, blocks, alone, written = [], [], 0.0, 0.0
    for number, same in enumerate(_equal_calls(workload)):
        backend = backend_of(target)
        with activity(f"counting what {same[0].path} computes and keeps"):
            program = block_program(same[0], of_blocks, backend.stack_passes, backend.fuses_into_matmuls)
        count = sum(len(call.layers()) for call in same)
        alone += count * (program.forward.seconds(of_blocks) + program.backward.seconds(of_blocks))
        written += count * program.written_seconds
        gathered = 0
        if shares is not None:
            program = divided(program, shares.of_parts(same[0].parts))
            gathered = gathered_bytes(program)
        chosen = nodes(program)
        kinds.append(_kind(number, same, program, chosen))
        needs = program.working_bytes + gathered if working is None else working
        blocks.append(_block(kinds[-1], chosen, float(needs)))
    link = None
    if of_blocks.out_bytes_per_s is not None and of_blocks.in_bytes_per_s is not None:
        speeds = of_blocks.out_bytes_per_s, of_blocks.in_bytes_per_s
        link = solver.HostLink(*speeds, rates.hidden_share, of_blocks.hbm_bytes_per_s)
    step = _plain_step(workload, kinds)
    trained = compat.tree_bytes(workload.parameters)
    share = compat.tree_bytes(_local_parameters(workload, step)) / trained if trained else 1.0
    stack = solver.Stack(
        # Inside a `shard_map` an array is one device's part already.
        tuple(
            replace(block, late_bytes=min(1.0, share * kind.program.call.parts) * block.late_bytes)
            for block, kind in zip(blocks, kinds, strict=True)
        ),
        link,
        _fixed_bytes(workload, step, kinds, shares, target),
    )
    return _with_outside(Described(stack, tuple(kinds), 0.0, rates, gradients, alone, written), step)


def describe_outside(described: Described, workload: Workload) -> Described:
    """`described` with the time outside the blocks of another workload, whose blocks are the same."""
    return _with_outside(described, _plain_step(workload, described.kinds))


def _plain_step(workload: Workload, kinds: Sequence[Kind]) -> TrainingStep:
    # Under `off`, the cost would include recomputation by the model's own checkpoints, inside the blocks or around them.
    own = workload.replaced_checkpoints > 0 or any(kind.program.dropped for kind in kinds)
    return workload.step("everything" if own else "off")


@activity("tracing the step to estimate its time")
def _with_outside(described: Described, step: TrainingStep) -> Described:
    whole = jaxpr_cost(jax.make_jaxpr(step.function)(*step.arguments)).seconds(described.rates)
    outside, alone = whole - described.traced_seconds - described.written_seconds, described.traced_seconds
    # The work outside the blocks is assumed to be partitioned like the work inside.
    share = described.stack.base_seconds / alone if alone else 1.0
    return replace(described, outside_seconds=max(0.0, outside) * share)


def _equal_calls(workload: Workload) -> Iterator[list[Call]]:
    """The calls of the workload's blocks, in lists: consecutive equal calls share a list if their positions form a range."""
    for _, neighbours in groupby(calls(workload), key=lambda call: call.signature):
        same = list(neighbours)
        layers = sorted(layer for call in same for layer in call.layers())
        # If two equal calls alternate with a different call in one scan, their positions are not a range.
        is_range = layers[-1] - layers[0] + 1 == len(layers)
        if is_range:
            yield same
        else:
            yield from ([call] for call in same)


def _kind(number: int, same: Sequence[Call], program: BlockProgram, chosen: Sequence[Node]) -> Kind:
    first, key = same[0].layers(), same[0].key
    path = {layer: call.path for call in same for layer in call.layers()}
    layers = first if len(same) == 1 else range(min(path), max(path) + 1)
    return Kind(
        f"{number}:{key if isinstance(key, str) else key.__name__}",
        key,
        layers,
        same[0].scanned,
        tuple(path[layer] for layer in layers),
        tuple(node.name for node in chosen),
        tuple(node.names for node in chosen),
        program,
    )


def _block(kind: Kind, chosen: Sequence[Node], working: float) -> solver.Block:
    program = kind.program
    return solver.Block(
        kind.name,
        tuple(residual(program, node, chosen) for node in chosen),
        program.forward.seconds(program.rates),
        program.backward.seconds(program.rates),
        working_bytes=working,
        repeats=len(kind.layers),
        late_bytes=float(program.call.stacked_bytes),
    )


def _fixed_bytes(workload: Workload, step: TrainingStep, kinds: Sequence[Kind], shares: Shares | None, target: Target) -> float:
    """The device bytes of a step's arguments, its gradients, and its residuals outside the blocks."""
    inside = 0
    for kind in kinds:
        saved, constant = kind.program.saved_bytes, kind.program.constant_bytes
        inside += len(kind.layers) * saved + (1 if kind.scanned else len(kind.layers)) * constant
    # `off` cannot be used in two cases. On a mesh, shares are looked up by residual names, and `off` gives no names. If the
    # model has checkpoints of its own, they drop residuals under `off`.
    named = shares is not None or any(kind.program.dropped for kind in kinds) or workload.replaced_checkpoints > 0
    rows = [row for row in residuals(workload, "everything" if named else "off") if row.action == Action.SAVE.value]
    kept = sum(row.bytes * (shares.of(row.name) if shares else 1.0) for row in rows)
    # A CPU has one memory: arrays in host memory count as device memory.
    taken = device_bytes if backend_of(target).separate_host_memory else compat.tree_bytes
    # The trained parameters count twice, because the gradients have the same size; the sums of gradients over micro-batches are
    # a tree of their own.
    trained = [_local_parameters(workload, step)] * (1 if workload.gradients == 1 else 2)
    return float(taken((step.local_arguments, trained)) + max(0, kept - inside))


def _local_parameters(workload: Workload, step: TrainingStep) -> Any:
    """The trained parameters as one device holds them. In a step that is made from a loss they are the first argument."""
    return step.local_arguments[0] if workload.has_loss else step.local_like(workload.parameters)


def extra_seconds(described: Described, policy: Any) -> float:
    """Seconds to keep and recompute residuals under `policy`, plus the seconds of copies that compute does not hide.

    Args:
      policy: one policy for all layers, or a sequence with one policy per layer; or a mapping from each block to either.

    Raises:
      PlanningError: the policy has too few or too many layers, or groups of layers, or is a JAX policy object.
    """
    *before, last = _priced(described, policy)
    seconds = sum(block_seconds(described.stack.link, *priced, last=False) for priced in before)
    return seconds + block_seconds(described.stack.link, *last, last=True)


def keeping_seconds(described: Described) -> float:
    """Seconds to keep all residuals, under `off` or `everything`, whichever is faster."""
    return min(extra_seconds(described, name) for name in KEEP_ALL)


def block_seconds(link: solver.HostLink | None, block: solver.Block, price: Price, *, last: bool) -> float:
    """Seconds to keep, recompute and copy the residuals of one block; `last`: whether it is the stack's last block."""
    busy = busy_seconds(link, price)
    return busy + copy_seconds(link, block, price.host_bytes, busy, last=last)


def busy_seconds(link: solver.HostLink | None, price: Price) -> float:
    """Device seconds to keep and recompute a block's residuals, and for the memory traffic of their copies."""
    return price.seconds + price.kept_seconds + (0.0 if link is None else link.seconds_per_byte * price.host_bytes)


def copy_seconds(link: solver.HostLink | None, block: solver.Block, away: float, busy: float, *, last: bool) -> float:
    """The exposed seconds (not hidden by compute) of copying `away` bytes of one block to the host and back.

    The backward compute that can hide copies includes the `busy` seconds (`busy_seconds`).
    """
    if link is None or not away:
        return 0.0
    # The last block's backward pass directly follows its forward pass, so no compute overlaps its copies back.
    beside = 0.0 if last else block.backward_seconds + busy
    return link.exposed_out(away, block.forward_seconds) + link.exposed_in(away, beside)


def recompute_flops(described: Described, policy: Any) -> int:
    """The FLOPs that `policy` recomputes in one step: `cost.count.flops` under `policy` minus that under `everything`."""
    return described.micro_batches * sum(price.flops for _, price in _priced(described, policy))


def kept_bytes(described: Described, policy: Any) -> tuple[int, int]:
    """The bytes of the blocks' residuals that `policy` keeps between the passes: on the device, and on the host."""
    prices = [price for _, price in _priced(described, policy)]
    return sum(price.saved_bytes for price in prices), sum(price.host_bytes for price in prices)


def _priced(described: Described, policy: Any) -> list[tuple[solver.Block, Price]]:
    """For each layer, its block and the price of its policy."""
    priced = []
    for block, kind in zip(described.stack.blocks, described.kinds, strict=True):
        count = sum(len(other.layers) for other in described.kinds if other.block == kind.block)
        policies = _of_layers(_for_block(policy, kind.block, described), count)
        layers = zip(kind.layers, kind.paths, strict=True)
        priced += [(block, kind.program.price(policies[layer], path)) for layer, path in layers]
    return priced


def _for_block(policy: Any, key: Block, described: Described) -> Any:
    if not isinstance(policy, Mapping):
        return policy
    blocks = list(dict.fromkeys(kind.block for kind in described.kinds))
    unknown = [block for block in policy if block not in blocks]
    if unknown or key not in policy:
        raise PlanningError(
            f"policy: blocks {unknown or [key]} {'are not blocks of the workload' if unknown else 'have no policy'}; give one "
            f"for each of {blocks}"
        )
    return policy[key]


def _of_layers(policy: Any, count: int) -> list[Policy]:
    """The policy of each of `count` layers."""
    if isinstance(policy, Sequence) and not isinstance(policy, str):
        policy = LayerPolicies.of(policy)
    checked = as_block_policy(policy)
    if isinstance(checked, Policy):
        return [checked] * count
    if not isinstance(checked, LayerPolicies):
        raise PlanningError(
            f"policy={policy!r}: a JAX policy object decides only during tracing, so its cost cannot be estimated; write it "
            "as a text, such as 'save: @dots'"
        )
    if checked.layers != count:
        raise PlanningError(f"policy has {checked.layers} layers, but there are {count}; give one policy for each layer")
    if checked.groups:
        raise PlanningError(f"policy={str(checked)!r}: groups of layers are not priced; use remat_jax.measure")
    return [checked[layer] for layer in range(count)]
