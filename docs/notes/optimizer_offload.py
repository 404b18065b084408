"""Device memory that optimizer state in host memory frees, and that gradient accumulation needs, compiled for an H200.

Run: `python docs/notes/optimizer_offload.py state|norm|accumulation`. Sizes are in MB, of one training step with donated
parameters and state, under the policy `full`. No GPU is needed.
"""

from __future__ import annotations

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import remat_jax as rj
from remat_jax.hardware import target
from remat_jax.memory.compile.compiler import Sizes, compile_programs, export_step

WIDTH, LAYERS = 1024, 6
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class Block(nn.Module):
    """A residual MLP block with two kernels of 16.8 MB."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """One block."""
        return x + nn.Dense(WIDTH, name="down")(nn.relu(nn.Dense(4 * WIDTH, name="up")(x)))


class Model(nn.Module):
    """201 MB of parameters, 403 MB of Adam's moments."""

    scan: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """All blocks."""
        if not self.scan:
            for index in range(LAYERS):
                x = Block(name=f"block_{index}")(x)
            return x
        one = nn.scan(
            lambda block, x, _: (block(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        return one(Block(name="layers"), x, None)[0]


def all_at_once(tx: Any) -> Any:
    """`tx` with its state on the host, moved by plain `device_put`s, whose order XLA ignores."""

    def there(tree: Any, space: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, space) if leaf.ndim else leaf, tree)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = tx.update(updates, there(state, DEVICE), params)
        return updates, there(state, HOST)

    return optax.GradientTransformation(lambda params: there(tx.init(params), HOST), update)


def workload(tx: Any, scan: bool, rows: int) -> rj.Workload:
    """One step of the model on `rows` rows."""
    model, x = Model(scan), jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return rj.Workload(lambda p, x: (model.apply(p, x) ** 2).mean(), params, (x,), Block, optimizer=tx)


def compiled(jobs: dict[str, rj.Workload], policy: str) -> dict[str, Sizes]:
    """The compiled sizes of each job on an H200."""
    h200 = target("h200")
    return compile_programs([export_step(key, job.step(policy), h200) for key, job in jobs.items()], h200, timeout=300)


def offload(name: str, tx: Any, scan: bool, rows: int) -> None:
    """Print a row of the table `state`: the freed bytes."""
    streamed = rj.offload_optimizer(tx)
    forms = {"plain": tx, "at once": all_at_once(tx), "apply": streamed}
    forms["update"] = optax.GradientTransformation(streamed.init, streamed.update)
    sizes = compiled({key: workload(form, scan, rows) for key, form in forms.items()}, "full")
    freed = [(sizes["plain"].device - sizes[key].device) / 1e6 for key in ("at once", "update", "apply")]
    moved = sizes["apply"].host / 1e6
    cells = [name, "scan" if scan else "unrolled", rows, f"{sizes['plain'].device / 1e6:.1f}", f"{moved:.1f}"]
    print("|", " | ".join(map(str, [*cells, *(f"{size:.1f}" for size in freed)])), "|")


def tied(policy: str) -> None:
    """Print a row of the table `norm`: an optimizer that clips by the norm of all gradients."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    jobs = {"plain": workload(tx, False, 8192), "offloaded": workload(rj.offload_optimizer(tx), False, 8192)}
    plain, offloaded = (size.device / 1e6 for size in compiled(jobs, policy).values())
    print("|", " | ".join([policy, jax.__version__, f"{plain:.1f}", f"{offloaded:.1f}", f"{plain - offloaded:.1f}"]), "|")


def accumulation(scan: bool, policy: str, rows: int = 32768, n: int = 8) -> None:
    """Print a row of the table `accumulation`: temp of the gradient of `rows` rows, in `n` micro-batches."""
    model = Model(scan)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(model.apply(params, x) ** 2), x.size

    def whole(params: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda p: loss(p, x)[0] / x.size)(params)

    batch, micro = (jax.ShapeDtypeStruct((size, WIDTH), jnp.float32) for size in (rows, rows // n))
    params = jax.eval_shape(model.init, jax.random.key(0), micro)
    functions = {"whole": (whole, batch), "micro": (whole, micro), "accumulated": (rj.accumulate_gradients(loss, n), batch)}
    jobs = {key: rj.Workload.from_step(fn, params, x, blocks=Block) for key, (fn, x) in functions.items()}
    temp = {key: size.temp / 1e6 for key, size in compiled(jobs, policy).items()}
    tree = sum(4 * leaf.size for leaf in jax.tree.leaves(params)) / 1e6
    cells = ["scan" if scan else "unrolled", policy, *(f"{temp[key]:.1f}" for key in functions)]
    print("|", " | ".join([*cells, f"{temp['accumulated'] - temp['micro'] - tree:+.1f}"]), "|")


def main(table: str) -> None:
    """Print one table."""
    if table == "state":
        clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
        print("| optimizer | layers | rows | plain | moved | freed: at once | freed: update | freed: apply |")
        print("|" + " --- |" * 8)
        for scan in (False, True):
            for rows in (256, 2048, 8192):
                offload("adam", optax.adam(1e-3), scan, rows)
            offload("momentum", optax.sgd(1e-3, momentum=0.9), scan, 256)
            offload("clip, adam", clipped, scan, 256)
            offload("clip, adam", clipped, scan, 8192)
    elif table == "norm":
        print("| policy | JAX | plain | offloaded state | freed |\n|" + " --- |" * 5)
        for policy in ("full", "offload_inputs"):
            tied(policy)
    else:
        print("| layers | policy | temp: whole batch | one micro-batch | 8 accumulated | over one + a tree of gradients |")
        print("|" + " --- |" * 6)
        for scan in (True, False):
            for policy in ("off", "full"):
                accumulation(scan, policy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("state", "norm", "accumulation"))
    main(parser.parse_args().table)
