"""The axes of operations: where an axis is found, each position of the result reads only its own position of the operand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from remat_jax.core.axes import AxisPlace, passage

IMAGES, KERNEL = (4, 6, 6, 2), (3, 3, 2, 4)
NHWC = ("NHWC", "HWIO", "NHWC")


def convolved(x, kernel, **options):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NHWC, **options)


def pooled(x, window=(1, 2, 1, 1), strides=(1, 2, 1, 1), padding=((0, 0),) * 4):
    return lax.reduce_window_max_p.bind(
        x, window_dimensions=window, window_strides=strides, padding=padding, base_dilation=(1,) * 4, window_dilation=(1,) * 4
    )


# What is computed, from which shapes, and where each followed dimension of the first operand is in the result.
CASES = {
    "conv_general_dilated": (convolved, [IMAGES, KERNEL], {0: 0}),
    "conv_general_dilated, images in groups": (lambda *args: convolved(*args, batch_group_count=2), [IMAGES, KERNEL], {}),
    "reduce_window_max": (pooled, [IMAGES], {0: 0, 2: 2, 3: 3}),
    "reduce_window_max, as large": (
        lambda x: pooled(x, (1, 3, 1, 1), (1,) * 4, ((0, 0), (1, 1), (0, 0), (0, 0))),
        [IMAGES],
        {0: 0, 2: 2, 3: 3},
    ),
    "reduce_window_max, shifted": (
        lambda x: pooled(x, (1,) * 4, (1,) * 4, ((1, -1), (0, 0), (0, 0), (0, 0))),
        [IMAGES],
        {1: 1, 2: 2, 3: 3},
    ),
    "dynamic_update_slice": (lambda x, part: lax.dynamic_update_slice(x, part, (0, 1)), [(4, 6), (4, 2)], {0: 0}),
    "stack": (lambda x, y: jnp.stack([x, y], 1), [(4, 6), (4, 6)], {0: 0, 1: 2}),
    "unstack": (lambda x: jnp.unstack(x, axis=1), [(4, 2, 3)], {0: 0, 2: 1}),
    "tile": (lambda x: jnp.tile(x, (1, 3)), [(4, 6)], {0: 0}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_position_of_the_result_reads_this_position_alone(name):
    function, shapes, expected = CASES[name]
    args = [jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32) for shape in shapes]
    (eqn,) = (eqn for eqn in jax.make_jaxpr(function)(*args).eqns if eqn.primitive.name == name.partition(",")[0])
    found = {}
    for dim, size in enumerate(shapes[0]):
        through = passage(eqn, 0, AxisPlace(dim), size)
        if through is not None:
            found[dim] = through.results[0].dim
            changed = args[0].at[(slice(None),) * dim + (0,)].add(1.0)
            for before, after in zip(*(jax.tree.leaves(function(x, *args[1:])) for x in (args[0], changed)), strict=True):
                assert set(np.nonzero(np.asarray(before != after))[found[dim]]) == {0}
    assert found == expected
