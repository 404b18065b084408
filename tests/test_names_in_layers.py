"""A name means the same array in every layer, whatever is dead in a block or differentiated outside it."""

from __future__ import annotations

import random
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax.errors import NoEffectError

LAYERS = 3
# Each operation has its own line, which identifies its arrays.
UNARY = (
    lambda x: jnp.sin(x),
    lambda x: jnp.sin(2 * x),
    lambda x: jnp.cos(x),
    lambda x: jnp.cos(3 * x),
    lambda x: jnp.tanh(x),
    lambda x: jnp.exp(-(x**2)),
)
BINARY = (
    lambda x, y: jnp.sin(x) * y,
    lambda x, y: x * jnp.cos(y),
    lambda x, y: jnp.maximum(x, y),
    lambda x, y: x / (2 + y * y),
)


class Random(nn.Module):
    """Operations on the input, the weights and each other, some of them dead."""

    seed: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        chosen = random.Random(self.seed)
        values = [x, nn.Dense(4, name="dense")(x)]
        for _ in range(chosen.randint(3, 9)):
            if chosen.random() < 0.5:
                values.append(chosen.choice(UNARY)(chosen.choice(values)))
            else:
                values.append(chosen.choice(BINARY)(chosen.choice(values), chosen.choice(values)))
        return x + chosen.choice(values[1:])


class Written(nn.Module):
    """A dead cosine and sine; then a layer whose own sines have equal numbers in all layers."""

    seed: int = 0

    @nn.compact
    def __call__(self, x: Any) -> Any:
        jnp.cos(x), jnp.sin(3 * x)
        first = jnp.sin(nn.Dense(4)(x))
        return x + jnp.sin(jnp.sin(x) * first)


class Model(nn.Module):
    block: Any
    seed: int = 0

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for layer in range(LAYERS):
            x = self.block(self.seed, name=f"layer_{layer}")(x)
        return x.sum()


def workload(block: Any, seed: int = 0) -> rj.Workload:
    """The gradient of the parameters alone: the first layer's input has none."""
    model, x = Model(block, seed), jnp.ones((2, 4))
    return rj.Workload(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), (x,), block)


def traced(job: rj.Workload, policy: str) -> None:
    jax.eval_shape(rj.checkpoint_blocks(job.loss, dict.fromkeys(job.blocks, policy)), job.params, *job.batch)


def kept(job: rj.Workload, policy: str) -> list[tuple[int, str, str]]:
    """For every kept array: its layer, its name in that layer, and its source line."""
    rows = [row for row in rj.residuals(job, policy).rows if row.name.startswith("layer_") and row.action == "save"]
    return [(int(row.name[6]), row.name[7:], row.source) for row in rows]


def test_dead_code_and_an_input_without_gradient_do_not_move_names() -> None:
    job = workload(Written)
    lines: dict[str, set[str]] = {}
    for _, name, line in kept(job, "everything"):
        lines.setdefault(name, set()).add(line.split(":")[-1])
    assert {name: len(some) for name, some in lines.items()} == dict.fromkeys(lines, 1)
    by_layer = [{name for layer, name, _ in kept(job, "everything") if layer == number} for number in range(LAYERS)]
    # Only the gradient with respect to x reads the slope of sin(x).
    assert by_layer[1] - {":add#0"} == by_layer[2] == {":sin#0", ":sin#1", ":cos#0", ":cos#1", ":cos#2"}
    assert by_layer[2] - by_layer[0] == {":cos#1", ":sin#0"}
    cosines = [(layer, name) for layer, name, _ in kept(job, "save: *:cos#2") if "cos" in name]
    assert cosines == [(layer, ":cos#2") for layer in range(LAYERS)]


class Linear(nn.Module):
    """The second product of the last layer is summed without weights."""

    seed: int = 0

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = jnp.sin(nn.Dense(4, name="dense")(x)) * 2
        return x + (y if self.name == "layer_2" else jnp.tanh(y))


@pytest.mark.parametrize(
    ("policy", "idle"),
    [
        ("save: *:cos#2, *Dense_0:add#0, layer_?:add#0", "layer_?:add#0"),
        ("save: @dots; save: layer_?:add#0", "layer_?:add#0"),
        ("offload: *:cos#2, layer_?:add#0", "layer_?:add#0"),
        ("save: *:sin#2; offload: *:cos#2", "*:sin#2"),
    ],
)
def test_each_selector_is_judged_by_itself_under_its_action(policy: str, idle: str) -> None:
    """No derivative reads the output of a layer or its sine; the other arrays are read."""
    with pytest.raises(NoEffectError, match=rf"the selector '{re.escape(idle)}' keeps nothing in layer_0, layer_1, layer_2: "):
        traced(workload(Written), policy)


def test_a_selector_without_effect_in_some_layers_says_in_which() -> None:
    job = workload(Linear)
    with pytest.raises(NoEffectError, match=r":mul#0' has an effect in layer_0, layer_1, but keeps nothing in layer_2"):
        traced(job, "save: *:mul#0")
    # The second selector matches some arrays in some layers.
    for policy in ("save: layer_[01]:mul#0", "save: layer_?:[ma]*#0, *:cos#0"):
        traced(job, policy)


def test_the_gradient_that_is_taken_decides_in_a_table() -> None:
    job = workload(Written)
    for text in ("save: layer_0:cos#1", "offload: layer_0:cos#1", "1 x save: *:cos#1 | 2 x full"):
        with pytest.raises(NoEffectError, match=r"cos#1' keeps nothing in layer_0: the requested gradients do not need"):
            rj.residuals(job, text)
    # The other layers read theirs.
    assert [row[:2] for row in kept(job, "save: *:cos#1") if "cos" in row[1]] == [(1, ":cos#1"), (2, ":cos#1")]

    def frozen(params: Any, x: Any) -> Any:
        scale = params["params"]["layer_0"]["Dense_0"]["bias"].sum()
        return scale * job.loss(jax.lax.stop_gradient(params), x)

    with pytest.raises(NoEffectError, match="'layer_1:cos#2' keeps nothing in any block"):
        rj.residuals(rj.Workload(frozen, job.params, job.batch, Written), "save: layer_1:cos#2")


@pytest.mark.parametrize("seed", [0, 3, 6, 23, 95])
def test_a_selector_of_one_residual_keeps_it_or_is_an_error(seed: int) -> None:
    job = workload(Random, seed)
    everything, full = kept(job, "everything"), kept(job, "full")
    lines = {}
    layers: dict[str, set[int]] = {}
    for layer, name, line in set(everything) - set(full):
        assert lines.setdefault(name, line) == line
        layers.setdefault(name, {1, 2}).add(layer)
    for name, line in lines.items():
        rows = [row for row in kept(job, f"save: layer_?{name}") if row[1] == name]
        assert set(rows) >= {(layer, name, line) for layer in layers[name]}
