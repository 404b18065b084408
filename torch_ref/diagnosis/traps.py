"""The known mistakes: a function for each mistake yields findings on a recorded region."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_ref.diagnosis.flags import Flags
from torch_ref.diagnosis.watch import Argument, Region
from torch_ref.errors import ReboundVariableError


@dataclass(frozen=True)
class Finding:
    """A mistake in the checkpointing of a model.

    Attributes:
        trap: the mistake's name in the table of `doctor`.
        block: the checkpointed block, or the submodel with the flag.
        place: `file:line (function)` of the checkpoint; empty for a flag.
        problem: what happens.
        remedy: what to do.

    >>> print(Finding("nothing_offloaded", "Linear", "train.py:3 (step)", "no tensor is moved", "Pass a tensor"))
    nothing_offloaded: Linear at train.py:3 (step): no tensor is moved. Pass a tensor.
    """

    trap: str
    block: str
    place: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        at = f" at {self.place}" if self.place else ""
        return f"{self.trap}: {self.block}{at}: {self.problem}. {self.remedy}."


def findings(regions: Sequence[Region], flags: Flags) -> list[Finding]:
    """All mistakes; a mistake that recurs at the same place is listed once."""
    by_place: dict[tuple[str, str], Finding] = {}
    for finding in flags_without_effect(flags, regions):
        by_place[finding.trap, finding.block + finding.problem] = finding
    for region in regions:
        for trap in TRAPS:
            for finding in trap(region):
                by_place.setdefault((finding.trap, finding.place), finding)
    return list(by_place.values())


def flags_without_effect(flags: Flags, regions: Sequence[Region]) -> Iterator[Finding]:
    """Flags that are set although nothing reads them, or although the model makes no checkpoint."""
    for flag in flags.entries:
        block, remedy = flag.owner or "the call", ""
        if not flag.in_training:
            problem = f"{flag.name} is set, but the submodel is in evaluation mode, where nothing is checkpointed"
            remedy = "Call train() on the model first"
        elif not flag.is_read:
            problem = f"{flag.name} is set, but nothing read it in this call"
            remedy = (
                "Check the flag where this submodel's layers are run, or put the policy on them from outside:"
                " torch_ref.checkpoint_blocks(model, {LayerClass: 'full'})"
            )
        elif not regions:
            problem = f"{flag.name} is set, but no checkpoint was made in this call"
            remedy = "Pass the flag on to the code that runs the layers, and call them through gradient_checkpoint_forward"
        if remedy:
            yield Finding("flag_without_effect", block, "", problem, remedy)


def hidden_from_offload(region: Region) -> Iterator[Finding]:
    """Tensors that an offload around the checkpoint misses."""
    hidden = _hidden(region)
    if region.is_hooked and hidden and not region.is_nested:
        yield _finding(
            region,
            "hidden_from_offload",
            f"{_listed(hidden)} stay on the device: the saved-tensor hooks around this checkpoint (save_on_cpu) only see "
            "positional, top-level tensors",
            "Pass the tensors by position, or use torch_ref.gradient_checkpoint_forward, which moves tensors anywhere",
        )


def rebound_variable(region: Region) -> Iterator[Finding]:
    """A captured variable that is rebound before backward runs the function again."""
    for captures in region.captures:
        try:
            captures.check_unchanged()
        except ReboundVariableError as error:
            yield _finding(
                region,
                "rebound_variable",
                f"the recomputation would differ from the forward pass: {str(error).split(', so')[0]}",
                "Bind the variable when the function is made (lambda x, layer=layer: layer(x)), or checkpoint the module",
            )


def nested_container(region: Region) -> Iterator[Finding]:
    """Tensors in containers or keywords of a nested checkpoint, which the outer checkpoint does not see."""
    hidden = _hidden(region)
    if region.is_nested and hidden:
        yield _finding(
            region,
            "nested_container",
            f"this checkpoint inside another keeps {_listed(hidden)} alive: the outer checkpoint does not see into"
            " containers and keywords, so it frees nothing and the block runs three times",
            "Pass the tensors by position, use torch_ref.gradient_checkpoint_forward for the inner checkpoint, or drop the"
            " outer checkpoint",
        )


def mutated_input(region: Region) -> Iterator[Finding]:
    """Tensors that a checkpoint saves for the recomputation, but that are changed in place."""
    later = [argument for argument in region.arguments if argument.is_mutated]
    mutated = region.mutated_inside or later
    if mutated:
        when = "by the block itself" if region.mutated_inside else "after the call"
        yield _finding(
            region,
            "mutated_input",
            f"{_listed(mutated)} were changed in place {when}: the recomputation would start from other values",
            "Make the change out of place, or give the block a clone",
        )


def reentrant_without_gradient(region: Region) -> Iterator[Finding]:
    """A reentrant checkpoint without a positional input that requires a gradient, so that its output has no graph."""
    if not region.is_reentrant:
        return
    seen = [argument for argument in region.arguments if argument.requires_grad and not argument.is_hidden]
    lost = [argument for argument in region.arguments if argument.requires_grad and argument.is_hidden]
    remedy = "Use use_reentrant=False"
    if not seen and (region.is_trainable or lost):
        yield _finding(
            region,
            "reentrant_without_gradient",
            "no positional input requires a gradient, so the output has no graph and the parameters inside get no gradient",
            remedy,
        )


def random_state(region: Region) -> Iterator[Finding]:
    """Random operators that are recomputed with different random numbers."""
    if region.is_random and not region.keeps_random_state:
        yield _finding(
            region,
            "random_state",
            "the block draws random numbers (dropout) with preserve_rng_state=False: the recomputation draws another mask",
            "Leave preserve_rng_state at its default, True",
        )


def buffers_updated_twice(region: Region) -> Iterator[Finding]:
    """Buffers, such as batch statistics, that the forward pass updates and the recomputation will update again."""
    if region.rewritten:
        shown = ", ".join(region.rewritten[:3]) + (
            f" and {len(region.rewritten) - 3} more" if len(region.rewritten) > 3 else ""
        )
        yield _finding(
            region,
            "buffers_updated_twice",
            f"the forward pass updates buffers ({shown}), and the recomputation updates them again with the same batch",
            "Use torch_ref.gradient_checkpoint_forward, which updates them once, or keep such modules outside the checkpoint",
        )


TRAPS = (
    hidden_from_offload,
    rebound_variable,
    nested_container,
    mutated_input,
    reentrant_without_gradient,
    random_state,
    buffers_updated_twice,
)


def _hidden(region: Region) -> list[Argument]:
    return [argument for argument in region.arguments if argument.is_hidden and not argument.is_parameter]


def _listed(arguments: list[Argument]) -> str:
    shown = ", ".join(f"{argument.where} {list(argument.shape)}" for argument in arguments[:3])
    more = f" and {len(arguments) - 3} more" if len(arguments) > 3 else ""
    return f"{len(arguments)} tensor(s), {sum(argument.nbytes for argument in arguments)} bytes ({shown}{more}),"


def _finding(region: Region, trap: str, problem: str, remedy: str) -> Finding:
    return Finding(trap, region.block, region.place, problem, remedy)
