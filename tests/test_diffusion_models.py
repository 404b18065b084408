"""The ports of diffusion transformers: dtypes, patches, positions, attention in chunks, wrong use."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from examples.models import qwen_image, wan
from examples.models.diffusion import (
    FeedForward,
    long_attention,
    pack,
    plain_norm,
    time_features,
    unpack,
)
from examples.models.transformer import attention


class Model(NamedTuple):
    """A port, its small configuration, the class to checkpoint, and the shapes of its arrays; other arguments are not
    arrays.
    """

    make: Callable[..., Any]
    config: Any
    block: type
    shapes: dict[str, tuple[int, ...]]
    constants: dict[str, Any]

    def arrays(self, dtype: Any = jnp.float32, **changed: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in {**self.shapes, **changed}.items()}

    def init(self, model: Any, arrays: dict[str, Any], **constants: Any) -> Any:
        constants = {**self.constants, **constants}
        return jax.eval_shape(lambda x: model.init(jax.random.key(0), **x, **constants), arrays)


MODELS = {
    "qwen_image": Model(
        qwen_image.QwenImage,
        qwen_image.QwenImageConfig(),
        qwen_image.QwenImageBlock,
        {"latents": (2, 6, 12), "text": (2, 5, 20), "time": (2,)},
        {"grids": ((1, 2, 3),)},
    ),
    "wan": Model(
        wan.Wan,
        wan.WanConfig(),
        wan.WanBlock,
        {"latents": (2, 1, 4, 6, 3), "text": (2, 5, 20), "time": (2,)},
        {},
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype", "scan"), [("qwen_image", "bfloat16", True), ("wan", "bfloat16", True), ("wan", "float32", False)]
)
def test_outputs_and_gradients_have_the_parameters_dtype(name: str, dtype: str, scan: bool, x64: None) -> None:
    port = MODELS[name]
    model, arrays = port.make(port.config, scan=scan, param_dtype=jnp.dtype(dtype)), port.arrays(jnp.dtype(dtype))
    variables = port.init(model, arrays)

    def loss(variables: Any, arrays: Any) -> jax.Array:
        return jnp.mean(model.apply(variables, **arrays, **port.constants))

    outputs = jax.eval_shape(loss, variables, arrays)
    gradients = jax.eval_shape(jax.grad(rj.checkpoint_blocks(loss, {port.block: "full"})), variables, arrays)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((variables, outputs))} == {dtype}
    assert jax.tree.map(lambda x: (x.shape, x.dtype), gradients) == jax.tree.map(lambda x: (x.shape, x.dtype), variables)


@pytest.mark.parametrize(("chunk", "masked"), [(1, True), (3, False), (7, True)])
def test_attention_in_chunks_is_attention(chunk: int, masked: bool, x64: None) -> None:
    random = np.random.default_rng(0)
    arrays = [random.normal(size=(2, length, 2, 4)) for length in (7, 5, 5)]
    bias = jnp.where(jnp.arange(5) < 3, 0.0, -1e30)[None, None, None] if masked else None

    def loss(attend: Any, arrays: Any) -> jax.Array:
        return jnp.sum(jnp.sin(attend(*arrays, bias)))

    def in_chunks(*arrays: Any) -> jax.Array:
        return long_attention(*arrays, chunk=chunk)

    expected = jax.value_and_grad(lambda x: loss(attention, x))(arrays)
    results = jax.value_and_grad(lambda x: loss(in_chunks, x))(arrays)
    for leaf, expected_leaf in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=0, atol=1e-13)


def test_attention_in_chunks_keeps_no_scores() -> None:
    """A chunk's scores, 64 × 64 for each of 2 heads, are not kept after the forward pass."""
    arrays = [jax.ShapeDtypeStruct((1, 64, 2, 4), jnp.float32)] * 3

    def largest(chunk: int | None) -> int:
        _, pullback = jax.eval_shape(lambda *x: jax.vjp(lambda *x: long_attention(*x, chunk=chunk), *x), *arrays)
        return max(leaf.size for leaf in jax.tree.leaves(pullback))

    assert largest(None) == 2 * 64 * 64 and largest(16) == 64 * 2 * 4


def test_packing_is_undone_and_orders_a_token_by_channel() -> None:
    images = np.random.default_rng(0).normal(size=(2, 4, 6, 3))
    tokens = pack(images, (2, 3))
    assert tokens.shape == (2, 4, 18)
    assert np.array_equal(tokens[1, 1], images[1, :2, 3:].transpose(2, 0, 1).ravel())
    assert np.array_equal(unpack(tokens, (2, 2), (2, 3)), images)


def test_words_stand_beyond_the_largest_image_and_images_are_centred() -> None:
    """With one frequency of 1 per axis, the angles equal the positions."""
    grids, axes = ((1, 3, 5), (1, 2, 3)), (2, 2, 2)
    (cos, sin), (_, text) = qwen_image.qwen_rotations(grids, 2, axes, jnp.float32)
    angles = np.arctan2(sin, cos)[0, :, 0]
    rows, columns = np.meshgrid([-2, -1, 0], [-3, -2, -1, 0, 1], indexing="ij")
    first = np.stack([np.zeros(15), rows.ravel(), columns.ravel()], axis=-1)
    np.testing.assert_allclose(angles[:15], first, atol=1e-6)
    np.testing.assert_allclose(angles[15], [1, -1, -2], atol=1e-6)
    np.testing.assert_allclose(text[0, :, 0], np.sin([[2] * 3, [3] * 3]), atol=1e-6)


