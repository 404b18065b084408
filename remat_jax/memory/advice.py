"""Advice on reducing memory by changes other than policies on blocks, from the compiled schedule of the measured step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from remat_jax import compat
from remat_jax.core.softmax_products import SoftmaxProduct, softmax_products
from remat_jax.errors import PlanningError
from remat_jax.hardware import Target
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.hlo.live import RESULT, LiveBuffer, Timeline
from remat_jax.memory.hlo.text import arrays_of
from remat_jax.report.activity import activity
from remat_jax.report.tables import format_bytes
from remat_jax.train import OffloadedOptimizer
from remat_jax.train.chunked_head import CHUNKS
from remat_jax.train.parameters import device_bytes, result_structs
from remat_jax.train.sums import wide
from remat_jax.workload import Workload

LEAST = 0.02
"""A change is advised if it reduces the step's device memory by at least this share."""

SHOWN = 0.05
"""Advice is printed with a report or a plan if it reduces the step's device memory by at least this share."""

MICRO_BATCHES = 2

HEAD, SCORES, STATE = "head in chunks", "attention in a kernel", "optimizer state on the host"
MICRO, DONATION, DTYPE = "micro-batches", "donated arguments", "parameters in bfloat16"


@dataclass(frozen=True)
class Advice:
    """A change other than a policy on blocks, and the memory that this change alone would free.

    Attributes:
      what: the change in a few words, such as `"head in chunks"`.
      bytes: the device memory that the change frees; on a mesh, on one device.
      how: the code to write.
      why: the buffers that occupy the memory now; if `doctor` could not make the change, also the reason.
      compiled: whether `doctor` compiled the changed step. Otherwise `bytes` is estimated: the peak of the compiled
        schedule is computed again without the buffers that the change removes.
    """

    what: str
    bytes: int
    how: str
    why: str
    compiled: bool = False

    def __str__(self) -> str:
        origin = "compiled" if self.compiled else "estimated"
        return f"{self.what}: {format_bytes(self.bytes)} less ({origin}): {self.how}. {self.why}."


@activity("looking for changes beyond the blocks")
def traced_products(workload: Workload) -> tuple[SoftmaxProduct, ...]:
    """The matmuls before a softmax in the traced loss, or in the finished step of a workload without a loss."""
    function, arguments = workload.loss, (workload.params, *workload.batch)
    if not workload.has_loss:
        step = workload.step("off")
        function, arguments = step.function, step.arguments
    return softmax_products(jax.make_jaxpr(function)(*arguments))


def advise(workload: Workload, sizes: Sizes, products: tuple[SoftmaxProduct, ...], target: Target) -> tuple[Advice, ...]:
    """Changes that would each free at least 2 % of a compiled step's device memory, the largest first; empty for the CPU.

    `sizes` are the compiled sizes of the workload's step under any policy, compiled for `target`; `products` are the workload's
    `traced_products`.
    """
    if sizes.timeline is None:
        return ()
    adviser = _Adviser(workload, sizes, sizes.timeline, products, target)
    worth = [advice for advice in adviser.all() if advice.bytes >= LEAST * sizes.device]
    return tuple(sorted(worth, key=lambda advice: -advice.bytes))


def largest_advice(workload: Workload, sizes: Sizes, target: Target) -> str | None:
    """`largest` of the advice for a compiled step."""
    return largest(advise(workload, sizes, traced_products(workload), target), sizes)


def largest(advice: tuple[Advice, ...], sizes: Sizes) -> str | None:
    """A sentence with the advice that frees most memory, for a step that needs too much; None if no advice frees 5 %."""
    return f"Beyond the blocks: {advice[0]}" if advice and advice[0].bytes >= SHOWN * sizes.device else None


