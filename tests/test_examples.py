"""The example models and text: dtypes, RNG streams, stacking, wrong use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import text
from examples.models import linen
from examples.models import nnx as nnx_models
from examples.models import weights as w
from examples.models.functions import cross_entropy

SIZES: dict[str, dict[str, Any]] = {
    "DecoderStack": {"num_layers": 2, "d_model": 8, "nhead": 2, "scan": False},
    "DecoderStack scanned": {"num_layers": 2, "d_model": 8, "nhead": 2, "scan": True},
    "ByteDecoder": {"d_model": 8, "nhead": 2, "num_layers": 2, "max_len": 12},
    "ByteDecoder scanned": {"d_model": 8, "nhead": 2, "num_layers": 2, "max_len": 12, "scan": True},
}
models = pytest.mark.parametrize("model", SIZES)
apis = pytest.mark.parametrize("api", ["linen", "nnx"])


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def example(model: str, dtype: str) -> jax.Array:
    if model.startswith("ByteDecoder"):
        return jnp.asarray(text.batches(seed=0, batch=2, length=6, steps=1)[0][0])
    return jax.random.normal(jax.random.key(1), (2, 6, 8), dtype)


def parameters(model: str, dtype: str = "float64") -> Any:
    """Random parameters of the right shapes: an initial bias of 0 or scale of 1 would hide a missing parameter."""
    made = getattr(linen, model.split()[0])(**SIZES[model])
    shapes = jax.eval_shape(made.init, jax.random.key(0), example(model, "float32"))["params"]
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), dtype), shapes)


def function(model: str, api: str) -> Callable[[Any, jax.Array], jax.Array]:
    """A function of Linen's parameters and the input. The model is built in float32, which must not matter."""
    if api == "linen":
        made = getattr(linen, model.split()[0])(**SIZES[model])
        return lambda params, x: made.apply({"params": params}, x)
    kind = getattr(nnx_models, model.split()[0])

    def call(params: Any, x: jax.Array) -> jax.Array:
        return w.load_nnx(nnx.eval_shape(lambda: kind(**SIZES[model], rngs=nnx.Rngs(0))), params)(x)

    return call


@models
@apis
def test_dtypes_are_those_of_parameters_and_input(model: str, api: str) -> None:
    call = function(model, api)
    jaxpr = str(jax.make_jaxpr(call)(parameters(model), example(model, "float64")))
    assert "f64[" in jaxpr and not any(f"{name}[" in jaxpr for name in ("f32", "bf16", "f16"))
    assert jax.eval_shape(call, parameters(model, "bfloat16"), example(model, "bfloat16")).dtype == jnp.bfloat16


@models
def test_linen_and_nnx_compute_the_same_scanned_and_unrolled(model: str) -> None:
    x, params = example(model, "float64"), parameters(model)
    by_linen, by_nnx = (jax.jit(function(model, api))(params, x) for api in ("linen", "nnx"))
    assert float(jnp.linalg.norm(by_linen)) > 1
    np.testing.assert_allclose(by_nnx, by_linen, rtol=0, atol=1e-14)
    if not model.endswith("scanned"):
        stacked = w.stack_layers(params)
        assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(jnp.shape, parameters(f"{model} scanned"))
        scanned = jax.jit(function(f"{model} scanned", "linen"))(stacked, x)
        np.testing.assert_allclose(scanned, by_linen, rtol=0, atol=1e-14)


def test_stacking_orders_layers_by_number_and_undoes_unstacking() -> None:
    tree = {f"layers_{i}": {"norm1": {"scale": np.full(2, i)}} for i in range(12)} | {"head": {"bias": np.ones(1)}}
    stacked = w.stack_layers(tree)
    assert stacked["layers"]["norm1"]["scale"][:, 0].tolist() == list(range(12))
    assert jax.tree.map(np.array_equal, w.unstack_layers(stacked), tree) == jax.tree.map(lambda _: True, tree)


