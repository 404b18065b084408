"""Checkpointing and offload with FSDP2: `fully_shard` on every block that has a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_ref.blocks import AppliedPolicies
from torch_ref.errors import InvalidArgumentError
from torch_ref.policy import Policy
from torch_ref.switch import Blocks, gradient_checkpointing_enable, repeated_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ShardedModel:
    """A model whose parameters are sharded over the ranks of a mesh.

    Attributes:
        model: the given module, now an `FSDPModule`.
        policies: the applied policies (`policies.remove()` removes them); None for `off`.
        blocks: the paths of the blocks that were sharded one by one, in model order; other parameters are sharded together.

    >>> whole = ShardedModel(nn.Linear(3, 5), None, ())  # as one rank by itself has it
    >>> whole.parameter_bytes, whole.gradient_bytes
    (80, 0)
    """

    model: nn.Module
    policies: AppliedPolicies | None
    blocks: tuple[str, ...]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that this rank keeps between steps."""
        return sum(_local(parameter).nbytes for parameter in self.model.parameters())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that this rank has after a backward pass."""
        return sum(_local(parameter.grad).nbytes for parameter in self.model.parameters() if parameter.grad is not None)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The full gradients by parameter name, averaged over all ranks. Every rank must call this.

        Raises:
            InvalidArgumentError: if a trained parameter has no gradient.
        """
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        lacking = [name for name, parameter in trained.items() if parameter.grad is None]
        if lacking:
            raise InvalidArgumentError(
                f"{lacking[0]} and {len(lacking) - 1} other parameters have no gradient: call backward() on a loss first."
            )
        return {name: _whole(parameter.grad) for name, parameter in trained.items()}


def shard_blocks(
    model: nn.Module,
    mesh: DeviceMesh,
    policy: Policy | str = "off",
    *,
    blocks: Blocks | None = None,
    reshard_after_forward: bool = True,
) -> ShardedModel:
    """Apply `policy` to the blocks of `model`, then FSDP2's `fully_shard` to each block and to the model.

    In this order FSDP gathers a block's parameters outside of the policy, which handles only the block's own arrays. In the
    reverse order (`selective_checkpoint` around a sharded block, with a policy that looks inside) the gathering would be part
    of the block, but the recomputation would not repeat it and would raise a `ChangedRecomputationError`.
    `gradient_checkpoint_forward` handles only arguments and may be called on sharded blocks.

    Every rank computes the loss of its own part of the batch, and FSDP averages the gradients. If this loss is a mean, and all
    ranks have equally many targets, the average is the gradient of the mean loss over the whole batch.

    Args:
        model: any module; it is changed in place, and its parameters become `DTensor`s.
        mesh: the mesh of ranks, such as `torch.distributed.device_mesh.init_device_mesh("cuda", (8,))`; with two axes,
            parameters are replicated over the first axis and sharded over the second.
        policy: a policy, its name or text, as for `checkpoint_blocks`; `off` for no policy.
        blocks: as for `gradient_checkpointing_enable`.
        reshard_after_forward: whether a block's gathered parameters are freed between the passes.

    Raises:
        InvalidArgumentError: if `mesh` is not a mesh, or the model has no blocks or is already sharded.
        PolicyError: if `policy` is malformed.

    >>> import torch, torch.distributed as dist, torch_ref
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    >>> sharded = torch_ref.shard_blocks(model, dist.device_mesh.init_device_mesh("cpu", (1,)), "offload_inputs")
    >>> sharded.blocks
    ('0', '1')
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> sharded.gradient_bytes == sharded.parameter_bytes == 2 * 72 * 4
    True
    >>> dist.destroy_process_group()
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not isinstance(mesh, DeviceMesh):
        raise InvalidArgumentError(
            f"mesh is a {type(mesh).__name__}, expected a DeviceMesh, as from"
            " torch.distributed.device_mesh.init_device_mesh('cuda', (n,)) for n ranks."
        )
    if mesh.ndim > 2:
        raise InvalidArgumentError(
            f"mesh has {mesh.ndim} axes, expected one axis, or two (replicated, sharded): select axes with mesh['…']."
        )
    checked = Policy.parse(policy)
    block_modules = _found(model, blocks)
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if sharded:
        raise InvalidArgumentError(
            f"model is sharded already at {sharded[0] or 'its root'!r}: give the model itself, before fully_shard."
        )
    applied = None if checked.is_off else gradient_checkpointing_enable(model, checked, blocks=blocks)
    # Shard inner blocks first: FSDP leaves an already sharded module out of the parameter group of the module around it.
    for module in [*reversed(block_modules.values()), model]:
        if not isinstance(module, FSDPModule):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return ShardedModel(model, applied, tuple(block_modules))


def _found(model: nn.Module, blocks: Blocks | None) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model is a {type(model).__name__}, expected a module.")
    if blocks is not None and not all(isinstance(cls, type) for cls in (blocks if isinstance(blocks, tuple) else (blocks,))):
        raise InvalidArgumentError(f"blocks is {blocks!r}, expected a class of modules or a tuple of them.")
    only = repeated_blocks(model)
    block_modules = {
        name: module
        for name, module in model.named_modules()
        if (module in only if blocks is None else isinstance(module, blocks))
    }
    if not block_modules:
        asked = "a list of two or more modules of one class" if blocks is None else str(blocks)
        raise InvalidArgumentError(
            f"model is a {type(model).__name__} without blocks, expected {asked}. Pass blocks=SomeClass."
        )
    return block_modules


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