class _Adviser:
    def __init__(
        self, workload: Workload, sizes: Sizes, timeline: Timeline, products: tuple[SoftmaxProduct, ...], target: Target
    ) -> None:
        self.workload, self.sizes, self.timeline, self.products, self.target = workload, sizes, timeline, products, target
        self.step = workload.step("off")
        self.arguments = dict(zip(self.step.names, self.step.local_arguments, strict=True)) if self.step.names else {}
        self.parameters = {name: tree for name, tree in self.arguments.items() if "parameters" in name}
        self._sizes_of_parameters = {math.prod(leaf.shape) for leaf in jax.tree.leaves(self.parameters)}

    def all(self) -> Iterator[Advice]:
        """Yield all advice that applies to the step, including changes that free little."""
        chunked = f"rj.in_chunks(head_loss, {CHUNKS}, axis=…), a head and its loss in {CHUNKS} chunks"
        heads, scores = ([each for each in self.products if each.is_head is is_head] for is_head in (True, False))
        yield from self._products(HEAD, "logits", heads, 1 / CHUNKS, chunked)
        needs, refused = (
            " and ".join(dict.fromkeys(filter(None, texts)))
            for texts in ([product.needs for product in scores], [product.cudnn_refuses for product in scores])
        )
        kernel = backend_of(self.target).attention_kernel(needs=needs, cudnn_refuses=refused)
        yield from self._products(SCORES, "attention scores", scores, 0, kernel)
        yield from self._state()
        yield from self._micro_batches()
        yield from self._donation()
        yield from self._dtype()

    def _saved(self, share: Callable[[LiveBuffer], float]) -> int:
        return self.timeline.peak() - self.timeline.peak(share)

    def _products(self, change: str, arrays: str, products: list[SoftmaxProduct], share: float, how: str) -> Iterator[Advice]:
        """Yield the advice named `change`: store only the fraction `share` of the results of `products`."""
        if not products:
            return
        saved = self._saved(lambda buffer: share if self._is_product(buffer, products) else 1)
        held = sum(buffer.nbytes for buffer in self.sizes.live if self._is_product(buffer, products))
        largest = max(products, key=lambda product: product.elements)
        at = f" made at {largest.source}" if largest.source else ""
        why = f"{format_bytes(held)} at the peak are {arrays}, such as {list(largest.shape)}{at}"
        yield Advice(change, saved - sums_of_heads(self.arguments.get("parameters", ()), products), how, why)

    def _is_product(self, buffer: LiveBuffer, products: list[SoftmaxProduct]) -> bool:
        """Whether a buffer is the result of one of the `products`, or is computed elementwise from such a result."""
        primitive = buffer.name.rpartition(":")[2]
        # A backward matmul computes the gradient of an operand, such as the weights of an output head. This gradient may
        # be as large as the logits.
        is_gradient = buffer.phase == "backward" and primitive in ("dot_general", "transpose")
        is_unnamed = self._is_unnamed(buffer)
        if buffer.phase in ("argument", RESULT) or is_gradient or (buffer.phase == "other" and not is_unnamed):
            return False
        return any(
            (self._is_part(buffer, product.elements) or self._is_part(buffer, product.read))
            and (
                self._has_classes(buffer, product) if product.is_head else is_unnamed or _is_inside(buffer.module, product.path)
            )
            for product in products
        )

    def _has_classes(self, buffer: LiveBuffer, product: SoftmaxProduct) -> bool:
        """Whether a dimension of a buffer may be one device's part of the classes of a head."""
        return any(
            dim and product.classes % dim == 0 and self.target.devices % (product.classes // dim) == 0
            for dim in _dims(buffer.shape)
        )

    def _is_unnamed(self, buffer: LiveBuffer) -> bool:
        """Whether a buffer is the result of a fusion without an operator name, and is not a gradient of a parameter."""
        is_unnamed = not buffer.module and ":" not in buffer.name and buffer.phase == "other"
        return is_unnamed and _elements(buffer.shape) not in self._sizes_of_parameters

    def _is_part(self, buffer: LiveBuffer, elements: int) -> bool:
        """Whether a buffer may be one device's part of an array with `elements` elements."""
        part = _elements(buffer.shape)
        return part > 0 and elements % part == 0 and self.target.devices % (elements // part) == 0

    def _state(self) -> Iterator[Advice]:
        state = self.arguments.get("optimizer state")
        if state is None or isinstance(self.workload.optimizer, OffloadedOptimizer):
            return
        is_state = ("argument", "optimizer state")
        without = self.timeline.peak(lambda buffer: 0 if (buffer.phase, buffer.module) == is_state else 1)
        # The update streams the state: only a few state arrays are on the device at a time, besides parameters and gradients.
        streamed = 3 * max(map(device_bytes, jax.tree.leaves(state)), default=0)
        updating = sum(map(device_bytes, [*self.parameters.values(), self.arguments["parameters"]])) + streamed
        saved = self.timeline.peak() - max(without, updating)
        why = (
            f"{format_bytes(device_bytes(state))} of optimizer state are on the device for the whole step, but only the "
            "update at its end reads them"
        )
        yield Advice(STATE, saved, "rj.offload_optimizer(optimizer)", why)

    def _micro_batches(self) -> Iterator[Advice]:
        if not micro_batches_divide(self.workload, self.step.local_arguments) or not _takes_micro_batches(self.workload):
            return
        saved = self._saved(lambda buffer: 1 / MICRO_BATCHES if self._is_activation(buffer) else 1)
        trained = jax.tree.leaves(self.arguments.get("parameters", ()))
        sums = sum(max(4 * math.prod(leaf.shape), compat.array_bytes(leaf.shape, leaf.dtype)) for leaf in trained)
        held = sum(buffer.nbytes for buffer in self.sizes.live if self._is_activation(buffer))
        if saved - sums < LEAST * self.sizes.device:
            return  # checking the loss would trace it again
        by_hand = (
            f"rj.accumulate_gradients(sums, {MICRO_BATCHES}), where sums(params, *batch) returns the sum of the losses and the "
            "number of targets"
        )
        mixed = mixed_examples(self.workload)
        how = by_hand if mixed else f'rj.plan(…, allow="micro_batches"), or {by_hand}'
        effect = (
            f"The step then computes another function, unless the loss is written over independent examples: {mixed}"
            if mixed
            else "The loss is a sum or a mean over examples, so the function stays the same"
        )
        why = (
            f"{format_bytes(held)} at the peak are activations; {MICRO_BATCHES} micro-batches halve them, and the sums of "
            f"gradients add {format_bytes(sums)}. {effect}"
        )
        yield Advice(MICRO, saved - sums, how, why)

    def _is_activation(self, buffer: LiveBuffer) -> bool:
        is_computed = buffer.phase in ("forward", "recomputed", "backward") or self._is_unnamed(buffer)
        return is_computed and _elements(buffer.shape) not in self._sizes_of_parameters

    def _donation(self) -> Iterator[Advice]:
        undonated = undonated_arguments(self.workload)
        if not undonated:
            return
        arguments = [self.step.local_arguments[place] for place in undonated]
        twice = sum(map(device_bytes, arguments))
        elements = {math.prod(leaf.shape) for leaf in jax.tree.leaves(arguments)}
        # XLA uses a result's buffer for temporary arrays until the result is written. With donation the result shares the
        # argument's buffer. The old value occupies it until the result is written, so the temporary arrays need other memory.
        left = self.timeline.peak(lambda buffer: 0 if buffer.phase == RESULT and _elements(buffer.shape) in elements else 1)
        how = "donate=True, for the workload and for plan.train_step; in a step of your own, donate_argnums of its jit"
        if self.step.own is not None:
            how = self.step.own.donating(sorted({*undonated, *self.step.donate_argnums}))
        *others, last = [self.step.labels[place] for place in undonated]
        names = " and ".join(filter(None, [", ".join(others), last]))
        why = (
            f"The step returns arrays of the same shapes as {names} without donating the old buffers, so "
            f"{format_bytes(twice)} are in memory twice at the end of the step. Before its end, temporary arrays use part of "
            "this memory"
        )
        yield Advice(DONATION, min(twice, self.sizes.device - left), how, why)

    def _dtype(self) -> Iterator[Advice]:
        wide, trained = (
            [leaf for leaf in jax.tree.leaves(trees) if leaf.dtype == jnp.float32]
            for trees in (self.parameters, self.arguments.get("parameters", ()))
        )
        if not wide or not _takes(self.workload, in_bfloat16(self.workload.params), self.workload.batch):
            return
        elements, of_trained = ({math.prod(leaf.shape) for leaf in leaves} for leaves in (wide, trained))
        state = self._state_follows()

        def share(buffer: LiveBuffer) -> float:
            if not buffer.shape.startswith("f32") or _elements(buffer.shape) not in elements:
                return 1.0
            is_narrowed = "parameters" in buffer.module or (state and buffer.module == "optimizer state")
            is_gradient = buffer.phase in ("backward", "other", RESULT) and _elements(buffer.shape) in of_trained
            return 0.5 if is_gradient or (buffer.phase == "argument" and is_narrowed) else 1.0

        how = f"{self._in_bfloat16()}; bfloat16 rounds small updates away"
        parts = " and ".join(["the gradients", *(["the optimizer's state"] if state else [])])
        whose = "" if len(trained) == len(wide) else f" of the {format_bytes(device_bytes(trained))} that are trained"
        why = f"{format_bytes(device_bytes(wide))} of parameters are float32" + (
            f", and so are {parts}{whose}" if trained else ""
        )
        yield Advice(DTYPE, self._saved(share), how, why)

    def _in_bfloat16(self) -> str:
        """The code that casts the parameters, which may have integers among them."""
        cast = "lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf"
        if isinstance(self.workload.params, nnx.State):
            return f"nnx.update(model, jax.tree.map({cast}, nnx.state(model, nnx.Param)))"
        return f"params = jax.tree.map({cast}, params)"

    def _state_follows(self) -> bool:
        if self.workload.optimizer is None or "parameters" not in self.arguments:
            return False
        trained = self.step.arguments[0]
        narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), trained)
        return device_bytes(result_structs(self.workload.optimizer.init, narrow)) < device_bytes(self.step.arguments[1])


