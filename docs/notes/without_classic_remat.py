"""Which forms of a differentiated block need no classic rematerialisation (`jax.checkpoint` as it is without `jax_remat3`)?

The forms are in `without_classic_remat_forms.py`; each replaces the checkpoint region of every block. The program prints two
tables for the JAX it runs on: what each form gives for each requirement, compared with the classic form; and matmuls and bytes
(temporary, arguments, outputs) of scanned stacks. With `--target` it prints these bytes compiled for a GPU.

python docs/notes/without_classic_remat.py [--only WORD] [--target h200]
"""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from without_classic_remat_forms import FORMS

import remat_jax as rj
from remat_jax import compat
from remat_jax.core.walk import equations
from remat_jax.cost.count import matmuls

jax.config.update("jax_enable_x64", True)
warnings.simplefilter("ignore")

LAYERS, ROWS, WIDTH = 4, 16, 8
POLICIES = ("full", "dots", "save: *exp*, *:dot_general#0")
Measured = dict[str, Any]
ZERO = 1e-12
WORDS = 60
"""How many characters of an error are printed."""
FIGURE = ("matmuls", "temp", "arguments", "outputs")
FIGURES: dict[str, Measured] = {}
PLAIN: dict[str, Any] = {}


def mlp(w: Any, x: Any) -> Any:
    """Two matmuls; the derivative rule of `exp` reads its output."""
    return x + jnp.exp(-((x @ w["up"]) ** 2)) @ w["down"]


def attention(w: Any, x: Any) -> Any:
    """Four matmuls; the derivative rule of the softmax reads its output."""
    q, v = x @ w["up"], x @ w["down"].T
    return x + jax.nn.softmax(q @ v.T) @ v @ w["down"]


keys = jax.random.split(jax.random.key(0), 4)
WEIGHTS = {
    "up": jax.random.normal(keys[0], (WIDTH, 2 * WIDTH)) / 4,
    "down": jax.random.normal(keys[1], (2 * WIDTH, WIDTH)) / 4,
}
X = jax.random.normal(keys[2], (ROWS, WIDTH))
STACKED = jax.tree.map(lambda w: jnp.stack([w * (1 + layer / 9) for layer in range(LAYERS)]), WEIGHTS)


def loss(block: Any, w: Any, x: Any) -> Any:
    """The sum of squares of one block's output."""
    return (block(w, x) ** 2).sum()


def scanned(block: Any, w: Any, x: Any) -> Any:
    """The sum of squares of a scanned stack of blocks."""
    return (lax.scan(lambda x, w: (block(w, x), None), x, w)[0] ** 2).sum()


def distance(values: Any, others: Any) -> float:
    """The largest difference of two trees, relative to the largest value; a difference below 1e-12 counts as none."""
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(others))
    gaps = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()) / scale, values, others)
    worst = max(jax.tree.leaves(gaps))
    return 0.0 if worst <= ZERO else worst


def of_plain(function: Any, *args: Any) -> Any:
    """The result of `function`, which has no blocks. It is computed once for all forms."""
    program = str(jax.make_jaxpr(function)(*args))
    if program not in PLAIN:
        PLAIN[program] = jax.jit(function)(*args)
    return PLAIN[program]


def compared(run: Any, plain: Any, *args: Any, label: str = "") -> Measured:
    """The distance of `run` to `plain`, its matmuls, and the bytes of its program compiled for the CPU."""
    compiled = jax.jit(run).lower(*args).compile()
    memory = compiled.memory_analysis()
    found = {"error": distance(compiled(*args), of_plain(plain, *args)), "matmuls": matmuls(run, *args)}
    found |= {
        "temp": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
    }
    return {f"{key} {label}".strip(): value for key, value in found.items()}


def copies(function: Any, *args: Any) -> str:
    """The equations of the traced `function` that copy to the host, or back to the device."""
    eqns = (eqn for eqn in equations(jax.make_jaxpr(function)(*args)) if eqn.primitive.name == "device_put")
    places = [compat.is_on_host(eqn.outvars[0].aval) for eqn in eqns]
    return f"{sum(places)} out, {len(places) - sum(places)} back"


