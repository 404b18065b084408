"""`accumulate_gradients` in every dtype of weights, masks and counts: the gradient of the whole batch, computed in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import remat_jax as rj
from remat_jax.parity.rule import global_norm
from remat_jax.parity.tolerances import TOLERANCES
from tests.fault.tally import Tally, attempted

WEIGHTS = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")
MASKS = ("bool", "int8", "uint8", "int32", "bfloat16", "float16", "float32", "float64")
COUNTS = ("mask", "int", "none")
"""How the loss counts: the sum of the mask in its own dtype, a Python number, or one for each micro-batch."""


@dataclass(frozen=True)
class Accumulation:
    """Micro-batches of a size, with dtypes of weights and mask, a count, and a policy on the layer."""

    weights: str
    mask: str
    count: str
    micro_batches: int
    size: int
    policy: str

    def check(self, tally: Tally) -> None:
        """Raise AssertionError unless the accumulated gradient is as near to float64 as that of the whole batch."""
        with jax.enable_x64(True):
            arrays = self._arrays()
            wide = "complex128" if self.weights.startswith("complex") else "float64"
            reference = self._whole(arrays, wide)
            ours = attempted(lambda: self._accumulated(arrays), lambda: self._whole(arrays, self.weights), tally)
            if ours is None:
                return
            tally.compared("accumulation", self.weights, f"mask {self.mask}", f"count {self.count}")
            self._judge(reference, self._whole(arrays, self.weights), ours)

    def _arrays(self) -> tuple[Any, Any]:
        rows = self.micro_batches * self.size
        x = np.cos(np.arange(rows * 4.0)).reshape(rows, 4) + 1.5
        mask = np.ones(rows) if self.mask in ("bfloat16", "float16", "int8", "uint8") else np.arange(rows) % 3 < 2
        return jnp.asarray(x), jnp.asarray(mask).astype(self.mask)

    def _loss(self, w: Any, x: Any, mask: Any) -> tuple[Any, Any]:
        layer = rj.block(lambda w, x: jnp.tanh(jnp.abs(x @ w) ** 2 / 9))
        rows = rj.checkpoint_blocks(lambda w, x: layer(w, x), {layer: self.policy})(w, x.astype(w.dtype)).sum(-1)
        total = jnp.sum(rows.astype(jnp.float32 if rows.dtype.itemsize < 4 else rows.dtype) * mask.astype(rows.dtype))
        return total, {"mask": lambda: jnp.sum(mask, dtype=mask.dtype if mask.dtype != bool else jnp.int32)}.get(
            self.count, lambda: x.shape[0] if self.count == "int" else 1
        )()

    def _weights(self, dtype: str) -> Any:
        w = np.sin(np.arange(12.0)).reshape(4, 3) / 3
        return jnp.asarray(w + 0.25j if dtype.startswith("complex") else w).astype(self.weights).astype(dtype)

    def _whole(self, arrays: Any, dtype: str) -> dict[str, Any]:
        x, mask = arrays
        exact = {
            "mask": float(np.asarray(mask).astype(np.float64).sum()),
            "int": float(len(x)),
            "none": float(self.micro_batches),
        }

        def mean(w: Any) -> Any:
            return self._loss(w, x, mask)[0] / exact[self.count]

        value, gradient = jax.jit(jax.value_and_grad(mean))(self._weights(dtype))
        return {"value": value, "gradient": gradient}

    def _accumulated(self, arrays: Any) -> dict[str, Any]:
        accumulated = jax.jit(rj.accumulate_gradients(self._loss, self.micro_batches))
        value, gradient = accumulated(self._weights(self.weights), *arrays)
        assert gradient.dtype == jnp.dtype(self.weights), f"the gradient is in {gradient.dtype}"
        return {"value": value, "gradient": gradient}

    def _judge(self, reference: Any, plain: Any, ours: Any) -> None:
        found, theirs, wanted = (
            {name: np.asarray(leaf).astype(np.complex128) for name, leaf in side.items()} for side in (ours, plain, reference)
        )
        eps = float(jnp.finfo(self.weights).eps)
        for name, exact in wanted.items():
            off, by_whole = (float(np.linalg.norm((side[name] - exact).ravel())) for side in (found, theirs))
            bound = TOLERANCES["error_ratio"].value * max(by_whole, eps * global_norm({name: np.abs(exact)}))
            assert off <= bound, f"{name} is {off:.3g} from float64, that of the whole batch {by_whole:.3g}"


accumulations = st.builds(
    Accumulation,
    st.sampled_from(WEIGHTS),
    st.sampled_from(MASKS),
    st.sampled_from(COUNTS),
    st.sampled_from([1, 2, 3, 8, 300]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from(["off", "full", "dots"]),
)
