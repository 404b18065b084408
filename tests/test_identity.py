"""Tables about objects hold the objects: Python gives the id of an object that is gone to the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx

import remat_jax as rj
from remat_jax.apply import nnx as nnx_blocks
from remat_jax.apply.calls import entered, is_inside

MANY = 20


class Part(nnx.Module):
    pass


class Whole(nnx.Module):
    def __init__(self) -> None:
        self.part, self.other = Part(), Part()


def test_a_new_module_has_not_the_path_of_a_replaced_one() -> None:
    whole: Any = Whole()
    with nnx_blocks.known_paths(whole):
        paths = [nnx_blocks.path_of(whole.part)]
        for _ in range(MANY):
            whole.part = None
            fresh = whole.part = Part()
            paths.append(nnx_blocks.path_of(fresh))
            del fresh
    assert paths == ["part", *["Part"] * MANY]


def test_a_new_object_is_not_inside_the_block_of_one_that_is_gone() -> None:
    with entered(Part()):
        assert not any(is_inside(Part()) for _ in range(MANY))


class Lazy(Mapping[str, Any]):
    """A state dict that reads each tensor anew, as a file does."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __getitem__(self, name: str) -> Any:
        return np.full(3000, self.names.index(name), np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def test_tensors_that_are_read_one_by_one_are_not_one_tensor() -> None:
    names = tuple("abcd")
    variables = {"params": {name: np.zeros(3000, np.float32) for name in names}}
    filled = rj.porting.from_torch(Lazy(names), variables, [f"{name} -> params/{name}" for name in names])
    assert [float(filled["params"][name][0]) for name in names] == [0, 1, 2, 3]
