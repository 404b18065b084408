"""Remove the parts of outputs that a model does not use, so that outputs of different sizes can be compared."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from remat_jax.parity.capture import CallArray, Slot, Trace

_OUTPUT: Slot = ("output", 0)


def trim(torch: Trace, flax: Trace, linked: Collection[tuple[str, str]]) -> None:
    """Trim the first outputs of linked modules to the used parts, if their sizes differ and the used parts' sizes are equal.

    A causal convolution, for example, may pad both ends and drop the end of its output, or pad only the front. `linked` are the
    pairs of paths whose weights a weight map connects.
    """
    for path, other in linked:
        theirs, ours = ([call for call in trace.calls if call.path == name] for trace, name in ((torch, path), (flax, other)))
        for call, other_call in zip(theirs, ours, strict=False):
            if _OUTPUT not in call.arrays or _OUTPUT not in other_call.arrays:
                continue
            arrays = call.arrays[_OUTPUT], other_call.arrays[_OUTPUT]
            used = _used(arrays[0]), _used(arrays[1])
            if arrays[0].value.size != arrays[1].value.size and used[0].value.size == used[1].value.size:
                call.arrays[_OUTPUT], other_call.arrays[_OUTPUT] = used


def _used(array: CallArray) -> CallArray:
    """The smallest part of an array outside which its cotangent is 0."""
    if array.cotangent is None or not np.any(array.cotangent):
        return array
    places = [(indices.min(), indices.max() + 1) for indices in np.nonzero(array.cotangent)]
    part = tuple(slice(first, end) for first, end in places)
    return CallArray(array.value[part], array.name, array.cotangent[part])
