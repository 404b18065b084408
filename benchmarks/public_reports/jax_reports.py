"""Reports about `jax.checkpoint` itself: residuals, names, offload, derivatives, leaks."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import remat_jax as rj
from benchmarks.public_reports.report import NOT_RUN, Outcome, compared, counted, message, mib, report, shown
from remat_jax.cost.count import count, matmuls

NAMES = jax.checkpoint_policies.save_and_offload_only_these_names
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
W = jnp.cos(jnp.arange(16.0)).reshape(4, 4) / 2


def primitives(function: Any, name: str, *args: Any) -> int:
    """How often `function` executes a primitive."""
    return count(jax.make_jaxpr(function)(*args), lambda eqn: eqn.primitive.name == name)


@report("jax-ml/jax#18817", "a checkpoint around checkpoints seems to disable the inner ones")
def nested_checkpoints() -> Outcome:
    def halved(wrap: Any, depth: int) -> Any:
        if depth == 0:
            return jnp.sin
        inner, outer = halved(wrap, depth - 1), halved(wrap, depth - 1)
        return lambda x: outer(wrap(inner)(x))

    plain = jax.grad(lambda x: jax.checkpoint(halved(jax.checkpoint, 3))(x))
    ours = jax.grad(lambda x: rj.remat(halved(lambda f: rj.remat(f, "full"), 3), "full")(x))
    executed = [primitives(gradient, "sin", 0.3) for gradient in (plain, ours)]
    wanted, right = jax.grad(halved(lambda f: f, 3))(0.3), abs(ours(0.3) - plain(0.3)) < 1e-6
    return counted(
        f"{executed[0]} sin for 8 layers",
        f"{executed[1]} sin",
        right and executed[1] <= executed[0] and bool(wanted),
        cured=False,
    )


@report("jax-ml/jax#12792", "with a checkpoint around the whole model the memory rises instead of falling")
def one_checkpoint_around_everything() -> Outcome:
    def loss(wrap: Any, ws: Any, x: Any) -> Any:
        def model(ws: Any, x: Any) -> Any:
            for w in ws:
                x = x + jnp.tanh(x @ w)
            return x

        return jnp.mean(wrap(model)(ws, x) ** 2)

    ws, x = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8, jax.ShapeDtypeStruct((8192, 256), jnp.float32)
    layer = rj.block(lambda w, x: x + jnp.tanh(x @ w))

    def in_blocks(ws: Any, x: Any) -> Any:
        for w in ws:
            x = layer(w, x)
        return jnp.mean(x**2)

    bytes_of = {
        "none": rj.measure(rj.Workload(lambda *a: loss(lambda f: f, *a), ws, (x,), "*"), "off", "h100").device_bytes,
        "whole": rj.measure(rj.Workload(lambda *a: loss(jax.checkpoint, *a), ws, (x,), "*"), "off", "h100").device_bytes,
        "layers": rj.measure(rj.Workload(in_blocks, ws, (x,), layer), "full", "h100").device_bytes,
    }
    return shown(
        f"H100: {mib(bytes_of['none'])}; with the checkpoint {mib(bytes_of['whole'])}",
        f"`measure` shows both before a run; `full` on each layer: {mib(bytes_of['layers'])}",
        bytes_of["layers"] < bytes_of["none"] and bytes_of["layers"] < bytes_of["whole"],
    )


@report(
    "jax-ml/jax#27748", "steps in a scan under `jax.remat`, in segments under `jax.remat`, run out of memory in newer versions"
)
def two_levels() -> Outcome:
    step = rj.block(lambda c, p: c + jnp.sin(p * c) + jnp.cos(p * jnp.sin(p * c)))

    def loss(p: Any, x: Any) -> Any:
        return lax.scan(lambda c, _: (step(c, p), None), x, None, length=100)[0].sum()

    job = rj.Workload(loss, jax.ShapeDtypeStruct((), jnp.float32), (jax.ShapeDtypeStruct((3000, 100), jnp.float32),), step)
    one, groups = (rj.measure(job, policy, "h100").device_bytes for policy in ("full", "100 x full in groups of 10"))
    return shown(f"one level: {mib(one)} on an H100", f"`100 × full in groups of 10`: {mib(groups)}", groups < one / 4)


@report("jax-ml/jax#20015", "a name in both lists of `save_and_offload_only_these_names` is silently not offloaded")
def a_name_in_both_lists() -> Outcome:
    layer = rj.block(lambda w, x: jnp.tanh(checkpoint_name(jnp.sin(x @ w), "h")))
    job = rj.Workload(lambda w, x: layer(w, layer(w, x)).sum(), W, (X,), layer)
    lists = {"names_which_can_be_saved": ["h"], "names_which_can_be_offloaded": ["h"]}
    said = message(lambda: rj.residuals(job, "save: h; offload: h"))
    host = rj.residuals(job, "offload: h").host_bytes
    return shown(
        message(lambda: NAMES(**lists, offload_src="device", offload_dst="pinned_host")),
        f"{said}; alone, `offload: h` moves {host} B",
        "PolicyError" in said and host == 2 * X.size * 4,
    )


@report("jax-ml/jax#23869", "offloading the named output of a scanned layer does nothing, and nobody says so")
def a_named_carry() -> Outcome:
    layer = rj.block(lambda w, x: checkpoint_name(x + jnp.tanh(x @ w), "residual"))

    def loss(ws: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0].sum()

    job = rj.Workload(loss, jnp.stack([W] * 4), (X,), layer)
    offloaded = rj.residuals(job, "offload_inputs").host_bytes
    said = message(lambda: rj.residuals(job, "offload: residual"))
    return shown(NOT_RUN + "0 B on the host", f"{said}; `offload_inputs`: {offloaded} B", "Error" in said and offloaded > 0)


@report("jax-ml/jax#16805", "the Hessian of a checkpointed `dot_general` of a Python float is an AttributeError")
def hessian_of_a_python_float() -> Outcome:
    def square(x: Any) -> Any:
        return lax.dot_general(x, x, (((), ()), ((), ())))

    return compared(
        jnp.float32(2.0),
        lambda: jax.hessian(jax.checkpoint(square))(1.0),
        lambda: jax.hessian(rj.remat(square, "everything"))(1.0),
    )


@report("jax-ml/jax#13999", "XLA's common-subexpression elimination undoes a hand-made rematerialisation")
def common_subexpressions() -> Outcome:
    def hand_made(w: Any, x: Any) -> Any:
        @jax.custom_vjp
        def layer(w: Any, x: Any) -> Any:
            return jnp.tanh(jnp.tanh(x @ w) @ w)

        layer.defvjp(lambda w, x: (layer(w, x), (w, x)), lambda kept, ct: jax.vjp(lambda *a: layer.fun(*a), *kept)[1](ct))
        return layer(w, x).sum()

    marked = rj.remat(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), "full")
    steps = [jax.value_and_grad(function) for function in (hand_made, lambda w, x: marked(w, x).sum())]
    traced = [matmuls(step, W, X) for step in steps]
    compiled = jax.jit(steps[0]).lower(W, X).compile().as_text().count(" dot(")
    barriers = jax.jit(steps[1]).lower(W, X).as_text().count("optimization_barrier")
    return shown(
        f"{traced[0]} products traced, {compiled} compiled",
        f"{traced[1]} traced; {barriers} barrier keeps the recomputation apart",
        traced == [7, 7] and compiled < 7 and barriers == 1,
    )


@report("jax-ml/jax#6098", "a checkpoint that nobody differentiates still blocks XLA's fusion")
def without_a_gradient() -> Outcome:
    def barriers(function: Any) -> int:
        return jax.jit(function).lower(W, X).as_text().count("optimization_barrier")

    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    ours = [barriers(rj.remat(layer, policy)) for policy in ("full", "offload_inputs")]
    plain = barriers(jax.checkpoint(layer))
    return counted(
        f"{plain} barriers", f"{ours[0]} under `full`, {ours[1]} under `offload_inputs`", not any(ours), cured=plain > 0
    )


def _kernel(named_inside: bool) -> Any:
    """A rule whose forward pass calls the function itself, as kernels are often written."""

    @jax.custom_vjp
    def kernel(x: Any) -> Any:
        return jnp.exp(jnp.sin(x))

    def forward(x: Any) -> Any:
        out = kernel(x)
        kept = checkpoint_name(out, "kernel_out") if named_inside else out
        return kept, (x, kept)

    kernel.defvjp(forward, lambda kept, ct: (ct * kept[1] * jnp.cos(kept[0]),))
    return kernel


@report(
    "apple/axlearn#942", "a name in a kernel's forward rule that calls the primal function keeps nothing: the kernel runs twice"
)
def a_kernel_by_name() -> Outcome:
    kernel = _kernel(True)
    keep = jax.checkpoint_policies.save_only_these_names("kernel_out")

    def executions(wrap: Any) -> int:
        return primitives(jax.grad(lambda x: jnp.sin(wrap(lambda x: kernel(x) * 2)(x)).sum()), "exp", X)

    runs = [executions(lambda f: jax.checkpoint(f, policy=keep)), executions(lambda f: rj.remat(f, "save: kernel_out"))]
    return counted(f"the kernel runs {runs[0]} ×", f"{runs[1]} ×", runs[1] == 1, cured=runs[0] > 1)


@report("jax-ml/jax#40309", "the next rematerialisation loses names inside the forward rule of a `custom_vjp`")
def a_kernel_under_the_next_rematerialisation() -> Outcome:
    kernel = _kernel(True)
    keep = jax.checkpoint_policies.save_only_these_names("kernel_out")

    def runs(wrap: Any) -> Any:
        return primitives(jax.grad(lambda x: jnp.sin(wrap(lambda x: kernel(x) * 2)(x)).sum()), "exp", X)

    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    try:
        plain = message(lambda: runs(lambda f: jax.checkpoint(f, policy=keep)))
        ours = runs(lambda f: rj.remat(f, "save: kernel_out"))
    finally:
        jax.config.update("jax_remat3", before)
    return counted(f"with `jax_remat3`: {plain} runs", f"{ours} run", ours == 1, cured=plain != "1")


@report("lucidrains/flash-attention-jax#7", "a kernel with a rule of its own cannot be differentiated inside a checkpoint")
def a_kernel_in_a_checkpoint() -> Outcome:
    kernel = _kernel(False)

    def gradient(wrap: Any) -> Any:
        return jax.jit(jax.grad(lambda x: wrap(kernel)(x).sum()))(X)

    return compared(
        gradient(lambda f: f), lambda: gradient(jax.checkpoint), lambda: gradient(lambda f: rj.remat(f, "everything"))
    )


@report("jax-ml/jax#5636", "the leak checker reports leaks that are none, inside rules of derivatives")
def leaks() -> Outcome:
    @jax.custom_jvp
    def soft(x: Any) -> Any:
        return jnp.log1p(jnp.exp(x))

    soft.defjvp(lambda primals, tangents: (soft(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]))

    def gradient(wrap: Any) -> Any:
        with jax.checking_leaks():
            return jax.jit(jax.grad(lambda x: wrap(lambda x: soft(x) * x)(x).sum()))(X)

    return compared(
        jax.grad(lambda x: (soft(x) * x).sum())(X),
        lambda: gradient(jax.checkpoint),
        lambda: gradient(lambda f: rj.remat(f, "everything")),
    )


@report("patrick-kidger/equinox#997", "with the leak checker on, a runtime check inside the model is an error")
def leaks_with_a_callback() -> Outcome:
    def layer(x: Any) -> Any:
        jax.debug.callback(lambda total: None, x.sum())
        return jnp.sin(x) * x

    def gradient(wrap: Any) -> Any:
        with jax.checking_leaks():
            return jax.jit(jax.grad(lambda x: wrap(layer)(x).sum()))(X)

    return compared(
        jax.grad(lambda x: layer(x).sum())(X), lambda: gradient(jax.checkpoint), lambda: gradient(lambda f: rj.remat(f, "full"))
    )


@report(
    "jax-ml/jax#31278",
    "weights that are gathered in each layer: the checkpoint's barrier should spare them (`prevent_cse=(False, True)`)",
)
def a_partial_barrier() -> Outcome:
    def model(wrap: Any, ws: Any) -> Any:
        layer = wrap(lambda w, x: jnp.tanh(x @ w))
        x = X
        for w in ws:
            x = layer(w, x)
        return x.sum()

    def own(f: Any) -> Any:
        return jax.checkpoint(f, prevent_cse=(False, True))

    ws = [W, W.T]
    return compared(
        jax.grad(lambda ws: model(lambda f: f, ws))(ws),
        lambda: jax.jit(jax.grad(lambda ws: model(own, ws)))(ws),
        lambda: jax.jit(jax.grad(rj.replan(lambda ws: model(own, ws), "dots")))(ws),
    )


@report("jax-ml/jax#5309", "reverse mode through GMRES inside a derivative rule fails")
def an_iterative_solver() -> Outcome:
    a = jnp.eye(4) * 3 + W

    def solve(w: Any, b: Any) -> Any:
        return jnp.tanh(
            jax.scipy.sparse.linalg.gmres(lambda v: (a + w) @ v, b, restart=4, maxiter=1, solve_method="batched")[0]
        ).sum()

    wanted = jax.grad(lambda w: jnp.tanh(jnp.linalg.solve(a + w, X[0])).sum())(W)
    return compared(
        wanted,
        lambda: jax.grad(jax.checkpoint(lambda w: solve(w, X[0])))(W),
        lambda: jax.grad(rj.remat(lambda w: solve(w, X[0]), "everything"))(W),
    )


@report("patrick-kidger/optimistix#151", "the Hessian of an implicitly differentiated root is an error")
def hessian_of_a_root() -> Outcome:
    def root(wrap: Any, a: Any) -> Any:
        function = wrap(lambda x: x**3 + a * x - 2.0)
        # Newton's method, with the derivative of an implicit function.
        return lax.custom_root(
            function,
            jnp.float32(1.0),
            lambda f, x: lax.fori_loop(0, 20, lambda _, x: x - f(x) / jax.grad(f)(x), x),
            lambda g, y: y / g(jnp.ones_like(y)),
        )

    hessians = [lambda wrap=wrap: jax.hessian(lambda a: root(wrap, a))(0.7) for wrap in (lambda f: f, jax.checkpoint)]
    wanted = hessians[0]()
    return compared(wanted, hessians[1], lambda: jax.hessian(lambda a: root(lambda f: rj.remat(f, "full"), a))(0.7))


@report("patrick-kidger/diffrax#332", "a second gradient through a checkpointed solve fails")
def a_second_gradient() -> Outcome:
    def solve(wrap: Any, z: Any) -> Any:
        step = wrap(lambda y: y - 0.1 * z * jnp.sin(y))
        return lax.scan(lambda y, _: (step(y), None), jnp.float32(2.0), None, length=10)[0]

    def second(wrap: Any) -> Any:
        return jax.grad(jax.grad(lambda z: solve(wrap, z)))(jnp.float32(2.3))

    return compared(
        second(lambda f: f), lambda: second(jax.checkpoint), lambda: second(lambda f: rj.remat(f, "save: *sin*; recompute: *"))
    )


@report("jax-ml/jax#34825", "an array on the host and one on the device cannot be added: ValueError of memory spaces")
def two_memory_spaces() -> Outcome:
    def layer(x: Any) -> Any:
        return jnp.tanh(x) * x

    def by_hand(x: Any) -> Any:
        kept = jax.device_put(jnp.tanh(x), jax.memory.Space.Host)
        return (kept * x).sum()

    def ours() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error", rj.RematWarning)
            return jax.jit(jax.grad(lambda x: rj.remat(layer, "offload: *tanh*")(x).sum()))(X)

    return compared(jax.grad(lambda x: layer(x).sum())(X), lambda: jax.jit(jax.grad(by_hand))(X), ours)
