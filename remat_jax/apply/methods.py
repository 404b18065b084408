"""Blocks that are methods: `Model.encode`, the function that a class defines, stands for the calls of this method.

Python does not record the class of a function, so the class is looked up among the loaded classes. A class may have one
function under several names (`__call__ = forward`); a call of one of these names is then a call of all of them.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from remat_jax.errors import ArgumentError

CALL = "__call__"
_NOT_RUN = frozenset({"__init__", "__post_init__", "__new__", "setup"})


@dataclass(frozen=True)
class Method:
    """The method `name` of `classes`, and of their subclasses, also where they define it anew.

    Several classes may share one function.
    """

    classes: tuple[type, ...]
    name: str


# Function → (its classes, its name). A class holds the function, so the class must not be held here.
_methods: weakref.WeakKeyDictionary[Any, tuple[weakref.WeakSet[type], str]] = weakref.WeakKeyDictionary()


def method_of(block: object) -> Method | None:
    """The method that `checked_method` found for `block`; None for every other block."""
    known = _methods.get(block) if callable(block) and not isinstance(block, type) and is_hashable(block) else None
    return None if known is None else Method(tuple(known[0]), known[1])


def checked_method(block: object, argument: str) -> bool:
    """Whether `block` is a method of a class. Its `Method` is remembered.

    Raises:
      ArgumentError: it is a bound method, a property, a class method or a static method, or it does not run a layer.
    """
    name = _name_in_its_class(block)
    if isinstance(block, property):
        raise ArgumentError(f"{argument}=property {name!r}: a property has no call. {_INSTEAD}")
    if inspect.ismethod(block):
        owner = block.__self__
        if isinstance(owner, type):
            raise ArgumentError(f"{argument}={owner.__name__}.{name}: a class method runs on no instance. {_INSTEAD}")
        cls = type(owner).__name__
        raise ArgumentError(f"{argument}: a method of one instance of {cls}; name the method of the class, {cls}.{name}")
    if method_of(block) is not None:
        return True
    owners = [cls for cls in subclasses(object) if isinstance(name, str) and _has(cls, name, block)] if callable(block) else []
    if not owners:
        return False
    cls, name = owners[0], str(name)
    if isinstance(vars(cls)[name], staticmethod):
        raise ArgumentError(f"{argument}={cls.__name__}.{name}: a static method runs on no instance. {_INSTEAD}")
    if name in _NOT_RUN:
        raise ArgumentError(f"{argument}={cls.__name__}.{name}: this method makes the module. {_INSTEAD}")
    _methods[block] = weakref.WeakSet(owners), name
    return True


_INSTEAD = "Name a method that instances run, such as Layer.encode, or a class, whose __call__ is then the block."


def is_hashable(value: object) -> bool:
    """Whether `value` can be a key."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _name_in_its_class(block: object) -> str | None:
    """The name under which a loaded class has `block`: that of the function, or another (`__call__ = forward`)."""
    name = getattr(block, "__name__", None) or getattr(getattr(block, "fget", None), "__name__", None)
    if not callable(block) or any(_has(cls, str(name), block) for cls in subclasses(object)):
        return name
    return next((name for cls in subclasses(object) for name, value in list(vars(cls).items()) if value is block), name)


def _has(cls: type, name: str, function: object) -> bool:
    own = vars(cls).get(name)
    if own is None or own is function or not hasattr(own, "__get__") or isinstance(own, property):
        return own is not None and own is function
    try:
        return getattr(cls, name) is function
    except Exception:  # whatever the descriptor of a foreign class raises, such as TorchScript's `forward`
        return False


def block_path(path: str, method: str) -> str:
    """The path of a block in the names of its residuals: the module's path, and the method if it is not `__call__`.

    >>> block_path("layers/0", CALL), block_path("layers/0", "encode")
    ('layers/0', 'layers/0.encode')
    """
    return path if method == CALL else f"{path}.{method}"


def names_of(cls: type, function: Callable[..., Any]) -> list[str]:
    """The names that a class has for a function, `__call__` first. Decorators that use `functools.wraps` do not count."""
    wanted = inspect.unwrap(function)
    attributes = (item for base in cls.__mro__ for item in list(vars(base).items()))
    names = [name for name, value in attributes if callable(value) and inspect.unwrap(value) is wanted]
    same = [name for name in dict.fromkeys(names) if inspect.unwrap(getattr(cls, name)) is wanted]
    return [*same] if CALL not in same else [CALL, *(name for name in same if name != CALL)]


def first_name(cls: type, method: str, function: Callable[..., Any] | None = None) -> str:
    """The first of the names that a class has for its `method`; `function`, if the class may have no such name."""
    function = getattr(cls, method, None) if function is None else function
    return method if method == CALL or function is None else next(iter(names_of(cls, function)), method)


def defines(cls: type, method: str) -> bool:
    """Whether a class has this method, inherited or not. Every class would inherit the `__call__` of its metaclass."""
    return any(method in vars(base) for base in cls.__mro__)


def with_own_method(cls: Any, method: str = CALL) -> Iterator[type]:
    """The subclasses, at any depth, that define the method themselves."""
    for subclass in type.__subclasses__(cls):
        if method in vars(subclass):
            yield subclass
        yield from with_own_method(subclass, method)


def classes_and_methods(blocks: Iterable[object]) -> Iterator[tuple[type, str]]:
    """The classes among `blocks` with their `__call__`, and the methods with their classes, under each of their names."""
    for block in blocks:
        method = method_of(block)
        classes, name = ((block,), CALL) if isinstance(block, type) else (method.classes, method.name) if method else ((), "")
        for cls in classes:
            yield cls, name
            yield from ((cls, other) for other in names_of(cls, getattr(cls, name)) if other != name and defines(cls, name))


def subclasses(base: type) -> list[Any]:
    """All subclasses, each once, in the order of their definition."""
    found: dict[Any, None] = {}
    waiting: list[Any] = list(type.__subclasses__(base))
    while waiting:
        each = waiting.pop(0)
        if each not in found and each is not type:
            found[each] = None
            waiting += type.__subclasses__(each)
    return list(found)


def loaded_methods(qualname: str) -> list[Any]:
    """The methods of this qualified name (`Layer.encode`) of all loaded classes."""
    owner, _, name = qualname.rpartition(".")
    loaded = [getattr(cls, name) for cls in subclasses(object) if cls.__qualname__ == owner and name in vars(cls)]
    return [method for method in loaded if getattr(method, "__qualname__", "") == qualname and checked_method(method, "block")]
