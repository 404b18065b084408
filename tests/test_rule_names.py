"""The weight maps of ports whose weights have several projects' names: every variable once, both ways."""

from __future__ import annotations

import functools
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


@functools.cache
def shapes(model: str, scan: bool) -> Any:
    make, config, _ = MODELS[model]
    grid: tuple[Any, ...] = ()
    if make is pi0.Pi0:
        arrays = config.shapes(batch=1)[:3]
    else:
        tokens, grid = ((1, 2, 4, 6, 3), ()) if make is wan.Wan else ((1, 6, 12), (((1, 2, 3),),))
        arrays = tuple(np.ones(shape, np.float32) for shape in (tokens, (1, 5, 20), (1,)))
    return jax.eval_shape(lambda *x: make(config, scan=scan).init(jax.random.key(0), *x, *grid), *arrays)


def numbered(tree: Any) -> Any:
    """All numbers of all arrays differ."""
    leaves, definition = jax.tree.flatten(tree)
    starts = np.cumsum([0, *(leaf.size for leaf in leaves)], dtype=np.int32)
    arrays = [start + np.arange(x.size, dtype=np.int32).reshape(x.shape) for x, start in zip(leaves, starts, strict=False)]
    return jax.tree.unflatten(definition, arrays)


@pytest.mark.parametrize(("model", "names"), CASES)
def test_every_variable_is_carried_once_and_comes_back_in_both_forms(model: str, names: str) -> None:
    _, config, rules = MODELS[model]
    variables, scanned = numbered(shapes(model, True)), rules(config, True, names)
    tensors = porting.to_torch(variables, scanned, numpy=True)
    tied = {second.text for _, second in scanned.ties}
    carried = np.concatenate([tensor.ravel() for name, tensor in tensors.items() if name not in tied])
    assert np.array_equal(np.sort(carried), np.arange(carried.size))
    assert carried.size == sum(leaf.size for leaf in jax.tree.leaves(variables))
    back = porting.from_torch(tensors, shapes(model, True), scanned)
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(variables)))
    unrolled = porting.from_torch(tensors, shapes(model, False), rules(config, False, names))
    again = porting.to_torch(unrolled, rules(config, False, names), numpy=True)
    assert {name: (x.shape, x.tobytes()) for name, x in again.items()} == {
        name: (x.shape, x.tobytes()) for name, x in tensors.items()
    }


# The released projects at the sizes above: names, shapes, and the place of one number of each in the port.
HEADS = "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel"
PLACES = [
    ("attn/q_einsum_1/w", (3, 4, 20, 10), "experts_1/q_proj/kernel", (2, 3, 4, 5), (2, 4, 35)),
    ("attn/kv_einsum/w", (3, 2, 2, 24, 10), "experts_0/v_proj/kernel", (2, 1, 1, 4, 5), (2, 4, 15)),
    ("attn/attn_vec_einsum/w", (3, 4, 10, 24), "experts_0/o_proj/kernel", (2, 3, 5, 4), (2, 35, 4)),
    ("mlp_1/gating_einsum", (3, 2, 20, 36), "experts_1/mlp/gate_proj/kernel", (1, 0, 4, 5), (1, 4, 5)),
]
OPENPI_JAX = [(f"PaliGemma/llm/layers/{name}", shape, f"layers/{path}", *places) for name, shape, path, *places in PLACES] + [
    ("PaliGemma/img/pos_embedding", (1, 4, 32), "vision/positions/embedding", (0, 3, 4), (3, 4)),
    (HEADS, (2, 32, 4, 8), "vision/layers/self_attn/query/kernel", (1, 5, 3, 7), (1, 5, 31)),
    ("action_in_proj/kernel", (8, 20), "action_in_proj/kernel", (3, 4), (3, 4)),
]


def test_openpi_heads_layers_and_pairs_go_to_their_places() -> None:
    variables = numbered(shapes("pi0", True))
    tensors = porting.to_torch(variables, pi0_rules.rules(MODELS["pi0"][1], True, "openpi_jax"), numpy=True)
    leaves = Variables(variables).leaves
    for name, shape, path, theirs, ours in OPENPI_JAX:
        assert tensors[name].shape == shape and tensors[name][theirs] == leaves[f"params/{path}"][ours], name
