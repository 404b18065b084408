"""The switch on a model: on with a policy, on with another, off again, with no stale traces."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, BlockError, PolicyError
from tests.small_models import Mlp, NnxMlp, NnxStack, Stack, assert_bit_equal, assert_same


class Model(NnxStack):
    """A stack with a head that is no block."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__(layers)
        self.head = nnx.Linear(4, 4, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        return self.head(super().__call__(x))


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def executions(model: Any) -> int:
    graphdef, state = nnx.split(model)
    return matmuls(jax.value_and_grad(lambda state: (nnx.merge(graphdef, state)(X) ** 2).sum()), state)


def test_on_other_policy_and_off_again_in_place():
    model = Model()
    classes, plain = [type(node) for _, node in nnx.iter_graph(model)], executions(model)
    parameters = jax.tree.map(np.asarray, nnx.state(model))
    counts = []
    for policy in ("full", "dots", "off", "full"):
        assert rj.enable_gradient_checkpointing(model, policy) is model
        assert all(isinstance(layer, NnxMlp) and type(layer).__name__ == "NnxMlp" for layer in model.layers)
        assert type(model.head) is nnx.Linear
        counts.append(executions(model) - plain)
    assert counts == [2, 0, 0, 2]
    assert_bit_equal(nnx.state(model), parameters)
    assert rj.disable_gradient_checkpointing(model) is model
    assert [type(node) for _, node in nnx.iter_graph(model)] == classes and executions(model) == plain
    assert rj.disable_gradient_checkpointing(model) is model  # nothing to do


def test_functions_that_were_jitted_before_are_traced_anew():
    traces = []

    @nnx.jit
    def step(model):
        def loss(model):
            traces.append(type(model.layers[0]))
            return (model(X) ** 2).sum()

        return nnx.grad(loss)(model)

    model = Model()
    plain = step(model)
    for switch in (lambda: rj.enable_gradient_checkpointing(model), lambda: rj.disable_gradient_checkpointing(model)):
        switch()
        assert_same(step(model), plain, 1e-7)
    assert [cls is NnxMlp for cls in traces] == [True, False]  # the third call reuses the first trace
    rj.enable_gradient_checkpointing(model)
    step(model)
    assert len(traces) == 2  # and the same switch the second


def test_blocks_by_class_tuple_glob_or_as_the_lists_that_there_are():
    plain = executions(Model(3))
    for blocks, again in (
        (None, 3),
        (NnxMlp, 3),
        ((NnxMlp, nnx.BatchNorm), 3),
        ("layers/1", 1),
        ("layers/*", 3),
        (("head", "layers/0"), 1),
    ):
        model = rj.enable_gradient_checkpointing(Model(3), blocks=blocks)
        assert executions(model) - plain == again, blocks
        changed = {"/".join(map(str, path)) for path, node in nnx.iter_graph(model) if hasattr(type(node), "_plain_class")}
        assert not any(path.endswith(("up", "down")) for path in changed), "only the outermost modules of a glob"

    class Nested(nnx.Module):
        def __init__(self):
            self.stages = nnx.List([nnx.Sequential(NnxMlp(nnx.Rngs(0)), NnxMlp(nnx.Rngs(1))) for _ in range(2)])

    nested = rj.enable_gradient_checkpointing(Nested())
    assert [type(stage) is nnx.Sequential for stage in nested.stages] == [False, False]
    assert type(nested.stages[0].layers[0]) is NnxMlp


def test_models_without_such_blocks_and_wrong_arguments_are_refused():
    with pytest.raises(BlockError, match=r"no list of two or more modules of one class.*Linear, List, Model, NnxMlp"):
        rj.enable_gradient_checkpointing(Model(1))
    with pytest.raises(BlockError, match="no module for blocks='layer/.'"):
        rj.enable_gradient_checkpointing(Model(), blocks="layer/?")
    with pytest.raises(ArgumentError, match="blocks=3: expected a module class"):
        rj.enable_gradient_checkpointing(Model(), blocks=3)
    with pytest.raises(PolicyError, match="policy=None"):
        rj.enable_gradient_checkpointing(Model(), None)
    for switch in (rj.enable_gradient_checkpointing, rj.disable_gradient_checkpointing):
        with pytest.raises(ArgumentError, match="expected an NNX module or a Linen module"):
            switch(jnp.sin)


class LinenModel(Stack):
    def loss(self, x: Any) -> Any:
        return (self(x) ** 2).sum()


def test_a_linen_model_gives_a_checkpointed_copy_with_the_same_parameters():
    model = LinenModel(layers=3)
    variables = model.init(jax.random.key(0), X)

    def count(model, **options):
        return matmuls(jax.value_and_grad(lambda v: jnp.sum(model.apply(v, X, **options) ** 2)), variables)

    enabled = rj.enable_gradient_checkpointing(model, "full", blocks=Mlp)
    assert isinstance(enabled, LinenModel) and type(enabled).__name__ == "LinenModel" and enabled.layers == 3
    assert jax.tree.map(jnp.shape, enabled.init(jax.random.key(0), X)) == jax.tree.map(jnp.shape, variables)
    assert (count(enabled), count(enabled, method="loss")) == (count(model) + 3, count(model, method="loss") + 3)
    assert count(rj.enable_gradient_checkpointing(enabled, "dots", blocks="layer_?")) == count(model)
    restored = rj.disable_gradient_checkpointing(enabled)
    assert type(restored) is LinenModel and restored == model
    assert rj.disable_gradient_checkpointing(model) is model
    # Equal models share a trace of a jit that takes the model as a static argument; the copy is not equal to them.
    assert enabled != model and enabled == rj.enable_gradient_checkpointing(model, "full", blocks=Mlp)


def test_wrong_use_on_a_linen_model_is_refused_at_once():
    model = LinenModel()
    with pytest.raises(ArgumentError, match="blocks=None for the Linen model LinenModel.*blocks=DecoderLayer"):
        rj.enable_gradient_checkpointing(model)
    with pytest.raises(ArgumentError, match="block=3: expected a class whose instances are called"):
        rj.enable_gradient_checkpointing(model, blocks=3)
    variables = model.init(jax.random.key(0), X)
    with pytest.raises(ArgumentError, match="is bound: enable checkpointing on the model before model.bind"):
        rj.enable_gradient_checkpointing(model.bind(variables), blocks=Mlp)
    with pytest.raises(BlockError, match="BatchNorm: this class was never called"):
        rj.enable_gradient_checkpointing(model, blocks=nn.BatchNorm).apply(variables, X)
