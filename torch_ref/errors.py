"""Errors of the PyTorch reference; they all derive from `TorchRefError`."""

from __future__ import annotations


class TorchRefError(Exception):
    """Base class of every error that `torch_ref` raises itself."""


class InvalidArgumentError(TorchRefError, ValueError):
    """An argument has a type or a value that cannot be used."""


class NothingToOffloadError(TorchRefError, ValueError):
    """Offload was asked for a call that has no tensor that could be moved."""


class MutatedTensorError(TorchRefError, RuntimeError):
    """An offloaded argument was changed in place between the forward and the backward pass."""


class ReboundVariableError(TorchRefError, RuntimeError):
    """A variable that the checkpointed function captures has another value in the backward pass."""


class FakeTensorStepError(TorchRefError, RuntimeError):
    """A training step cannot be run on fake tensors, because it asks for a tensor's value."""


class PolicyError(InvalidArgumentError):
    """A policy's text or name is malformed, or something else is given for one."""


class NoEffectError(PolicyError):
    """A policy would do nothing: a selector that matches no array, a class of blocks that is not there."""


class ChangedRecomputationError(TorchRefError, RuntimeError):
    """A block computes something else in its recomputation than it did in its forward pass."""
