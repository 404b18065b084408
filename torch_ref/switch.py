"""Switch checkpointing on and off on a finished model, without other changes to the model."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from torch_ref.blocks import AppliedPolicies, checked_policies
from torch_ref.errors import InvalidArgumentError, TorchRefError
from torch_ref.policy import Policy

logger = logging.getLogger(__name__)
_ATTRIBUTE = "_torch_ref_gradient_checkpointing"

Blocks = type[nn.Module] | tuple[type[nn.Module], ...]


def gradient_checkpointing_enable(
    model: nn.Module, policy: Policy | str = "full", *, blocks: Blocks | None = None
) -> AppliedPolicies:
    """Switch checkpointing of the model's blocks on; if it is on already, the new policy replaces the old policy.

    The switch acts only in training with gradients enabled: each block checks its own mode when it is called. Parameters,
    their names and the state dict stay the same. This is the counterpart of `remat_jax.enable_gradient_checkpointing`;
    `examples/pytorch/faithful/openpi.py` has OpenPI's switch, with its quirks.

    Args:
        model: any module.
        policy: a policy, its name or text, as for `checkpoint_blocks`.
        blocks: a class of modules or a tuple of classes. By default, the blocks are the modules in each outermost
            `ModuleList` or `Sequential` that has two or more modules, all of the same class.

    Returns:
        The policies in force; `.blocks` lists the paths of the blocks.

    Raises:
        InvalidArgumentError: if `model` is not a module or has no blocks.
        PolicyError: if `policy` is malformed.

    >>> import torch, torch_ref
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, num_layers=3)
    >>> sorted(torch_ref.gradient_checkpointing_enable(model).blocks)
    ['layers/0', 'layers/1', 'layers/2']
    >>> x = torch.ones(2, 5, 8)
    >>> with torch_ref.count_calls(*model.layers) as calls:
    ...     model(x).sum().backward()
    ...     torch_ref.gradient_checkpointing_disable(model)
    ...     model(x).sum().backward()
    >>> calls.total
    9
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model is a {type(model).__name__}, expected a module.")
    only = repeated_blocks(model) if blocks is None else None
    block_classes = tuple(map(type, only)) if only is not None else blocks if isinstance(blocks, tuple) else (blocks,)
    classes: list[Any] = list(dict.fromkeys(block_classes))
    if not classes:
        present = sorted({type(module).__name__ for module in model.modules()})
        raise InvalidArgumentError(
            f"model is a {type(model).__name__} without blocks, expected a list of two or more modules of one class. Pass"
            f" blocks=SomeClass; its modules are of {', '.join(present)}."
        )
    checked = Policy.parse(policy)
    before = vars(model).get(_ATTRIBUTE)
    gradient_checkpointing_disable(model)
    try:
        applied = AppliedPolicies(model, checked_policies(dict.fromkeys(classes, checked)), only)
    except TorchRefError:
        if before is not None:
            vars(model)[_ATTRIBUTE] = before.again(model)
        raise
    vars(model)[_ATTRIBUTE] = applied
    names = ", ".join(sorted(block.__name__ for block in classes))
    logger.info("Enabled gradient checkpointing (%s) on %d %s of %s", checked, len(applied.blocks), names, type(model).__name__)
    return applied


def gradient_checkpointing_disable(model: nn.Module) -> None:
    """Switch checkpointing off; no effect if it is off already.

    Copies (`copy.deepcopy`) share the model's switch: switching the model off also switches its copies off. Switching a copy
    off does not affect the model.

    Raises:
        InvalidArgumentError: if `model` is not a module.

    >>> import torch, torch_ref
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    >>> _ = torch_ref.gradient_checkpointing_enable(model)
    >>> gradient_checkpointing_disable(model)
    >>> torch_ref.is_gradient_checkpointing(model)
    False
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model is a {type(model).__name__}, expected a module.")
    applied = vars(model).pop(_ATTRIBUTE, None)
    if applied is not None:
        applied.remove_from(model)
        logger.info("Disabled gradient checkpointing on %s", type(model).__name__)


def is_gradient_checkpointing(model: nn.Module) -> bool:
    """Whether checkpointing is switched on.

    >>> from torch import nn
    >>> is_gradient_checkpointing(nn.Linear(1, 1))
    False
    """
    applied = vars(model).get(_ATTRIBUTE) if isinstance(model, nn.Module) else None
    return applied is not None and not applied.is_removed


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the outermost lists that have two or more modules, all of the same class."""
    repeated: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and len(set(map(type, module))) == 1:
            repeated[path] = list(module)
    outermost = [path for path in repeated if not any(path != other and _is_inside(path, other) for other in repeated)]
    return list(dict.fromkeys(block for path in outermost for block in repeated[path]))


def _is_inside(path: str, other: str) -> bool:
    return not other or path.startswith(other + ".")
