"""The switch on an NNX model with Linen modules behind `nnx.bridge.ToNNX`, built like OpenPI's."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import BlockError, NoEffectError
from tests.small_models import assert_bit_equal, assert_same, to_host

WIDTH, DEPTH, TOWER = 8, 3, 2


class Block(nn.Module):
    """A layer of two streams, either of which may be absent."""

    @nn.compact
    def __call__(self, xs: Any, scale: Any, deterministic: bool = True) -> Any:
        return [x if x is None else x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(2 * WIDTH)(x * scale))) for x in xs], None


class Decoder(nn.Module):
    def setup(self) -> None:
        self.table = self.param("table", nn.initializers.normal(), (5, WIDTH))
        checkpointed = nn.remat(Block, prevent_cse=False, static_argnums=(3,), policy=jax.checkpoint_policies.nothing_saveable)
        scanned = nn.scan(
            checkpointed,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast),
            length=DEPTH,
        )
        self.layers = scanned()

    def embed(self, tokens: Any) -> Any:
        return self.table[tokens]

    def __call__(self, xs: Any, scale: Any, *, deterministic: bool = True) -> Any:
        return self.layers(xs, scale, deterministic)[0]

    def init(self, present: Any) -> Any:
        """Linen's own method of this name is another, as in OpenPI."""
        self.embed(jnp.zeros((1, 1), jnp.int32))
        return self([jnp.zeros((1, 1, WIDTH)) if there else None for there in present], jnp.ones(()))


class TowerBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return x + nn.Dense(WIDTH)(jnp.sin(nn.Dense(WIDTH)(x))), {"seen": x}


class Tower(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, train: bool = False) -> Any:
        block = nn.remat(TowerBlock, prevent_cse=False, static_argnums=(2,))
        scanned = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=TOWER)
        return scanned(name="encoderblock")(x, train)


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        llm, img = nnx.bridge.ToNNX(Decoder()), nnx.bridge.ToNNX(Tower())
        llm.lazy_init(rngs=rngs, method="init", present=[True, True])
        img.lazy_init(jnp.zeros((1, 4, WIDTH)), train=False, rngs=rngs)
        self.parts = nnx.Dict(llm=llm, img=img)
        self.out = nnx.Linear(WIDTH, 2, rngs=rngs)

    def loss(self, image: Any, tokens: Any) -> Any:
        seen, _ = self.parts.img(image, train=False)
        words = self.parts.llm(tokens, method="embed")
        first, second = self.parts.llm([seen, words], jnp.float32(0.5), deterministic=True)
        return jnp.sum(self.out(first) ** 2) + jnp.sum(self.out(second) ** 2)


@functools.cache
def made() -> Model:
    return Model()


def fresh() -> Model:
    """A model that no switch has changed: making its parameters anew would compile its scans for each test."""
    return nnx.clone(made())


BLOCKS = (Block, TowerBlock)
IMAGE = np.linspace(-1, 1, 2 * 4 * WIDTH, dtype=np.float32).reshape(2, 4, WIDTH)
TOKENS = np.array([[0, 3, 4], [1, 2, 2]])
# Matrix products of the forward pass: two per stream in each layer of the two streams, and two in each layer of the tower.
LAYERS, TOWERS = 4 * DEPTH, 2 * TOWER


def value_and_gradient(model: Any) -> Any:
    graphdef, state = nnx.split(model, nnx.Param)
    return jax.value_and_grad(lambda state: nnx.merge(graphdef, state).loss(IMAGE, TOKENS)), state


def executions(model: Any) -> int:
    function, state = value_and_gradient(model)
    return matmuls(function, state)


def written() -> int:
    """Executions without recomputation; the model's own checkpoints are `nothing_saveable`, which is `full`."""
    return executions(fresh()) - again("full")


