"""The residual table against closed forms, and against JAX's own list of saved arrays."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from tests.small_models import Stack
from tests.workloads import mean_square, struct

ROWS, WIDTH, LAYERS = 3, 4, 2


class Block(nn.Module):
    """Residuals: the input, and the sine and cosine, twice as wide."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + nn.Dense(WIDTH, name="down")(jnp.sin(nn.Dense(2 * WIDTH, name="up")(x)))


def workload(scan: bool = False, dtype: Any = jnp.float32, block: Any = Block) -> rj.Workload:
    job = mean_square(Stack(block, LAYERS, scan), struct(ROWS, WIDTH), Block)
    given = jax.tree.map(lambda leaf: struct(*leaf.shape, dtype=dtype), (job.params, job.batch))
    return rj.Workload(job.loss, *given, Block)


def totals(job: rj.Workload, policy: Any) -> tuple[int, int, int]:
    table = rj.residuals(job, policy)
    return table.device_bytes, table.host_bytes, table.recompute_bytes


X, HIDDEN, HEAD = ROWS * WIDTH, 2 * ROWS * WIDTH, ROWS * WIDTH
"""Elements of a block's input, of its hidden layer, and of the arrays that the squared output keeps outside the blocks."""


@pytest.mark.parametrize(("dtype", "size"), [(jnp.float32, 4), (jnp.bfloat16, 2)])
@pytest.mark.parametrize("scan", [False, True])
def test_bytes_are_the_closed_form(scan, dtype, size):
    job = workload(scan, dtype)
    # Unrolled, the input of the first block is the batch, which is no residual; scanned, it is copied into the stack of inputs.
    inputs, hidden = (LAYERS if scan else LAYERS - 1) * X, LAYERS * HIDDEN
    for policy, device, host, again in [
        ("off", HEAD + inputs + 2 * hidden, 0, 0),
        ("everything", HEAD + inputs + 2 * hidden, 0, 0),
        ("full", HEAD + inputs, 0, 2 * hidden),
        ("offload_inputs", HEAD, LAYERS * X, 2 * hidden),
        ("dots_with_no_batch_dims", HEAD + inputs + hidden, 0, 2 * hidden),
        ("offload_dot_with_no_batch_dims", HEAD + inputs, hidden, 2 * hidden),
        ("save: *:sin*; offload: *:cos*", HEAD + inputs + hidden, hidden, 0),
    ]:
        assert totals(job, policy) == (device * size, host * size, again * size), policy
    assert totals(job, {Block: "full"}) == totals(job, "full")


def test_blocks_inside_jit_have_the_rows_of_the_same_blocks_outside():
    policy = "offload: @inputs; save: @dots_with_no_batch_dims"
    assert totals(workload(block=nn.jit(Block)), policy) == totals(workload(), policy)


