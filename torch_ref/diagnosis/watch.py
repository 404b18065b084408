"""Records the checkpointed regions of a run, their arguments, and later changes to the arguments.

Users import `torch.utils.checkpoint.checkpoint` by name, so a patch of its module would miss their calls. A profile function
sees the frames of all calls.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import TensorWeakRef

from torch_ref.buffers import Buffers
from torch_ref.captures import Captures, captured, reached_modules
from torch_ref.errors import InvalidArgumentError
from torch_ref.host import nbytes_of, version_of
from torch_ref.operators import draws
from torch_ref.receipts import name_of
from torch_ref.replay import Replay

_CHECKPOINT = inspect.unwrap(checkpoint).__code__
_ENTER, _EXIT = saved_tensors_hooks.__enter__.__code__, saved_tensors_hooks.__exit__.__code__
_OURS = os.path.dirname(os.path.dirname(__file__))
_PLUMBING = (
    os.path.dirname(torch.__file__) + os.sep,
    *(
        os.path.join(_OURS, name)
        for name in ("checkpoint.py", "offload.py", "selective.py", "blocks.py", "region.py", "replay.py", "faithful.py")
    ),
)


class Argument:
    """A tensor argument of a region.

    Attributes:
        where: the argument's position, such as `argument 0` or `keyword 'x'`.
        is_hidden: whether the tensor is in a container or a keyword, where saved-tensor hooks miss it.
    """

    def __init__(self, tensor: torch.Tensor, where: str, is_hidden: bool) -> None:
        self.where, self.is_hidden = where, is_hidden
        self.shape, self.nbytes, self.requires_grad = tuple(tensor.shape), nbytes_of(tensor), tensor.requires_grad
        self.is_parameter = isinstance(tensor, nn.Parameter)
        self._tensor, self._version = TensorWeakRef(tensor), version_of(tensor)

    @property
    def is_mutated(self) -> bool:
        """Whether the tensor is alive and was changed in place after the region started."""
        tensor = self._tensor()
        return tensor is not None and version_of(tensor) != self._version


@dataclass
class Region:
    """A call of `torch.utils.checkpoint.checkpoint`.

    Attributes:
        block: name of the checkpointed block.
        place: `file:line (function)` of the call, and of the call one frame further out.
        is_reentrant: whether the checkpoint is reentrant.
        keeps_random_state: whether the recomputation uses forward's random state.
        is_nested: whether the region is inside another region.
        is_hooked: whether saved-tensor hooks, such as an offload's, are active around the region.
        is_trainable: whether the block has parameters, or captures tensors, that require a gradient.
        arguments: the region's tensor arguments.
        is_random: whether an operator in the region drew random numbers.
        mutated_inside: the arguments that were changed in place while the region ran.
        rewritten: the buffers that changed while the region ran, if the recomputation will change them again.
        captures: the captured variables of the block's function and of each function that it captures.
        buffers: the buffers before the region ran; None if `torch_ref` restores them for the recomputation.
    """

    block: str
    place: str
    is_reentrant: bool
    keeps_random_state: bool
    is_nested: bool
    is_hooked: bool
    is_trainable: bool
    arguments: list[Argument]
    is_random: bool = False
    mutated_inside: list[Argument] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    captures: list[Captures] = field(default_factory=list)
    buffers: Buffers | None = None


class Watch(TorchDispatchMode):
    """Records every region that this thread runs inside the context."""

    def __init__(self, root: nn.Module | None) -> None:
        super().__init__()
        self.regions: list[Region] = []
        self._paths = {module: path for path, module in root.named_modules() if path} if root is not None else {}
        self._open: list[tuple[types.FrameType, Region]] = []
        self._hooks = 0

    def __enter__(self) -> Watch:
        self._before = sys.getprofile()
        if self._before is not None and not callable(self._before):
            raise InvalidArgumentError(
                f"a profiler written in C ({type(self._before).__name__}) is active, expected none: Python cannot restore it "
                "after another profiler. Call doctor outside cProfile and torch.profiler(with_stack=True)."
            )
        super().__enter__()
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(self._before)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._open and draws(func, args, kwargs or {}):
            for _, region in self._open:
                region.is_random = True
        return func(*args, **(kwargs or {}))

    def _profile(self, frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code is _CHECKPOINT and torch.is_grad_enabled():
            region = self._region(frame)
            self.regions.append(region)
            self._open.append((frame, region))
        elif event == "return" and self._open and frame is self._open[-1][0]:
            _, region = self._open.pop()
            region.mutated_inside = [argument for argument in region.arguments if argument.is_mutated]
            region.rewritten = region.buffers.changed() if region.buffers is not None else []
        elif event == "call" and code is _ENTER:
            self._hooks += 1
        elif event == "call" and code is _EXIT:
            self._hooks -= 1

    def _region(self, frame: types.FrameType) -> Region:
        frame_locals = frame.f_locals
        function: Any = frame_locals["function"]
        keywords = dict(frame_locals["kwargs"])
        keeps_random_state = keywords.pop("preserve_rng_state", True)
        buffers = None
        if isinstance(function, Replay):
            # A Replay takes tensors out of containers and passes them one by one, so none is hidden.
            function, arguments = function.block, _arguments(pytree.tree_leaves(function.arguments), {})
        else:
            arguments = _arguments(frame_locals["args"], keywords)
            buffers = Buffers(reached_modules(function, pytree.tree_leaves((frame_locals["args"], keywords))))
        reached = list(_reached(function))
        return Region(
            block=self._name(reached, function),
            place=_place(frame),
            is_reentrant=frame_locals["use_reentrant"] is not False,
            keeps_random_state=keeps_random_state,
            is_nested=bool(self._open),
            is_hooked=self._hooks > 0,
            is_trainable=any(_is_trainable(value) for value in reached),
            arguments=arguments,
            captures=[Captures(value) for value in reached if isinstance(value, types.FunctionType)],
            buffers=buffers,
        )

    def _name(self, reached: list[Any], function: Callable[..., Any]) -> str:
        for value in reached:
            if isinstance(value, nn.Module):
                return f"{self._paths[value]} ({name_of(value)})" if value in self._paths else name_of(value)
        return name_of(function)


def _arguments(positional: Any, keywords: dict[str, Any]) -> list[Argument]:
    places = [(f"argument {k}", value, False) for k, value in enumerate(positional)]
    places += [(f"keyword {key!r}", value, True) for key, value in keywords.items()]
    arguments = []
    for where, value, is_keyword in places:
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                arguments.append(Argument(leaf, where + pytree.keystr(path), is_keyword or bool(path)))
    return arguments


def _reached(function: Callable[..., Any]) -> Iterator[Any]:
    """The function, and the modules and functions that it captures, outermost first."""
    waiting: list[Any] = [function]
    seen: dict[int, Any] = {}  # holds the values, so that no other value gets their ids
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            waiting += [value.__self__, value.__func__]
        elif isinstance(value, types.FunctionType):
            if not value.__code__.co_filename.startswith(_PLUMBING[0]):
                yield value
            waiting += value.__defaults__ or ()
            waiting += [cell.cell_contents for cell in value.__closure__ or () if _is_bound(cell)]
            waiting += [module for module in captured(value).values() if isinstance(module, nn.Module)]
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, nn.Module | torch.Tensor):
            yield value
        elif value is function or isinstance(function, types.MethodType) and value is function.__self__:
            waiting += vars(value).values() if hasattr(value, "__dict__") else ()


def _is_bound(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_trainable(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return any(parameter.requires_grad for parameter in value.parameters())
    return isinstance(value, torch.Tensor) and value.requires_grad


def _place(frame: types.FrameType) -> str:
    """The line that calls `checkpoint`, often in a helper function, and the line that calls this helper."""
    lines: list[str] = []
    at = frame.f_back
    while at is not None and len(lines) < 2:
        if not at.f_code.co_filename.startswith(_PLUMBING):
            lines.append(f"{os.path.relpath(at.f_code.co_filename)}:{at.f_lineno} ({at.f_code.co_name})")
        at = at.f_back
    return ", from ".join(lines)
