"""The Flax classes that hold the weights of PyTorch's blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flax import nnx


def find_blocks(module: Any, seen: Mapping[str, type], torch: Any, sources: Mapping[str, tuple[str, ...]]) -> tuple[type, ...]:
    """The classes of the Flax modules that hold exactly the weights of PyTorch's blocks; empty where there are none.

    `seen` has the classes of Linen's modules by path, met while one ran; `sources` the tensors that fill each variable.
    """
    classes = dict(seen)
    if isinstance(module, nnx.Module):
        nodes = ((path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Module))
        classes = {re.sub(r"/(\d+)(?=/|$)", r"_\1", "/".join(map(str, path))): type(node) for path, node in nodes}
    names = [name for name in torch.weights if any(name in torches for torches in sources.values())]
    found: dict[type, None] = {}
    for prefix in _prefixes(names, torch.block_paths):
        paths = [path for path, torches in sources.items() if any(name.startswith(f"{prefix}.") for name in torches)]
        kind = classes.get(_common(paths)) if paths else None
        if kind is not None:
            found[kind] = None
    return tuple(found)


def _prefixes(names: list[str], paths: list[str]) -> list[str]:
    return [path for path in paths if any(name.startswith(f"{path}.") for name in names)]


def _common(paths: list[str]) -> str:
    """The path of the innermost module that has all these variables: without the collection, and the variable's name."""
    modules = [path.split("/")[1:-1] for path in paths]
    shared = []
    for parts in zip(*modules, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)
