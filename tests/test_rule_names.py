"""The weight maps of ports whose weights have several projects' names: every variable once, both ways."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from examples.models import pi0, qwen_image, wan
from examples.models.pi0_config import Pi0Config
from examples.models.rules import pi0 as pi0_rules
from examples.models.rules import qwen_image as qwen_image_rules
from examples.models.rules import wan as wan_rules
from remat_jax import porting
from remat_jax.errors import PortingError
from remat_jax.porting.variables import Variables

# All sizes differ, so that no two axes can be confused.
PI0 = {"widths": (24, 20), "mlp_dims": (28, 36), "depth": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 10}
MODELS = {
    "wan": (wan.Wan, wan.WanConfig(), wan_rules.rules),
    "qwen_image": (qwen_image.QwenImage, qwen_image.QwenImageConfig(activation="quick_gelu"), qwen_image_rules.rules),
    "pi0": (pi0.Pi0, Pi0Config(**PI0), pi0_rules.rules),
    "pi0.5": (pi0.Pi0, Pi0Config(**PI0, adaptive=True), pi0_rules.rules),
    "pi0 without groups": (pi0.Pi0, Pi0Config(**PI0 | {"num_kv_heads": 4}), pi0_rules.rules),
}
NAMES = {"wan": ("diffusers", "diffsynth"), "qwen_image": ("diffusers", "diffsynth")}
CASES = [(model, names) for model in MODELS for names in NAMES.get(model, ("torch_ref", "openpi_jax", "openpi_pytorch"))]


def shapes(model: str, scan: bool) -> Any:
    make, config, _ = MODELS[model]
    given: tuple[Any, ...] = ()
    if make is pi0.Pi0:
        given = config.shapes(batch=1)[:3]
    elif make is wan.Wan:
        given = np.ones((1, 2, 4, 6, 3), np.float32), np.ones((1, 5, 20), np.float32), np.ones(1, np.float32)
    else:
        given = np.ones((1, 6, 12), np.float32), np.ones((1, 5, 20), np.float32), np.ones(1, np.float32), ((1, 2, 3),)
        return jax.eval_shape(lambda *x: make(config, scan=scan).init(jax.random.key(0), *x, given[3]), *given[:3])
    return jax.eval_shape(make(config, scan=scan).init, jax.random.key(0), *given)


def numbered(tree: Any) -> Any:
    """All numbers of all arrays differ."""
    leaves, definition = jax.tree.flatten(tree)
    starts = np.cumsum([0, *(leaf.size for leaf in leaves)])
    arrays = [
        np.arange(start, start + leaf.size, dtype=np.int32).reshape(leaf.shape)
        for leaf, start in zip(leaves, starts, strict=False)
    ]
    return jax.tree.unflatten(definition, arrays)


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize(("model", "names"), CASES)
def test_every_variable_is_carried_once_and_comes_back(model: str, names: str, scan: bool) -> None:
    _, config, rules = MODELS[model]
    variables = numbered(shapes(model, scan))
    tensors = porting.to_torch(variables, rules(config, scan, names), numpy=True)
    tied = {second.text for _, second in rules(config, scan, names).ties}
    carried = np.concatenate([tensor.ravel() for name, tensor in tensors.items() if name not in tied])
    assert np.array_equal(np.sort(carried), np.arange(carried.size))
    assert carried.size == sum(leaf.size for leaf in jax.tree.leaves(variables))
    back = porting.from_torch(tensors, shapes(model, scan), rules(config, scan, names))
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(variables)))


@pytest.mark.parametrize(("model", "names"), CASES)
def test_both_forms_have_the_same_tensors(model: str, names: str) -> None:
    _, config, rules = MODELS[model]
    scanned = porting.to_torch(numbered(shapes(model, True)), rules(config, True, names), numpy=True)
    unrolled = porting.from_torch(scanned, shapes(model, False), rules(config, False, names))
    again = porting.to_torch(unrolled, rules(config, False, names), numpy=True)
    assert {name: (x.shape, x.tobytes()) for name, x in again.items()} == {
        name: (x.shape, x.tobytes()) for name, x in scanned.items()
    }


# The released projects at the sizes above: names, shapes, and the place of one number of each in the port.
OPENPI_JAX = {
    "PaliGemma/llm/layers/attn/q_einsum_1/w": (
        (3, 4, 20, 10),
        "params/layers/experts_1/q_proj/kernel",
        (2, 3, 4, 5),
        (2, 4, 35),
    ),
    "PaliGemma/llm/layers/attn/kv_einsum/w": (
        (3, 2, 2, 24, 10),
        "params/layers/experts_0/v_proj/kernel",
        (2, 1, 1, 4, 5),
        (2, 4, 15),
    ),
    "PaliGemma/llm/layers/attn/attn_vec_einsum/w": (
        (3, 4, 10, 24),
        "params/layers/experts_0/o_proj/kernel",
        (2, 3, 5, 4),
        (2, 35, 4),
    ),
    "PaliGemma/llm/layers/mlp_1/gating_einsum": (
        (3, 2, 20, 36),
        "params/layers/experts_1/mlp/gate_proj/kernel",
        (1, 0, 4, 5),
        (1, 4, 5),
    ),
    "PaliGemma/img/pos_embedding": ((1, 4, 32), "params/vision/positions/embedding", (0, 3, 4), (3, 4)),
    "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel": (
        (2, 32, 4, 8),
        "params/vision/layers/self_attn/query/kernel",
        (1, 5, 3, 7),
        (1, 5, 31),
    ),
    "action_in_proj/kernel": ((8, 20), "params/action_in_proj/kernel", (3, 4), (3, 4)),
}


@pytest.mark.parametrize("name", OPENPI_JAX)
def test_openpi_heads_layers_and_pairs_go_to_their_places(name: str) -> None:
    shape, path, theirs, ours = OPENPI_JAX[name]
    variables = numbered(shapes("pi0", True))
    tensors = porting.to_torch(variables, pi0_rules.rules(MODELS["pi0"][1], True, "openpi_jax"), numpy=True)
    assert tensors[name].shape == shape
    assert tensors[name][theirs] == Variables(variables).leaves[path][ours]


def test_openpi_without_groups_has_queries_keys_and_values_in_one() -> None:
    variables = numbered(shapes("pi0 without groups", False))
    rules = pi0_rules.rules(MODELS["pi0 without groups"][1], False, "openpi_jax")
    tensor = porting.to_torch(variables, rules, numpy=True)["PaliGemma/llm/layers/attn/qkv_einsum_1/w"]
    leaves = Variables(variables).leaves
    assert tensor.shape == (3, 3, 4, 20, 10)
    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        assert tensor[2, index, 3, 4, 5] == leaves[f"params/layers_2/experts_1/{name}/kernel"][4, 35]


def test_a_checkpoint_keeps_paligemmas_embedding_under_either_name() -> None:
    """If one tensor has two names, `safetensors` stores one of them."""
    config, rules = MODELS["pi0"][1], pi0_rules.rules(MODELS["pi0"][1], True, "openpi_pytorch")
    variables = numbered(shapes("pi0", True))
    tensors = porting.to_torch(variables, rules, numpy=True)
    ((first, second),) = rules.ties
    for name in (first.text, second.text):
        kept = {each: tensor for each, tensor in tensors.items() if each != name}
        back = porting.from_torch(kept, shapes("pi0", True), pi0_rules.rules(config, True, "openpi_pytorch"))
        assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(variables)))


@pytest.mark.parametrize("model", MODELS)
def test_unknown_names_are_refused(model: str) -> None:
    _, config, rules = MODELS[model]
    choices = " or ".join(map(repr, NAMES.get(model, ("torch_ref", "openpi_jax", "openpi_pytorch"))))
    for names in ("openpi", ["diffusers"]):
        with pytest.raises(ValueError) as caught:
            rules(config, names=names)
        assert str(caught.value) == f"names={names!r}: expected {choices}, the project that the weights come from"


def test_weights_under_another_projects_names_are_refused_with_their_names() -> None:
    tensors = porting.to_torch(numbered(shapes("wan", True)), wan_rules.rules(wan.WanConfig(), True), numpy=True)
    with pytest.raises(PortingError, match=r"blocks\.0\.attn1\.to_q\.weight: extra"):
        porting.from_torch(tensors, shapes("wan", True), wan_rules.rules(wan.WanConfig(), True, "diffsynth"))