def grads(function: Any, argnums: Any = (0, 1)) -> Any:
    """The gradient of `function` along its arguments."""
    return jax.grad(function, argnums=argnums)


def of(stack: Any, block: Any) -> Any:
    """The loss `stack` of this block."""
    return functools.partial(stack, block)


STACKS = (("block", loss, WEIGHTS), ("scan", scanned, STACKED))

# --- requirements: each returns errors, which must be 0, and figures, which must be those of the classic form -----------------


def gradients() -> Measured:
    """1: gradients of both blocks under every policy, compiled, in float64."""
    found = {}
    for block in (mlp, attention):
        plain = of_plain(grads(of(loss, block)), WEIGHTS, X)
        for policy in POLICIES:
            ours = jax.jit(grads(of(loss, rj.remat(block, policy))))(WEIGHTS, X)
            found[f"error {block.__name__} {policy}"] = distance(ours, plain)
    return found


def bytes_and_matmuls() -> Measured:
    """2: matmuls and compiled bytes of scanned stacks under every policy."""
    found = {}
    for block in (mlp, attention):
        for policy in POLICIES:
            run, label = grads(of(scanned, rj.remat(block, policy))), f"{block.__name__}, {policy}"
            found |= compared(run, grads(of(scanned, block)), STACKED, X, label=label)
    return found


def pushed(function: Any, w: Any, x: Any) -> Any:
    """The tangent of `function`."""
    return jax.jvp(function, (w, x), (w, x))[1]


def forward_mode() -> Measured:
    """3a: forward mode alone."""
    run, plain = of(loss, rj.remat(attention, "dots")), of(loss, attention)
    return compared(of(pushed, run), of(pushed, plain), WEIGHTS, X)


def forward_over_reverse() -> Measured:
    """3b: forward over reverse, through a scan."""
    run, plain = (of(pushed, grads(of(scanned, block))) for block in (rj.remat(attention, "dots"), attention))
    return compared(run, plain, STACKED, X)


def reverse_over_reverse() -> Measured:
    """3c: reverse over reverse, through a scan."""

    def sines(function: Any, w: Any, x: Any) -> Any:
        return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(grads(function)(w, x)))

    run, plain = (grads(of(sines, of(scanned, block))) for block in (rj.remat(mlp, "full"), mlp))
    return compared(run, plain, STACKED, X)


def reverse_over_forward() -> Measured:
    """3d: reverse over forward."""
    run, plain = (grads(of(pushed, of(loss, block))) for block in (rj.remat(attention, "dots"), attention))
    return compared(run, plain, WEIGHTS, X)


def batches() -> Measured:
    """4: `vmap` of a gradient, and a gradient of a `vmap`."""
    batch = jnp.stack([X, X / 2])
    run, plain = of(loss, rj.remat(attention, "dots")), of(loss, attention)

    def of_vmap(function: Any) -> Any:
        return grads(lambda w, x: jax.vmap(function, (None, 0))(w, x).sum())

    found = compared(*(jax.vmap(grads(each), (None, 0)) for each in (run, plain)), WEIGHTS, batch, label="vmap of grad")
    return found | compared(of_vmap(run), of_vmap(plain), WEIGHTS, batch, label="grad of vmap")