@pytest.mark.parametrize(("api", "name"), [("linen", "DecoderStack scanned"), ("nnx", "DecoderStack")])
def test_dropout_follows_its_stream(api: str, name: str) -> None:
    tree, x = parameters(name), example(name, "float64")

    @functools.partial(jax.jit, static_argnames="deterministic")
    def run(seed: int, deterministic: bool = False) -> jax.Array:
        if api == "linen":
            model = linen.DecoderStack(**SIZES[name], dropout=0.5)
            rngs = {"dropout": jax.random.key(seed)}
            return model.apply({"params": tree}, x, deterministic=deterministic, rngs=rngs)
        model = nnx_models.DecoderStack(**SIZES[name], dropout=0.5, rngs=nnx.Rngs(0, dropout=jax.random.key(seed)))
        return w.load_nnx(model, tree)(x, deterministic=deterministic)

    assert np.array_equal(run(1), run(1)) and not np.allclose(run(1), run(2))
    expected = jax.jit(function(name, "linen"))(tree, x)
    np.testing.assert_allclose(run(1, deterministic=True), expected, rtol=0, atol=1e-14)


def test_scanned_layers_draw_different_masks() -> None:
    model = linen.DecoderStack(**SIZES["DecoderStack scanned"], dropout=0.5)
    call = functools.partial(model.apply, deterministic=False, capture_intermediates=True)
    x, rngs = example("DecoderStack", "float64"), {"dropout": jax.random.key(0)}
    _, seen = jax.jit(call)({"params": parameters("DecoderStack scanned")}, x, rngs=rngs)
    dropped = np.asarray(seen["intermediates"]["layers"]["dropout2"]["__call__"][0]) == 0
    assert dropped.shape == (2, 2, 6, 8) and 0.35 < dropped.mean() < 0.65
    assert not np.array_equal(dropped[0], dropped[1])


def test_cross_entropy_keeps_one_array_of_the_logits_size() -> None:
    logits, targets = jnp.ones((4, 6, 32)), jnp.zeros((4, 6), jnp.int32)
    _, pullback = jax.vjp(lambda logits: cross_entropy(logits, targets), logits)
    assert sorted(leaf.size for leaf in jax.tree.leaves(pullback))[-2:] == [24, 24 * 32]


def test_wrong_sizes_are_named() -> None:
    for call in (
        lambda: nnx_models.DecoderLayer(16, 5, rngs=nnx.Rngs(0)),
        lambda: linen.DecoderLayer(16, 5).init(jax.random.key(0), jnp.ones((1, 2, 16))),
    ):
        with pytest.raises(ValueError, match="nhead=5 does not divide d_model=16"):
            call()
    for api in ("linen", "nnx"):
        with pytest.raises(ValueError, match="length 13, expected at most max_len=12"):
            function("ByteDecoder", api)(parameters("ByteDecoder"), jnp.zeros((1, 13), jnp.int32))


def test_batches_are_real_text_and_follow_their_seed() -> None:
    first, again = (text.batches(seed=3, batch=2, length=40, steps=4) for _ in range(2))
    another_seed = text.batches(seed=4, batch=2, length=40, steps=4)
    source = text.corpus().tobytes()
    assert len(source) > 1_000_000 and b"class ArgumentParser" in source
    assert len(first) == 4 and not np.array_equal(first[0][0], first[1][0])
    for (tokens, targets), (same, _), (different, _) in zip(first, again, another_seed, strict=True):
        assert tokens.dtype == targets.dtype == np.int32 and tokens.shape == targets.shape == (2, 40)
        assert np.array_equal(tokens, same) and not np.array_equal(tokens, different)
        assert np.array_equal(tokens[:, 1:], targets[:, :-1])
        for window in np.concatenate([tokens, targets[:, -1:]], axis=1).astype(np.uint8):
            assert window.tobytes() in source


def test_the_text_is_joined_in_sorted_order_and_its_absence_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="5 bytes, expected more than length=5"):
        text.batches(seed=0, batch=1, length=5, steps=1, data=range(5))
    with pytest.raises(FileNotFoundError, match="none of 27 modules.*'argparse'"):
        text.corpus(folder=tmp_path)
    (tmp_path / "ast.py").write_bytes(b"one")
    (tmp_path / "csv.py").write_bytes(b"two")
    assert text.corpus(("csv", "ast", "uuid"), tmp_path).tobytes() == b"one\ntwo"
