"""Weight maps: Linen and NNX variables, dtypes, copies, placement, and placeholders in a proposed map."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from remat_jax import porting
from remat_jax.errors import PortingError
from remat_jax.porting import Rule, Rules
from remat_jax.porting.auto.compress import compress


def arrays(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(dtype)


# Types of variables.


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])


NNX_RULES = """
    {i}.up.weight -> params/layers_{i}/up/kernel | linear
    {i}.{up,norm}.bias -> params/layers_{i}/{up,norm}/bias
    {i}.norm.weight -> params/layers_{i}/norm/scale
    {i}.norm.running_{mean,var} -> batch_stats/layers_{i}/norm/{mean,var}
"""


def nnx_state() -> dict[str, np.ndarray]:
    names = ("up.bias", "norm.bias", "norm.weight", "norm.running_mean", "norm.running_var")
    state = {f"{i}.{name}": arrays(4, seed=k + 7 * i) for k, name in enumerate(names) for i in range(2)}
    return state | {f"{i}.up.weight": arrays(4, 4, seed=i) for i in range(2)}


def test_an_nnx_model_is_filled_anew_and_keeps_its_random_keys() -> None:
    model, state = Model(nnx.Rngs(3)), nnx_state()
    before = nnx.state(model)
    filled = porting.from_torch(state, model, NNX_RULES)
    assert np.array_equal(filled.layers[1].up.kernel[...], state["1.up.weight"].T)
    assert np.array_equal(filled.layers[1].norm.var[...], state["1.norm.running_var"])
    assert jax.random.key_data(filled.layers[0].dropout.rngs.key[...]).tolist() == (
        jax.random.key_data(model.layers[0].dropout.rngs.key[...]).tolist()
    )
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, jax.tree.leaves(before), jax.tree.leaves(nnx.state(model))))
    for given in (filled, nnx.state(filled), nnx.state(filled, nnx.Any(nnx.Param, nnx.BatchStat))):
        back = porting.to_torch(given, NNX_RULES, numpy=True)
        assert back.keys() == state.keys() and all(np.array_equal(back[name], state[name]) for name in state)


def test_nnx_gradients_are_a_state_of_parameters() -> None:
    model = porting.from_torch(nnx_state(), nnx.eval_shape(lambda: Model(nnx.Rngs(0))), NNX_RULES)
    gradients = nnx.grad(lambda model: sum(jnp.sum(layer.up.kernel[...] ** 2) for layer in model.layers))(model)
    pulled = porting.gradients_to_torch(gradients, NNX_RULES, numpy=True)
    assert np.array_equal(pulled["0.up.weight"], 2 * nnx_state()["0.up.weight"]) and len(pulled) == 8
    there = porting.gradients_from_torch(pulled, model, NNX_RULES)
    assert jax.tree.all(jax.tree.map(np.array_equal, there, gradients))
    assert jax.tree.structure(there) == jax.tree.structure(gradients)


def test_metadata_of_linen_s_partitioned_parameters_stays() -> None:
    model = nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.zeros, ("in", "out")))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2))))
    text = "weight -> params/kernel | linear\nbias -> params/bias"
    converted = porting.from_torch({"weight": arrays(3, 2), "bias": arrays(3)}, shapes, text)
    assert converted["params"]["kernel"].names == ("in", "out")
    assert np.array_equal(converted["params"]["kernel"].value, arrays(3, 2).T)


def test_what_is_no_variables_is_refused() -> None:
    with pytest.raises(PortingError, match="variables=3 is of type int; give what a Linen module's init returns"):
        porting.from_torch({}, 3, "a -> params/a")
    with pytest.raises(PortingError, match="every leaf must be a NumPy or JAX array, or a shape"):
        porting.from_torch({}, {"params": {"a": "text"}}, "a -> params/a")
    with pytest.raises(PortingError, match="list is not a mapping"):
        porting.from_torch([], {"params": {}}, "a -> params/a")  # type: ignore[arg-type]


def test_an_array_that_may_be_missing_needs_a_value_to_keep() -> None:
    shapes = {"params": {"a": jax.ShapeDtypeStruct((2,), np.float32)}}
    with pytest.raises(PortingError, match="params/a: is named under 'missing:', but `variables` has no value for it"):
        porting.from_torch({}, shapes, "missing: params/a")


# Dtypes and copies.


def test_float64_is_kept_or_refused_and_never_made_smaller_silently() -> None:
    state, shapes = {"a": arrays(2, dtype=np.float64)}, {"params": {"a": np.zeros(2, np.float32)}}
    with pytest.raises(PortingError, match=r"params/a: is float64, but JAX would convert it to float32; turn on 64-bit types"):
        porting.from_torch(state, shapes, "a -> params/a")
    assert porting.from_torch(state, shapes, "a -> params/a", dtype="float32")["params"]["a"].dtype == np.float32
    with jax.enable_x64(True):
        converted = porting.from_torch(state, shapes, "a -> params/a")["params"]["a"]
        assert converted.dtype == np.float64 and np.array_equal(converted, state["a"])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_small_dtypes_are_kept_and_scaled_with_one_rounding(dtype: Any) -> None:
    x = np.linspace(0.1, 1, 50).astype(dtype)
    converted = porting.from_torch({"a": x}, {"params": {"a": x}}, "a -> params/a | scale(3.3)")["params"]["a"]
    assert converted.dtype == dtype and np.array_equal(converted, (x.astype(np.float64) * 3.3).astype(dtype))


def test_parts_of_several_dtypes_are_refused() -> None:
    state = {"l.0": arrays(2), "l.1": arrays(2, dtype=np.float16)}
    with pytest.raises(PortingError, match="params/l: the parts of the stack are of several dtypes"):
        porting.from_torch(state, {"params": {"l": np.zeros((2, 2))}}, "l.{i} -> params/l[{i}]")
    with pytest.raises(PortingError, match="l.0, l.1: several dtypes, float32, float16, expected one"):
        porting.from_torch(state, {"params": {"l": np.zeros(4)}}, "l.0, l.1 -> params/l | concat(0)")


def test_integers_take_the_model_s_width_where_they_fit() -> None:
    shapes = {"params": {"n": np.zeros(1, np.int32)}}
    assert porting.from_torch({"n": np.array([7])}, shapes, "n -> params/n")["params"]["n"].dtype == np.int32
    with pytest.raises(PortingError, match="is int64, but JAX would convert it to int32"):
        porting.from_torch({"n": np.array([2**40])}, shapes, "n -> params/n")


def test_arrays_go_where_the_variables_are() -> None:
    mesh = jax.make_mesh((1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    shapes = {"params": {"a": jax.ShapeDtypeStruct((4,), np.float32, sharding=sharding)}}
    assert porting.from_torch({"a": arrays(4)}, shapes, "a -> params/a")["params"]["a"].sharding == sharding


def test_rules_are_taken_in_every_form() -> None:
    shapes, state = {"params": {"a": np.zeros(2)}}, {"a": arrays(2)}
    forms = ["a -> params/a", Rules.parse("a -> params/a"), [Rule.parse("a -> params/a")], ["a -> params/a"]]
    assert all(np.array_equal(porting.from_torch(state, shapes, form)["params"]["a"], state["a"]) for form in forms)


# Placeholders in a proposed map, for words and for names that end alike: only where the map stays the same.


def compressed(lines: list[str], also: tuple[str, ...] = ()) -> list[str]:
    """The shorter map of models with the names in `lines`, all of one shape; `also` are further names of PyTorch."""
    rules = Rules.parse("\n".join(lines))
    tensors = [rule.torch[0].text for rule in rules.rules]
    arrays = [str(rule.flax[0]) for rule in rules.rules]
    return str(compress(rules, dict.fromkeys((*tensors, *also), (3, 3)), dict.fromkeys(arrays, (3, 3)))).splitlines()


def weights(*names: str, steps: str = " | linear") -> list[str]:
    return [f"{name}.weight -> params/{name.replace('.', '/')}/kernel{steps}" for name in names]


def test_words_of_both_names_become_placeholders() -> None:
    names = [f"{side}.{i}.{name}" for side in ("encoder", "decoder") for i in range(2) for name in ("query", "key")]
    assert compressed(weights(*names, "head")) == [
        "{part}.{i}.{name}.weight -> params/{part}/{i}/{name}/kernel | linear",
        *weights("head"),
    ]


def test_what_is_transformed_otherwise_comes_first() -> None:
    lines = [*weights("attn.query", "attn.key"), *weights("attn.rotary", steps="")]
    assert compressed(lines) == [*weights("attn.rotary", steps=""), "attn.{name}.weight -> params/attn/{name}/kernel | linear"]


def test_no_placeholder_takes_a_tensor_that_has_no_place() -> None:
    lines = weights("attn.query", "attn.key")
    assert compressed([*lines, "extra: attn.unused.weight"], ("attn.unused.weight",))[:2] == lines


def test_extra_names_that_end_alike_are_a_glob() -> None:
    lines = [*weights("a", "b"), "extra: a.count, b.count, a.mean, c"]
    also = ("a.count", "b.count", "a.mean", "b.mean", "c")
    assert compressed(lines, also)[-1] == "extra: *.count, a.mean, c"