def test_unrolled_agrees_with_what_jax_lists_as_saved(capsys):
    for policy, by_hand in [
        ("off", None),
        ("full", jax.checkpoint_policies.nothing_saveable),
        ("dots_with_no_batch_dims", jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    ]:
        block = Block if by_hand is None else nn.remat(Block, policy=by_hand)
        model = Stack(block, LAYERS)
        job = workload()
        jax.ad_checkpoint.print_saved_residuals(lambda p, x, m=model: (m.apply(p, x) ** 2).mean(), job.params, *job.batch)
        lines = [
            line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line and "constant" not in line
        ]
        sizes = [re.match(r"f32\[([\d,]*)\]", line).group(1) for line in lines]
        listed = sum(4 * int(jnp.prod(jnp.array([int(n) for n in dims.split(",") if n] or [1]))) for dims in sizes)
        assert rj.residuals(job, policy).device_bytes == listed, policy


def test_names_actions_and_source_lines():
    with open(__file__, encoding="utf-8") as file:
        line = next(number for number, text in enumerate(file, 1) if "jnp.sin(nn.Dense" in text)
    rows = {row.name: row for row in rj.residuals(workload(), "save: *up:dot*; offload: @inputs")}
    assert {name: (row.action, row.shape, row.dtype, row.bytes) for name, row in rows.items() if row.action != "recompute"} == {
        ":mul": ("save", (3, 4), "float32", 48),
        "layer_0/up:dot_general#0": ("save", (3, 8), "float32", 96),
        "layer_1/up:dot_general#0": ("save", (3, 8), "float32", 96),
        "layer_0:input#0": ("offload", (3, 4), "float32", 48),
        "layer_1:input#0": ("offload", (3, 4), "float32", 48),
    }
    assert {name for name, row in rows.items() if row.action == "recompute"} == {
        f"layer_{index}:{primitive}#0" for index in range(2) for primitive in ("sin", "cos")
    }
    assert f"test_residuals.py:{line}" in rows["layer_0/up:dot_general#0"].source
    table = rj.residuals(workload(), "save: *up:dot*; offload: @inputs")
    actions = [row.action for row in table]
    assert actions == sorted(actions, key=["save", "offload", "recompute"].index) and len(table) == len(actions)
    assert table.to_dict()["host_bytes"] == sum(row.bytes for row in table if row.action == "offload") == 96
    assert "device 240 B, host 96 B" in str(table) and "layer_1:input#0" in str(table)

    scanned = {row.name: row for row in rj.residuals(workload(scan=True), "full") if row.action == "save"}
    assert {name: (row.shape, row.scanned) for name, row in scanned.items()} == {
        ":mul": ((3, 4), False),
        "Stack:carry#0": ((2, 3, 4), True),
    }


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return jnp.sin(2 * x)


doubled.defvjp(lambda x: (jnp.sin(2 * x), (2 * jnp.cos(2 * x),)), lambda kept, g: (kept[0] * g,))


class Odd(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = doubled(nn.Dropout(0.5, deterministic=False)(x))
        x = jax.lax.cond(x.sum() > 0, lambda x: jnp.exp(x), lambda x: 2 * x, x)
        return jax.jit(lambda x: jnp.tanh(x))(x)


def test_through_cond_custom_vjp_jit_and_rng_keys():
    key, x = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    model = nn.Sequential([nn.Dense(WIDTH, use_bias=False), Odd(), Odd()])
    params = jax.eval_shape(lambda k, x: model.init({"params": k, "dropout": k}, x), key, x)
    job = rj.Workload(lambda p, x, k: (model.apply(p, x, rngs={"dropout": k}) ** 2).mean(), params, (x, key), Odd)
    assert totals(job, "full")[:2] == (4 * 3 * X, 0)  # both inputs, and outside the blocks the squared output's
    assert totals(job, "offload_inputs")[:2] == (4 * X, 4 * 2 * X)
    assert totals(job, "everything")[0] == totals(job, "off")[0]
    saved = {row.name.rpartition("/")[2] for row in rj.residuals(job, "save: *cos*, *tanh*") if row.action == "save"}
    assert {f"layers_{index}:{primitive}#0" for index in (1, 2) for primitive in ("cos", "tanh")} <= saved
    # The dropout mask: one byte each.
    assert {row.bytes for row in rj.residuals(job, "save: *Dropout_0:lt*") if "Dropout_0:lt" in row.name} == {X}


def test_a_kept_rng_key_counts_its_data():
    @rj.block
    def keyed(x, key):
        return jnp.sin(x) * jax.random.normal(key, x.shape)

    def loss(w, x, key):
        return keyed(keyed(x * w, jax.random.fold_in(key, 0)), jax.random.fold_in(key, 1)).sum()

    job = rj.Workload(loss, struct(), (struct(ROWS, WIDTH), jax.eval_shape(jax.random.key, 0)), keyed)
    keys = [row for row in rj.residuals(job, "full") if row.dtype.startswith("key")]
    assert [(row.bytes, row.count) for row in keys] == [(16, 2)]  # two words of 4 bytes each


def test_parameters_and_batch_are_no_residuals_and_frozen_ones_neither():
    job = workload()
    frozen = rj.Workload(job.loss, job.params, job.batch, Block, trainable="*/layer_1/*")
    # Nothing before layer_1 is differentiated, so nothing of layer_0 is kept.
    assert {row.name for row in rj.residuals(frozen, "off")} == {
        ":mul",
        "Stack/layer_0:add",
        "Stack/layer_1:sin",
        "Stack/layer_1:cos",
    }
    assert totals(frozen, "off")[0] == 4 * (HEAD + X + 2 * HIDDEN)


@pytest.mark.versions
@pytest.mark.parametrize(("scan", "flags"), [(False, []), (True, ["jax_remat3"])])
def test_a_checkpoint_of_the_models_own_around_the_blocks_is_told(scan, flags, with_flags):
    with_flags(flags)
    freed = workload(scan, block=nn.remat(Block))
    job = rj.Workload(freed.loss, freed.params, freed.batch, Block, own_checkpoints="keep")
    off, table = rj.residuals(job, "off"), rj.residuals(job, "dots")
    assert off.warning is None and totals(job, "off") == (table.device_bytes, table.host_bytes, 0)
    assert "own_checkpoints='keep'" in str(table.warning) and table.to_dict()["warning"] == table.warning
    assert "replaces these checkpoints" in str(table) and rj.measure(job, "dots").warnings == (table.warning,)
    free = rj.residuals(freed, "everything")
    assert free.warning is None and free.device_bytes > off.device_bytes == totals(freed, "full")[0]
    assert rj.measure(freed, "full").warnings == ()
