"""The programs of the problem forms: the values and operations of a stack and of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from remat_jax.solver.problem import Block, Stack
from tests.solver_oracles.chain_problem import Chain, Stage
from tests.solver_oracles.program import Operation, Program, Value


def labels(stack: Stack) -> list[str]:
    """The name of every single block of a stack, in the order of the forward pass.

    >>> labels(Stack((Block("layer", (), 1.0, 2.0, repeats=2), Block("head", (), 1.0, 2.0))))
    ['layer/0', 'layer/1', 'head/0']
    """
    return [f"{block.name}/{index}" for block in stack.blocks for index in range(block.repeats)]


def stack_program(stack: Stack, kept_seconds: Sequence[float] | None = None) -> Program:
    """Everything that a stack could do: the passes of its blocks, and recomputing single residuals.

    ``kept_seconds`` is what each block's kept residuals cost; it is added to the time of its backward pass. The arrays that
    go from block to block take no memory of their own: they are in the working sets.
    """
    values = [Value("input"), Value("input cotangent")]
    operations: list[Operation] = []
    before, cotangent = "input", "input cotangent"
    positions = stack.positions()
    for label, block, kept in zip(labels(stack), positions, kept_seconds or [0.0] * len(positions), strict=True):
        values += _block_values(label, block)
        block = replace(block, backward_seconds=block.backward_seconds + kept)
        operations += _block_operations(label, block, before, cotangent)
        before, cotangent = f"{label}:output", f"{label}:cotangent"
    operations.append(Operation("loss", 0.0, (before,), (cotangent,)))
    return Program(tuple(values), tuple(operations), ("input",), ("input cotangent",), stack.fixed_bytes, stack.link)


def _block_values(label: str, block: Block) -> list[Value]:
    values = [Value(f"{label}:output"), Value(f"{label}:cotangent"), Value(f"{label}:input", block.input_bytes)]
    for residual in block.residuals:
        again, fetched = block.recomputed_share * residual.bytes, block.fetched_share * residual.bytes
        values.append(
            Value(f"{label}/{residual.name}", residual.bytes, again, fetched, residual.may_save, residual.may_offload)
        )
    return values


def _block_operations(label: str, block: Block, before: str, cotangent: str) -> list[Operation]:
    names = {residual.name: f"{label}/{residual.name}" for residual in block.residuals}
    writes = (f"{label}:output", f"{label}:input", *names.values())
    forward = Operation(f"forward {label}", block.forward_seconds, (before,), writes, block.working_bytes)
    again = [
        Operation(
            f"recompute {names[residual.name]}",
            residual.seconds,
            tuple(names[parent] for parent in residual.parents),
            (names[residual.name],),
        )
        for residual in block.residuals
        if residual.seconds is not None
    ]
    needed = (names[residual.name] for residual in block.residuals if residual.needed)
    reads = (f"{label}:cotangent", f"{label}:input", *needed)
    backward = Operation(f"backward {label}", block.backward_seconds, reads, (cotangent,), block.working_bytes)
    return [forward, *again, backward]


def chain_program(chain: Chain) -> Program:
    """Everything that a chain could do: run each stage and keep only its output, or run it under one of its options.

    Stages are counted from 1. ``a0`` is the input, ``a{i}`` the output of stage i, ``a{i} cotangent`` as large as it;
    ``{i}:{option}`` is what an option keeps beside the output, and ``{i}:{option} on host`` its part in host memory. What a
    backward pass writes takes the place of what it reads.
    """
    values = [Value("a0", chain.input_bytes), Value("a0 cotangent", chain.input_bytes)]
    operations: list[Operation] = []
    for number, stage in enumerate(chain.stages, 1):
        values += [Value(f"a{number}", stage.output_bytes), Value(f"a{number} cotangent", stage.output_bytes)]
        operations += _stage_operations(number, stage)
        for option in stage.options:
            kept = option.kept_bytes - stage.output_bytes
            values.append(Value(f"{number}:{option.name}", kept))
            if option.host_bytes:
                values.append(Value(f"{number}:{option.name} on host", option.host_bytes, fetched_bytes=0.0, may_offload=True))
    last = len(chain.stages)
    operations.append(Operation("loss", 0.0, (f"a{last}",), (f"a{last} cotangent",), in_place=True))
    return Program(tuple(values), tuple(operations), ("a0",), ("a0 cotangent",), chain.fixed_bytes, chain.link)


def _stage_operations(number: int, stage: Stage) -> list[Operation]:
    before, after = f"a{number - 1}", f"a{number}"
    operations = [Operation(f"forward {number}", stage.forward_seconds, (before,), (after,))]
    for option in stage.options:
        kept = (f"{number}:{option.name}", *((f"{number}:{option.name} on host",) if option.host_bytes else ()))
        reads = (before, after, *kept, f"{after} cotangent")
        forward = f"forward {number}:{option.name}"
        backward = f"backward {number}:{option.name}"
        operations.append(Operation(forward, option.forward_seconds, (before,), (after, *kept), option.forward_bytes))
        operations.append(
            Operation(backward, option.backward_seconds, reads, (f"{before} cotangent",), option.backward_bytes, in_place=True)
        )
    return operations
