"""A block's program as one device of a mesh runs it."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax.cost.cost import flat_cost
from remat_jax.hardware.rates import Rates
from remat_jax.planning.blocks import calls
from remat_jax.planning.division import Shares, divided
from remat_jax.planning.program import block_program


class Experts(nn.Module):
    """A block that accumulates into zeros, as a dispatch to experts does."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        zeros = jnp.zeros((4, *x.shape))
        placed = zeros.at[1].add(nn.Dense(64, name="up")(x))
        return x + nn.Dense(x.shape[-1], name="down")(jnp.sin(placed).sum(0))


def test_a_constant_that_the_compiler_leaves_whole_does_not_make_its_block_slow() -> None:
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    model = Experts()
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    job = rj.Workload(lambda params, x: model.apply(params, x).sum(), params, (x,), Experts)
    rates = Rates({"float32": 1e9, "tensorfloat32": 1e9}, 1e9)
    program = block_program(calls(job)[0], rates, stack_passes=3)
    before = flat_cost(program.flat.eqns, program.flat.outputs)
    names = {name for array in program.arrays for name in array.names}
    zeros = next(name for name in names if "broadcast_in_dim" in name and name not in program.inputs)
    everything = dict.fromkeys(names, 1 / 8)
    eighth, with_whole = (divided(program, Shares(shares, 1 / 8)) for shares in (everything, everything | {zeros: 1.0}))
    for cost in (eighth.forward, eighth.backward):
        assert cost.seconds(rates) < program.forward.seconds(rates) + program.backward.seconds(rates)
    assert with_whole.forward.seconds(rates) == pytest.approx(eighth.forward.seconds(rates))
    assert with_whole.backward.seconds(rates) == pytest.approx(eighth.backward.seconds(rates))
    assert flat_cost(program.flat.eqns, program.flat.outputs) == before, "the program that is given stays as it is"
    assert all(array.share == 1.0 for array in program.arrays)
