"""Pairs of models for the localisation: right ones, and common faults, planted one at a time."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from examples.models import linen
from parity_tests import support as s
from parity_tests.third_party import ports as p
from parity_tests.third_party.ports import Port
from remat_jax.parity.localise import Divergences, first_divergences


def changed(tree: Any, path: str, change: Any) -> Any:
    """The tree with `change` applied to the item at `path`."""
    first, _, rest = path.partition("/")
    return {**tree, first: changed(tree[first], rest, change) if rest else change(tree[first])}


def of_port(port: Port, *, scan: bool = False, variables: Any = None, **options: Any) -> Divergences:
    """The divergences between an original and its port as it is now, with the given weights or the right ones."""
    model = p.make_torch(port, "float64")
    with jax.enable_x64(True):
        variables = p.variables(port, scan, "float64") if variables is None else variables
        arguments = port.arguments(port.inputs)
    return first_divergences(
        model,
        port.make_flax(port.config, scan=scan),
        variables,
        dict(port.inputs),
        flax_inputs=arguments,
        torch_call=lambda module, **inputs: p.torch_outputs(port, module, inputs),
        **options,
    )


def of_decoder(*, scan: bool = False, change: Any = None, loss: Any = None, **options: Any) -> Divergences:
    """The divergences between the decoder of `torch_ref` and its Linen counterpart."""
    tree = s.parameters("ByteDecoder", scan)
    variables = {"params": change(tree) if change else tree}
    model = linen.ByteDecoder(**s.SIZES["ByteDecoder"], scan=scan)
    return first_divergences(s.torch_model("ByteDecoder"), model, variables, (tokens(),), loss=loss, **options)


def tokens() -> np.ndarray:
    return s.data("ByteDecoder").x.astype(np.int64)


def shown(divergences: Divergences) -> tuple[str | None, str | None]:
    """The named Flax modules, in the forward and in the backward pass."""
    return divergences.forward and divergences.forward.flax_path, divergences.backward and divergences.backward.flax_path


# Functions with a right forward pass and a wrong derivative.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def times_backwards(x: jax.Array, factor: float) -> jax.Array:
    """x; its gradient is multiplied by `factor`."""
    return x


times_backwards.defvjp(lambda x, factor: (x, None), lambda factor, _, cotangent: (cotangent * factor,))


class DoubledNorm(nn.LayerNorm):
    """A layer norm whose gradient is doubled."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return times_backwards(super().__call__(x), 2.0)
