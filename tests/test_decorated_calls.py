"""Blocks whose method is decorated with transforms, has several names, or is another method than `__call__`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, BlockError
from tests.small_models import Linear, assert_same

Case = tuple[Callable[..., Any], tuple[Any, ...]]
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def counted(loss: Any, policies: dict[Any, str], arguments: tuple[Any, ...]) -> int:
    return matmuls(jax.value_and_grad(rj.checkpoint_blocks(loss, policies), has_aux=True), *arguments)


def check(loss: Any, block: Any, arguments: tuple[Any, ...], counts: dict[str, int]) -> None:
    """`counts` has the matrix products under each policy; under the last, all results are those of the plain loss."""
    assert {policy: counted(loss, {block: policy}, arguments) for policy in counts} == counts
    losses = (rj.checkpoint_blocks(loss, {block: [*counts][-1]}), loss)
    assert_same(*(jax.jit(jax.value_and_grad(fn, has_aux=True))(*arguments) for fn in losses), 1e-6)


def linen_loss(model: nn.Module) -> Case:
    params = jax.jit(model.init)(KEYS, X)["params"]

    def loss(params: Any, x: Any) -> Any:
        y, state = model.apply({"params": params}, x, rngs=KEYS, mutable=["sums"])
        return jnp.sum(y**2), state

    return loss, (params, X)


def nnx_loss(model: nnx.Module, run: Callable[[Any, Any], Any] = lambda model, x: model(x)) -> Case:
    graph, params, state = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, state: Any, x: Any) -> Any:
        merged = nnx.merge(graph, params, state, copy=True)
        return jnp.sum(run(merged, x) ** 2), nnx.to_pure_dict(nnx.state(merged, nnx.BatchStat))

    return loss, (params, state, X)


class LinenCoder(nn.Module):
    def setup(self) -> None:
        self.up, self.down = Linear(8), Linear(4)

    def encode(self, x: Any) -> Any:
        return jnp.tanh(self.down(jnp.tanh(self.up(x))))

    def decode(self, x: Any) -> Any:
        return self.down(jnp.sin(self.up(x)))

    def __call__(self, x: Any) -> Any:
        return self.decode(self.encode(x))

    @property
    def width(self) -> int:
        return 4

    @classmethod
    def make(cls) -> Any:
        return cls()

    @staticmethod
    def twice(x: Any) -> Any:
        return 2 * x


class LinenChild(LinenCoder):
    pass


class NnxCoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def encode(self, x: Any) -> Any:
        return jnp.tanh(self.down(jnp.tanh(self.up(x))))

    def decode(self, x: Any) -> Any:
        return self.down(jnp.sin(self.up(x)))


class EqxCoder(eqx.Module):
    up: Any
    down: Any

    def encode(self, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ self.up) @ self.down)

    def decode(self, x: Any) -> Any:
        return jnp.sin(x @ self.up) @ self.down


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class PlainCoder:
    """It shares its functions with another class."""

    up: Any
    down: Any
    encode, decode = EqxCoder.encode, EqxCoder.decode


KERNELS = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8), jnp.linspace(-1.0, 2.0, 32).reshape(8, 4)


def coder_case(cls: Any) -> Case:
    if issubclass(cls, nn.Module):
        return linen_loss(cls())
    if issubclass(cls, nnx.Module):
        return nnx_loss(cls(nnx.Rngs(0)), lambda model, x: model.decode(model.encode(x)))
    return (lambda model, x: (jnp.sum(model.decode(model.encode(x)) ** 2), None)), (cls(*KERNELS), X)


def decorated(call: Any, decorators: list[Any]) -> Any:
    """`call` under the decorators, the innermost first."""
    return functools.reduce(lambda function, wrap: wrap(function), decorators, call)


def linen_case(decorators: list[Any], name: str = "__call__") -> tuple[Any, Any, tuple[Any, ...]]:
    """Two layers whose call, also under another name, is decorated."""

    def call(self: Any, x: Any) -> Any:
        h = Linear(4, name="down")(jnp.tanh(Linear(8, name="up")(x)))
        self.sow("sums", "h", h.sum())
        return x + nn.Dropout(0.5, deterministic=False)(h)

    call.__name__ = name
    method = nn.compact(call)
    layer: Any = type("Layer", (nn.Module,), {name: method, "__call__": decorated(method, decorators)})
    return layer, *linen_loss(nn.Sequential([layer(), layer()]))


def nnx_case(decorators: list[Any], name: str = "__call__") -> tuple[Any, Any, tuple[Any, ...]]:
    def call(self: Any, x: Any) -> Any:
        self.calls[...] += 1.0
        return x + self.down(jnp.tanh(self.up(x)))

    call.__name__ = name
    layer: Any = type("Layer", (NnxCoder,), {name: call, "__call__": decorated(call, decorators)})
    return layer, *nnx_loss(nnx.Sequential(layer(nnx.Rngs(0)), layer(nnx.Rngs(1))))


def scanned(method: Any) -> Any:
    @functools.wraps(method)
    def one_layer(self: Any, carry: Any, _: None) -> Any:
        return method(self, carry), None

    layers = nn.scan(one_layer, variable_axes={"params": 0, "sums": 0}, split_rngs={"params": True, "dropout": True}, length=2)
    return functools.wraps(layers)(lambda self, x: layers(self, x, None)[0])


each_example = functools.partial(
    nn.vmap, variable_axes={"params": None, "sums": 0}, split_rngs={"params": False, "dropout": True}
)
BOTH = {"full": 13, "dots": 11, "1 x full | 1 x dots": 12}
IN_SCANS = {"full": 28, "dots": 24, "2 x full | 2 x dots": 26}
DECORATED: dict[str, tuple[Any, list[Any], dict[str, int]]] = {
    "linen remat": (linen_case, [nn.remat], BOTH),
    "linen jit": (linen_case, [nn.jit], BOTH),
    "linen vmap": (linen_case, [each_example], BOTH),
    "linen scan": (linen_case, [scanned], IN_SCANS),
    "linen remat inside scan": (linen_case, [nn.remat, scanned], {"full": 28, "dots": 24}),
    "linen remat around jit": (linen_case, [nn.jit, nn.remat], BOTH),
    "nnx jit": (nnx_case, [nnx.jit], BOTH),
    "nnx jit around remat": (nnx_case, [nnx.remat, nnx.jit], BOTH),
    "nnx remat around jit": (nnx_case, [nnx.jit, nnx.remat], BOTH),
}


@pytest.mark.parametrize("name", DECORATED)
def test_a_decorated_call_takes_a_policy(name: str) -> None:
    make, decorators, counts = DECORATED[name]
    layer, loss, arguments = make(decorators)
    check(loss, layer, arguments, counts)


@pytest.mark.parametrize(
    ("make", "decorators"), [(linen_case, []), (linen_case, [nn.jit]), (linen_case, [nn.remat]), (nnx_case, [])]
)
def test_a_call_by_another_name_is_the_call(make: Any, decorators: list[Any]) -> None:
    layer, loss, arguments = make(decorators, "forward")
    assert {policy: counted(loss, {layer: policy}, arguments) for policy in BOTH} == BOTH
    for block in [layer.forward] + [layer.__call__, "layers_?"] * (make is linen_case):
        assert counted(loss, {block: "full"}, arguments) == 13


def test_a_method_that_a_subclass_defines_anew_is_no_longer_the_call() -> None:
    layer, _, _ = linen_case([], "forward")

    class Child(layer):  # type: ignore[misc,valid-type]
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return jnp.sin(self.forward(x))

    loss, arguments = linen_loss(Child())
    # The block `Child` ends in the sine, which reads the second product; the block `forward` does not.
    check(loss, Child, arguments, {"full": 7})
    check(loss, Child.forward, arguments, {"full": 6})


def test_a_descriptor_of_another_class_that_raises_is_passed_over() -> None:
    class Raising:
        def __get__(self, instance: Any, owner: Any) -> Any:
            raise AttributeError("no forward without an instance")

    foreign = type("Foreign", (), {"forward": Raising()})
    layer, loss, arguments = nnx_case([], "forward")
    assert counted(loss, {layer.forward: "full"}, arguments) == 13
    assert foreign.__name__ == "Foreign"


def test_the_policy_takes_the_place_of_a_remat_inside_a_scan() -> None:
    class Stack(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jax.random.normal(jax.random.key(0), (3, 4, 4)))

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def __call__(self, x: Any) -> Any:
            return jnp.tanh(jnp.tanh(x @ self.w[...]) @ self.w[...])

    loss, arguments = nnx_loss(Stack())
    check(loss, Stack, arguments, {"full": 24, "dots": 18, "1 x full | 2 x dots": 20})


def test_a_vmapped_call_of_nnx_and_a_decorated_method_of_it_take_a_policy() -> None:
    class Layer(NnxCoder):
        @nnx.vmap(in_axes=(None, 0))
        def __call__(self, x: Any) -> Any:
            return jnp.tanh(self.down(jnp.tanh(self.up(x))))

        encode = nnx.remat(NnxCoder.encode)

    loss, arguments = nnx_loss(Layer(nnx.Rngs(0)), lambda layer, x: layer(layer.encode(x)))
    check(loss, Layer, arguments, {"full": 15, "dots": 13})  # the model's own checkpoint on `encode` recomputes two
    check(loss, Layer.encode, arguments, {"full": 13, "dots": 11})


@pytest.mark.parametrize(
    ("decorator", "own"), [(eqx.filter_checkpoint, 1), (eqx.filter_jit, 0), (lambda f: jax.vmap(f, (None, 0)), 0)]
)
def test_decorated_methods_of_equinox_take_a_policy(decorator: Any, own: int) -> None:
    class Layer(EqxCoder):
        @decorator
        def __call__(self, x: Any) -> Any:
            return jnp.tanh(jnp.tanh(x @ self.up) @ self.down)

        @decorator
        def encode(self, x: Any) -> Any:
            return jnp.sin(x @ self.up) @ self.down

    def loss(layer: Any, x: Any) -> Any:
        return jnp.sum(layer.encode(layer(x)) ** 2), None

    # The model's own checkpoint of the other method stays.
    check(loss, Layer, (Layer(*KERNELS), X), {"full": 13 + own, "dots": 11 + own})
    check(loss, Layer.encode, (Layer(*KERNELS), X), {"full": 12 + 2 * own, "dots": 11 + 2 * own})


def test_the_switch_takes_methods() -> None:
    model = NnxCoder(nnx.Rngs(0))

    def gradient() -> Any:
        loss, arguments = nnx_loss(model, lambda coder, x: coder.decode(coder.encode(x)))
        of_loss = jax.value_and_grad(loss, has_aux=True)
        return matmuls(of_loss, *arguments), nnx.to_pure_dict(jax.jit(of_loss)(*arguments)[1])

    count, plain = gradient()
    for blocks, again in (([NnxCoder.encode], 2), ([NnxCoder.encode, NnxCoder.decode], 3)):
        rj.enable_gradient_checkpointing(model, "full", blocks=tuple(blocks))
        under, ours = gradient()
        assert under == count + again
        assert_same(ours, plain, 1e-6)
        assert type(rj.disable_gradient_checkpointing(model)) is NnxCoder


@pytest.mark.parametrize("cls", [LinenCoder, LinenChild, NnxCoder, EqxCoder, PlainCoder])
def test_a_method_is_a_block(cls: Any) -> None:
    loss, arguments = coder_case(cls)
    # `full` recomputes both products of `encode`, whose output the tanh after them reads, and the first product of `decode`.
    check(loss, cls.encode, arguments, {"dots": 11, "1 x full": 13, "full": 13})
    assert counted(loss, {cls.decode: "full"}, arguments) == 12
    assert counted(loss, {cls.encode: "full", cls.decode: "full"}, arguments) == 14


def test_remat_decorates_a_linen_method() -> None:
    class Decorated(LinenCoder):
        encode = rj.remat(LinenCoder.encode, "full")

    (loss, arguments), (plain, _) = coder_case(Decorated), coder_case(LinenCoder)
    gradients = [jax.value_and_grad(fn, has_aux=True) for fn in (loss, plain)]
    assert [matmuls(gradient, *arguments) for gradient in gradients] == [13, 11]
    assert_same(*(jax.jit(gradient)(*arguments) for gradient in gradients), 1e-6)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (LinenCoder.width, "a property has no call"),
        (LinenCoder.make, "LinenCoder.make: a class method runs on no instance"),
        (LinenCoder.twice, "LinenCoder.twice: a static method runs on no instance"),
        (LinenCoder().encode, "name the method of the class, LinenCoder.encode"),
        (NnxCoder.__init__, "NnxCoder.__init__: this method makes the module"),
        (lambda x: x, "expected a class whose instances are called"),
        (type("Other", (), {}), r"the method that runs a layer \(Layer.encode\)"),
    ],
)
def test_what_is_no_method_of_instances(block: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        rj.checkpoint_blocks(lambda x: x, {block: "full"})


def test_a_method_that_is_never_called() -> None:
    with pytest.raises(BlockError, match=r"block=NnxCoder.encode: this method was never called"):
        rj.checkpoint_blocks(lambda x: x * 2, {NnxCoder.encode: "full"})(1.0)
