"""`python -m benchmarks.chunked_head`: device memory of Llama 3 8B with its head and loss in chunks, compiled for a GPU.

    python -m benchmarks.chunked_head --batch 8 32                  8 and 32 × 1024 tokens, policy full, one H200
    python -m benchmarks.chunked_head --batch 2 --length 4096       where attention scores set the peak
    python -m benchmarks.chunked_head --found                       bytes by hand, and with the head found in the loss
    python -m benchmarks.chunked_head --buys 66GiB 72GiB            for each budget the plan without and with chunks

Adam, parameters in bfloat16, layers scanned, 128,256 words. Nothing is run. For the first row, standard error has the advice
about head and attention: as estimated by `measure`, and as compiled by `doctor`. The modelled step time is that of the compiled
schedule, at the rates that programs reach on the target.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import remat_jax as rj
from benchmarks.figures import markdown
from examples.models import llama
from examples.models.functions import cross_entropy
from remat_jax.errors import InfeasibleBudget
from remat_jax.memory.advice import HEAD, SCORES
from remat_jax.planning.plan import Plan
from remat_jax.planning.plan_data import Beyond
from remat_jax.report import format_bytes
from remat_jax.train.chunked_head import chunk_head


def decoder(batch: int, length: int, chunks: int) -> rj.Workload:
    """One training step whose head and loss run in `chunks` chunks of the sequence; with one chunk the head is unchanged."""
    config = llama.LlamaConfig.llama3_8b()
    model = llama.Llama(config, scan=True, param_dtype=jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def head_loss(kernel: jax.Array, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(hidden @ kernel, targets) * targets.size

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        hidden = model.apply({"params": params}, tokens, logits=False)
        total = rj.in_chunks(head_loss, chunks, axis=(None, 1, 1))(params["lm_head"]["kernel"], hidden, targets)
        return total / targets.size

    return rj.Workload(loss, params, (tokens, tokens), llama.LlamaBlock, optimizer=optax.adam(1e-4), name="Llama 3 8B")


def column(batch: int, length: int, chunks: list[int], policy: str, target: str) -> Iterator[tuple[str, str]]:
    """Device memory and modelled step time for each number of chunks. Prints the advice for the first number."""
    for number in chunks:
        work = decoder(batch, length, number)
        report = rj.measure(work, policy, target)
        if number == chunks[0]:
            for advice in (*report.advice, *rj.doctor(work, policy, target).advice):
                if advice.what in (HEAD, SCORES):
                    how = "compiled" if advice.compiled else "estimated"
                    print(f"{advice.what}: {format_bytes(advice.bytes)} less ({how})", file=sys.stderr)
        yield format_bytes(report.device_bytes), "" if report.seconds is None else f"{report.seconds * 1e3:.0f} ms"


def found(batch: int, length: int, policies: Sequence[str], target: str) -> list[tuple[str, ...]]:
    """For each policy the bytes with a hand-written head in eight chunks, and with the head that `chunk_head` finds."""
    unchanged = decoder(batch, length, 1)
    steps = decoder(batch, length, 8), unchanged.with_loss(chunk_head(unchanged.loss, chunks=8))
    return [(policy, *(f"{rj.measure(step, policy, target).device_bytes:,}" for step in steps)) for policy in policies]


def buys(batch: int, length: int, budgets: Sequence[str], target: str) -> Iterator[tuple[str, ...]]:
    """For each budget: the plan, the plan with the head in chunks, and the changes kept if planning may make this change."""
    work = decoder(batch, length, 1)
    for budget in budgets:
        unchanged, allowed = (planned(work, budget, target, allow) for allow in ((), ("head_in_chunks",)))
        chunked = allowed.beyond[0] if allowed else None
        yield budget, *figures(unchanged), *figures(chunked), ", ".join(allowed.changes) or "none" if allowed else ""


def planned(work: rj.Workload, budget: str, target: str, allow: tuple[str, ...]) -> Plan | None:
    """The plan; None if nothing fits."""
    try:
        return rj.plan(work, budget, target, allow=allow, timeout=3600)
    except InfeasibleBudget:
        return None


def figures(made: Plan | Beyond | None) -> tuple[str, str]:
    """Device memory and modelled step time of a plan."""
    if made is None or made.device_bytes is None or made.seconds is None:
        return "nothing fits", ""
    return format_bytes(made.device_bytes), f"{made.seconds * 1e3:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--found", action="store_true", help="compare with the head that chunk_head finds in the loss")
    parser.add_argument("--buys", nargs="+", metavar="BUDGET", help="plan for each budget with and without a head in chunks")
    options = parser.parse_args()
    if options.buys:
        rows = list(buys(options.batch[0], options.length, options.buys, options.target))
        print(markdown(["budget", "plan", "step", "plan with the head in chunks", "step", "kept"], rows))
        return
    if options.found:
        rows = found(options.batch[0], options.length, ("full", "dots_with_no_batch_dims"), options.target)
        print(markdown(["policy", "by hand", "found in the loss"], rows))
        return
    columns = [list(column(batch, options.length, options.chunks, options.policy, options.target)) for batch in options.batch]
    names = [name for batch in options.batch for name in (f"{batch} × {options.length} tokens", "step")]
    rows = [
        (chunks, *(cell for pair in pairs for cell in pair))
        for chunks, pairs in zip(options.chunks, zip(*columns, strict=True), strict=True)
    ]
    print(markdown(["chunks", *names], rows))


if __name__ == "__main__":
    main()
