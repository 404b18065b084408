"""The checks of every port. A check describes what is wrong with a port, in words, or returns nothing."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

import remat_jax as rj
import torch_ref
from parity_tests import support as s
from parity_tests.third_party import of_diffusers, of_transformers
from parity_tests.third_party import ports as p
from parity_tests.third_party.ports import Case, Port
from remat_jax import porting
from remat_jax.memory.residuals import kept_residuals
from remat_jax.parity.torch_side import imports_frozen
from remat_jax.porting.links import fit

# `parity_tests/matrix.py` crosses forms, modes and dtypes. Scanned layers compile fastest.
CASES = [
    Case("torch", "checkpoint", "float64"),
    Case("torch", "offload", "float64"),
    Case("unrolled", "off", "float64"),
    Case("unrolled", "offload", "float64"),
    Case("scan", "checkpoint", "float64"),
    Case("scan", "offload", "float32"),
    Case("scan", "checkpoint", "bfloat16"),
]


def step_differs(port: Port, case: Case) -> list[str]:
    """One training step against plain PyTorch: outputs, the gradient of every parameter, the parameters after AdamW."""
    result = p.torch_step(port, case.mode, case.dtype) if case.form == "torch" else p.jax_step(port, case)
    return s.differences(p.torch_step(port, "off", "float64"), result, p.torch_step(port, "off", case.dtype), case.dtype)


def round_trip_differs(port: Port) -> list[str]:
    """PyTorch → Flax → PyTorch, unrolled and scanned, in float64 and bfloat16: the same bits under the same names."""
    wrong = []
    for scan, dtype in ((False, "float64"), (True, "bfloat16")):
        state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in p.weights(port).items()}
        rules = port.rules(port.config, scan)
        with jax.enable_x64(dtype == "float64"):
            back = porting.to_torch(porting.from_torch(state, p.empty(port, scan), rules), rules)
        wrong += [f"{name}: only on one side" for name in sorted(state.keys() ^ back.keys())]
        wrong += [f"{name}: other bits" for name in state.keys() & back.keys() if not _same_bits(state[name], back[name])]
    return wrong


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def published_differs(port: Port) -> list[str]:
    """The published sizes on paper: the same parameters in the same shapes, and as many as the published model has."""
    wrong = []
    for config, count in port.published.items():
        with torch.device("meta"):
            original = {name: tuple(x.shape) for name, x in port.make_torch(config).named_parameters()}
        empty = p.shapes(port, port.make_flax(config, scan=True), paper_inputs(port, config))
        flat = {"/".join(key.key for key in path): x.shape for path, x in jax.tree.leaves_with_path(empty)}
        wrong += fit(port.rules(config, True), original, flat)[1]
        total = sum(int(np.prod(shape)) for shape in flat.values())
        wrong += [f"{config}: {total} parameters, expected {count}"] if total != count else []
    return wrong


def paper_inputs(port: Port, config: Any) -> dict[str, Any]:
    """Inputs of the right shapes: images have the size of the configuration."""
    given = port.inputs if port.paper is None else port.paper(config)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, s.in_dtype(x[:0], "float32").dtype) for name, x in given.items()}
    if "pixel_values" in shapes:
        size = (1, config.num_channels, config.image_size, config.image_size)
        shapes["pixel_values"] = jax.ShapeDtypeStruct(size, np.float32)
    return shapes


# Residual bytes.


class Kept(NamedTuple):
    """Bytes between the passes; an argument that is kept unchanged is left out."""

    device: int
    host: int


def kept(port: Port, form: str, mode: str, num_layers: int) -> Kept:
    """The arrays that a training step with a number of layers keeps in float32, in PyTorch or in JAX, unrolled or scanned."""
    arrays = arrays_kept(port, form, mode, num_layers)
    return Kept(arrays.device_bytes, arrays.host_bytes)


@functools.cache
def arrays_kept(port: Port, form: str, mode: str, num_layers: int) -> Any:
    """The same array by array: torch_ref's `SavedBytes`, or a `ResidualTable`."""
    config = replace(port.config, num_layers=num_layers)
    return _torch_kept(port, mode, config) if form == "torch" else _jax_kept(port, mode, config, form == "scan")


def _torch_kept(port: Port, mode: str, config: Any) -> torch_ref.SavedBytes:
    model, targets = p.make_torch(port, "float32", config), p.tensors(port.targets, "float32")

    def loss(inputs: Any) -> torch.Tensor:
        return p.torch_loss(p.torch_outputs(port, model, inputs), targets)

    with imports_frozen(), p.in_mode(port, model, mode):
        return torch_ref.saved_for_backward(loss, p.tensors(port.inputs, "float32"))


def _jax_kept(port: Port, mode: str, config: Any, scan: bool) -> rj.ResidualTable:
    model, (inputs, targets) = port.make_flax(config, scan=scan), p.batch(port, "float32")
    loss, empty = p.loss_of(port, model), p.shapes(port, model, inputs)
    return kept_residuals(rj.Workload(loss, empty, (inputs, targets), port.block, has_aux=True), p.POLICIES[mode])


def layers_keep_differently(port: Port, few: int = 1, many: int = 2) -> list[str]:
    """In both frameworks one more layer keeps only its input: on the device under a checkpoint, on the host under an offload.

    Around the layers the frameworks keep different arrays (PyTorch's fused layer norm its input, JAX an intermediate array).
    Of an array that layers share, JAX puts one copy per layer on the host, unless the layers are scanned.
    """
    wrong = []
    # PyTorch first: each count collects garbage twice, which takes long among the objects of JAX's traces.
    for mode, layers in itertools.product(("checkpoint", "offload"), (few, many)):
        arrays_kept(port, "torch", mode, layers)
    for mode, jax_form in (("checkpoint", "unrolled"), ("offload", "scan")):
        grown = {form: _growth(port, form, mode, few, many) for form in ("torch", jax_form)}
        stream = p.torch_step(port, "off", "float64").outputs  # (B, T, …) of the first output
        tokens = port.carried or int(np.prod(next(iter(stream.values())).shape[:2]))
        inputs = (many - few) * tokens * port.config.hidden_size * 4
        expected = Kept(inputs, 0) if mode == "checkpoint" else Kept(0, inputs)
        wrong += [f"{mode}, {form}: {growth}, expected {expected}" for form, growth in grown.items() if growth != expected]
    return wrong


def _growth(port: Port, form: str, mode: str, few: int, many: int) -> Kept:
    less, more = kept(port, form, mode, few), kept(port, form, mode, many)
    return Kept(more.device - less.device, more.host - less.host)


PORTS = {**of_transformers.PORTS, **of_diffusers.PORTS}
CHECKS = {
    **{str(case): functools.partial(step_differs, case=case) for case in CASES},
    "weights come back bit equal": round_trip_differs,
    "published sizes": published_differs,
    "layers keep the same bytes": layers_keep_differently,
}
