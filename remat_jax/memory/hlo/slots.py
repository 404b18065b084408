"""Detects scanned offloads whose compiled copies use the wrong slot of a host buffer (openxla/xla#46231).

An iteration of a loop copies to or from one slot of a stacked array. XLA:GPU computes the slot's address when it compiles: it
writes a byte offset and a byte stride per iteration into the `backend_config` of the `dynamic-slice` or `dynamic-update-slice`.
The program's own index is still an operand. With JAX 0.10.2 and 0.11.0 the address is wrong in the backward pass: iteration k
asks for slot L-1-k of L slots, but the address is that of slot k.
"""

from __future__ import annotations

import math

from remat_jax.errors import UnsupportedError
from remat_jax.memory.hlo.scalars import scalar_value, trip_count
from remat_jax.memory.hlo.text import HloArray, HloModule, Instruction, parse


def scanned_offload_is_miscompiled(text: str | HloModule) -> bool:
    """Whether a loop of the compiled module `text` copies a different slot of a host buffer than the program asks for.

    Checks every iteration of every loop with a known trip count. False if no loop copies to or from host memory, or if the
    addresses are computed at run time. Raises UnsupportedError if an index cannot be computed from the text.

    >>> scanned_offload_is_miscompiled("ENTRY %main (x: f32[]) -> f32[] {\\n  ROOT %x = f32[] parameter(0)\\n}")
    False
    """
    module = parse(text)
    try:
        return any(
            _is_wrong(loop, instruction)
            for computation in module.computations.values()
            for loop in computation
            if loop.opcode == "while"
            for instruction in module.computations[loop.attribute("body") or ""]
        )
    except (LookupError, RecursionError, ValueError) as error:
        raise UnsupportedError(
            "a loop of the compiled module refers to an instruction that is missing from the module's text "
            f"({type(error).__name__}: {error}), so the loop's copies cannot be checked; give the whole text"
        ) from error


def _is_wrong(loop: Instruction, instruction: Instruction) -> bool:
    """Whether a copy inside an instruction of the loop's body uses a different slot than the program asks for."""
    for copy in instruction.called or ():
        constant, whole = _constant_address(copy), copy.input(0)
        if constant is None or whole is None or not any(array.on_host for array in (*whole.arrays, *copy.arrays)):
            continue
        offset, stride = constant
        for iteration in range(trip_count(loop, unknown=0)):
            if _address(instruction, copy, whole.arrays[0], _counters(loop, iteration)) != offset + iteration * stride:
                return True
    return False


def _constant_address(copy: Instruction) -> tuple[int, int] | None:
    """(offset, stride per iteration of the innermost loop) in bytes, as XLA wrote them for a copy; None if it wrote none."""
    if copy.opcode not in ("dynamic-slice", "dynamic-update-slice"):
        return None
    config = copy.config.get("dynamic_slice_config")
    if config is None or int(config.get("loop_index", 0)) != 0:
        return None
    # JAX 0.12 nests the address under "linear".
    config = config.get("linear", config)
    return int(config.get("byte_offset", 0)), int(config.get("byte_stride", 0))


def _address(instruction: Instruction, copy: Instruction, whole: HloArray, counters: dict[int, int]) -> int:
    """The byte offset of the slot that the program's own index selects, at these values of the loop's counters."""
    first, part = (1, copy) if copy.opcode == "dynamic-slice" else (2, copy.input(1))
    if part is None or not part.arrays:
        raise UnsupportedError("a dynamic-update-slice whose update has no shape in the module's text; give the whole text")

    def given(parameter: int) -> int:
        return scalar_value(instruction.home.instructions[instruction.operands[parameter]], counters, None)

    address, stride = 0, whole.bytes // math.prod(whole.dims)
    for axis in whole.order:
        index = scalar_value(copy.home.instructions[copy.operands[first + axis]], {}, given)
        address += stride * max(0, min(index, whole.dims[axis] - part.arrays[0].dims[axis]))
        stride *= whole.dims[axis]
    return address


def _counters(loop: Instruction, iteration: int) -> dict[int, int]:
    variables = loop.config.get("dynamic_variables")
    if not variables and "known_induction_variable" in loop.config:
        steps = loop.config.get("known_init_step", {"init": "0", "step": "1"})
        variables = [{**loop.config["known_induction_variable"], **steps}]
    return {int(each["tuple_index"]): int(each["init"]) + iteration * int(each["step"]) for each in variables or ()}
