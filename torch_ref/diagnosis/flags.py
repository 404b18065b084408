"""Flags that request checkpointing, and a record of whether the model reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

ATTRIBUTES = ("gradient_checkpointing", "gradient_checkpointing_enabled", "use_gradient_checkpointing", "use_checkpoint")
KEYWORDS = ("use_gradient_checkpointing", "use_gradient_checkpointing_offload", "use_checkpoint")


@dataclass
class Flag:
    """A flag that is set.

    Attributes:
        name: the attribute or the keyword.
        owner: module path and class of the submodel with the flag; empty for a keyword of the call.
        in_training: whether the submodel is in training mode.
        is_read: whether the run read the flag; a keyword counts as read.
    """

    name: str
    owner: str
    in_training: bool
    is_read: bool


@dataclass
class Flags:
    """All flags that are set."""

    entries: list[Flag] = field(default_factory=list)


@contextmanager
def watched_flags(root: nn.Module | None, kwargs: Mapping[str, Any]) -> Iterator[Flags]:
    """Find the set flags of a model and of a call, and record which flags are read inside the context.

    Inside the context, the classes of submodels with flags are patched to record attribute reads.
    """
    flags = Flags([Flag(name, "", True, True) for name in KEYWORDS if kwargs.get(name) is True])
    watched: dict[int, dict[str, Flag]] = {}
    classes: dict[type, None] = {}
    # Held until the context ends, so that no other module gets the id of one of them.
    modules = list(root.named_modules()) if root is not None else []
    for path, module in modules:
        mine = {
            name: Flag(name, f"{path or 'the model'} ({type(module).__name__})", module.training, False)
            for name in ATTRIBUTES
            if vars(module).get(name) is True
        }
        if mine:
            flags.entries += mine.values()
            watched[id(module)] = mine
            classes[type(module)] = None
    with ExitStack() as stack:
        for cls in classes:
            stack.enter_context(_reading(cls, watched))
        yield flags


@contextmanager
def _reading(cls: type, watched: Mapping[int, Mapping[str, Flag]]) -> Iterator[None]:
    """Record attribute reads. The class is patched and not replaced, so that `type(module)` stays the same."""
    own_method: Any = vars(cls).get("__getattribute__")
    original: Any = cls.__getattribute__

    def __getattribute__(self: Any, name: str) -> Any:
        if name in ATTRIBUTES and name in watched.get(id(self), ()):
            watched[id(self)][name].is_read = True
        return original(self, name)  # an AttributeError makes Python call `__getattr__`

    cls.__getattribute__ = __getattribute__  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        if own_method is None:
            del cls.__getattribute__
        else:
            cls.__getattribute__ = own_method  # type: ignore[method-assign]
