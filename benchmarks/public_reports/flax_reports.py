"""Reports about Flax and Equinox: lifted transforms, flags, methods, state."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import remat_jax as rj
from benchmarks.public_reports.report import Outcome, compared, message, mib, report, shown
from remat_jax.cost.count import matmuls

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


class Flagged(nn.Module):
    """A layer with a flag that Python branches on."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Dense(4)(x)
        return nn.Dropout(0.5, deterministic=not train)(jnp.tanh(x)) if train else x


def stacked(layer: Any, **keywords: Any) -> Any:
    """A model of two such layers, named alike whatever wraps them, called with the flag by position or by keyword."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any, *flags: Any) -> Any:
            for index in range(2):
                x = layer(name=f"layer_{index}")(x, *flags, **keywords)
            return x

    return Model()


def gradient(model: Any, *flags: Any, policy: Any = None, block: Any = Flagged) -> Any:
    """The gradient of a sum of the model's outputs, jitted, with the model's own parameters."""
    params = stacked(block, **({} if flags else {"train": True})).init(KEYS, X, *flags)["params"]

    def loss(params: Any) -> Any:
        return model.apply({"params": params}, X, *flags, rngs={"dropout": KEYS["dropout"]}).sum()

    return jax.jit(jax.grad(rj.checkpoint_blocks(loss, {block: policy}) if policy else loss))(params)


@report(
    "google/flax#3946",
    "`static_argnums` of `nn.remat` counts without `self`: a `train` flag is traced, ConcretizationTypeError",
)
def a_static_flag() -> Outcome:
    wanted = gradient(stacked(Flagged), False)
    return compared(
        wanted,
        lambda: gradient(stacked(nn.remat(Flagged, static_argnums=(1,))), False),
        lambda: gradient(stacked(Flagged), False, policy="full"),
    )


@report("google/flax#3630", "a checkpointed module cannot branch on a boolean argument")
def a_boolean() -> Outcome:
    # The masks of `nn.remat` differ from those of the plain model.
    wanted = gradient(stacked(Flagged), True)
    return compared(
        wanted, lambda: gradient(stacked(nn.remat(Flagged)), True), lambda: gradient(stacked(Flagged), True, policy="dots")
    )


@report("google/flax#2389", "keyword arguments of a checkpointed module are traced once it is differentiated")
def a_keyword() -> Outcome:
    wanted = gradient(stacked(Flagged, train=True))
    return compared(
        wanted,
        lambda: gradient(stacked(nn.remat(Flagged), train=True)),
        lambda: gradient(stacked(Flagged, train=True), policy="full"),
    )


@report(
    "Physical-Intelligence/openpi#1021",
    "the index of the static argument is one too small under scan and remat: with dropout on, an error",
)
def scanned_with_a_static_flag() -> Outcome:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, condition: Any, deterministic: bool) -> Any:
            y = nn.Dropout(0.5)(nn.Dense(4)(x), deterministic=deterministic)
            return x + jnp.tanh(y), None

    def loss(wrap: Any) -> Any:
        scan = nn.scan(
            wrap(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, nn.broadcast),
            length=3,
        )

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                return scan(name="layers")(x, None, False)[0]

        return lambda params: Model().apply(params, X, rngs={"dropout": KEYS["dropout"]}).sum(), Model()

    function, model = loss(lambda block: block)
    params = {"params": model.init(KEYS, X)["params"]}
    return compared(
        jax.grad(function)(params),
        lambda: jax.grad(loss(lambda block: nn.remat(block, prevent_cse=False, static_argnums=(2,)))[0])(params),
        lambda: jax.jit(jax.grad(rj.checkpoint_blocks(function, {Block: "full"})))(params),
    )


@report("google/flax#3171", "under `nn.jit` a flag by keyword is lost: missing 1 required positional argument")
def a_flag_under_jit() -> Outcome:
    jitted = nn.jit(Flagged, static_argnums=(2,))
    return compared(
        gradient(stacked(jitted), True),
        lambda: gradient(stacked(jitted, train=True)),
        lambda: gradient(stacked(jitted), True, policy="full"),
    )


@report("google/flax#2808", "which methods does `nn.remat` checkpoint? Other methods than `__call__` are not")
def other_methods() -> Outcome:
    class Coder(nn.Module):
        def setup(self) -> None:
            self.up, self.down = nn.Dense(8), nn.Dense(4)

        def encode(self, x: Any) -> Any:
            return jnp.tanh(self.up(x))

        def decode(self, z: Any) -> Any:
            return jnp.tanh(self.down(z))

        def __call__(self, x: Any) -> Any:
            return self.decode(self.encode(x))

    coder = Coder()
    params = coder.init(KEYS["params"], X)

    def loss(params: Any) -> Any:
        return coder.apply(params, coder.apply(params, X, method="encode"), method="decode").sum()

    products = matmuls(jax.value_and_grad(loss), params)
    again = message(lambda: matmuls(jax.value_and_grad(rj.checkpoint_blocks(loss, {Coder: "full"})), params))
    return shown(f"{products} products, none recomputed", again, again.isdigit() and int(again) > products or "Error" in again)


class Dropped(nnx.Module):
    """A layer that counts its dropout masks."""

    def __init__(self, rngs: Any) -> None:
        self.linear, self.drop = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(jnp.tanh(self.linear(x)))


def three_losses(call: Any, jit: Any = nnx.jit) -> Any:
    """Three values and gradients in a row, with one module whose state goes on, and the state at the end."""
    module = Dropped(nnx.Rngs(0))
    step = jit(nnx.value_and_grad(lambda module, x: call(module, x).sum()))
    results = [step(module, X) for _ in range(3)]
    return [(value, nnx.state(gradients, nnx.Param)) for value, gradients in results], nnx.state(module, nnx.RngCount)


def pure(tree: Any) -> Any:
    """A state as plain arrays."""
    return jax.tree.leaves(jax.tree.map(lambda leaf: leaf, tree))


@report("google/flax#4151", "`nnx.Dropout` inside `lax.scan`: TraceContextError")
def dropout_in_a_scan() -> Outcome:
    module = Dropped(nnx.Rngs(0))
    graph, state = nnx.split(module)

    def loss(wrap: Any, state: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            x, state = carry
            module = nnx.merge(graph, state)
            return (wrap(module, x), nnx.state(module)), None

        return lax.scan(body, (X, state), None, length=3)[0][0].sum()

    def gradients(function: Any) -> Any:
        params, rest = nnx.split_state(state, nnx.Param, ...)
        return pure(jax.jit(jax.grad(lambda params: function(nnx.merge_state(params, rest))))(params))

    return compared(
        gradients(lambda state: loss(lambda module, x: module(x), state)),
        lambda: jax.grad(lambda x: lax.scan(lambda x, _: (module(x), None), x, None, length=3)[0].sum())(X),
        lambda: gradients(rj.checkpoint_blocks(lambda state: loss(lambda module, x: module(x), state), {Dropped: "full"})),
    )


@report("google/flax#4771", "dropout counts in scanned NNX layers under `jax.grad`: an error of mutated variables")
def scanned_layers() -> Outcome:
    class Stack(nnx.Module):
        def __init__(self) -> None:
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=0, out_axes=0)
            def made(rngs: Any) -> Any:
                return Dropped(rngs)

            self.layers = made(nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    def two_steps(policy: str | None, grad: Any) -> Any:
        def loss(model: Any, x: Any) -> Any:
            return model(x).sum()

        model = Stack()
        step = grad(rj.checkpoint_blocks(loss, {Dropped: policy}) if policy else loss)
        return pure([step(model, X) for _ in range(2)])

    wanted = two_steps(None, lambda loss: nnx.jit(nnx.grad(loss)))
    return compared(wanted, lambda: two_steps(None, jax.grad), lambda: two_steps("full", lambda loss: nnx.jit(nnx.grad(loss))))


@report("google/flax#4819", "`nnx.while_loop` over a model with `nnx.remat` fails")
def a_while_loop() -> Outcome:
    def generate(call: Any) -> Any:
        model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def body(carry: Any) -> Any:
            model, x, index = carry
            return model, jnp.tanh(call(model, x)), index + 1

        return nnx.while_loop(lambda carry: carry[2] < 3, body, (model, X, 0))[1]

    return compared(
        generate(lambda model, x: model(x)),
        lambda: generate(nnx.remat(lambda model, x: model(x))),
        lambda: rj.checkpoint_blocks(lambda: generate(lambda model, x: model(x)), {nnx.Linear: "full"})(),
    )


@report("google/flax#5116", "`nnx.grad` in a step needs more memory than the pure step")
def memory_of_an_nnx_step() -> Outcome:
    class Layer(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.up, self.down = nnx.Linear(256, 1024, rngs=rngs), nnx.Linear(1024, 256, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return x + self.down(nnx.gelu(self.up(x)))

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([Layer(nnx.Rngs(0)) for _ in range(4)])

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = nnx.eval_shape(Model), jax.ShapeDtypeStruct((4096, 256), jnp.float32)

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(model(x) ** 2)

    def step(model: Any, x: Any) -> Any:
        value, gradients = nnx.value_and_grad(loss)(model, x)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), nnx.state(gradients))
        nnx.update(model, params)
        return value

    job = rj.Workload.from_step(step, model, x, blocks=Layer)
    off, full = (rj.measure(job, policy, "h100").device_bytes for policy in ("off", "full"))
    return shown(
        f"H100: {mib(off)} for the step that returns the loss", f"`full`: {mib(full)}", full < off and off > 40 * 2**20
    )


@report("google/flax#4734", "`nnx.eval_shape` of a model with `BatchNorm` fails, so its memory cannot be asked about")
def shapes_of_a_batch_norm() -> Outcome:
    class Layer(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.linear, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(self.norm(self.linear(x)))

    plain = message(lambda: nnx.eval_shape(lambda x: Layer(nnx.Rngs(0))(x), jax.ShapeDtypeStruct((3, 4), jnp.float32)).shape)
    model = nnx.eval_shape(lambda: Layer(nnx.Rngs(0)))
    job = rj.Workload.from_nnx(model, lambda m, x: m(x).sum(), (jax.ShapeDtypeStruct((3, 4), jnp.float32),), Layer)
    ours = message(lambda: rj.residuals(job, "full").device_bytes)
    return shown(plain, f"residuals under `full`: {ours} B", ours.isdigit())


@report("patrick-kidger/equinox#1152", "how to checkpoint a method of a module: `filter_checkpoint` or `jax.checkpoint`?")
def an_equinox_method() -> Outcome:
    class Model(eqx.Module):
        first: eqx.nn.Linear
        second: eqx.nn.Linear

        @functools.partial(eqx.filter_checkpoint, policy=jax.checkpoint_policies.checkpoint_dots)
        def expensive(self, x: Any) -> Any:
            return jnp.tanh(self.second(jnp.tanh(self.first(x))))

        def __call__(self, x: Any) -> Any:
            return self.expensive(x).sum()

    keys = jax.random.split(jax.random.key(0))
    model = Model(eqx.nn.Linear(4, 8, key=keys[0]), eqx.nn.Linear(8, 4, key=keys[1]))

    def loss(model: Any, x: Any) -> Any:
        return jnp.tanh(model.second(jnp.tanh(model.first(x)))).sum()

    return compared(
        eqx.filter_grad(loss)(model, X[0]),
        lambda: eqx.filter_grad(lambda model, x: model(x))(model, X[0]),
        lambda: jax.grad(rj.replan(lambda model, x: model(x), "full"))(model, X[0]),
    )


@report("marin-community/levanter#427", "the stacked inputs of all scanned layers are large: only some of them should be kept")
def every_other_carry() -> Outcome:
    layer = rj.block(lambda w, x: x + jnp.tanh(x @ w))

    def loss(ws: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0].sum()

    job = rj.Workload(
        loss, jax.ShapeDtypeStruct((16, 64, 64), jnp.float32), (jax.ShapeDtypeStruct((4096, 64), jnp.float32),), layer
    )
    one, groups = (rj.residuals(job, policy).device_bytes for policy in ("full", "16 x full in groups of 4"))
    return shown(f"{mib(one)} of inputs under `full`", f"`16 × full in groups of 4`: {mib(groups)}", groups * 4 == one)


@report(
    "NVIDIA/TransformerEngine#415", "FP8 layers and recomputation: scales are updated twice, or the recomputation sees others"
)
def fp8() -> Outcome:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return jnp.tanh(nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x))

    def loss(wrap: Any) -> Any:
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                for index in range(2):
                    x = wrap(name=f"layer_{index}")(x)
                return x

        return Model(), lambda variables: Model().apply(variables, X).sum()

    model, function = loss(Layer)
    variables = model.init(KEYS["params"], X)
    return compared(
        jax.jit(jax.grad(function, allow_int=True))(variables),
        lambda: jax.jit(jax.grad(loss(nn.remat(Layer))[1], allow_int=True))(variables),
        lambda: jax.jit(jax.grad(rj.checkpoint_blocks(function, {Layer: "everything"}), allow_int=True))(variables),
    )
