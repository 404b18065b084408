"""The operations of random programs, on a few kinds of arrays; arrays of a kind have one shape, so that any two fit.

| kind | what it is |
| --- | --- |
| f | float64 of the shape (ROWS, WIDTH): what flows through |
| s | a float64 scalar |
| l | float32, bfloat16, float16 or one of two of 8 bits (float64 where the reference is computed), as f |
| c | complex128, as f |
| e | float64 of no rows |
| i | int32 of the shape (ROWS,) |
| b | bool, as f |
| k | an RNG key |
| w | a float64 matrix (WIDTH, WIDTH): a parameter |
| z | a complex vector (WIDTH,): a parameter |
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

ROWS, WIDTH = 3, 4
DEVICES = 1
"""The number of devices over which a sharding constraint partitions an array; with several, only programs under `jit` run."""


LOW = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
low_precision: ContextVar[Any] = ContextVar("low_precision", default=None)
"""The dtype of kind `l`; None for the dtype of `LOW` that a step's number selects."""


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
      takes, gives: the kinds of its operands and of its result, one letter each.
      run: from a small number and the operands to the result.
    """

    takes: str
    gives: str
    run: Callable[..., Any]


TABLE = np.sin(np.arange(ROWS * WIDTH, dtype=np.float64)).reshape(ROWS, WIDTH)
"""A constant that a program closes over."""


def _layer_norm(n: int, x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 0.1)


def _attention(n: int, q: Any, k: Any, v: Any) -> Any:
    heads = [x.reshape(ROWS, 2, WIDTH // 2) for x in (q, k, v)]
    scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", heads[0], heads[1]))
    return jnp.einsum("hqk,khd->qhd", scores, heads[2]).reshape(ROWS, WIDTH)


def _update(n: int, x: Any, y: Any, ids: Any) -> Any:
    start = ids[n % ROWS] % ROWS
    at = (start, jnp.zeros_like(start))
    return lax.dynamic_update_slice(x, lax.dynamic_slice(jnp.sin(y), at, (1, WIDTH)), at)


def _pool(n: int, x: Any) -> Any:
    return lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "SAME")


def _convolved(n: int, x: Any, w: Any) -> Any:
    # The weights' first rows as a kernel over the width, rows as batch.
    return lax.conv_general_dilated(x[:, None, :], w[:1, None, :3] * 1.0, (1,), "SAME")[:, 0, :]


def _solve(n: int, x: Any, w: Any) -> Any:
    return jnp.linalg.solve(jnp.eye(WIDTH) * 4 + jnp.tanh(w), x.T).T


def _dropout(n: int, x: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(jax.random.fold_in(key, n), 0.7, x.shape), x / 0.7, 0.0)


def _dead(n: int, x: Any) -> Any:
    # Nobody reads the first result.
    return (jnp.cos(x).sum() * jnp.exp(x), x * 0.9)[1]


def _constrained(n: int, x: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), ("all",))
    return lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, P(None, "all") if n % 2 else P()))


def _told(n: int, x: Any) -> Any:
    jax.debug.callback(lambda total: None, x.sum(), ordered=n % 2 == 0)
    return jnp.sin(x)


STORED = (
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e3m4", "float4_e2m1fn"),
    *("int4", "uint4", "int8", "complex64", "bfloat16", "float16"),
)
"""Dtypes in which an array is only stored."""


def _stored(n: int, x: Any) -> Any:
    """A factor that is kept in few bits: a rule that saves it in another number of bits changes the result."""
    dtype = STORED[n % len(STORED)]
    # Subnormal numbers, and numbers near the largest.
    wide = lax.stop_gradient(jnp.concatenate([x[:, :2] / 300, x[:, 2:] * (3 if "4" in dtype[:6] else 200)], 1))
    kept = checkpoint_name(wide.astype(dtype), "user_0")
    return x * jnp.tanh(kept.astype(jnp.complex128 if dtype == "complex64" else x.dtype).real)


def _normalised(x: Any) -> Any:
    return x / (1.0 + jnp.abs(x))


OPS: dict[str, Op] = {
    "sin": Op("f", "f", lambda n, x: jnp.sin(x)),
    "tanh": Op("f", "f", lambda n, x: jnp.tanh(x)),
    "exp": Op("f", "f", lambda n, x: jnp.exp(-(x**2))),
    "logistic": Op("f", "f", lambda n, x: jax.nn.sigmoid(x)),
    "softplus": Op("f", "f", lambda n, x: jax.nn.softplus(x)),
    "relu": Op("f", "f", lambda n, x: jax.nn.relu(x)),
    "gelu": Op("f", "f", lambda n, x: jax.nn.gelu(x, approximate=bool(n % 2))),
    "log1p": Op("f", "f", lambda n, x: jnp.log1p(x**2)),
    "sqrt": Op("f", "f", lambda n, x: jnp.sqrt(1.0 + x**2)),
    "abs": Op("f", "f", lambda n, x: jnp.abs(x)),
    "clip": Op("f", "f", lambda n, x: jnp.clip(x, -0.5, 0.7)),
    "sort": Op("f", "f", lambda n, x: jnp.sort(x, axis=n % 2)),
    "cumsum": Op("f", "f", lambda n, x: jnp.cumsum(x, axis=n % 2) / 3),
    "cummax": Op("f", "f", lambda n, x: lax.cummax(x, axis=n % 2)),
    "flip": Op("f", "f", lambda n, x: jnp.flip(x, n % 2)),
    "roll": Op("f", "f", lambda n, x: jnp.roll(x, n % 3, -1)),
    "transposed": Op("ff", "f", lambda n, x, y: (x.T @ y / 2)[:ROWS]),
    "softmax": Op("f", "f", lambda n, x: jax.nn.softmax(x, axis=n % 2)),
    "layer_norm": Op("f", "f", _layer_norm),
    "stop": Op("f", "f", lambda n, x: lax.stop_gradient(x) * 0.5),
    "half_stopped": Op("ff", "f", lambda n, x, y: x + lax.stop_gradient(y)),
    "named": Op("f", "f", lambda n, x: checkpoint_name(jnp.sin(x), f"user_{n % 3}")),
    "scoped": Op("f", "f", lambda n, x: jax.named_scope(f"part_{n % 3}")(jnp.cos)(x)),
    "dead": Op("f", "f", _dead),
    "constrained": Op("f", "f", _constrained),
    "told": Op("f", "f", _told),
    "barrier": Op("ff", "f", lambda n, x, y: lax.optimization_barrier((x, y))[n % 2]),
    "rounded": Op("f", "f", lambda n, x: x + jnp.floor(x)),
    "pool": Op("f", "f", _pool),
    "padded": Op("f", "f", lambda n, x: lax.pad(x, 0.5, ((1, -1, 0), (0, 0, 0)))),
    "add": Op("ff", "f", lambda n, x, y: x + y),
    "sub": Op("ff", "f", lambda n, x, y: x - 0.5 * y),
    "mul": Op("ff", "f", lambda n, x, y: _normalised(x) * y),
    "div": Op("ff", "f", lambda n, x, y: x / (1.0 + y**2)),
    "max": Op("ff", "f", lambda n, x, y: jnp.maximum(x, y)),
    "joined": Op("ff", "f", lambda n, x, y: jnp.concatenate([x, y])[n % ROWS : n % ROWS + ROWS]),
    "stacked": Op("ff", "f", lambda n, x, y: jnp.stack([x, y]).mean(0)),
    "attention": Op("fff", "f", _attention),
    "constant": Op("f", "f", lambda n, x: x + TABLE * (n % 3)),
    "dense": Op("fw", "f", lambda n, x, w: x @ w),
    "dense_low": Op("lw", "l", lambda n, x, w: x @ w.astype(x.dtype)),
    "convolved": Op("fw", "f", _convolved),
    "solve": Op("fw", "f", _solve),
    "weight": Op("fw", "f", lambda n, x, w: x * w[n % WIDTH]),
    "gather": Op("fi", "f", lambda n, x, ids: x[ids % ROWS]),
    "scatter": Op("fi", "f", lambda n, x, ids: x.at[ids % ROWS].add(jnp.sin(x))),
    "set": Op("ffi", "f", lambda n, x, y, ids: x.at[ids % ROWS, n % WIDTH].set(jnp.sin(y[:, 0]), unique_indices=False)),
    "update": Op("ffi", "f", _update),
    "one_hot": Op("fi", "f", lambda n, x, ids: x * jax.nn.one_hot(ids % WIDTH, WIDTH, dtype=x.dtype)),
    "chosen": Op("fb", "f", lambda n, x, b: jnp.where(b, jnp.sin(x), x)),
    "masked": Op("ffb", "f", lambda n, x, y, b: lax.select(b, x, y)),
    "dropout": Op("fk", "f", _dropout),
    "noise": Op("fk", "f", lambda n, x, key: x + jax.random.normal(jax.random.fold_in(key, n), x.shape, x.dtype)),
    "scaled": Op("fs", "f", lambda n, x, s: x * jnp.tanh(s)),
    "filled": Op("fs", "f", lambda n, x, s: x + jnp.full(x.shape, s) / 4),
    "nothing_added": Op("fe", "f", lambda n, x, e: jnp.concatenate([jnp.sin(e), x]) + e.sum()),
    "sum": Op("f", "s", lambda n, x: x.sum() / 4),
    "peak": Op("f", "s", lambda n, x: x.max()),
    "norm": Op("f", "s", lambda n, x: jnp.sqrt(1.0 + (x**2).sum())),
    "logsumexp": Op("f", "s", lambda n, x: jax.scipy.special.logsumexp(x)),
    "element": Op("f", "s", lambda n, x: x[n % ROWS, n % WIDTH]),
    "scalar_sin": Op("ss", "s", lambda n, a, b: jnp.sin(a) * b),
    "empty": Op("f", "e", lambda n, x: jnp.cos(x[:0])),
    "empty_product": Op("ew", "e", lambda n, e, w: e @ w),
    "narrow": Op("f", "l", lambda n, x: x.astype(low_precision.get() or LOW[n % len(LOW)])),
    "low_sin": Op("l", "l", lambda n, x: jnp.sin(x) * 2),
    "stored": Op("f", "f", _stored),
    "widen": Op("fl", "f", lambda n, x, low: x + low.astype(x.dtype)),
    "complex": Op("ff", "c", lambda n, x, y: lax.complex(x, jnp.sin(y))),
    "complex_weight": Op("cz", "c", lambda n, c, z: c * z),
    "complex_product": Op("cc", "c", lambda n, a, b: a * jnp.conj(b) / (1.0 + jnp.abs(b) ** 2)),
    "complex_exp": Op("c", "c", lambda n, c: jnp.exp(1j * c.real) + c / 2),
    "fourier": Op("c", "c", lambda n, c: jnp.fft.fft(c) / 2),
    "real": Op("c", "f", lambda n, c: c.real),
    "imaginary": Op("c", "f", lambda n, c: jnp.sin(c.imag)),
    "modulus": Op("c", "f", lambda n, c: jnp.sqrt(1.0 + jnp.abs(c * c.conj()))),
    "above": Op("f", "b", lambda n, x: x > 0.1 * (n % 3) + 0.013),
    "either": Op("bb", "b", lambda n, a, b: jnp.logical_xor(a, ~b)),
    "counted": Op("b", "i", lambda n, b: b.sum(1, dtype=jnp.int32)),
    "truncated": Op("f", "i", lambda n, x: jnp.round(3 * x[:, n % WIDTH] + 0.21).astype(jnp.int32)),
    "largest": Op("f", "i", lambda n, x: jnp.argmax(x, axis=1).astype(jnp.int32)),
    "shifted": Op("ii", "i", lambda n, a, b: (a * 5 + b + n) % 7),
    "integers": Op("fi", "f", lambda n, x, ids: x * jnp.cos(ids.astype(x.dtype))[:, None]),
    "another_key": Op("k", "k", lambda n, key: jax.random.split(key)[n % 2]),
}
