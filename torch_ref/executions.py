"""Count executed matrix multiplications and block calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ref.errors import InvalidArgumentError

MATMULS = {
    torch.ops.aten.mm.default: ("mm", 0),
    torch.ops.aten.addmm.default: ("addmm", 1),
    torch.ops.aten.bmm.default: ("bmm", 0),
    torch.ops.aten.baddbmm.default: ("baddbmm", 1),
}


@dataclass(frozen=True)
class Matmul:
    """One matrix multiplication: `operator` is `mm`, `addmm`, `bmm` or `baddbmm`; `left` and `right` are shapes.

    >>> Matmul("mm", (2, 3), (3, 5)).flops  # 2 · 2 · 3 · 5
    60
    """

    operator: str
    left: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def flops(self) -> int:
        """Floating-point operations: two per multiply-add; an added bias is not counted."""
        flops = 2 * self.right[-1]
        for size in self.left:
            flops *= size
        return flops


@dataclass
class MatmulCount:
    """The matrix multiplications that were executed.

    Attributes:
        executed: the multiplications, in order.

    >>> count = MatmulCount([Matmul("mm", (2, 3), (3, 5)), Matmul("bmm", (4, 2, 3), (4, 3, 5))])
    >>> count.total, count.flops, dict(count.per_operator)
    (2, 300, {'mm': 1, 'bmm': 1})
    """

    executed: list[Matmul] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The number of matrix multiplications."""
        return len(self.executed)

    @property
    def per_operator(self) -> dict[str, int]:
        """The number of matrix multiplications of each operator."""
        return dict(Counter(matmul.operator for matmul in self.executed))

    @property
    def flops(self) -> int:
        """The floating-point operations of all matrix multiplications."""
        return sum(matmul.flops for matmul in self.executed)


@contextmanager
def count_matmuls() -> Iterator[MatmulCount]:
    """Count the matrix multiplications executed in the `with` block: forward, backward and recomputation.

    The counted operators are `mm`, `addmm`, `bmm` and `baddbmm`, to which linear layers and explicit attention reduce.
    Fused attention (`scaled_dot_product_attention`), convolutions and matrix-vector products are not counted.

    >>> import torch, torch_ref
    >>> layer, x = torch.nn.Linear(3, 5), torch.ones(2, 3)
    >>> with torch_ref.count_matmuls() as count:
    ...     layer(x).sum().backward()
    >>> count.total, count.per_operator, count.flops
    (2, {'addmm': 1, 'mm': 1}, 120)
    """
    count = MatmulCount()
    with _MatmulMode(count):
        yield count


class _MatmulMode(TorchDispatchMode):
    def __init__(self, count: MatmulCount) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in MATMULS:
            operator, first = MATMULS[func]
            self._count.executed.append(Matmul(operator, tuple(args[first].shape), tuple(args[first + 1].shape)))
        return func(*args, **(kwargs or {}))


@dataclass
class CallCount:
    """How often each watched block was started.

    Attributes:
        per_module: the number of calls of each module.

    >>> import torch, torch_ref
    >>> layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    >>> with torch_ref.count_calls(layer) as calls:
    ...     torch_ref.gradient_checkpoint_forward(layer, True, False, x).sum().backward()
    >>> calls.per_module[layer]  # again in the backward pass
    2
    """

    per_module: Counter[nn.Module] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """The number of calls of all watched modules."""
        return sum(self.per_module.values())

    @property
    def per_class(self) -> dict[str, int]:
        """For each class name: the number of calls of all modules of the class."""
        by_class: Counter[str] = Counter()
        for module, calls in self.per_module.items():
            by_class[type(module).__name__] += calls
        return dict(by_class)


@contextmanager
def count_calls(*blocks: nn.Module | type[nn.Module]) -> Iterator[CallCount]:
    """Count how often modules start in the `with` block; for a class, all modules of the class are counted.

    Starts are counted, also during recomputation. Ends are not counted: a recomputation stops once backward has the tensors
    it needs, and may never reach the end of the block, where forward hooks run.

    Raises:
        InvalidArgumentError: if a block is neither a module nor a class of modules, or if no block is given.

    >>> import torch, torch_ref
    >>> block, x = torch.nn.Sigmoid(), torch.ones(2, requires_grad=True)
    >>> with torch_ref.count_calls(torch.nn.Sigmoid) as calls:
    ...     torch_ref.gradient_checkpoint_forward(block, True, False, input=x).sum().backward()
    >>> calls.total, calls.per_class
    (2, {'Sigmoid': 2})
    """
    classes = tuple(block for block in blocks if isinstance(block, type) and issubclass(block, nn.Module))
    modules = {block for block in blocks if isinstance(block, nn.Module)}
    for block in blocks:
        if not isinstance(block, nn.Module) and block not in classes:
            raise InvalidArgumentError(
                f"blocks contains {block!r}, expected modules or classes of modules; wrap a function in a module."
            )
    if not blocks:
        raise InvalidArgumentError("blocks is empty, expected at least one module or class of modules.")
    count = CallCount()

    def started(module: nn.Module, _: Any) -> None:
        if module in modules or isinstance(module, classes):
            count.per_module[module] += 1

    handle = register_module_forward_pre_hook(started)
    _watching.append(started)
    try:
        yield count
    finally:
        handle.remove()
        _watching.remove(started)


def note_start(module: nn.Module) -> None:
    """Count a start of a module's forward that bypasses the module's `__call__`."""
    for started in _watching:
        started(module, ())


_watching: list[Callable[[nn.Module, Any], None]] = []