def again(policy: str) -> int:
    """Recomputed products: never a block's last product, whose value no backward pass reads."""
    return {"full": LAYERS // 2 + TOWERS // 2, "dots": 0}[policy]


@pytest.mark.parametrize("blocks", [BLOCKS, None, "checkpoints", ("layers", "encoderblock")], ids=str)
def test_policies_take_the_place_of_the_models_own_checkpoints(blocks: Any) -> None:
    plain = written()
    model = fresh()
    for policy in ("dots", "full"):
        assert rj.enable_gradient_checkpointing(model, policy, blocks=blocks) is model
        assert executions(model) == plain + again(policy)
        assert isinstance(model.parts["llm"], nnx.bridge.ToNNX) and type(model.out) is nnx.Linear
    assert rj.disable_gradient_checkpointing(model) is model
    assert type(model.parts["llm"]) is nnx.bridge.ToNNX and executions(model) == plain + again("full")


@pytest.mark.parametrize(
    ("policy", "blocks"),
    [("off", BLOCKS), ("full", BLOCKS), ("dots", None), ("offload_inputs", None)],
    ids=lambda value: value if isinstance(value, str) else "by default" if value is None else "classes",
)
def test_values_gradients_and_parameters_are_the_models_own(policy: str, blocks: Any) -> None:
    model = fresh()
    parameters = jax.tree.map(np.asarray, nnx.state(model))
    function, state = value_and_gradient(model)
    expected = jax.jit(function)(state)
    rj.enable_gradient_checkpointing(model, policy, blocks=blocks)
    function, state = value_and_gradient(model)
    assert_same(jax.jit(function)(state), expected, 1e-7)
    assert_bit_equal(jax.tree.map(np.asarray, nnx.state(model)), parameters)
    assert bool(to_host(function, state)) == (policy == "offload_inputs")


def test_one_of_two_classes_leaves_the_other_parts_checkpoints() -> None:
    plain = written()
    model = rj.enable_gradient_checkpointing(fresh(), "dots", blocks=TowerBlock)
    assert executions(model) == plain + LAYERS // 2
    model = rj.enable_gradient_checkpointing(fresh(), "dots", blocks=Block)
    assert executions(model) == plain + TOWERS // 2


def test_the_models_own_checkpoints_can_be_kept() -> None:
    plain, model = written(), rj.enable_gradient_checkpointing(fresh(), "dots", blocks=BLOCKS, own_checkpoints="keep")
    with pytest.warns(rj.RematWarning, match="own_checkpoints='keep'"):
        assert executions(model) == plain + again("full")


class Absent(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(WIDTH)(x)


def test_a_class_that_no_part_calls_is_an_error_when_every_part_was_called() -> None:
    model = rj.enable_gradient_checkpointing(fresh(), blocks=(Block, Absent))
    with pytest.raises(BlockError, match=r"block=Absent: this class was never called.*layers: Block"):
        model.loss(IMAGE, TOKENS)
    with pytest.raises(BlockError, match="block=Absent"):  # once more: nothing was cached
        model.loss(IMAGE, TOKENS)
    with pytest.raises(BlockError, match="no module for blocks='nowhere/.'|the glob matches no path of a called module"):
        rj.enable_gradient_checkpointing(fresh(), blocks="nowhere/?").loss(IMAGE, TOKENS)


def test_a_selector_that_matches_nothing_in_any_part_is_an_error() -> None:
    rj.enable_gradient_checkpointing(fresh(), "save: @primitive:sin; recompute: *", blocks=BLOCKS).loss(IMAGE, TOKENS)
    model = rj.enable_gradient_checkpointing(fresh(), "save: @primitive:erf; recompute: *", blocks=BLOCKS)
    with pytest.raises(NoEffectError, match="@primitive:erf"):
        model.loss(IMAGE, TOKENS)


def test_parts_without_checkpoints_of_their_own_need_blocks() -> None:
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return TowerBlock()(TowerBlock()(x)[0])[0]

    model = nnx.bridge.ToNNX(Plain())
    model.lazy_init(IMAGE, rngs=nnx.Rngs(0))
    with pytest.raises(BlockError, match="no jax.checkpoint region"):
        rj.enable_gradient_checkpointing(model)(IMAGE)
    rj.enable_gradient_checkpointing(model, blocks=TowerBlock)
    # Four forward, four backward, and the first product of each block again.
    assert matmuls(jax.value_and_grad(lambda x: (model(x) ** 2).sum()), IMAGE) == 4 + 4 + 2


def test_random_streams_and_mutable_collections_of_a_part_go_on() -> None:
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.remat(TowerBlock)()(x)[0]
            return nn.Dropout(0.5, deterministic=False)(x)

    def draws(enabled: bool) -> Any:
        model = nnx.bridge.ToNNX(Noisy(), rngs=nnx.Rngs(0, dropout=1))
        model.lazy_init(IMAGE)
        if enabled:
            rj.enable_gradient_checkpointing(model)
        outputs = [nnx.jit(lambda model, x: model(x))(model, IMAGE), model(IMAGE), model(IMAGE)]
        assert not np.array_equal(outputs[1], outputs[2])
        return outputs

    assert_same(draws(True), draws(False), 1e-7)