def test_times_turn_by_their_frequencies(x64: None) -> None:
    features = time_features(jnp.array([0.5]), 4, scale=1000.0)[0]
    np.testing.assert_allclose(features, [np.cos(500), np.cos(5), np.sin(500), np.sin(5)], atol=1e-12)


def test_the_activation_is_the_one_that_is_asked_for(x64: None) -> None:
    """The feed-forward layer applied to an identity; the formula is that of DiffSynth-Studio."""
    x = np.linspace(-4, 4, 25)
    identity = {"kernel": np.ones((1, 1)), "bias": np.zeros(1)}
    outputs = FeedForward(1, activation="quick_gelu").apply(
        {"params": {"fc1": identity, "fc2": identity}}, jnp.asarray(x)[None, :, None]
    )
    np.testing.assert_allclose(outputs[0, :, 0], x / (1 + np.exp(-1.702 * x)), rtol=0, atol=1e-15)


@pytest.mark.parametrize("jit", [False, True])
def test_exact_angles_far_out_are_those_of_float64(jit: bool) -> None:
    times = np.array([0.0, 0.3, 17.25, 312.0, 999.9], np.float32)
    frequencies = 10000.0 ** -(np.arange(128) / 128)
    angles = times.astype(np.float64)[:, None] * frequencies
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)

    def error(exact: bool) -> float:
        features = jax.jit(time_features, static_argnums=1, static_argnames="exact") if jit else time_features
        return float(np.abs(features(jnp.asarray(times), 256, exact=exact) - expected).max())

    assert error(exact=True) < 1e-6 < 3e-5 < error(exact=False)


def test_a_plain_norm_of_large_numbers_keeps_their_differences() -> None:
    normed = plain_norm(jnp.array([1e4, 1e4 + 1, 1e4 + 2], jnp.float32), 1e-6)
    np.testing.assert_allclose(normed, np.array([-1, 0, 1]) * 1.5**0.5, atol=1e-5)


def qwen(**changes: Any) -> Callable[[], Any]:
    return lambda: run("qwen_image", **changes)


def video(**changes: Any) -> Callable[[], Any]:
    return lambda: run("wan", **changes)


def run(name: str, config: dict[str, Any] | None = None, constants: dict[str, Any] | None = None, **shapes: Any) -> Any:
    port = MODELS[name]
    return port.init(port.make(type(port.config)(**(config or {}))), port.arrays(**shapes), **(constants or {}))


WRONG = {
    "patch=(2, 2) does not divide 4 x 5": lambda: pack(np.ones((1, 4, 5, 3)), (2, 2)),
    "images have shape (4, 4, 3), expected (batch, height, width, channels)": lambda: pack(np.ones((4, 4, 3)), (2, 2)),
    "features=5 is odd": lambda: time_features(jnp.ones(1), 5),
    "chunk=0: expected at least 1": lambda: long_attention(*[jnp.ones((1, 4, 2, 4))] * 3, chunk=0),
    "num_heads=5 does not divide hidden_size=32": qwen(config={"num_heads": 5}),
    "rope_axes=(4, 6, 8): expected three even numbers whose sum is 16, a head": qwen(config={"rope_axes": (4, 6, 8)}),
    "num_layers=0: expected at least 1": qwen(config={"num_layers": 0}),
    "in_channels=0: expected at least 1": qwen(config={"in_channels": 0}),
    "query_chunk=0: expected at least 1": qwen(config={"query_chunk": 0}),
    "activation='gelu': expected 'gelu_tanh' (diffusers) or 'quick_gelu' (DiffSynth-Studio)": qwen(
        config={"activation": "gelu"}
    ),
    "grids=(): expected (frames, rows, columns)": qwen(constants={"grids": ()}),
    "latents have shape (2, 6, 12), expected (2, 8, 12)": qwen(constants={"grids": ((1, 2, 4),)}),
    "latents have shape (2, 6, 48), expected (2, 6, 12)": qwen(latents=(2, 6, 48)),
    "text has shape (1, 5, 20), expected (2, tokens, 20)": qwen(text=(1, 5, 20)),
    "time has shape (2, 1), expected (2,)": qwen(time=(2, 1)),
    "mask has shape (2, 6), expected (2, 5)": qwen(mask=(2, 6)),
    "num_heads=3 does not divide hidden_size=32": video(config={"num_heads": 3}),
    "hidden_size=32, num_heads=32: heads 1 wide": video(config={"num_heads": 32}),
    "intermediate_size=0: expected at least 1": video(config={"intermediate_size": 0}),
    "patch=(1, 2): expected frames, rows and columns": video(config={"patch": (1, 2)}),
    "patch=(1, 2, 2) does not divide 1 x 5 x 6": video(latents=(2, 1, 5, 6, 3)),
    "latents have shape (2, 3, 1, 4, 6), expected (batch, frames, height, width, 3)": video(latents=(2, 3, 1, 4, 6)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_use_is_explained(message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        WRONG[message]()
