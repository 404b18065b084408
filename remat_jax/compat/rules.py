"""The rules of JAX's primitives: tables in `jax.interpreters`, which JAX's compatibility page counts as private."""

from __future__ import annotations

from jax.interpreters.ad import Zero as Zero
from jax.interpreters.ad import instantiate_zeros as instantiate_zeros
from jax.interpreters.ad import is_undefined_primal as is_undefined_primal
from jax.interpreters.ad import primitive_jvps as primitive_jvps
from jax.interpreters.ad import primitive_transposes as primitive_transposes
from jax.interpreters.batching import fancy_primitive_batchers as fancy_primitive_batchers
from jax.interpreters.batching import primitive_batchers as primitive_batchers
from jax.interpreters.mlir import register_lowering as register_lowering
