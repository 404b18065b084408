"""What XLA:TPU says of memory, compiled for described chips: it needs `pip install 'jax[tpu]'`, and no TPU.

python docs/notes/tpu.py            where the offloaded inputs of unrolled layers are, on a v5p
python docs/notes/tpu.py package    the same with the package, on several chips
python docs/notes/tpu.py attention  unrolled transformer layers, on all chips
python docs/notes/tpu.py limits     the largest array that a step can update on each chip
"""

from __future__ import annotations

import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5p-8", TPU_WORKER_HOSTNAMES="localhost")
os.environ.update(TPU_LOG_DIR="disabled", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import export, lax
from jax.experimental import topologies

import remat_jax as rj
from remat_jax.memory.measure import measure_many

LAYERS, WIDTH, ROWS, MIB = 8, 2048, 16384, 2**20
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
Weights = tuple[jax.Array, jax.Array]


def layer(x: jax.Array, w: Weights) -> jax.Array:
    """A block whose only residual is its input."""
    return x + jnp.tanh(x @ w[0]) @ w[1]


def never(*arrays: jax.Array) -> jax.Array:
    """0, computed from arrays in a way that no compiler sees through: k (k + 1) is even."""
    elements = [lax.bitcast_convert_type(array.ravel()[0], jnp.int16).astype(jnp.int32) for array in arrays]
    return sum((lax.rem(k * (k + 1), 2) for k in elements), jnp.int32(0))


def at(ws: Weights, place: int) -> Weights:
    """The weights of one layer."""
    return ws[0][place], ws[1][place]


def scanned(ws: Weights, x: jax.Array) -> Any:
    """The gradients of scanned layers with checkpoints."""

    def loss(ws: Weights) -> jax.Array:
        last, _ = lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), jnp.sin(x), ws)
        return (last.astype(jnp.float32) ** 2).mean()

    return jax.grad(loss)(ws)


def unrolled(fetch: Callable[[jax.Array, jax.Array], jax.Array] | None) -> Callable[[Weights, jax.Array], Any]:
    """The gradients of unrolled layers, each input on the host and copied back by `fetch`; with None on the device."""

    @jax.custom_vjp
    def block(x: jax.Array, w: Weights) -> jax.Array:
        return layer(x, w)

    def forward(x: jax.Array, w: Weights) -> Any:
        return layer(x, w), (x if fetch is None else jax.device_put(x, HOST), w)

    def backward(kept: Any, ct: jax.Array) -> Any:
        x, w = kept
        x, ct = lax.optimization_barrier((x, ct)) if fetch is None else (fetch(x, ct), ct)
        return jax.vjp(layer, x, w)[1](ct)

    block.defvjp(forward, backward)

    def gradients(ws: Weights, x: jax.Array) -> Any:
        def loss(ws: Weights) -> jax.Array:
            last = jnp.sin(x)
            for place in range(LAYERS):
                last = block(last, at(ws, place))
            return (last.astype(jnp.float32) ** 2).mean()

        return jax.grad(loss)(ws)

    return gradients


def stacked(ws: Weights, x: jax.Array, *, after_gradients: bool) -> Any:
    """The gradients with all inputs in one array on the host, each read at a place that depends on the cotangent.

    Args:
      after_gradients: whether the place also depends on the weights' gradients of the layer whose backward pass came before.
    """
    weights = [at(ws, place) for place in range(LAYERS)]
    x, stack = jnp.sin(x), jax.device_put(jnp.zeros((LAYERS * ROWS, WIDTH), x.dtype), HOST)
    for place, w in enumerate(weights):
        stack = lax.dynamic_update_slice(stack, jax.device_put(x, HOST), (place * ROWS, 0))
        x = layer(x, w)
    ct, gradients = (2 * x / x.size).astype(x.dtype), list[Weights]()
    for place, w in reversed(list(enumerate(weights))):
        waits = [ct, *(gradients[-1] if gradients and after_gradients else ())]
        kept = jax.device_put(lax.dynamic_slice(stack, (place * ROWS + never(*waits), 0), (ROWS, WIDTH)), DEVICE)
        ct, gradient = jax.vjp(layer, kept, w)[1](ct)
        gradients.append(gradient)
    return jax.tree.map(lambda *each: jnp.stack(each), *gradients[::-1])


def after(value: jax.Array, *waits: jax.Array) -> jax.Array:
    """`value`, selected once an element of each array of `waits` is known."""
    return jnp.where(never(*waits) == 0, value, 0)


