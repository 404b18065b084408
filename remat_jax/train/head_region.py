"""Finds what a loss computes from its logits for each token, up to the sums over the tokens, and evaluates it for a chunk.

The search follows one axis of the logits, the token axis, forward through the operations. Operations that treat all tokens
alike are in the region. A sum over the tokens ends it, and so does an operation that combines tokens and reads only small
arrays, such as one loss per token. An operation that combines tokens and reads an array as large as the logits makes the region
impossible. Arrays that the region reads are cut along the token axis too. Large arrays among them, such as one-hot labels, are
computed in the region.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_jax import compat
from remat_jax.core.axes import AxisPlace, Passage, passage, resized
from remat_jax.core.walk import bodies
from remat_jax.errors import PlanningError
from remat_jax.train.head_program import VIEWS, Operation, Program, Value, read, run_nodes

Key = tuple[Value, AxisPlace | None]
"""An array in a chunk: the value, and where its token axis is; None for the whole value, and for a sum over the tokens."""


class NotPerToken(PlanningError):
    """Raised when an operation combines tokens before the large arrays end."""


@dataclass(frozen=True, eq=False)
class RegionStep:
    """An operation of the region, and the token axis in its operands and results.

    Attributes:
      shifts: whether it is a slice of the token axis, which a chunk has done already.
      column: for a gather that reads each token's own position: the column of its indices with this position.
      call: for a function with a custom derivative: this function for a chunk.
      whole: the places of results that do not depend on the tokens.
    """

    node: Operation
    through: Passage
    shifts: bool = False
    column: int | None = None
    call: Callable[..., Any] | None = None
    whole: Collection[int] = ()

    def run(self, inputs: list[Any], positions: int, valid: Any) -> list[Any]:
        """Evaluate the operation for a chunk with this number of positions. `valid` says which of them exist."""
        if self.shifts:
            return inputs
        if self.call is not None:
            return list(self.call(positions, valid)(*inputs))
        if self.through.is_summed and valid is not None:
            place, summed = next((place, cut) for place, cut in enumerate(self.through.operands) if cut is not None)
            inputs[place] = _masked(inputs[place], summed, valid)
        if self.column is not None:
            of_indices = self.through.operands[1]
            assert of_indices is not None
            own = jax.lax.broadcasted_iota(inputs[1].dtype, inputs[1].shape, of_indices.dim)
            is_column = jax.lax.broadcasted_iota(np.dtype("int32"), inputs[1].shape, inputs[1].ndim - 1) == self.column
            inputs[1] = jnp.where(is_column, own, inputs[1])
        return self.node.run(inputs, **resized(self.node.eqn, self.through, positions))


def _masked(array: Any, cut: AxisPlace, valid: Any) -> Any:
    """`array` with zeros at positions that do not exist."""
    kept = jnp.broadcast_to(valid[None, :, None], (cut.outer, valid.size, cut.inner)).reshape(-1)
    return jnp.where(jnp.expand_dims(kept, [dim for dim in range(array.ndim) if dim != cut.dim]), array, jnp.zeros_like(array))


class TokenRegion:
    """The operations that depend on `given`, the values with a token axis.

    Args:
      program: the program.
      given: the values that are cut at the start: for each, where its token axis is.
      positions: the length of the token axis.
      large: arrays with more elements may not leave the region, and are computed inside it; None: nothing may leave, and
        everything is computed inside.
      taken: nodes that belong to other regions.
      in_rule: whether the program is a derivative rule. Rules of calls inside it are then traced only if they are applied.
      calls: gives the step of a call, a loop or a branch; None: they are in no region.
    """

    things = "tokens"
    """What the positions of the axis are called in messages."""

    def __init__(
        self,
        program: Program,
        given: Mapping[Value, AxisPlace],
        positions: int,
        *,
        large: int | None = None,
        taken: Collection[Operation] = (),
        in_rule: bool = False,
        calls: Callable[[TokenRegion, Operation], RegionStep | None] | None = None,
    ) -> None:
        self.program, self.large, self.taken, self.in_rule, self.calls = program, large, taken, in_rule, calls
        self.lengths, self.window = [positions], (0, positions, 1)
        self.cuts: dict[Value, AxisPlace] = dict(given)
        self.sums: dict[Value, Operation] = {}
        self.after: dict[Value, Operation] = {}
        """Values that depend on the tokens of all chunks: for each, the operation that combined them."""
        self.emitted: dict[Value, AxisPlace] = {}
        self.steps: dict[tuple[Operation, tuple[AxisPlace | None, ...]], RegionStep] = {}
        self.frontier: dict[Key, None] = {}
        self._makers = program.makers()
        self._order = {node: place for place, node in enumerate(program.nodes)}
        self._resolved: set[Key] = set()

    # --- the search -----------------------------------------------------------------------------------------------

    def find(self, first: Sequence[RegionStep] = ()) -> None:
        """Find the region; `first` are the steps that make the given values, if these are no inputs.

        Raises:
          NotPerToken: an operation on large arrays combines tokens.
        """
        heads = {step.node for step in first}
        for step in first:
            self._add(step)
        for node in self.program.nodes:
            if node not in self.taken and node not in heads:
                self._follow(node)
        for value in self.program.outputs:
            if isinstance(value, Value) and value in self.cuts and first:
                self.emit(value, f"the loss returns {text(value)}, an array as large as the logits")
        early = [value for value in (*self.emitted, *self.sums) if self._stage(value) == 0]
        if len(self.lengths) > 1 and early:
            raise NotPerToken(f"the loss uses all tokens of {text(early[0])}, but slices the tokens of the logits elsewhere")
        for step in [*self.steps.values()]:
            self._demand(step)

    def _stage(self, value: Value) -> int:
        if value in self.cuts:
            return self.cuts[value].stage
        node = self.sums[value]
        return max(self.cuts[operand].stage for operand in node.values if operand in self.cuts)

    def _follow(self, node: Operation) -> None:
        cut = [(place, each) for place, each in enumerate(node.operands) if isinstance(each, Value) and each in self.cuts]
        combined = next((self.after[each] for each in node.values if each in self.after), None)
        step = self._step(node, cut) if cut and combined is None else None
        if step is not None:
            self._add(step)
            return
        for _, value in cut:
            why = f"{node} combines {self.things} of {text(value)}"
            if combined is not None:
                why = f"{combined} combines the {self.things}, and {node} reads its result with {text(value)}"
            self.emit(value, why)
        if cut or combined is not None:
            self.after.update(dict.fromkeys(node.results, combined or node))

    def _add(self, step: RegionStep) -> None:
        self.steps[step.node, step.through.results] = step
        for place, (value, cut) in enumerate(zip(step.node.results, step.through.results, strict=True)):
            if cut is not None:
                self.cuts[value] = cut
            elif place not in step.whole:
                if self.large is not None and value.aval.size > self.large:
                    raise NotPerToken(f"{step.node} sums the tokens in an array as large as the logits")
                self.sums[value] = self.after[value] = step.node

    def emit(self, value: Value, why: str) -> None:
        """Make `value` a result of the region; raises NotPerToken with the reason `why` if it is large."""
        if self.large is None or value.aval.size > self.large:
            raise NotPerToken(why)
        self.emitted[value] = self.cuts[value]

    def _step(self, node: Operation, cut: Sequence[tuple[int, Value]]) -> RegionStep | None:
        """The step of a node whose operands at these places are cut; None if it does not treat all tokens alike."""
        if node.eqn.effects or node.region is not None:
            return None
        if bodies(node.eqn):
            return None if self.calls is None else self.calls(self, node)
        place, value = cut[0]
        step = (
            self._window(node, value) or self._through(node, place, self.cuts[value]) or self._own_position(node, place, value)
        )
        if step is None or any(step.through.operands[place] != self.cuts[value] for place, value in cut):
            return None
        is_partial = None in step.through.results and not step.through.is_summed
        return None if is_partial else step

    def _through(self, node: Operation, place: int, cut: AxisPlace) -> RegionStep | None:
        through = passage(node.eqn, place, cut, self.lengths[cut.stage])
        return None if through is None else RegionStep(node, through)

    def _window(self, node: Operation, value: Value) -> RegionStep | None:
        """The step of a slice of the token axis. All slices of the region's token axis must be equal."""
        cut = self.cuts[value]
        if node.name != "slice" or cut.stage or cut.outer * cut.inner != 1 or self.large is None:
            return None
        starts, limits = node.eqn.params["start_indices"], node.eqn.params["limit_indices"]
        strides = node.eqn.params["strides"] or (1,) * len(starts)
        dim, rest = cut.dim, [each for each in range(value.aval.ndim) if each != cut.dim]
        window = (starts[dim], limits[dim], strides[dim])
        is_whole = window == (0, self.lengths[0], 1)
        if is_whole or any((starts[each], limits[each], strides[each]) != (0, value.aval.shape[each], 1) for each in rest):
            return None
        if len(self.lengths) > 1 and window != self.window:
            return None
        self.lengths, self.window = [self.lengths[0], node.results[0].aval.shape[dim]], window
        return RegionStep(node, Passage((cut,), (replace(cut, stage=1),)), shifts=True)

    def _own_position(self, node: Operation, place: int, value: Value) -> RegionStep | None:
        """The step of a gather that reads, for each token, the token's own position of the logits: `logits[arange(n), y]`."""
        cut = self.cuts[value]
        if node.name != "gather" or place != 0:
            return None
        numbers, indices = node.eqn.params["dimension_numbers"], node.operands[1]
        if cut.dim not in numbers.collapsed_slice_dims or cut.dim not in numbers.start_index_map:
            return None
        column = numbers.start_index_map.index(cut.dim)
        known = self._known_column(indices, column)
        if known is None:
            return None
        own = np.arange(cut.size(self.lengths[cut.stage]))
        for dim, result in enumerate(dim for dim in range(node.results[0].aval.ndim) if dim not in numbers.offset_dims):
            shape = [own.size if each == dim else 1 for each in range(known.ndim)]
            if known.shape[dim] == own.size and np.array_equal(known, np.broadcast_to(own.reshape(shape), known.shape)):
                return RegionStep(node, Passage((cut, cut.at(dim)), (cut.at(result),)), column=column)
        return None

    def _known_column(self, indices: Any, column: int) -> Any:
        """The values of a column of `indices`, if they do not depend on inputs; else None."""
        maker = self._makers.get(indices, (None, 0))[0]
        if maker is None or maker.name != "concatenate" or maker.eqn.params["dimension"] != indices.aval.ndim - 1:
            return None
        for part in maker.operands:
            if column < part.aval.shape[-1]:
                known = self.known(part)
                return None if known is None else known[..., column]
            column -= part.aval.shape[-1]
        return None

    def known(self, value: Any) -> Any:
        """A value that does not depend on inputs of the program; None if it does."""
        needed: list[Operation] = []
        waiting, seen = [value], set()
        while waiting:
            each = waiting.pop()
            if not isinstance(each, Value) or each in seen or each in self.program.constants:
                continue
            seen.add(each)
            if each not in self._makers:
                return None
            node = self._makers[each][0]
            needed.append(node)
            waiting += node.operands
        env: dict[Any, Any] = dict(self.program.constants)
        if any(map(compat.is_traced, env.values())):
            return None
        with jax.ensure_compile_time_eval():
            run_nodes(sorted(set(needed), key=self._order.__getitem__), env)
            return np.asarray(read(value, env))

    # --- what the region reads ---------------------------------------------------------------------------------------

    def _demand(self, step: RegionStep) -> None:
        for operand, cut in zip(step.node.operands, step.through.operands, strict=True):
            if isinstance(operand, Value) and operand not in self.cuts:
                self.want(operand, cut)

    def want(self, value: Value, cut: AxisPlace | None) -> None:
        """Make the value, which depends on no given value, available in a chunk: computed in it, or read."""
        if (value, cut) in self._resolved:
            return
        self._resolved.add((value, cut))
        step = self._pulled(value, cut)
        if step is None:
            self.frontier[value, cut] = None
        else:
            self.steps[step.node, step.through.results] = step
            self._demand(step)

    def _pulled(self, value: Value, cut: AxisPlace | None) -> RegionStep | None:
        """The step that computes a value in a chunk; None if the chunk reads it."""
        if value not in self._makers:
            return None
        node, place = self._makers[value]
        if node.eqn.effects or node.region is not None:
            return None
        if cut is None:
            if self.large is None or node.name in VIEWS:
                return RegionStep(node, Passage((None,) * len(node.operands), (None,) * len(node.results)))
            return None
        if self.large is not None and value.aval.size <= self.large:
            return None
        through = passage(node.eqn, place, cut, self.lengths[cut.stage], of_result=True)
        return None if through is None or compat.has_own_derivative(node.eqn) else RegionStep(node, through)

    def place_of(self, value: Value) -> AxisPlace | None:
        """Where the token axis of an input is in the region."""
        if value in self.cuts:
            return self.cuts[value]
        places = [cut for each, cut in self.frontier if each is value]
        if len(set(places)) > 1:
            raise NotPerToken(f"{text(value)} is read both whole and by token")
        return places[0] if places else None

    def check_reads(self, keys: Collection[Key]) -> None:
        """Raise NotPerToken if the region reads more than `keys` and constants."""
        for value, cut in self.frontier:
            if (value, cut) not in keys and (value not in self.program.constants or cut is not None):
                raise NotPerToken(f"{text(value)} is not computed for each token")

    # --- evaluation ------------------------------------------------------------------------------------------------------

    def ordered(self) -> list[RegionStep]:
        """The steps in the order of evaluation."""
        return sorted(self.steps.values(), key=lambda step: self._order[step.node])

    def run(self, env: dict[Key, Any], positions: int, valid: Any) -> None:
        """Evaluate the region for a chunk. `env` has the frontier, and gets all values."""
        constants = self.program.constants
        for step in self.ordered():
            keys = zip(step.node.operands, step.through.operands, strict=True)
            inputs = [
                (env[each, cut] if (each, cut) in env else constants[each]) if isinstance(each, Value) else each.val
                for each, cut in keys
            ]
            outputs = step.run(inputs, positions, valid)
            env.update(zip(zip(step.node.results, step.through.results, strict=True), outputs, strict=True))

    def evaluate(self, inputs: Sequence[Key], positions: int, valid: Any, *args: Any) -> list[Any]:
        """The outputs of the program for a chunk, whose `inputs` are `args`."""
        env = dict(zip(inputs, args, strict=True))
        self.run(env, positions, valid)
        return [env[value, self.cuts.get(value)] if isinstance(value, Value) else value.val for value in self.program.outputs]


def text(value: Any) -> str:
    """The dtype and shape of a value."""
    return f"{value.aval.dtype}{list(value.aval.shape)}"
