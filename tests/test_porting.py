"""Weight maps: rules, strictness, Linen and NNX, stacks, ties, dtypes; NumPy arrays stand for PyTorch's tensors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from remat_jax import porting
from remat_jax.errors import PortingError
from remat_jax.porting import Rules, Transform
from remat_jax.porting.tensors import as_jax

RULES = """
    embed.weight -> params/embed/embedding | scale(4)
    layers.{i}.in_proj_weight -> params/layers_{i}/{query,key,value}/kernel | in_proj
    layers.{i}.norm.weight -> params/layers_{i}/norm/scale | norm_plus_one
    layers.{i}.norm.running_mean -> batch_stats/layers_{i}/norm/mean
    tie: embed.weight = head.weight
    extra: *.inv_freq
    missing: params/adapter/*
"""


def arrays(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(dtype)


def state_dict() -> dict[str, np.ndarray]:
    state = {"embed.weight": arrays(5, 4), "inv.inv_freq": arrays(3)}
    for i in range(3):
        state[f"layers.{i}.in_proj_weight"] = arrays(12, 4, seed=i)
        state[f"layers.{i}.norm.weight"] = arrays(4, seed=10 + i)
        state[f"layers.{i}.norm.running_mean"] = arrays(4, seed=20 + i)
    return state | {"head.weight": state["embed.weight"].copy()}


def variables(stacked: bool = False) -> dict[str, Any]:
    heads = {name: {"kernel": np.zeros((4, 2, 2))} for name in ("query", "key", "value")}
    layer, stats = heads | {"norm": {"scale": np.zeros(4)}}, {"norm": {"mean": np.zeros(4)}}
    around = {"embed": {"embedding": np.zeros((5, 4))}, "adapter": {"a": np.ones(2, np.float32)}}
    if stacked:
        layer, stats = jax.tree.map(lambda x: np.stack([x] * 3), (layer, stats))
        return {"params": around | {"layers": layer}, "batch_stats": {"layers": stats}}
    layers = {f"layers_{i}": layer for i in range(3)}
    return {"params": around | layers, "batch_stats": {f"layers_{i}": stats for i in range(3)}}


def rules(stacked: bool) -> Rules:
    parsed = Rules.parse(RULES)
    return parsed.stacked("layers_{i}", "layers") if stacked else parsed


# The map as data.


@pytest.mark.parametrize("stacked", [False, True])
def test_rules_survive_text_and_json(stacked: bool) -> None:
    weight_map = rules(stacked)
    assert Rules.parse(str(weight_map)) == weight_map == Rules.from_json(weight_map.to_json())
    assert hash(weight_map) == hash(Rules.parse(str(weight_map)))
    assert weight_map.rules[1].flax[2].path.text == (
        "params/layers/value/kernel" if stacked else "params/layers_{i}/value/kernel"
    )


SIZES = "concat(0, 4, 2) | (h two d) e -> e (h d two), h=3, two=1"


@pytest.mark.parametrize("text", [*porting.NAMED, "scale(sqrt(15)) | shift(-0.5)", "flip(2, 3) | i o h w -> h w i o", SIZES])
def test_transforms_survive_text(text: str) -> None:
    assert Transform.parse(str(Transform.parse(text))) == Transform.parse(text)


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "linear": [(3, 4)],
    "conv3d": [(1, 2, 3, 4, 5)],
    "conv_transpose2d": [(2, 3, 4, 5)],
    "heads_out": [(2, 3, 4)],
    "in_proj": [(4, 2, 3), (4, 1, 3), (4, 1, 3)],
    "gpt2_qkv": [(4, 2, 3)] * 3,
    "gates": [(4, 3)] * 4,
    "lstm_bias": [(3,)] * 4,
    "gru_bias": [(3,)] * 4,
    "scale(0.3) | linear": [(3, 4)],
    "shift(1)": [(3,)],
    "flip(0, 1) | a b -> b a": [(3, 4)],
    "concat(1) | linear": [(6, 4)],
    "concat(0, 4, 1, 1) | o i -> i o": [(5, 6)],
    "(h two d) e -> e (h d two), two=2, h=3": [(5, 12)],
    "o i 1 1 -> i o": [(3, 4)],
}
COUNTS = {"lstm_bias": 2, "gru_bias": 2, "concat(1) | linear": 2, "concat(0, 4, 1, 1) | o i -> i o": 3}


@pytest.mark.parametrize("text", SHAPES)
def test_inverse_and_adjoint_are_what_they_are_called(text: str) -> None:
    transform, after, count = Transform.parse(text), SHAPES[text], COUNTS.get(text, 1)
    before = transform.before(after, count)
    x = [arrays(*shape, seed=i, dtype=np.float64) for i, shape in enumerate(before)]
    y = [arrays(*shape, seed=i + 9, dtype=np.float64) for i, shape in enumerate(after)]
    forward = transform.forward(x, after)
    assert [part.shape for part in forward] == after
    # Always a right inverse; a left inverse except where PyTorch's tensors are added.
    for got, want in zip(transform.forward(transform.inverse(y, count), after), y, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-15)
    if "bias" not in text:
        for got, want in zip(transform.inverse(forward, count), x, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-15)
    origin = transform.forward([np.zeros_like(part) for part in x], after)
    left = sum(float(np.vdot(a - o, b)) for a, o, b in zip(forward, origin, y, strict=True))
    pulled = transform.adjoint(y, count)
    assert left == pytest.approx(sum(float(np.vdot(a, b)) for a, b in zip(x, pulled, strict=True)), rel=1e-13)
    for got, want in zip(transform.gradient(pulled, after), y, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-14)


def test_gradients_of_tensors_that_are_added_must_be_equal() -> None:
    transform = Transform.parse("sum")
    with pytest.raises(PortingError, match="their gradients are equal; the given gradients differ"):
        transform.gradient([np.ones(3), np.array([1, 1, 1.001])], [(3,)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("linaer", r"'linaer' is not a transform; the names are .* Did you mean 'linear'\?"),
        ("(h d) e -> e d", "the two sides name different axes"),
        ("a (b c) -> (a b c)", r"\(a b c\) can be divided in many ways; give b=…, c=…"),
        ("a a -> a", "must be names of axes, each once"),
        ("o i -> i o, z=3", "z: no axis has this name"),
        ("o i -> i o, 3", "'3' is not a size"),
        ("scale(0)", "the factor must be finite and not 0"),
    ],
)
def test_a_malformed_transform_is_refused(text: str, message: str) -> None:
    with pytest.raises(PortingError, match=message):
        Transform.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.weight", "'a.weight' is not a rule; write it as in"),
        ("a -> ", "'a ->' is not a rule; write it as in 'layers"),
        ("l.{i}.w -> params/w", r"'params/w' has no \{i\}, so several tensors would share one name"),
        ("l.w -> params/w[j]", "'j' is not an index"),
        ("l.{}.w -> params/w", "a placeholder is written {i}"),
        ("a -> params/a | linear | linaer", "'linaer' is not a transform"),
        ("tie: a = b\ntie: c = a", "'a' is first in one tie and second in another"),
        ("tie: a = b = c", "is neither a rule"),
        ("tie: a.{i} = b", "must be two names with the same placeholders"),
    ],
)
def test_a_malformed_rule_is_refused(text: str, message: str) -> None:
    with pytest.raises(PortingError, match=message):
        Rules.parse(text)


def test_all_malformed_lines_are_named_at_once() -> None:
    with pytest.raises(PortingError, match=r"(?s)line 2: .*line 4: "):
        Rules.parse("a -> params/a\nb ->\n\nc -> params/c | linaer")


@pytest.mark.parametrize("given", [3, "auto", [1], {"version": 2}])
def test_what_is_no_map_is_refused(given: Any) -> None:
    with pytest.raises(PortingError):
        Rules.from_dict(given) if isinstance(given, dict) else porting.from_torch({}, {}, given)


# Values and gradients under the map.


@pytest.mark.parametrize("stacked", [False, True])
def test_values_arrive_and_come_back(stacked: bool) -> None:
    state = state_dict()
    converted = porting.from_torch(state, variables(stacked), rules(stacked))
    query = (
        converted["params"]["layers"]["query"]["kernel"][2] if stacked else converted["params"]["layers_2"]["query"]["kernel"]
    )
    assert np.array_equal(query, state["layers.2.in_proj_weight"][:4].T.reshape(4, 2, 2))
    assert np.array_equal(converted["params"]["embed"]["embedding"], state["embed.weight"] * 4)
    assert converted["params"]["adapter"]["a"].tolist() == [1, 1]
    back = porting.to_torch(converted, rules(stacked), like=state, numpy=True)
    assert back.keys() == state.keys()
    exact = [name for name in state if not name.endswith("norm.weight")]
    assert all(np.array_equal(back[name], state[name]) and back[name].dtype == np.float32 for name in exact)
    assert set(porting.to_torch(converted, rules(stacked), numpy=True)) == set(state) - {"inv.inv_freq"}


@pytest.mark.parametrize("stacked", [False, True])
def test_gradients_are_pulled_back_and_pushed_forward(stacked: bool) -> None:
    mine = jax.tree.map(lambda x: arrays(*x.shape), variables(stacked)["params"])
    pulled = porting.gradients_to_torch({"params": mine}, rules(stacked), numpy=True)
    assert "head.weight" not in pulled and "layers.0.norm.running_mean" not in pulled
    assert np.array_equal(pulled["embed.weight"], mine["embed"]["embedding"] * 4)
    there = porting.gradients_from_torch(pulled, variables(stacked), rules(stacked))
    assert there.keys() == {"params"}
    mine["adapter"]["a"] = np.zeros(2, np.float32)
    assert jax.tree.all(jax.tree.map(np.array_equal, there["params"], mine))


def test_gradients_of_tied_tensors_add_up_unless_they_are_one() -> None:
    text = "a -> params/a\ntie: a = b"
    first, second = np.array([1.0], np.float32), np.array([2.0], np.float32)
    for given, total in (({"a": first, "b": second}, 3), ({"a": first, "b": first}, 1), ({"b": second}, 2), ({"a": first}, 1)):
        assert porting.gradients_from_torch(given, {"params": {"a": first}}, text)["params"]["a"].tolist() == [total]


def test_tied_values_must_be_equal_and_one_is_enough() -> None:
    state = state_dict()
    state["head.weight"][0, 0] += 1
    with pytest.raises(PortingError, match=r"1 problem:\n  head.weight: tied to embed.weight, but their values differ"):
        porting.from_torch(state, variables(), RULES)
    alone = {name: value for name, value in state.items() if name != "embed.weight"}
    converted = porting.from_torch(alone, variables(), RULES)
    assert np.array_equal(converted["params"]["embed"]["embedding"], state["head.weight"] * 4)
    assert set(porting.to_torch(converted, RULES, like=alone, numpy=True)) == set(alone)


def test_one_array_under_two_names_is_refused_without_a_tie() -> None:
    shared = arrays(3)
    text, both = "a -> params/a\nb -> params/b", {"params": {"a": shared, "b": shared}}
    with pytest.raises(PortingError, match=r"b: duplicated: it is the same tensor as a, .*'tie: a = b'"):
        porting.from_torch({"a": shared, "b": shared}, both, text)
    porting.from_torch({"a": shared, "b": shared.copy()}, both, text)


def test_everything_that_does_not_fit_is_in_one_error() -> None:
    state = state_dict()
    del state["layers.1.norm.weight"]
    state["stray"] = arrays(2)
    state["layers.0.in_proj_weight"] = arrays(4, 12)
    state["layers.7.norm.weight"] = arrays(4)
    state["again"] = arrays(4)
    state["text"] = "no array"  # type: ignore[assignment]
    text = RULES + "\nagain -> params/layers_2/norm/scale"
    target = variables()
    target["params"]["new"] = {"bias": np.zeros(3)}
    with pytest.raises(PortingError) as error:
        porting.from_torch(state, target, text)
    lines = str(error.value).splitlines()
    assert lines[0] == "the tensors do not fit the variables, 7 problems:" and len(lines) == 8
    for start in (
        "  text: is of type str, not a tensor or array",
        "  stray: extra, shape (2,): no rule matches it; write a rule, or name it under 'extra:'",
        "  params/new/bias: not filled, shape (3,): no rule fills it; write a rule, or name it under 'missing:'",
        "  layers.0.in_proj_weight: shape (4, 12), expected (12, 4) for params/layers_0/query/kernel (4, 2, 2), ",
        "  params/layers_7/norm/scale: not in the Flax model, where layers.7.norm.weight (4,) should go.",
        "  layers.1.norm.weight: missing, wanted for params/layers_1/norm/scale by the rule 'layers.{i}.norm.weight -> ",
        "  params/layers_2/norm/scale: duplicated, filled by layers.2.norm.weight and again by again; each is used",
    ):
        assert [line for line in lines if line.startswith(start)], start
    assert isinstance(error.value, rj.RematError) and isinstance(error.value, ValueError)


def test_a_stack_with_a_layer_too_few_or_too_many_is_refused() -> None:
    few = {name: value for name, value in state_dict().items() if not name.startswith("layers.2.")}
    with pytest.raises(PortingError, match=r"3 problems:(?s:.*)layers\.2\.in_proj_weight: missing"):
        porting.from_torch(few, variables(stacked=True), rules(True))
    many = state_dict() | {"layers.3.norm.weight": arrays(4)}
    with pytest.raises(PortingError, match=r"1 problem:\n  params/layers/norm/scale\[3\]: outside the stack"):
        porting.from_torch(many, variables(stacked=True), rules(True))


def test_to_torch_is_held_to_the_model_that_it_is_for() -> None:
    converted = porting.from_torch(state_dict(), variables(), RULES)
    like = state_dict()
    del like["layers.2.norm.weight"]
    like |= {"embed.weight": arrays(6, 4), "new": arrays(1)}
    with pytest.raises(PortingError, match="3 problems") as error:
        porting.to_torch(converted, RULES, like=like, numpy=True)
    for text in ("embed.weight: shape (5, 4), expected (6, 4)", "new: no rule makes it", "layers.2.norm.weight: not a tensor"):
        assert text in str(error.value)
    converted["params"]["layers_3"] = {"norm": {"bias": jnp.zeros(4)}}
    with pytest.raises(PortingError, match="params/layers_3/norm/bias: not filled"):
        porting.to_torch(converted, RULES, numpy=True)


def test_a_gradient_that_never_came_is_named() -> None:
    text, params = "a -> params/a\nb -> params/b", {"params": {"a": np.zeros(2), "b": np.zeros(2)}}
    with pytest.raises(PortingError, match="b: its gradient is None"):
        porting.gradients_from_torch({"a": arrays(2), "b": None}, params, text)
    unused = porting.gradients_from_torch({"a": arrays(2)}, jax.tree.map(np.float32, params), text + "\nmissing: params/b")
    assert unused["params"]["b"].tolist() == [0, 0]


def test_numbers_beside_a_placeholder_find_the_ends_of_a_stack() -> None:
    text = """
        layers.0.weight -> params/first/kernel | linear
        layers.3.weight -> params/head/kernel | linear
        layers.{i}.weight -> params/layers/kernel[{i-1}] | linear
    """
    state = {f"layers.{i}.weight": arrays(2, 2, seed=i) for i in range(4)}
    shapes = {"first": np.zeros((2, 2)), "head": np.zeros((2, 2)), "layers": np.zeros((2, 2, 2))}
    converted = porting.from_torch(state, {"params": {name: {"kernel": x} for name, x in shapes.items()}}, text)["params"]
    assert np.array_equal(converted["layers"]["kernel"][1], state["layers.2.weight"].T)
    assert np.array_equal(converted["head"]["kernel"], state["layers.3.weight"].T)
    back = porting.to_torch({"params": converted}, text, numpy=True)
    assert back.keys() == state.keys() and all(np.array_equal(back[name], state[name]) for name in state)


def test_a_stack_inside_a_stack_and_on_a_later_axis() -> None:
    text = "l.{i}.{j}.w -> params/w[{i}, {j}]\nv.{i} -> params/v[:, {i}]"
    state = {f"l.{i}.{j}.w": arrays(3, seed=10 * i + j) for i in range(2) for j in range(2)}
    state |= {f"v.{i}": arrays(4, seed=i) for i in range(3)}
    converted = porting.from_torch(state, {"params": {"w": np.zeros((2, 2, 3)), "v": np.zeros((4, 3))}}, text)["params"]
    assert np.array_equal(converted["w"][1, 0], state["l.1.0.w"]) and np.array_equal(converted["v"][:, 2], state["v.2"])


@pytest.mark.parametrize("to_stack", [True, False])
def test_restacking_is_exact_in_linen(to_stack: bool) -> None:
    whole = porting.from_torch(state_dict(), variables(not to_stack), rules(not to_stack))
    restacked = porting.restack(whole, variables(to_stack), "layers_{i}", "layers")
    expected = porting.from_torch(state_dict(), variables(to_stack), rules(to_stack))
    assert jax.tree.all(jax.tree.map(np.array_equal, restacked, expected))


def test_a_part_of_a_stack_that_no_rule_speaks_of_is_named() -> None:
    state, shapes = {"l.0": arrays(2), "l.2": arrays(2)}, {"params": {"l": np.zeros((3, 2))}}
    with pytest.raises(PortingError, match=r"1 problem:\n  params/l\[1\]: not filled, shape \(3, 2\): no rule fills this part"):
        porting.from_torch(state, shapes, "l.0 -> params/l[0]\nl.2 -> params/l[2]")
    with pytest.raises(PortingError, match=r"params/l: duplicated, filled as params/l\[0\] and as params/l\[:, 0\]"):
        porting.from_torch(state, shapes, "l.0 -> params/l[0]\nl.2 -> params/l[:, 0]")


def test_no_program_is_compiled_for_a_shape_and_the_users_arrays_are_copied() -> None:
    lowered: list[str] = []

    def record(event: str, *_: Any, **__: Any) -> None:
        lowered.append(event)

    state = {f"w{i}": np.zeros((41, i), np.float32) for i in range(1, 6)}
    shapes = {"params": {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in state.items()}}
    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        converted = porting.from_torch(state, shapes, "{name} -> params/{name}")["params"]
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
    assert not [event for event in lowered if "jaxpr_to_mlir" in event]
    copies = [as_jax(array) for array in state.values()]
    for array in state.values():
        array += 1
    assert not any(array.any() for array in [*converted.values(), *copies])
    assert all(isinstance(array, jax.Array) for array in converted.values())


def test_converted_arrays_are_replicated_on_the_mesh_that_is_set() -> None:
    mesh = jax.make_mesh((1,), ("data",))
    with jax.set_mesh(mesh):
        converted = porting.from_torch({"w": arrays(3)}, {"params": {"w": np.zeros(3, np.float32)}}, "w -> params/w")
    assert converted["params"]["w"].sharding == jax.NamedSharding(mesh, jax.P())
