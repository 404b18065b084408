"""The job of one process of the benchmark, and the weights and text that all processes share."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from examples import text

# 1 − b1 is a power of two, so Adam's first moment after one step is exactly (1 − b1) times the gradient. The timed step thus
# also gives the gradient to compare.
ADAM = {"learning_rate": 3e-4, "b1": 0.875, "b2": 0.9375, "eps": 1e-8}
MICRO_BATCHES = 2


@dataclasses.dataclass(frozen=True)
class Size:
    """The decoder and its batch, all in `dtype`. The defaults fill half of an H200 without checkpoints."""

    layers: int = 16
    d_model: int = 2048
    heads: int = 16
    batch: int = 64
    length: int = 512
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.length


SMALL = Size(layers=2, d_model=32, heads=4, batch=2, length=16, dtype="float32")


@dataclasses.dataclass(frozen=True)
class Job:
    """One row to be measured.

    Attributes:
        form: how the layers are written: `unrolled` or `scan` in JAX, `eager` in PyTorch.
        mode: a mode or a named policy; `…+host_optimizer` keeps Adam's state in host memory, `…+accumulate` takes the batch in
            two micro-batches, `…+unlinked` ties each block to its place in the schedule but does not link blocks, so that fewer
            copies overlap compute.
        folder: the folder with the weights, through which processes exchange gradients.
        reference: the file in the folder with the gradients to compare this row's gradients with; None for no comparison.
        keep_gradients: the file in the folder to write this row's gradients to; None to write none.
        device: `cuda` or `cpu`.
    """

    size: Size
    form: str
    mode: str
    folder: str
    reference: str | None = None
    keep_gradients: str | None = None
    device: str = "cuda"
    warm_up: int = 3
    steps: int = 10

    @property
    def policy(self) -> str:
        """The mode or policy alone."""
        return self.mode.partition("+")[0]

    @property
    def variant(self) -> str:
        """The variant: `host_optimizer`, `accumulate`, `unlinked`, or empty."""
        return self.mode.partition("+")[2]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Job:
        """The job that `to_json` wrote.

        >>> job = Job(SMALL, "scan", "offload", "folder")
        >>> Job.from_json(job.to_json()) == job
        True
        """
        fields = json.loads(line)
        return cls(**fields | {"size": Size(**fields["size"])})

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Real text as (tokens, targets) for each step, warm-up included: the same in every row."""
        return text.batches(seed=0, batch=self.size.batch, length=self.size.length, steps=self.warm_up + self.steps)


# --- arrays in the folder ---------------------------------------------------------------------------------------------


def parameter_shapes(size: Size, vocab: int = 256) -> dict[str, tuple[int, ...]]:
    """The parameters' shapes under the names of the unrolled Linen decoder, without importing a framework."""
    d = size.d_model
    linear = {"self_attn/in_proj": (d, 3 * d), "self_attn/out_proj": (d, d), "ffn/up": (d, 4 * d), "ffn/down": (4 * d, d)}
    shapes: dict[str, tuple[int, ...]] = {"embed/embedding": (vocab, d), "positions/embedding": (size.length, d)}
    for index in range(size.layers):
        for name, shape in linear.items():
            shapes |= {f"layers_{index}/{name}/kernel": shape, f"layers_{index}/{name}/bias": shape[1:]}
        for name in ("norm1", "norm2"):
            shapes |= {f"layers_{index}/{name}/scale": (d,), f"layers_{index}/{name}/bias": (d,)}
    return shapes | {"head/kernel": (d, vocab), "head/bias": (vocab,)}


def make_weights(size: Size, seed: int = 0) -> dict[str, np.ndarray]:
    """Initial weights, the same on every machine: normal kernels and embeddings, norms 1, biases 0."""
    random = np.random.default_rng(seed)
    arrays = {}
    for name, shape in parameter_shapes(size).items():
        if name.endswith(("kernel", "embedding")):
            deviation = shape[0] ** -0.5 if name.endswith("kernel") else 0.02
            drawn = random.standard_normal(shape, np.float32)
            drawn *= deviation
            arrays[name] = drawn.astype(numpy_dtype(size.dtype))
        else:
            arrays[name] = np.full(shape, name.endswith("scale"), numpy_dtype(size.dtype))
    return arrays


def save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write named arrays, uncompressed; the file gets its name only when it is complete."""
    new = path.with_suffix(".new.npz")
    np.savez(new, **arrays)  # type: ignore[arg-type]
    new.replace(path)


def load_arrays(path: Path, dtype: str) -> dict[str, np.ndarray]:
    """Read the file of `save_arrays`. NumPy's files forget bfloat16, so `dtype` names the arrays' dtype."""
    with np.load(path) as stored:
        return {name: stored[name].view(numpy_dtype(dtype)) for name in stored.files}


def numpy_dtype(dtype: str) -> Any:
    """The NumPy dtype of a name, also of bfloat16."""
    if dtype == "bfloat16":
        import ml_dtypes  # comes with JAX

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)
