"""The public function `doctor`, and its result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_ref.diagnosis.flags import watched_flags
from torch_ref.diagnosis.traps import Finding, findings
from torch_ref.diagnosis.watch import Watch
from torch_ref.errors import InvalidArgumentError


@dataclass(frozen=True)
class Diagnosis:
    """The result of `doctor`.

    Attributes:
        findings: the mistakes, in the order of discovery.
        regions: the number of checkpointed regions that ran.

    >>> Diagnosis((), 2).ok
    True
    >>> print(Diagnosis((), 2))
    2 checkpointed region(s), nothing wrong.
    """

    findings: tuple[Finding, ...]
    regions: int

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def __str__(self) -> str:
        if self.ok:
            return f"{self.regions} checkpointed region(s), nothing wrong."
        return "\n".join(f"{finding}" for finding in self.findings)


def doctor(module: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Diagnosis:
    """Run `module(*args, **kwargs)` once, and report mistakes in its gradient checkpointing, each with place and remedy.

    | trap | what it does |
    | --- | --- |
    | `hidden_from_offload` | `save_on_cpu` misses tensors in keywords or containers: they stay on the device |
    | `flag_without_effect` | a flag is set, but nothing reads it or the model makes no checkpoint |
    | `rebound_variable` | a closure reads a loop variable that was rebound: backward recomputes with the wrong layer |
    | `nested_container` | a checkpoint inside a checkpoint holds tensors in a list: the outer checkpoint frees nothing |
    | `mutated_input` | a tensor that a checkpoint keeps was changed in place: backward raises an error or is wrong |
    | `reentrant_without_gradient` | no input of a reentrant checkpoint requires a gradient: its parameters get no gradient |
    | `random_state` | `preserve_rng_state=False` around dropout: backward uses a different mask |
    | `buffers_updated_twice` | the recomputation updates batch statistics or other buffers a second time |

    The module runs forward only, with gradients, in its current training or evaluation mode. Buffers such as batch
    statistics and the random state change as in any call. All calls of `torch.utils.checkpoint.checkpoint` are recorded,
    whatever name the model imports the function under.

    Raises:
        InvalidArgumentError: if `module` cannot be called, or a profiler written in C is active.

    >>> import torch, torch_ref
    >>> from torch.utils.checkpoint import checkpoint
    >>> layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
    >>> print(torch_ref.doctor(lambda x: checkpoint(layer, x, use_reentrant=False), torch.ones(2, 3)))
    1 checkpointed region(s), nothing wrong.
    >>> diagnosis = torch_ref.doctor(
    ...     lambda x: checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False), torch.ones(2, 3)
    ... )
    >>> [finding.trap for finding in diagnosis.findings]
    ['random_state']
    """
    if not callable(module):
        raise InvalidArgumentError(f"module is a {type(module).__name__}, expected a module or a function.")
    root = module if isinstance(module, nn.Module) else None
    with warnings.catch_warnings():
        # PyTorch's warning about a reentrant checkpoint would only repeat a finding.
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        with torch.enable_grad(), watched_flags(root, kwargs) as flags, Watch(root) as watch:
            output = module(*args, **kwargs)
    mistakes = findings(watch.regions, flags)
    del output
    return Diagnosis(tuple(mistakes), len(watch.regions))