def sums_of_heads(parameters: Any, products: Iterable[SoftmaxProduct]) -> int:
    """The bytes that `in_chunks` adds: it sums the gradient of a narrow head in float32.

    An embedding has as many rows as the head has classes, so one array is counted for each number of classes.
    """
    classes = {product.classes for product in products if product.is_head}
    added = (
        [device_bytes(leaf) * (wide(leaf.dtype).itemsize - leaf.dtype.itemsize) // leaf.dtype.itemsize for leaf in leaves]
        for leaves in ([leaf for leaf in jax.tree.leaves(parameters) if size in leaf.shape] for size in classes)
    )
    return sum(max(sizes, default=0) for sizes in added)


def in_bfloat16(params: Any) -> Any:
    """The structs `params` with bfloat16 in place of float32."""
    return jax.tree.map(lambda leaf: leaf.update(dtype=jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf, params)


def _takes(workload: Workload, params: Any, batch: tuple[Any, ...]) -> bool:
    """Whether the loss can be traced with arguments of these shapes and dtypes."""
    try:
        jax.eval_shape(workload.loss, params, *batch)
    except Exception:  # whatever the user's loss raises
        return False
    return True


def _takes_micro_batches(workload: Workload) -> bool:
    """Whether the loss takes a batch with fewer rows."""
    return _takes(workload, workload.params, workload.in_micro_batches(MICRO_BATCHES).batch)


def mixed_examples(workload: Workload) -> str:
    """Why the traced loss is not shown to be a sum or a mean over examples; empty if it is."""
    step = workload.in_micro_batches(MICRO_BATCHES).step("off")
    try:
        jax.eval_shape(step.function, *step.arguments)
    except PlanningError as error:
        return str(error)
    return ""


def micro_batches_divide(workload: Workload, local_arguments: tuple[Any, ...]) -> bool:
    """Whether all arrays of the batch have the same number of rows (leading axis) on one device, and this number is even."""
    if not workload.has_loss:
        return False
    batch = jax.tree.leaves(local_arguments[len(local_arguments) - len(workload.batch) :])
    rows = {leaf.shape[0] if leaf.ndim else 0 for leaf in batch}
    return len(rows) == 1 and all(count and count % MICRO_BATCHES == 0 for count in rows)


def undonated_arguments(workload: Workload) -> tuple[int, ...]:
    """The positions of arguments that are not donated although the step returns results with their shapes and dtypes."""
    step = workload.step("off")
    if workload.has_loss:
        # A step with an optimizer returns its first two arguments, updated. A step without an optimizer returns gradients,
        # which have the parameters' shapes but do not replace the parameters.
        updated = () if workload.optimizer is None or step.donate_argnums else (0, 1)
        return tuple(place for place in updated if jax.tree.leaves(step.arguments[place]))
    assert step.own is not None, "a finished step"
    return tuple(place for place in step.own.replaced(step.function) if place not in step.donate_argnums)


def _is_inside(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}/")


def _dims(shape: str) -> tuple[int, ...]:
    """The dimensions of a buffer whose shape XLA writes as `shape`; empty for a tuple."""
    arrays = arrays_of(shape)
    return tuple(arrays[0].dims) if arrays and not shape.startswith("(") else ()


def _elements(shape: str) -> int:
    """The number of elements in a buffer whose shape XLA writes as `shape`; 0 for a tuple."""
    arrays = arrays_of(shape)
    return math.prod(arrays[0].dims) if arrays and not shape.startswith("(") else 0