def sharded(check: bool) -> Measured:
    """5: `shard_map` on a mesh of one device."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def on_mesh(block: Any, w: Any, x: Any) -> Any:
        def part(w: Any, x: Any) -> Any:
            return lax.psum(scanned(block, w, x), "data")

        return jax.shard_map(part, mesh=mesh, in_specs=(whole, rows), out_specs=whole, check_vma=check)(w, x)

    return compared(grads(of(on_mesh, rj.remat(mlp, "dots"))), grads(of(on_mesh, mlp)), STACKED, X)


def cut_scans() -> Measured:
    """6: a scan that policies by layer cut."""
    block = rj.block(mlp)
    run = rj.checkpoint_blocks(of(scanned, block), {block: "1 x full | 2 x dots | 1 x save: *exp*"})
    return compared(grads(run), grads(of(scanned, mlp)), STACKED, X)


def offload() -> Measured:
    """7: an offload in a scan, and an unrolled offload, which `remat_jax` ties."""
    found: Measured = {}
    for (label, stack, w), policy in zip(STACKS, ("offload_inputs", "save: @dots; offload: *exp*"), strict=True):
        run, plain = grads(of(stack, rj.remat(mlp, policy))), grads(of(stack, mlp))
        found |= {f"copies {label}": copies(run, w, X)} | compared(run, plain, w, X, label=label)
    return found


def eager() -> Measured:
    """8: without `jit`, one block and a scanned stack."""
    found = {}
    for label, stack, w in STACKS:
        found[f"error {label}"] = distance(
            grads(of(stack, rj.remat(mlp, "save: *exp*")))(w, X), of_plain(grads(of(stack, mlp)), w, X)
        )
    return found


def nested() -> Measured:
    """9: a block in a block, a block in `jax.checkpoint`, `jax.checkpoint` in a block."""

    def plain(w: Any, x: Any, block: Any = mlp) -> Any:
        return mlp(w, jnp.sin(block(w, x)))

    full, dots = (functools.partial(plain, block=rj.remat(mlp, policy)) for policy in ("full", "dots"))
    cases = {
        "full in dots": rj.remat(lambda w, x: full(w, x), "dots"),
        "dots in full": rj.remat(lambda w, x: dots(w, x), "full"),
        "full in jax.checkpoint of dots": jax.checkpoint(full, policy=jax.checkpoint_policies.dots_saveable),
        "jax.checkpoint in dots": rj.remat(lambda w, x: plain(w, x, jax.checkpoint(mlp)), "dots"),
    }
    found = {}
    for label, block in cases.items():
        found |= compared(grads(of(scanned, block)), grads(of(scanned, plain)), STACKED, X, label=label)
    return found


def some_inputs() -> Measured:
    """10: a gradient along some inputs, a block with an output that nothing reads."""

    def two(w: Any, x: Any) -> Any:
        return mlp(w, x), jnp.sin(x @ w["up"]) @ w["down"]

    def of_down(block: Any, down: Any, x: Any) -> Any:
        return scanned(block, {**STACKED, "down": down}, x)

    block, part = rj.remat(mlp, "dots"), rj.remat(two, "save: @dots, *sin*")
    found = compared(*(grads(of(scanned, each), 0) for each in (block, mlp)), STACKED, X, label="weights")
    found |= compared(*(grads(of(scanned, each), 1) for each in (block, mlp)), STACKED, X, label="input")
    found |= compared(*(grads(of(of_down, each), 0) for each in (block, mlp)), STACKED["down"], X, label="one weight")
    first = (grads(of(scanned, lambda w, x: part(w, x)[0])), grads(of(scanned, mlp)))
    return found | compared(*first, STACKED, X, label="one output")


def keys_and_effects() -> Measured:
    """11: a random key among the inputs, and `jax.debug.callback` in the block."""
    calls: list[int] = []

    def noisy(w: Any, x: Any, key: Any) -> Any:
        jax.debug.callback(lambda _: calls.append(1), x.sum())
        return mlp(w, x * jax.random.bernoulli(key, 0.5, x.shape))

    def total(block: Any, w: Any, x: Any) -> Any:
        return (block(w, x, jax.random.key(7)) ** 2).sum()

    run = grads(of(total, rj.remat(noisy, "full")))
    found = compared(run, grads(of(total, noisy)), WEIGHTS, X)
    jax.effects_barrier()
    calls.clear()
    jax.block_until_ready(jax.jit(run)(WEIGHTS, X))
    jax.effects_barrier()
    eager = distance(run(WEIGHTS, X), of_plain(grads(of(total, noisy)), WEIGHTS, X))
    return found | {"calls": len(calls), "error eager": eager}


REQUIREMENTS: dict[str, Callable[[], Measured]] = {
    "1 gradients": gradients,
    "2 bytes, matmuls": bytes_and_matmuls,
    "3a jvp": forward_mode,
    "3b jvp of grad": forward_over_reverse,
    "3c grad of grad": reverse_over_reverse,
    "3d grad of jvp": reverse_over_forward,
    "4 vmap": batches,
    "5a shard_map, check_vma off": functools.partial(sharded, False),
    "5b shard_map, check_vma on": functools.partial(sharded, True),
    "6 cut scan": cut_scans,
    "7 offload": offload,
    "8 eager": eager,
    "9 nested": nested,
    "10 some inputs": some_inputs,
    "11 keys, effects": keys_and_effects,
}


# --- tables -------------------------------------------------------------------------------------------------------------------


def verdict(measured: Measured, classic: Measured) -> str:
    """Whether all gradients are right and all figures are those of the classic form; else the first that is not."""
    wrong = [f"{key} {value:.0e}" for key, value in measured.items() if key.startswith("error") and value]
    other = [f"{key} {classic.get(key)} → {value}" for key, value in measured.items() if value != classic.get(key)]
    found = wrong or other
    return f"{found[0]} ({len(found)} of {len(measured)})" if found else "holds"


def outcome(requirement: str, form: str, classic: dict[str, Measured]) -> str:
    """What a form gives for a requirement, or its error in a few words."""
    jax.clear_caches()
    try:
        with FORMS[form]():
            measured = REQUIREMENTS[requirement]()
    except Exception as error:
        words = " ".join(str(error).split())[:WORDS]
        return f"{type(error).__name__}: {words}"
    if form == "classic":
        classic[requirement] = measured
    if requirement.startswith("2"):
        FIGURES[form] = measured
    return verdict(measured, classic[requirement])


def on_target(form: str, target: str) -> list[str]:
    """The bytes of a scanned stack's step, compiled for the GPU `target`."""
    rows = []
    for block in (mlp, attention):
        for policy in POLICIES:
            jax.clear_caches()
            marked = rj.block(block)
            job = rj.Workload(functools.partial(scanned, marked), STACKED, (X,), marked)
            with FORMS[form]():
                report = rj.measure(job, policy, target=target)
            found = (report.device_bytes, report.temp_bytes, report.argument_bytes, report.output_bytes)
            rows.append(f"| {form} | {block.__name__} | {policy} | {' | '.join(map(str, found))} |")
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="only forms whose name contains this word, beside the classic one")
    parser.add_argument("--target", help="print only the bytes of steps compiled for this GPU")
    given = parser.parse_args()
    forms = [form for form in FORMS if given.only in form or form == "classic"]
    if given.target:
        print(
            "| form | block | policy | device | temp | arguments | outputs |\n| --- | --- | --- | ---: | ---: | ---: | ---: |"
        )
        for form in forms:
            print("\n".join(on_target(form, given.target)), flush=True)
        return
    classic: dict[str, Measured] = {}
    print(f"| form, JAX {jax.__version__} | holds | does not hold |\n| --- | --- | --- |")
    for form in forms:
        outcomes = {requirement: outcome(requirement, form, classic).replace("|", "/") for requirement in REQUIREMENTS}
        places: dict[str, list[str]] = {}
        for requirement, found in outcomes.items():
            places.setdefault(found, []).append(requirement.partition(" ")[0])
        holds = ", ".join(places.pop("holds", []))
        fails = "; ".join(f"**{', '.join(numbers)}** {found}" for found, numbers in places.items())
        print(f"| {form} | {holds} | {fails} |", flush=True)
    print(f"\n| block, policy | {' | '.join(form.partition(' ')[0] for form in FIGURES)} |\n| --- |{' ---: |' * len(FIGURES)}")
    for block in (mlp, attention):
        for policy in POLICIES:
            of_forms = [[found[f"{figure} {block.__name__}, {policy}"] for figure in FIGURE] for found in FIGURES.values()]
            print(f"| {block.__name__}, {policy} | {' | '.join(' / '.join(map(str, figures)) for figures in of_forms)} |")


if __name__ == "__main__":
    main()
