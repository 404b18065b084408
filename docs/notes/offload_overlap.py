"""The share of an unrolled offload's copies that compute hides, compiled for a GPU: with tied blocks, and with linked blocks.

python docs/notes/offload_overlap.py [--layers N] [--target NAME] [--keep N]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

from remat_jax import compat

os.environ.update(compat.GPU_COMPILER_ENVIRONMENT)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {compat.GPU_COMPILER_FLAGS}"

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies

import remat_jax as rj
from examples.models.linen import ByteDecoder, DecoderLayer
from remat_jax.core import tied_chain as overlap
from remat_jax.hardware import Target, target
from tests.overlap_at_rates import read_overlap

# Rates that an H200 reaches, below its nominal rates. All targets use them, so that tables compare schedules, not GPUs.
RATES = {"flops_per_s": 790e12, "hbm_bytes_per_s": 4.8e12, "host_link_bytes_per_s": 50e9}
Program = tuple[str, Callable[..., Any], Any, tuple[int, ...]]


def mlp(layers: int) -> Program:
    """The gradient of a stack of MLPs in bfloat16, 16384 rows, width 1024."""
    block = rj.remat(
        lambda x, w: x + jax.nn.gelu(x @ w[0].astype(jnp.bfloat16)) @ w[1].astype(jnp.bfloat16),
        "offload_dot_with_no_batch_dims",
    )

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = block(x, w)
        return (x.astype(jnp.float32) ** 2).mean()

    w = jax.ShapeDtypeStruct((1024, 4096), jnp.float32), jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    return "MLP, offload_dot", jax.grad(loss), ([w] * layers, jax.ShapeDtypeStruct((16384, 1024), jnp.bfloat16)), ()


def decoder(layers: int, policy: str, kept: int = 0) -> Program:
    """A training step of the byte decoder of the examples, float32, 16 × 512 tokens, width 512, Adam, donated.

    Args:
      kept: the number of last blocks under `full`, which keep their input on the device.
    """
    model = ByteDecoder(d_model=512, nhead=8, num_layers=layers, max_len=512)
    tokens = jax.ShapeDtypeStruct((16, 512), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    job = rj.Workload(
        lambda p, x, y: model.apply(p, x, y, method="loss"), params, (tokens, tokens), DecoderLayer, optimizer=optax.adam(1e-3)
    )
    last = {f"*layers_{index}": "full" for index in range(layers - kept, layers)}
    step = job.step({**last, DecoderLayer: policy} if kept else policy)
    return (
        f"decoder, {policy}" + (f", the last {kept} kept" if kept else ""),
        step.function,
        step.arguments,
        step.donate_argnums,
    )


def programs(layers: int, kept: int) -> Iterator[Program]:
    """The programs of the table; each has a pair of rows."""
    if not kept:
        yield mlp(layers)
    yield decoder(layers, "offload_inputs", kept)
    yield decoder(layers, "offload_dot_with_no_batch_dims", kept)


def row(name: str, function: Any, arguments: Any, donated: tuple[int, ...], gpu: Target, where: Any) -> str:
    """One row of the table."""
    placed = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=where), arguments)
    compiled = jax.jit(lambda *args: function(*args), donate_argnums=donated).lower(*placed).compile()
    memory, found = compiled.memory_analysis(), read_overlap(compiled.as_text(), gpu, **RATES)
    shares = [f"{100 * copies.covered:.1f} of {100 * copies.coverable:.1f}" for copies in (found.out, found.back)]
    cells = [jax.__version__, name, f"{memory.temp_size_in_bytes / 1e6:.0f}", f"{memory.host_temp_size_in_bytes / 1e6:.0f}"]
    return " | ".join([*cells, *shares, f"{1e3 * found.compute_seconds:.1f}", f"{1e3 * found.step_seconds:.1f}"])


def main() -> None:
    """Print the table."""
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--keep", type=int, default=0, help="how many of the decoder's last blocks keep their input")
    options = parser.parse_args()
    gpu = target(options.target)
    devices = topologies.get_topology_desc(platform="cuda", target_config=gpu.compiler_description, topology="1x1x1").devices
    where = jax.sharding.SingleDeviceSharding(devices[0])
    print("| JAX | program | temp MB | host MB | out % | back % | compute ms | step ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, *rest in programs(options.layers, options.keep):
        with overlap.unlinked():
            print("|", row(f"{name}, tied", *rest, gpu, where), "|", flush=True)
        print("|", row(f"{name}, linked", *rest, gpu, where), "|", flush=True)


if __name__ == "__main__":
    main()
