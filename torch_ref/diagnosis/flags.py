"""Flags that ask for checkpointing, and whether anybody reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
        owner: module path and class of the submodel that carries it; empty for a keyword of the call.
        in_training: whether that submodel is in training mode.
        is_read: whether the run asked for its value; a keyword counts as read.
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
    """Find the flags of a model and of a call, and note which ones are read meanwhile.

    A submodel with a flag changes its class for the time to a subclass of the same name that sees attributes being read.
    """
    found = Flags([Flag(name, "", True, True) for name in KEYWORDS if kwargs.get(name) is True])
    plain: list[tuple[nn.Module, type]] = []
    for path, module in root.named_modules() if root is not None else ():
        mine = {
            name: Flag(name, f"{path or 'the model'} ({type(module).__name__})", module.training, False)
            for name in ATTRIBUTES
            if vars(module).get(name) is True
        }
        if mine:
            found.entries += mine.values()
            plain.append((module, type(module)))
            module.__class__ = _reading(type(module), mine)
    try:
        yield found
    finally:
        for module, cls in plain:
            module.__class__ = cls


def _reading(cls: type, flags: Mapping[str, Flag]) -> type:
    def __getattribute__(self: Any, name: str) -> Any:
        if name in flags:
            flags[name].is_read = True
        return object.__getattribute__(self, name)

    body = {"__getattribute__": __getattribute__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    watched = type(cls.__name__, (cls,), body)
    return watched
