"""The residual table against closed forms, and against JAX's own list of saved arrays."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj

ROWS, WIDTH, LAYERS = 3, 4, 2


class Block(nn.Module):
    """Residuals: the input, and the sine and cosine, twice as wide."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + nn.Dense(WIDTH, name="down")(jnp.sin(nn.Dense(2 * WIDTH, name="up")(x)))


class Model(nn.Module):
    scan: bool = False
    block: Any = Block

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if not self.scan:
            for index in range(LAYERS):
                x = self.block(name=f"block_{index}")(x)
            return x
        scan = nn.scan(
            lambda block, x, _: (block(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        return scan(self.block(name="layers"), x, None)[0]


def workload(scan: bool = False, dtype: Any = jnp.float32, block: Any = Block) -> rj.Workload:
    model, x = Model(scan, block), jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
    params = jax.eval_shape(Model(scan).init, jax.random.key(0), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)
    return rj.Workload(lambda p, x: (model.apply(p, x) ** 2).mean(), params, (x,), blocks=Block)


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
    job, inside = workload(), workload(block=nn.jit(Block))
    for policy in ("full", "offload_inputs", "offload_dot_with_no_batch_dims"):
        assert totals(inside, policy) == totals(job, policy), policy


def test_unrolled_agrees_with_what_jax_lists_as_saved(capsys):
    for policy, by_hand in [
        ("off", None),
        ("full", jax.checkpoint_policies.nothing_saveable),
        ("dots_with_no_batch_dims", jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    ]:
        block = Block if by_hand is None else nn.remat(Block, policy=by_hand)
        model = Model(block=block)
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
        "block_0/up:dot_general#0": ("save", (3, 8), "float32", 96),
        "block_1/up:dot_general#0": ("save", (3, 8), "float32", 96),
        "block_0:input#0": ("offload", (3, 4), "float32", 48),
        "block_1:input#0": ("offload", (3, 4), "float32", 48),
    }
    assert {name for name, row in rows.items() if row.action == "recompute"} == {
        f"block_{index}:{primitive}#0" for index in range(2) for primitive in ("sin", "cos")
    }
    assert f"test_residuals.py:{line}" in rows["block_0/up:dot_general#0"].source

    scanned = {row.name: row for row in rj.residuals(workload(scan=True), "full") if row.action == "save"}
    assert {name: (row.shape, row.scanned) for name, row in scanned.items()} == {
        ":mul": ((3, 4), False),
        "Model:carry#0": ((2, 3, 4), True),
    }


def test_rows_are_ordered_and_printed_with_their_totals():
    table = rj.residuals(workload(), "save: *up:dot*; offload: @inputs")
    actions = [row.action for row in table]
    assert actions == sorted(actions, key=["save", "offload", "recompute"].index) and len(table) == len(actions)
    assert table.to_dict()["host_bytes"] == sum(row.bytes for row in table if row.action == "offload") == 96
    assert "device 240 B, host 96 B" in str(table) and "block_1:input#0" in str(table)


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


class Odds(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Odd(name="b")(Odd(name="a")(nn.Dense(WIDTH, use_bias=False, name="in")(x)))


def test_through_cond_custom_vjp_jit_and_rng_keys():
    key, x = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    params = jax.eval_shape(lambda k, x: Odds().init({"params": k, "dropout": k}, x), key, x)
    job = rj.Workload(lambda p, x, k: (Odds().apply(p, x, rngs={"dropout": k}) ** 2).mean(), params, (x, key), Odd)
    assert totals(job, "full")[:2] == (4 * 3 * X, 0)  # both inputs, and outside the blocks the squared output's
    assert totals(job, "offload_inputs")[:2] == (4 * X, 4 * 2 * X)
    assert totals(job, "everything")[0] == totals(job, "off")[0]
    saved = {row.name for row in rj.residuals(job, "save: *cos*, *tanh*") if row.action == "save"}
    assert {"a:cos#0", "a:tanh#0", "b:cos#0", "b:tanh#0"} <= saved
    # The dropout mask: one byte each.
    assert {row.bytes for row in rj.residuals(job, "save: *Dropout_0:lt*") if "Dropout_0:lt" in row.name} == {X}


def test_a_kept_rng_key_counts_its_data():
    class Keyed(nn.Module):
        @nn.compact
        def __call__(self, x, key):
            return jnp.sin(x) * jax.random.normal(key, x.shape)

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x, key):
            for index in range(2):
                x = Keyed(name=f"block_{index}")(x, jax.random.fold_in(key, index))
            return x

    x, key = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.eval_shape(jax.random.key, 0)
    job = rj.Workload(
        lambda w, x, k: (Twice().apply({}, x * w, k)).sum(), jax.ShapeDtypeStruct((), jnp.float32), (x, key), Keyed
    )
    keys = [row for row in rj.residuals(job, "full") if row.dtype.startswith("key")]
    assert [(row.bytes, row.count) for row in keys] == [(16, 2)]  # two words of 4 bytes each


def test_parameters_and_batch_are_no_residuals_and_frozen_ones_neither():
    job = workload()
    frozen = rj.Workload(job.loss, job.params, job.batch, Block, trainable="*/block_1/*")
    # Nothing before block_1 is differentiated, so nothing of block_0 is kept.
    assert {row.name for row in rj.residuals(frozen, "off")} == {
        ":mul",
        "Model/block_0:add",
        "Model/block_1:sin",
        "Model/block_1:cos",
    }
    assert totals(frozen, "off")[0] == 4 * (HEAD + X + 2 * HIDDEN)


@pytest.mark.parametrize("scan", [False, True])
def test_a_checkpoint_of_the_models_own_around_the_blocks_is_told(scan):
    freed = workload(scan, block=nn.remat(Block))
    job = rj.Workload(freed.loss, freed.params, freed.batch, Block, own_checkpoints="keep")
    kept = {policy: totals(job, policy) for policy in ("off", "full", "dots", "everything")}
    assert {policy for policy in kept if rj.residuals(job, policy).warning} == {"full", "dots", "everything"}
    assert len(set(kept.values())) == 1 and kept["full"][2] == 0
    table = rj.residuals(job, "dots")
    assert "own_checkpoints='keep'" in str(table.warning) and table.to_dict()["warning"] == table.warning
    assert "replaces these checkpoints" in str(table) and rj.measure(job, "dots").warnings == (table.warning,)
    assert totals(freed, "everything")[0] > totals(freed, "full")[0] == kept["full"][0]
    assert rj.residuals(freed, "full").warning is rj.residuals(freed, "everything").warning is None
    assert rj.measure(freed, "full").warnings == ()


@pytest.mark.versions
@pytest.mark.parametrize("scan", [False, True])
def test_it_is_told_under_remat3_too(remat3, scan):
    freed = workload(scan, block=nn.remat(Block))
    job = rj.Workload(freed.loss, freed.params, freed.batch, Block, own_checkpoints="keep")
    assert [rj.residuals(job, policy).warning is None for policy in ("off", "full", "dots")] == [True, False, False]
