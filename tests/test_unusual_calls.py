"""Blocks in blocks that both offload, blocks in solvers, inputs without a derivative, and NumPy values as flags."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback

import remat_jax as rj
from remat_jax import compat
from remat_jax.core.origins import is_on_host
from remat_jax.cost.count import matmuls
from remat_jax.errors import BlockError, UnsupportedError
from tests.small_models import Linear, assert_same

WEIGHTS, X = {"w": np.linspace(-0.4, 0.5, 36).reshape(6, 6)}, np.linspace(0, 1, 24).reshape(4, 6)


def layer(params: Any, x: Any) -> Any:
    return jnp.sin(x @ params["w"])


def nested(inner: Callable[..., Any], outer: Callable[[Any], Any], scanned: bool = False) -> Callable[..., Any]:
    block = outer(lambda params, x: inner(params, jnp.sin(x)) * jnp.cos(x))

    def loss(params: Any, x: Any) -> Any:
        if scanned:
            return jnp.sum(jax.lax.scan(lambda x, _: (block(params, x), None), x, length=2)[0])
        return jnp.sum(block(params, block(params, x)))

    return loss


@pytest.mark.versions
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("inner", "outer", "scanned", "on_host", "on_device"),
    [
        # Whatever an outer policy keeps is on the host if one of the two policies offloads it.
        ("offload_inputs", "offload: *", False, 18, 0),
        ("offload: *dot*", "offload: *", False, 21, 0),
        ("offload_inputs", "offload: *", True, 7, 0),
        ("offload: *", "everything", False, 6, 8),
        # Only the inputs of the two outer blocks: the weights, x, and the output of the first block.
        ("offload_inputs", "full", False, 0, 3),
    ],
)
def test_blocks_in_blocks_may_both_offload(inner: str, outer: str, scanned: bool, on_host: int, on_device: int) -> None:
    loss = nested(rj.remat(layer, inner), functools.partial(rj.remat, policy=outer), scanned)
    gradient = jax.grad(nested(layer, lambda fn: fn, scanned), argnums=(0, 1))(WEIGHTS, X)
    assert_same(jax.jit(jax.grad(loss, argnums=(0, 1)))(WEIGHTS, X), gradient)
    residuals = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(loss, *args)[1]))(WEIGHTS, X).jaxpr.outvars
    assert sum(map(is_on_host, residuals)) == on_host
    assert len(residuals) - on_host == on_device


def system(params: Any, x: Any) -> Any:
    return jnp.tanh(params["w"]) @ x + 2 * x


marked_system = rj.block(system)


def by_steps(matvec: Any, b: Any) -> Any:
    def step(state: Any) -> Any:
        number, x = state
        return number + 1, x + 0.4 * (b - matvec(x))

    return jax.lax.while_loop(lambda state: state[0] < 40, step, (0, b))[1]


def by_jacobian(matvec: Any, b: Any) -> Any:
    return jnp.linalg.solve(jax.jacobian(matvec)(b), b)


def solved(system: Callable[..., Any], solve: Any, transposed: bool = True) -> Callable[..., Any]:
    def loss(params: Any, x: Any) -> Any:
        solution = jax.lax.custom_linear_solve(functools.partial(system, params), x, solve, solve if transposed else None)
        return jnp.sum(jnp.sin(solution))

    return loss


@pytest.mark.versions
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("solve", "policy"), [(by_steps, "dots"), (by_jacobian, "offload: *tanh*"), (by_steps, "1 x full")])
def test_a_linear_solver_has_one_layer_which_is_its_linear_function(solve: Any, policy: str) -> None:
    marked, own = solved(marked_system, solve), solved(jax.checkpoint(system), solve)
    gradient = jax.grad(solved(system, solve))(WEIGHTS, X[0])
    assert_same(jax.grad(rj.checkpoint_blocks(marked, {marked_system: policy}))(WEIGHTS, X[0]), gradient)
    if compat.remat3():
        with pytest.raises(NotImplementedError, match="must implement `transpose`"):
            own(WEIGHTS, X[0])  # JAX cannot transpose a region of jax_remat3
    else:
        assert_same(jax.grad(rj.checkpoint_blocks(own, {"checkpoints": policy}))(WEIGHTS, X[0]), gradient)
    # Calls of the solver itself are no layers; under `jit` its loop and the transposed function contain the traced block.
    with pytest.raises(BlockError, match="policies for 4 layers, but the block is called once"):
        rj.checkpoint_blocks(solved(jax.jit(marked_system), solve), {marked_system: "4 x full"})(WEIGHTS, X[0])


def test_a_linear_solver_costs_what_its_solution_costs() -> None:
    loss = solved(system, lambda matvec, b: matvec(matvec(matvec(b))))
    # The backward pass solves the transposed system, and multiplies once for the matrix's gradient.
    assert (matmuls(loss, WEIGHTS, X[0]), matmuls(jax.grad(loss), WEIGHTS, X[0])) == (3, 3 + 3 + 1)


@pytest.mark.versions
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "put", [rj.remat, lambda block, policy: rj.replan(jax.checkpoint(block), policy)], ids=["remat", "replan"]
)
def test_a_block_offloads_in_a_solver_in_a_shard_map_without_jit(put: Any) -> None:
    """JAX, not the block, runs the linear function of a solver."""

    def block(params: Any, x: Any) -> Any:
        return jnp.tanh(jnp.sin(x) @ params["w"])

    def solve(matvec: Any, b: Any) -> Any:
        return b / matvec(jnp.ones_like(b))

    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:1]), "d"), jax.sharding.PartitionSpec()

    def gradient(block: Any) -> Any:
        def inside(params: Any, x: Any) -> Any:
            return jnp.sum(jax.lax.custom_linear_solve(lambda v: v * (2 + block(params, x)), x, solve, symmetric=True))

        return jax.grad(jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(WEIGHTS, X)

    assert_same(gradient(put(block, "offload: *tanh*")), gradient(block))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("transposed", [True, False])
def test_identical_layers_may_hold_a_solver(transposed: bool) -> None:
    def two(block: Any) -> Callable[..., Any]:
        return lambda params: block(params, X[0]) + block(params, X[0] * block(params, X[1]))

    layer = solved(system, by_steps, transposed)
    under, plain = two(rj.remat(layer, "save: *cos*")), two(layer)
    # Without a solver of the transposed function there is only forward mode.
    derivative = jax.grad if transposed else lambda fn: lambda params: jax.jvp(fn, (params,), (params,))[1]
    assert_same(derivative(under)(WEIGHTS), derivative(plain)(WEIGHTS))


@pytest.mark.usefixtures("x64")
def test_policies_by_layer_in_a_custom_root_are_refused() -> None:
    def loss(params: Any, x: Any) -> Any:
        def root(y: Any) -> Any:
            return marked_system(params, y) - x

        def solve(f: Any, y: Any) -> Any:
            return jax.lax.fori_loop(0, 40, lambda _, y: y - 0.4 * f(y), y)

        return jnp.sum(jax.lax.custom_root(root, x, solve, lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y)))

    gradient = jax.grad(loss)(WEIGHTS, X[0])
    assert_same(jax.grad(rj.checkpoint_blocks(loss, {marked_system: "full"}))(WEIGHTS, X[0]), gradient)
    with pytest.raises(UnsupportedError, match="not for a custom_root"):
        jax.grad(rj.checkpoint_blocks(loss, {marked_system: "1 x full"}))(WEIGHTS, X[0])


@jax.custom_jvp
def underivable(x: Any) -> Any:
    return jnp.sin(x)


@underivable.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise ValueError("no derivative")


@pytest.mark.versions
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("policy", ["full", "save: *dot*", "offload: *tanh*"])
def test_an_input_that_is_not_differentiated_needs_no_derivative(policy: str) -> None:
    def noisy(params: Any, x: Any, data: Any) -> Any:
        return jnp.tanh(x @ params["w"] + underivable(data)) * jnp.cos(x)

    def two(block: Any) -> Callable[..., Any]:
        return lambda params: jnp.sum(block(params, block(params, X, X), X))

    under = two(rj.remat(noisy, policy))
    assert_same(jax.grad(under)(WEIGHTS), jax.grad(two(noisy))(WEIGHTS))
    # Two products forward, three backward; under `full` the second block's gradient reads its recomputed tanh.
    assert matmuls(jax.grad(under), WEIGHTS) == (6 if policy == "full" else 5)
    with pytest.raises(ValueError, match="no derivative"):
        jax.grad(lambda x: jnp.sum(rj.remat(noisy, policy)(WEIGHTS, x, x)))(X)


@pytest.mark.parametrize("policy", ["full", "1 x full"])
def test_an_io_callback_in_a_differentiated_block_is_refused_with_a_remedy(policy: str) -> None:
    seen: list[Any] = []

    @rj.block
    def reporting(params: Any, x: Any) -> Any:
        io_callback(seen.append, None, jax.lax.stop_gradient(x.sum()))
        return layer(params, x)

    loss = rj.checkpoint_blocks(lambda params, x: reporting(params, x).sum(), {reporting: policy})
    loss(WEIGHTS, X)
    jax.effects_barrier()
    assert len(seen) == 1
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        with pytest.raises(UnsupportedError, match="such as io_callback. Use jax.debug.callback"):
            gradient(WEIGHTS, X)


FLAGS = [np.bool_(True), np.int64(1), np.array(True), np.float32(1)]


@flax.struct.dataclass
class Settings:
    train: Any


class Doubling(nn.Module):
    @nn.compact
    def __call__(self, x: Any, settings: Any) -> Any:
        # The next layer branches on the flag that this layer returns.
        return Linear(6)(x) * (2 if settings.train else 3), settings


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: Any, settings: Any) -> Any:
        for _ in range(2):
            x, settings = Doubling()(x, settings=settings)
        return jnp.sum(jnp.sin(x))


@pytest.mark.versions
@pytest.mark.usefixtures("x64")
def test_blocks_may_branch_on_a_numpy_value() -> None:
    linen, with_nnx = Model(), Flagged()
    variables = jax.jit(lambda x: linen.init(jax.random.key(0), x, Settings(True)))(X)

    def scaled(params: Any, x: Any, train: Any = False) -> Any:
        return layer(params, x) if train else x

    plain = jax.grad(linen.apply)(variables, X, Settings(True))
    for flag in FLAGS:
        for policy in ("full", "1 x full | 1 x off"):
            under = rj.checkpoint_blocks(linen.apply, {Doubling: policy})
            assert_same(jax.grad(under)(variables, X, Settings(flag)), plain)
        under = rj.checkpoint_blocks(lambda model, x, flag=flag: model(x, flag), {Flagged: "full"})
        assert_same(under(with_nnx, X), with_nnx(X, flag))
        assert_same(rj.remat(scaled)(WEIGHTS, X, train=flag), layer(WEIGHTS, X))


class Flagged(nnx.Module):
    def __init__(self) -> None:
        self.dense, self.doubles = nnx.Linear(6, 6, rngs=nnx.Rngs(0)), np.bool_(True)

    def __call__(self, x: Any, train: Any) -> Any:
        return self.dense(x) * (2 if train and self.doubles else 3)


def test_another_flag_is_another_call() -> None:
    block = rj.block(layer)

    def loss(params: Any, x: Any, runs: Any) -> Any:
        return jnp.sum(block(params, x)) if runs else jnp.sum(x)

    under = rj.checkpoint_blocks(loss, {block: "full"})
    under(WEIGHTS, X, np.array(True))
    with pytest.raises(BlockError, match="never called"):
        under(WEIGHTS, X, np.array(False))


@pytest.mark.parametrize("name", ["clone", "function", "groups", "inner", "module", "parameters", "rngs", "variables"])
def test_an_argument_of_a_block_may_have_any_name(name: str) -> None:
    """These are names of remat_jax's own parameters. Flax itself refuses some names for Linen blocks, such as `transform`."""
    scaled = rj.block(lambda params, x, **scales: layer(params, x) * scales[name])

    class OfNNX(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.asarray(WEIGHTS["w"]))

        def __call__(self, **scales: float) -> Any:
            return jnp.sin(X @ self.w[...]) * scales[name]

    class OfLinen(nn.Module):
        @nn.compact
        def __call__(self, x: Any, **scales: float) -> Any:
            return jnp.sin(nn.Dense(6)(x)) * scales[name]

    linen = nn.Sequential([lambda x: OfLinen(name="block")(x, **{name: 2.0})])
    losses: list[tuple[Any, Callable[..., Any], Any]] = [
        (scaled, lambda params: jnp.sum(scaled(params, X, **{name: 2.0})), WEIGHTS),
        (OfNNX, lambda model: jnp.sum(model(**{name: 2.0})), OfNNX()),
    ]
    if name != "module":  # Flax's interceptors have an argument of this name
        losses.append((OfLinen, lambda params: jnp.sum(linen.apply(params, X)), linen.init(jax.random.key(0), X)))
    for block, loss, params in losses:
        assert_same(nnx.grad(rj.checkpoint_blocks(loss, {block: "full"}))(params), nnx.grad(loss)(params))