def in_halves(kept: jax.Array, *waits: jax.Array) -> jax.Array:
    """`kept`, on the host, copied back in two halves, whose places depend on `waits`."""
    half = kept.shape[0] // 2
    parts = [lax.dynamic_slice(kept, (place + never(*waits), 0), (half, kept.shape[1])) for place in (0, half)]
    return jnp.concatenate([jax.device_put(part, DEVICE) for part in parts])


def linked(ws: Weights, x: jax.Array) -> Any:
    """The gradients as remat_jax computes them: each layer fetches the input of the layer whose backward pass comes next.

    In the forward pass, a layer's output waits for the copy of the previous layer's input to the host. In the backward pass,
    the next layer's input waits for this layer's gradients.
    """
    weights = [at(ws, place) for place in range(LAYERS)]
    x, inputs = jnp.sin(x), list[jax.Array]()
    for w in weights:
        inputs.append(jax.device_put(x, HOST))
        x = layer(x, w)
        if len(inputs) > 1:
            x = after(x, jax.device_put(lax.dynamic_slice(inputs[-2], (0, 0), (16, WIDTH)), DEVICE))
    ct, gradients = (2 * x / x.size).astype(x.dtype), list[Weights]()
    kept = in_halves(inputs[-1], ct)
    for place, w in reversed(list(enumerate(weights))):
        following = in_halves(inputs[place - 1], ct, kept) if place else kept
        ct, gradient = jax.vjp(layer, kept, w)[1](ct)
        gradients.append(gradient)
        kept = after(following, *gradient)
    return jax.tree.map(lambda *each: jnp.stack(each), *gradients[::-1])


def barrier(kept: jax.Array, ct: jax.Array) -> jax.Array:
    """The copy back behind an optimization barrier with the cotangent, as on a GPU."""
    return jax.device_put(lax.optimization_barrier((kept, ct))[0], DEVICE)


FORMS: dict[str, tuple[str, Callable[[Weights, jax.Array], Any]]] = {
    "scan": ("on the device", scanned),
    "unrolled": ("on the device", unrolled(None)),
    "unrolled, offloaded": ("on the host, behind a barrier", unrolled(barrier)),
    "unrolled, stacked": (
        "in one array on the host, at a place that depends on the cotangent",
        functools.partial(stacked, after_gradients=False),
    ),
    "the same, in order": (
        "at a place that depends on the cotangent and on the last gradients",
        functools.partial(stacked, after_gradients=True),
    ),
    "unrolled, linked": ("each apart, in halves, at such places, one layer early", linked),
}


def sizes(function: Callable[[Weights, jax.Array], Any], device: Any) -> dict[str, int]:
    """In bytes: JAX's `temp`, and the compiler's allocations that are neither arguments nor results, on device and host."""

    def step(ws: Weights, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - g, ws, function(ws, x))

    def struct(*shape: int, **place: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, **place)

    shapes = ((struct(LAYERS, WIDTH, 4 * WIDTH), struct(LAYERS, 4 * WIDTH, WIDTH)), struct(ROWS, WIDTH))
    checks = [export.DisabledSafetyCheck.custom_call("annotate_device_placement")]
    exported = export.export(jax.jit(step), platforms=["tpu"], disabled_checks=checks)(*shapes)
    place = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(lambda each: struct(*each.shape, sharding=place), shapes)
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = jax.jit(exported.call, donate_argnums=0).lower(*placed).compile(compiler_options=options)
        (path,) = Path(folder).glob("*after_optimizations-buffer-assignment.txt")
        text = path.read_text(encoding="utf-8")
    allocations = re.findall(
        r"^allocation \d+: size (\d+)((?:, color \d+)?)((?:, page \d+)?), preallocated-temp", text, re.MULTILINE
    )
    return {
        "memory_analysis": compiled.memory_analysis().temp_size_in_bytes,
        "device": sum(int(size) for size, space, _ in allocations if not space),
        "host": sum(int(size) for size, space, _ in allocations if space == ", color 5"),
    }


CHIPS = {"v4": "megacore", "v5e": "default", "v5p": "megacore", "v6e": "default", "tpu7x": "default"}
"""The names of libtpu for chips, and for their configurations."""


