"""Ties by data, with which XLA:TPU keeps the order of unrolled blocks that offload (`compat.data_ties`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from remat_jax import compat
from remat_jax.compat import data_ties

HOST = jax.memory.Space.Host
VALUES = (
    jnp.asarray([-0.0, jnp.nan, jnp.inf, 1e-40, 3.0]),
    jnp.asarray([[True, False]]),
    jnp.asarray(3, jnp.int8),
    jnp.asarray([1 + 2j]),
    jnp.linspace(-1, 1, 12).astype(jnp.bfloat16).reshape(3, 4),
    jnp.asarray([0.1, 2.0], jnp.float8_e4m3fn),
    jnp.zeros((0, 2)),
    jax.random.key(0),
)


def bits(value: Any) -> bytes:
    return np.asarray(jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value).tobytes()


def text(function: Any, *args: Any, platform: str, devices: int = 1) -> str:
    mesh = jax.sharding.AbstractMesh((devices,), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    checks = [export.DisabledSafetyCheck.custom_call("annotate_device_placement")]
    jitted = jax.jit(function, in_shardings=place) if devices > 1 else jax.jit(function)
    return str(export.export(jitted, platforms=[platform], disabled_checks=checks)(*args).mlir_module())


def test_held_values_keep_their_bits_whatever_they_wait_for() -> None:
    held = jax.jit(lambda *values: data_ties._held(*values, *values, number=len(values)))(*VALUES)
    assert list(map(bits, held[: len(VALUES)])) == list(map(bits, VALUES))


SHAPES = [(), (5,), (1, 8), (15, 8), (64, 4), (33, 8), (5, 4, 3), (1, 40, 3), (2, 1, 1)]


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, "float32") for shape in SHAPES), ((15, 8), "bfloat16"), ((33, 8), "int8")]
)
def test_a_fetched_array_keeps_its_bits(shape: tuple[int, ...], dtype: str) -> None:
    value = jnp.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    fetched = jax.jit(lambda x: data_ties._fetched(jax.device_put(x, HOST), x, jax.device_put(x, HOST)))(value)
    assert fetched.shape == shape and bits(fetched) == bits(value)


def program(x: Any) -> Any:
    host = jax.device_put(x, HOST)
    y = jnp.sin(x)
    return compat.held([y], [host, y])[0] + compat.fetched(host, [y])


@pytest.mark.parametrize(
    "platform, devices, tied", [("tpu", 1, True), ("tpu", 2, False), ("cuda", 1, False), ("cpu", 1, False)]
)
def test_only_a_program_for_one_tpu_is_tied_by_data(platform: str, devices: int, tied: bool) -> None:
    lowered = text(program, jax.ShapeDtypeStruct((64, 8), jnp.float32), platform=platform, devices=devices)
    assert (lowered.count("stablehlo.dynamic_slice") == 3) == tied
    assert ("stablehlo.select" in lowered) == ("stablehlo.remainder" in lowered) == tied


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
def test_a_program_with_64_bits_is_tied_too(dtype: str) -> None:
    with jax.enable_x64(True):
        lowered = text(program, jax.ShapeDtypeStruct((64, 8), dtype), platform="tpu")
        held = jax.jit(lambda x: data_ties._held(x, x, number=1)[0])(jnp.asarray([[2**40, -(2**62)]]).astype(dtype))
    assert lowered.count("stablehlo.dynamic_slice") == 3 and bits(held) == bits(np.asarray([[2**40, -(2**62)]]).astype(dtype))


def test_derivatives_and_batches() -> None:
    x = jnp.linspace(0, 1, 512).reshape(64, 8)
    plain = lambda x: jnp.sin(x) + x  # noqa: E731
    direct, expected = (jax.jit(lambda x, f=f: jax.jvp(f, (x,), (x,)))(x) for f in (program, plain))
    assert all(map(jnp.array_equal, direct, expected))
    batch = jnp.stack([x, 2 * x])
    assert jnp.array_equal(jax.jit(jax.vmap(program))(batch), jax.jit(jax.vmap(plain))(batch))
