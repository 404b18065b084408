"""Errors of the PyTorch reference; they all derive from `TorchRefError`."""

from __future__ import annotations


class TorchRefError(Exception):
    """The base class of all errors that `torch_ref` defines.

    >>> import torch_ref
    >>> try:
    ...     torch_ref.mode_of("checkpoint", "offload")
    ... except torch_ref.TorchRefError as error:
    ...     type(error).__name__
    'InvalidArgumentError'
    """


class InvalidArgumentError(TorchRefError, ValueError):
    """An argument has a wrong type or value.

    >>> import torch_ref
    >>> torch_ref.gradient_checkpointing_disable("a model")
    Traceback (most recent call last):
      ...
    torch_ref.errors.InvalidArgumentError: model is a str, expected a module.
    """


class NothingToOffloadError(TorchRefError, ValueError):
    """A call in offload mode has no tensor that can be moved.

    >>> import torch_ref
    >>> torch_ref.gradient_checkpoint_forward(lambda number: number, True, True, 3)
    Traceback (most recent call last):
      ...
    torch_ref.errors.NothingToOffloadError: ...
    """


class MutatedTensorError(TorchRefError, RuntimeError):
    """An offloaded argument was changed in place between the forward and the backward pass.

    >>> import torch, torch_ref
    >>> x = torch.ones(2, requires_grad=True) * 1
    >>> y = torch_ref.gradient_checkpoint_forward(torch.sin, True, True, x)
    >>> with torch.no_grad():
    ...     _ = x.add_(1)
    >>> y.sum().backward()
    Traceback (most recent call last):
      ...
    torch_ref.errors.MutatedTensorError: ...
    """


class ReboundVariableError(TorchRefError, RuntimeError):
    """A variable that the checkpointed function captures has another value in the backward pass.

    >>> import torch, torch_ref
    >>> y, total = torch.ones(2, requires_grad=True), 0.0
    >>> def run(x):
    ...     for factor in (2.0, 3.0):
    ...         x = torch_ref.gradient_checkpoint_forward(lambda x: torch.sin(x * factor), True, True, x)
    ...     return x
    >>> run(y).sum().backward()
    Traceback (most recent call last):
      ...
    torch_ref.errors.ReboundVariableError: ...
    """


class FakeTensorStepError(TorchRefError, RuntimeError):
    """A training step cannot run on fake tensors because it reads a tensor's value.

    >>> import torch, torch_ref
    >>> def build():
    ...     model = torch.nn.Linear(2, 2)
    ...     return torch_ref.TrainingStep(model, lambda x: model(x).sum() * float(x.sum()), (torch.ones(2, 2),))
    >>> torch_ref.peak_bytes(build)
    Traceback (most recent call last):
      ...
    torch_ref.errors.FakeTensorStepError: ...
    """


class PolicyError(InvalidArgumentError):
    """A policy's text or name is malformed, or the policy has a wrong type.

    >>> import torch_ref
    >>> torch_ref.Policy.parse("keep: @dots")
    Traceback (most recent call last):
      ...
    torch_ref.errors.PolicyError: ...
    """


class NoEffectError(PolicyError):
    """A policy has no effect: a selector matches no array, or a class of blocks is not in the model.

    >>> import torch, torch_ref
    >>> torch_ref.checkpoint_blocks(torch.nn.Linear(2, 2), {torch.nn.LayerNorm: "full"})
    Traceback (most recent call last):
      ...
    torch_ref.errors.NoEffectError: ...
    """


class ChangedRecomputationError(TorchRefError, RuntimeError):
    """A block's recomputation differs from its forward pass: in its operators, in what it saves, or by an error.

    >>> import torch, torch_ref
    >>> runs = []
    >>> def block(x):
    ...     runs.append(x)
    ...     return torch.sin(x) if len(runs) == 1 else torch.sin(torch.cos(torch.exp(x)))
    >>> y = torch_ref.selective_checkpoint(block, "save: @primitive:sin", torch.ones(2, requires_grad=True))
    >>> y.sum().backward()
    Traceback (most recent call last):
      ...
    torch_ref.errors.ChangedRecomputationError: ...
    """
