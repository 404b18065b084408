"""`checkpoint_blocks`: apply policies to the blocks of a finished model without editing it."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_ref.errors import InvalidArgumentError, NoEffectError
from torch_ref.executions import note_start
from torch_ref.policy import Policy
from torch_ref.selective import Seen, check_effect, run_under


def checkpoint_blocks(
    model: nn.Module, policies: Mapping[type[nn.Module], Policy | str], *, in_evaluation: bool = False
) -> AppliedPolicies:
    """Apply a policy to every submodule of the named classes, without editing the model.

    Parameter names, the state dict and the classes stay the same; outputs and gradients equal those of the plain model. In
    training with gradients enabled, each block is called as by `selective_checkpoint`. The names of its arrays start with
    the block's path in the model, such as `decoder/layers/0/self_attn:dot_general#0`. A block is called plainly in evaluation
    mode or with gradients disabled. If several classes match a module, the first class wins. A copy of the model
    (`copy.deepcopy`) has the same policies until they are removed.

    Every policy must have an effect. At the end of each training forward pass of `model`, and at the end of the `with` block,
    three cases raise an error: a selector that matched nothing in any block, an offload that moved nothing, and a class whose
    blocks were never called.

    Args:
        model: the model, or a part of one.
        policies: maps a class of modules (subclasses count) to a policy, its name or its text.
        in_evaluation: apply the policies to blocks in evaluation mode too, to differentiate a model without dropout.

    Returns:
        The applied policies; `remove()`, or the end of a `with` block, removes them.

    Raises:
        InvalidArgumentError: if an argument has the wrong type, or a block already has a policy.
        PolicyError: if a policy is malformed.
        NoEffectError: if `model` has no module of a class, or earlier classes match all modules of the class. After a forward
            pass: for a selector or a class without effect, as above.
        NothingToOffloadError: after a forward pass, for an offload that moved nothing, as above.

    >>> import torch, torch_ref
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, num_layers=3)
    >>> x = torch.ones(2, 5, 8, requires_grad=True)
    >>> def products():
    ...     with torch_ref.count_matmuls() as count:
    ...         model(x).sum().backward()
    ...     return count.total
    >>> with torch_ref.checkpoint_blocks(model, {type(layer): "save: *self_attn*:dot_general*"}):
    ...     products()
    60
    >>> products()
    54
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}, expected a module; a function is for selective_checkpoint."
        )
    return AppliedPolicies(model, checked_policies(policies), in_evaluation=in_evaluation)


class AppliedPolicies:
    """The policies that `checkpoint_blocks` put on a model; a context manager.

    Attributes:
        blocks: maps the path of each block in the model to its policy.

    >>> import torch, torch_ref
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> with torch_ref.checkpoint_blocks(model, {torch.nn.Linear: "full"}) as applied:
    ...     model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    >>> sorted(applied.blocks)
    ['0', '1']
    """

    def __init__(
        self,
        model: nn.Module,
        policies: dict[type[nn.Module], Policy],
        only: Collection[nn.Module] | None = None,
        *,
        in_evaluation: bool = False,
    ) -> None:
        self._only, self._in_evaluation = only, in_evaluation
        self._records = [_Record(block, policy) for block, policy in policies.items()]
        records = {
            path: (module, self._record_for(module)) for path, module in model.named_modules() if only is None or module in only
        }
        placed = {path: (module, record) for path, (module, record) in records.items() if record is not None}
        self._check_placed(model, [record for _, record in placed.values()])
        self._forwards = [_Forward(self, m, record, path.replace(".", "/")) for path, (m, record) in placed.items()]
        for forward in self._forwards:
            forward.check_free()
        for forward in self._forwards:
            forward.install()
        self.blocks = {forward.path: forward.record.policy for forward in self._forwards}
        self._model = model
        self._hooks = [model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end)]
        self.is_removed = False

    def remove(self) -> None:
        """Remove the policies; the blocks of the model and of its copies are called plainly again."""
        self.is_removed = True
        for forward in self._forwards:
            forward.uninstall()
        for hook in self._hooks:
            hook.remove()
        self._forwards, self._hooks = [], []

    def remove_from(self, model: nn.Module) -> None:
        """Remove the policies from `model` and its copies; if `model` itself is a copy, only from this copy."""
        if model is self._model:
            self.remove()
            return
        for module in model.modules():
            forward = module.__dict__.get("forward")
            if isinstance(forward, _Forward) and forward._applied is self:
                forward.uninstall()
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]

    def again(self, model: nn.Module) -> AppliedPolicies:
        """Apply the same policies to the same blocks again, after they were removed."""
        policies = {record.block: record.policy for record in self._records}
        return AppliedPolicies(model, policies, self._only, in_evaluation=self._in_evaluation)

    def applies_to(self, module: nn.Module) -> bool:
        """Whether a call of `module` would use its policy now."""
        return (module.training or self._in_evaluation) and torch.is_grad_enabled() and not self.is_removed

    def __enter__(self) -> AppliedPolicies:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self.remove()
        if failed is None:
            # Skip policies that a forward pass has proven effective: a later recomputation may have run only part of the model.
            self._check([record for record in self._records if not record.is_proven])

    def __deepcopy__(self, memo: dict[int, Any]) -> AppliedPolicies:
        return self

    def _record_for(self, module: nn.Module) -> _Record | None:
        return next((record for record in self._records if isinstance(module, record.block)), None)

    def _check_placed(self, model: nn.Module, placed: list[_Record]) -> None:
        for record in self._records:
            if not any(record is used for used in placed):
                classes = sorted({type(module).__name__ for module in model.modules()})
                taken = any(isinstance(module, record.block) for module in model.modules())
                why = "classes listed before it match all of its modules" if taken else "it has no module"
                raise NoEffectError(
                    f"policies has {record.block.__name__}, but {why} in the model, a {type(model).__name__}; its modules are"
                    f" of {', '.join(classes)}. Name one of these, the class whose forward runs once per layer."
                )

    def _begin(self, model: nn.Module, _: Any) -> None:
        if not self.is_removed:
            for record in self._records:
                record.clear()

    def _end(self, model: nn.Module, _: Any, __: Any) -> None:
        if self.applies_to(model):
            self._check(self._records)

    def _check(self, records: list[_Record]) -> None:
        for record in records:
            seen, was_called = record.seen, record.was_called
            record.seen = []
            if seen:
                check_effect(record.policy, seen)
            elif not was_called:
                raise NoEffectError(
                    f"policies has {record.block.__name__}, but no block of this class was called, so its policy has no "
                    "effect. Name the class whose forward runs, call the block itself (and not its forward's parts), or "
                    "leave the class out."
                )
            record.is_proven = True


