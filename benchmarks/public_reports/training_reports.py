"""Reports about training steps: accumulation, optimizers on the host, policies of whole projects."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import remat_jax as rj
from benchmarks.public_reports.report import NOT_RUN, Outcome, compared, counted, distance, message, mib, report, shown
from remat_jax.cost.count import matmuls

W = jnp.cos(jnp.arange(16.0)).reshape(4, 4) / 2
BATCH = jnp.sin(jnp.arange(48.0)).reshape(12, 4)
MASK = (jnp.arange(12) % 4 < 1 + jnp.arange(12) // 4).astype(jnp.float32)
"""One, two and three tokens of each four count."""


def tokens_loss(w: Any, x: Any, mask: Any) -> Any:
    """The sum over the tokens that count, and their number."""
    return jnp.sum(mask * jnp.sum(jnp.tanh(x @ w) ** 2, -1)), jnp.sum(mask)


def whole(w: Any, x: Any, mask: Any) -> Any:
    """The mean over the tokens of the whole batch."""
    total, count = tokens_loss(w, x, mask)
    return total / count


def mean_of_means(w: Any, x: Any, mask: Any) -> Any:
    """What a loop computes that divides by the number of micro-batches."""
    gradients = [jax.grad(whole)(w, *part) for part in zip(jnp.split(x, 3), jnp.split(mask, 3), strict=True)]
    return sum(gradients) / 3


def accumulated(w: Any, x: Any, mask: Any, parts: int = 3) -> Any:
    """The same by remat_jax."""
    return rj.accumulate_gradients(tokens_loss, parts)(w, x, mask)[1]


@report("ml-explore/mlx-lm#1413", "accumulation divides by the number of micro-batches, so short examples weigh more")
def micro_batches_by_tokens() -> Outcome:
    return compared(jax.grad(whole)(W, BATCH, MASK), lambda: mean_of_means(W, BATCH, MASK), lambda: accumulated(W, BATCH, MASK))


@report("huggingface/transformers#35203", "the gradient norm with accumulation is lower than without")
def norm_of_accumulated_gradients() -> Outcome:
    norms = [float(jnp.linalg.norm(g)) for g in (jax.grad(whole)(W, BATCH, MASK), mean_of_means(W, BATCH, MASK))]
    ours = float(jnp.linalg.norm(accumulated(W, BATCH, MASK)))
    return counted(
        f"norm {norms[1]:.4f}, whole batch {norms[0]:.4f}",
        f"{ours:.4f}",
        abs(ours - norms[0]) < 1e-5,
        cured=abs(norms[1] - norms[0]) > 1e-3,
    )


@report("google-deepmind/optax#1567", "accumulated gradients of bfloat16 weights differ from those of the whole batch")
def bfloat16_weights() -> Outcome:
    w, x, mask = W.astype(jnp.bfloat16), jnp.tile(BATCH, (64, 1)), jnp.ones(768, jnp.bfloat16)
    wanted = jax.grad(whole)(w.astype(jnp.float32), x, mask.astype(jnp.float32))
    parts = (x.reshape(768, 1, 4), mask.reshape(768, 1))
    total = lax.scan(lambda total, part: (total + jax.grad(whole)(w, *part), None), jnp.zeros_like(w), parts)[0] / 768
    plain, ours = distance(total, wanted), distance(accumulated(w, x, mask, 768), wanted)
    return counted(
        f"summed in bfloat16 over 768 micro-batches: off by {plain:.1%}", f"off by {ours:.1%}", ours < 5e-3, cured=plain > 5e-3
    )


@report("google-deepmind/optax#320", "`MultiSteps` needs as much memory as a batch that is k times larger")
def memory_of_micro_batches() -> Outcome:
    layer = rj.block(lambda w, x: x + jnp.tanh(x @ w))

    def loss(ws: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0] ** 2)

    ws, x = jax.ShapeDtypeStruct((8, 128, 128), jnp.float32), jax.ShapeDtypeStruct((16384, 128), jnp.float32)
    job = rj.Workload(loss, ws, (x,), layer)
    one = rj.measure(job, "off", "h100").device_bytes

    def accumulating(ws: Any, x: Any) -> Any:
        total, gradients = rj.accumulate_gradients(lambda ws, x: (loss(ws, x), 1), 8)(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), total

    step = rj.Workload.from_step(accumulating, ws, x, blocks=layer, donate_argnums=0)
    parts = rj.measure(step, "off", "h100").device_bytes
    return shown(f"one batch: {mib(one)} on an H100", f"8 micro-batches in one step: {mib(parts)}", parts < one / 2)


@report("google-deepmind/optax#377", "`MultiSteps` with bfloat16 weights and an optimizer that casts is a TypeError of `cond`")
def dtypes_of_accumulated_updates() -> Outcome:
    w = W.astype(jnp.bfloat16)
    casting = optax.stateless(lambda updates, _: jax.tree.map(lambda u: u.astype(jnp.float32) * 0.5, updates))

    def multi_steps() -> Any:
        tx = optax.MultiSteps(casting, 3)
        state = tx.init(w)
        for part in zip(jnp.split(BATCH, 3), jnp.split(MASK, 3), strict=True):
            updates, state = jax.jit(tx.update)(jax.grad(whole)(w, *part), state, w)
        return updates

    def ours() -> Any:
        return casting.update(accumulated(w, BATCH, MASK), casting.init(w))[0]

    wanted = 0.5 * jax.grad(whole)(w.astype(jnp.float32), BATCH, MASK)
    plain = message(lambda: f"off by {distance(multi_steps(), wanted):.1%}")
    off = distance(ours(), wanted)
    return counted(plain, f"off by {off:.1%}", off < 5e-3, cured="Error" in plain)


@report(
    "AI-Hypercomputer/maxtext#5039", "the sum of accumulated gradients is kept in another dtype than the configuration says"
)
def dtype_of_the_sum() -> Outcome:
    w = W.astype(jnp.bfloat16)
    found = {
        str(dtype): rj.accumulate_gradients(tokens_loss, 3, dtype=dtype)(w, BATCH, MASK)[1].dtype
        for dtype in (None, jnp.float32, jnp.bfloat16)
    }
    text = ", ".join(f"{getattr(dtype, 'name', dtype)}" for dtype in found.values())
    return shown(
        NOT_RUN + "the dtype of the weights",
        f"`dtype=` None, float32, bfloat16 return {text}",
        [dtype.name for dtype in found.values()] == ["bfloat16", "float32", "bfloat16"],
    )


@report("Physical-Intelligence/openpi#286", "a model that fits with a small batch only: accumulation is asked for")
def a_batch_that_fits() -> Outcome:
    gradients = [jax.grad(whole)(W, BATCH, MASK), accumulated(W, BATCH, MASK, 12)]
    off = distance(gradients[1], gradients[0])
    return shown(NOT_RUN + "`optax.MultiSteps` is suggested", f"12 micro-batches of one: off by {off:.0e}", off < 1e-5)


def adam_step(tx: Any) -> Any:
    """A training step of two weights."""

    def step(params: Any, state: Any, x: Any) -> Any:
        gradients = jax.grad(lambda params: jnp.sum(jnp.tanh(x @ params["a"]) @ params["b"]))(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


@report("AI-Hypercomputer/maxtext#1223", "an optimizer's state on the host changes its dtype to bfloat16")
def dtype_of_the_state() -> Outcome:
    params = {"a": W.astype(jnp.bfloat16), "b": W}
    results, dtypes = [], []
    for tx in (optax.adam(1e-2, mu_dtype=jnp.float32), rj.offload_optimizer(optax.adam(1e-2, mu_dtype=jnp.float32))):
        state = tx.init(params)
        updated, state = adam_step(tx)(params, state, BATCH)
        results.append(updated)
        dtypes.append([leaf.dtype.name for leaf in jax.tree.leaves(state)])
    off = distance(results[1], results[0])
    same = dtypes[0] == dtypes[1]
    return counted(
        f"state: {', '.join(dtypes[0])}", "the same" if same else ", ".join(dtypes[1]), same and off < 1e-6, cured=False
    )


@report("marin-community/marin#3766", "offloaded state is copied again although it already is where it should be")
def no_second_copy() -> Outcome:
    params = {"a": W, "b": W}
    tx = rj.offload_optimizer(optax.adam(1e-2))
    traced = jax.make_jaxpr(lambda p, s, x: adam_step(tx)(p, s, x))(params, tx.init(params), BATCH)
    text = str(traced)
    out, back = text.count("Space.Host"), text.count("Space.Device")
    return shown(
        NOT_RUN + "a `device_put` for every leaf",
        f"4 leaves on the host: {out} copies out, {back} back",
        out <= 4 and back <= 4,
    )


class Named(nn.Module):
    """A layer, with a name on its product as large projects have them, or without."""

    name_of_product: str = ""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.Dense(8)(x)
        h = checkpoint_name(h, self.name_of_product) if self.name_of_product else h
        return x + nn.Dense(4)(jnp.tanh(h))


def named_job(*names: str) -> tuple[Any, Any]:
    """A loss of such layers and its workload."""
    model = nn.Sequential([Named(name) for name in names])
    params = model.init(jax.random.key(0), BATCH)

    def loss(params: Any, x: Any) -> Any:
        return model.apply(params, x).sum()

    return loss, rj.Workload(loss, params, (BATCH,), blocks=Named)


@report("AI-Hypercomputer/maxtext#965", "a list of names saves nothing in models that have none of the names")
def a_missing_name() -> Outcome:
    _, job = named_job("", "")
    policy = jax.checkpoint_policies.save_only_these_names("qkv_proj")
    plain = message(lambda: f"{rj.residuals(job, policy).device_bytes} B")
    ours = message(lambda: rj.residuals(job, "save: qkv_proj"))
    return shown(f"a JAX policy object, here: {plain}", ours, "Error" in plain and "Error" in ours)


@report("AI-Hypercomputer/maxtext#4288", "`full` resolves to `policy=None`, read as “no remat”: the default silently drops it")
def none_is_full() -> Outcome:
    loss, job = named_job("up", "up")
    runs = {
        name: matmuls(jax.value_and_grad(rj.checkpoint_blocks(loss, {Named: name})), job.params, BATCH)
        for name in ("off", "full")
    }
    said = message(lambda: rj.checkpoint_blocks(loss, {Named: None}))
    return shown(
        NOT_RUN + "None has two meanings",
        f"`off` runs {runs['off']} products, `full` {runs['full']}; None: {said}",
        runs["full"] > runs["off"] and "Error" in said,
    )


def nested_loss(blocks: Any = None) -> Any:
    """Periods in a scan, each with layers in an inner scan."""
    inner = rj.block(lambda w, x: x + jnp.tanh(x @ w))

    def loss(ws: Any, x: Any) -> Any:
        def period(x: Any, group: Any) -> Any:
            return lax.scan(lambda x, w: (inner(w, x), None), x, group)[0], None

        return lax.scan(period, x, ws)[0].sum()

    return loss, inner


@report("AI-Hypercomputer/maxtext#4995", "an offload inside a scan inside a scan does not compile: an internal error of XLA")
def nested_scans() -> Outcome:
    loss, layer = nested_loss()
    ws, x = jax.ShapeDtypeStruct((4, 3, 64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)
    job = rj.Workload(loss, ws, (x,), layer)
    offloaded = message(lambda: f"{mib(rj.measure(job, 'offload_inputs', 'h100').host_bytes)} on the host")
    full = mib(rj.measure(job, "full", "h100").device_bytes)
    return shown(NOT_RUN + "XLA fails to compile it", f"H100: {offloaded}; `full`: {full}", "INTERNAL" not in offloaded)


@report(
    "AI-Hypercomputer/maxtext#4405", "the scan over layers returns the layers' weights, which are then stacked a second time"
)
def weights_out_of_a_scan() -> Outcome:
    def loss(returned: bool, ws: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w), (w * 1.0 if returned else None)

        x, kept = lax.scan(body, x, ws)
        return x.sum(), kept

    ws, x = jax.ShapeDtypeStruct((8, 512, 512), jnp.float32), jax.ShapeDtypeStruct((64, 512), jnp.float32)
    sizes = []
    for returned in (True, False):

        def step(ws: Any, x: Any, returned: bool = returned) -> Any:
            (_, kept), gradients = jax.value_and_grad(lambda ws: loss(returned, ws, x), has_aux=True)(ws)
            return jax.tree.map(lambda w, g: w - g, ws, gradients), kept

        job = rj.Workload.from_step(step, ws, x, blocks="checkpoints", donate_argnums=0)
        sizes.append(message(lambda job=job: mib(rj.measure(job, "off", "h100").device_bytes)))
    return shown(
        f"H100: {sizes[0]}",
        f"`measure` shows it before a run: {sizes[1]} without them",
        "MiB" in sizes[0] and sizes[0] != sizes[1],
    )


@report(
    "NVIDIA/TransformerEngine#542", "names inside a library's layers are asked for, so that policies can reach its products"
)
def names_without_names() -> Outcome:
    loss, job = named_job("", "")
    params = jax.tree.map(lambda leaf: jnp.sin(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), job.params)
    products = "Dense_0:dot_general#0"
    saved = rj.checkpoint_blocks(loss, {Named: f"save: *{products}"})
    runs = [matmuls(jax.value_and_grad(rj.checkpoint_blocks(loss, {Named: "full"})), params, BATCH)]
    runs.append(matmuls(jax.value_and_grad(saved), params, BATCH))
    off = distance(jax.grad(saved)(params, BATCH), jax.grad(loss)(params, BATCH))
    return shown(
        f"{runs[0]} products: `full` is all that works without names",
        f"{runs[1]} with `save: *{products}`",
        off < 1e-5 and runs[1] < runs[0],
    )
