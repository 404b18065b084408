"""Transforms: sequences of steps, with a name or a text such as `split(0) | (h d) e -> e h d`."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

from remat_jax.errors import PortingError, nearest
from remat_jax.porting.steps import Arrays, Concat, Flip, GruBias, Rearrange, Scale, Shape, Shift, Split, Step, Sum

# The tests check values and gradients of each transform in float64 against the PyTorch module that it is for.
NAMED: dict[str, str] = {
    "identity": "",
    "linear": "o i -> i o",
    "conv1d": "o i w -> w i o",
    "conv2d": "o i h w -> h w i o",
    "conv3d": "o i d h w -> d h w i o",
    # For Flax's ConvTranspose with transpose_kernel=True.
    "conv_transpose1d": "i o w -> w o i",
    "conv_transpose2d": "i o h w -> h w o i",
    "conv_transpose3d": "i o d h w -> d h w o i",
    # For Flax's MultiHeadDotProductAttention: query, key, value; their biases; out.
    "heads": "(h d) e -> e h d",
    "heads_bias": "(h d) -> h d",
    "heads_out": "e (h d) -> h d e",
    # PyTorch's fused in_proj, and GPT-2's c_attn, whose Conv1D weight has the shape (in, out).
    "in_proj": "split(0) | (h d) e -> e h d",
    "in_proj_bias": "split(0) | (h d) -> h d",
    "gpt2_qkv": "split(1) | e (h d) -> e h d",
    # For a PyTorch norm that multiplies by 1 + weight, if the Flax norm multiplies by its scale.
    "norm_plus_one": "shift(1)",
    # For weight_ih and weight_hh of recurrent cells: the gates are i, f, g, o in an LSTM, and r, z, n in a GRU.
    "gates": "split(0) | o i -> i o",
    "lstm_bias": "sum | split(0)",
}

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_INTEGERS = r"-?\d{1,9}(?:\s*,\s*-?\d{1,9})*"


@dataclass(frozen=True)
class Transform:
    """A sequence of steps from PyTorch to Flax. Raises PortingError for an unknown step, and for shapes that do not fit.

    >>> Transform.parse("in_proj").before([(8, 2, 4)] * 3, 1)
    [(24, 8)]
    >>> str(Transform.parse("o i -> i o"))
    'linear'
    """

    steps: tuple[Step, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Transform:
        """The transform written as a name, a step, or several of them separated by `|`."""
        return cls(_parsed(text))

    def __str__(self) -> str:
        names = [name for name in NAMED if Transform.parse(name) == self]
        return names[0] if names else " | ".join(map(str, self.steps))

    def before(self, after: list[Shape], count: int) -> list[Shape]:
        """The shapes of the `count` PyTorch tensors that become Flax arrays of the shapes `after`."""
        return self._chain(after, count)[0]

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        """Convert PyTorch's values to Flax's; the results have the shapes `after`."""
        return self._to_flax("forward", arrays, after)

    def gradient(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        """Convert PyTorch's gradients to Flax's, of the shapes `after`, by the inverse of `adjoint`."""
        return self._to_flax("gradient", arrays, after)

    def inverse(self, arrays: Arrays, count: int) -> Arrays:
        """Convert Flax's values to the `count` tensors of PyTorch."""
        return self._to_torch("inverse", arrays, count)

    def adjoint(self, arrays: Arrays, count: int) -> Arrays:
        """Convert Flax's gradients to those of the `count` PyTorch tensors, by the transpose of the transform's linear part."""
        return self._to_torch("adjoint", arrays, count)

    def _chain(self, after: list[Shape], count: int) -> list[list[Shape]]:
        """The shapes before every step, and after the last step."""
        chain = [after]
        for step in reversed(self.steps):
            chain.insert(0, step.before(chain[0], count))
        if len(chain[0]) != count:
            raise PortingError(f"'{self}' takes {len(chain[0])} tensors, but {count} are given")
        return chain

    def _to_flax(self, method: str, arrays: Arrays, after: list[Shape]) -> Arrays:
        shapes = self._chain(after, len(arrays))
        for step, result in zip(self.steps, shapes[1:], strict=True):
            arrays = getattr(step, method)(arrays, result)
        return arrays

    def _to_torch(self, method: str, arrays: Arrays, count: int) -> Arrays:
        shapes = self._chain([x.shape for x in arrays], count)
        for step, result in zip(reversed(self.steps), reversed(shapes[:-1]), strict=True):
            arrays = getattr(step, method)(arrays, result)
        return arrays


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Step, ...]:
    return tuple(step for part in text.split("|") for step in _steps(part.strip()))


def _steps(part: str) -> tuple[Step, ...]:
    if part in NAMED:
        return _parsed(NAMED[part]) if NAMED[part] else ()
    if "->" in part:
        pattern, *sizes = part.split(",")
        return (Rearrange(pattern, tuple(_size(text, part) for text in sizes)),)
    if part in ("sum", "gru_bias"):
        return (Sum() if part == "sum" else GruBias(),)
    if match := re.fullmatch(rf"(scale|shift)\(\s*(?:(sqrt)\(\s*({_NUMBER})\s*\)|({_NUMBER}))\s*\)", part):
        number = math.sqrt(abs(float(match[3]))) if match[2] else float(match[4])
        return (Scale(number) if match[1] == "scale" else Shift(number),)
    if match := re.fullmatch(rf"(flip|split|concat)\(\s*({_INTEGERS})\s*\)", part):
        numbers = tuple(int(number) for number in match[2].split(","))
        if match[1] == "flip":
            return (Flip(numbers),)
        if match[1] == "concat":
            return (Concat(numbers[0], numbers[1:]),)
        if len(numbers) == 1:
            return (Split(numbers[0]),)
    raise PortingError(
        f"{part!r} is not a transform; the names are {', '.join(NAMED)}; the steps are scale(x), scale(sqrt(x)), shift(x), "
        f"flip(axes), split(axis), concat(axis, sizes), sum, gru_bias, and patterns such as '(h d) e -> e h d'."
        f"{nearest(part, NAMED)}"
    )


def _size(text: str, part: str) -> tuple[str, int]:
    match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,9})\s*", text)
    if not match:
        raise PortingError(f"{part!r}: {text.strip()!r} is not a size; write it as in '(h two d) -> (h d two), h=8, two=2'.")
    return match[1], int(match[2])
