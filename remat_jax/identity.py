"""A mapping keyed by objects themselves, for objects that have no hash or whose `==` is not identity: arrays, modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, TypeVar

T = TypeVar("T")


class ByIdentity(MutableMapping[Any, T]):
    """A dict that compares its keys by `is`, and holds them: the `id` of an object that is gone may be another object's.

    >>> first, second = [1], [1]
    >>> names = ByIdentity([(first, "first")])
    >>> names.get(first), names.get(second)
    ('first', None)
    """

    def __init__(self, items: Iterable[tuple[Any, T]] = ()) -> None:
        self._items: dict[int, tuple[Any, T]] = {}
        self.update(items)

    def __getitem__(self, key: Any) -> T:
        return self._items[id(key)][1]

    def __setitem__(self, key: Any, value: T) -> None:
        self._items[id(key)] = key, value

    def __delitem__(self, key: Any) -> None:
        del self._items[id(key)]

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __or__(self, other: ByIdentity[T]) -> ByIdentity[T]:
        return ByIdentity([*self.items(), *other.items()])