def described(chip: str) -> Any:
    """A device of a chip by itself."""
    shape = "1x1" if chip in ("v5e", "v6e") else "1x1x1"
    form = {"chip_config_name": CHIPS[chip], "chips_per_host_bounds": (1, 1, 1)}
    return topologies.get_topology_desc(f"{chip}:{shape}", "tpu", **form).devices[0]


def refusal(mebibytes: int, device: Any) -> str:
    """The compiler's words if a step that updates an array of this size does not fit; else empty."""
    place = jax.sharding.SingleDeviceSharding(device)
    array = jax.ShapeDtypeStruct((mebibytes * 256, 1024), jnp.float32, sharding=place)
    try:
        jax.jit(lambda x: x + 1, donate_argnums=0).lower(array).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def limits() -> None:
    """Print the largest array for each chip, found by bisection, and the memory that the compiler says it has."""
    print("| chip | largest array | available, says the compiler |")
    print("| --- | ---: | ---: |")
    for chip in CHIPS:
        device = described(chip)
        least, most = 1024, 2**18
        words = refusal(most, device)
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if refusal(middle, device) else (middle, most)
        said = re.search(r"available HBM \(([\d.]+)G\)", words)
        print(f"| {chip} | {least:,} MiB | {said[1] if said else 'unknown'} GiB |", flush=True)


class Block(nn.Module):
    """The same layer in Linen, with biases."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The layer's output."""
        hidden = nn.gelu(nn.Dense(4 * WIDTH, dtype=jnp.bfloat16, name="up")(x))
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16, name="down")(hidden)


class Stack(nn.Module):
    """Unrolled layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The last layer's output."""
        for number in range(LAYERS):
            x = Block(name=f"layer_{number}")(x)
        return x


def package(chips: Sequence[str] = ("v5e", "v5p", "v6e")) -> None:
    """Print what `remat_jax.measure` says of the offload of unrolled layers, with Adam."""
    model, x = Stack(), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)

    job = rj.Workload(loss, params, (x,), Block, optimizer=optax.adam(1e-3))
    print("| chip | policy | temp | on the host | compute | copies out covered | copies back covered |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for chip in chips:
        for policy in ("full", "offload_inputs"):
            report = rj.measure(job, policy, chip, timeout=3600)
            shares = (report.overlap.out, report.overlap.back) if report.overlap else ()
            covered = " | ".join(f"{each.covered:.0%} of {each.coverable:.0%}" for each in shares) or "| "
            sizes = f"{report.temp_bytes / MIB:.0f} MiB | {report.host_bytes / MIB:.0f} MiB"
            print(f"| {chip} | {policy} | {sizes} | {(report.compute_seconds or 0) * 1e3:.0f} ms | {covered} |", flush=True)


class Transformer(nn.Module):
    """A transformer layer whose attention scores are in memory: 1 GiB in float32, 16 times the layer's input."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The layer's output."""
        x = x + nn.MultiHeadDotProductAttention(num_heads=8)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))


def attention(chips: Sequence[str] = ("v4", "v5e", "v5p", "v6e", "tpu7x")) -> None:
    """Print the memory of eight unrolled transformer layers, with their inputs on the device and offloaded."""
    model, x = nn.Sequential([Transformer() for _ in range(LAYERS)]), jax.ShapeDtypeStruct((32, 1024, 512), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.apply(params, x) ** 2)

    job = rj.Workload(loss, params, (x,), Transformer, optimizer=optax.adam(1e-3))
    print("| chip | `full` | `offload_inputs` | on the host |")
    print("| --- | ---: | ---: | ---: |")
    for chip in chips:
        full, offloaded = measure_many(job, ["full", "offload_inputs"], chip, memory_only=True)
        sizes = " | ".join(
            f"{size / MIB:.0f} MiB" for size in (full.device_bytes, offloaded.device_bytes, offloaded.host_bytes)
        )
        print(f"| {chip} | {sizes} |", flush=True)


def main() -> None:
    """Print the table of offloads."""
    device = described("v5p")
    print("| layers | inputs | `temp` of `memory_analysis` | temp as allocated | on the host |")
    print("| --- | --- | ---: | ---: | ---: |")
    for name, (where, function) in FORMS.items():
        found = sizes(function, device)
        cells = " | ".join(f"{found[key] / MIB:.0f} MiB" for key in ("memory_analysis", "device", "host"))
        print(f"| {name} | {where} | {cells} |", flush=True)


if __name__ == "__main__":
    {"limits": limits, "package": package, "attention": attention}.get("".join(sys.argv[1:]), main)()