@dataclass(eq=False)
class _Record:
    """A class of blocks, its policy, and the calls since the last check."""

    block: type[nn.Module]
    policy: Policy
    was_called: bool = False
    is_proven: bool = False
    seen: list[Seen] = field(default_factory=list)

    def clear(self) -> None:
        self.was_called, self.seen = False, []


class _Forward:
    """Replaces the `forward` of a module by a call under its policy."""

    def __init__(self, applied: AppliedPolicies, module: nn.Module, record: _Record, path: str) -> None:
        self._applied, self._module, self.record, self.path = applied, module, record, path
        # Another library may have replaced the module's forward too: call that replacement, and restore it on removal.
        self._replaced: Callable[..., Any] | None = module.__dict__.get("forward")
        functools.update_wrapper(self, self._original(), updated=())

    def check_free(self) -> None:
        before = self._replaced
        if isinstance(before, _Forward) and not before._applied.is_removed:
            raise InvalidArgumentError(
                f"model already has a policy on its module {self.path!r}: {str(before.record.policy)!r}. Remove it first: "
                "call remove() on the result of checkpoint_blocks."
            )

    def install(self) -> None:
        self._module.__dict__["forward"] = self

    def uninstall(self) -> None:
        if self._replaced is None:
            self._module.__dict__.pop("forward", None)
        else:
            self._module.__dict__["forward"] = self._replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._original()
        if self._applied.is_removed:
            return run(*args, **kwargs)
        self.record.was_called = True
        if not self._applied.applies_to(self._module):
            return run(*args, **kwargs)
        output, seen = run_under(self._module, self._noting_starts(run), self.record.policy, self.path, args, kwargs)
        if seen is not None:
            self.record.seen.append(seen)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        # `memo` already has the copied module, because a module is copied before its attributes.
        made = _Forward.__new__(_Forward)
        made._applied, made.record, made.path = self._applied, self.record, self.path
        made._module, made._replaced = copy.deepcopy(self._module, memo), copy.deepcopy(self._replaced, memo)
        functools.update_wrapper(made, made._original(), updated=())
        return made

    def _noting_starts(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `run` to call `note_start` at each start after the first; module hooks count the first start."""
        starts = itertools.count()

        def noted(*args: Any, **kwargs: Any) -> Any:
            if next(starts):
                note_start(self._module)
            return run(*args, **kwargs)

        return noted

    def _original(self) -> Callable[..., Any]:
        return self._replaced or type(self._module).forward.__get__(self._module)


def checked_policies(policies: object) -> dict[type[nn.Module], Policy]:
    """Check that `policies` maps classes of modules to policies, and parse the policies.

    Raises:
        InvalidArgumentError, PolicyError: the message quotes the wrong value.
    """
    if not isinstance(policies, Mapping) or not policies:
        raise InvalidArgumentError(
            f"policies is {policies!r}, expected a mapping from classes of modules to policies with at least one entry,"
            " such as {DecoderLayer: 'full'}."
        )
    for block in policies:
        if not (isinstance(block, type) and issubclass(block, nn.Module)):
            raise InvalidArgumentError(f"policies has the key {block!r}, expected a class of modules; the class, not a module.")
    return {block: Policy.parse(policy, f"policies[{block.__name__}]") for block, policy in policies.items()}
