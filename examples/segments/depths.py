"""Memory against depth, and the two rules of thumb: claimed shares and measured shares.

The rules are 1 − √L / L for the memory that √L segments save, and 2√L / L for the computation that they add.
"""

from __future__ import annotations

import math

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_ref

from .. import pytorch
from . import jax_forms
from .setting import Setting, cuts
from .torch_forms import segments_of


def short(name: str) -> str:
    """A form's name without its number of segments, which changes with the depth."""
    return name.rpartition(", ")[0] or name


def kept_at(setting: Setting, num_layers: int) -> dict[str, dict[str, int]]:
    """Bytes kept between the passes at one depth, measured and by the closed form, by framework and form."""
    found = {}
    with FakeTensorMode():
        x = torch.zeros(setting.batch, setting.in_features)
        model = pytorch.DeepMLP(num_layers, **setting.widths)
        for name, cut in cuts(num_layers).items():
            if name == "checkpoint_sequential, 3":
                continue
            segments = segments_of(name, cut)
            measured = torch_ref.saved_for_backward(lambda x, segments=segments: model(x, segments=segments), x).device_bytes
            expected = pytorch.deep_mlp_cost(num_layers, cut, batch=setting.batch, **setting.widths).saved_bytes
            found[f"PyTorch, {short(name)}"] = {"measured": measured, "closed_form": expected}
    # A scan needs equal iterations: it covers the layers between the first and the head, which can be cut evenly.
    for name, form in jax_forms.forms(setting, num_layers + 2).items():
        if form.stacked:
            measured = jax_forms.saved_bytes(setting, form, num_layers + 2)
            found[f"JAX, {name if form.recomputed == 0 else short(name)}"] = {
                "measured": measured,
                "closed_form": form.saved_bytes,
            }
    return found


def rule_at(setting: Setting, num_layers: int, kept: dict[str, dict[str, int]]) -> dict[str, float]:
    """The rules' claims for √L segments, and PyTorch's kept bytes (`kept_at` of this depth) and executions with them."""
    root, flops = math.sqrt(num_layers), []
    with FakeTensorMode():
        x = torch.zeros(setting.batch, setting.in_features)
        model = pytorch.DeepMLP(num_layers, **setting.widths)
        for segments in (None, pytorch.sqrt_segments(num_layers)):
            with torch_ref.count_matmuls() as count:
                model(x, segments=segments).sum().backward()
            flops.append(count.flops)
    return {
        "num_layers": num_layers,
        "claimed_saving": 1 - root / num_layers,
        "measured_saving": 1 - kept["PyTorch, √L uniform"]["measured"] / kept["PyTorch, plain"]["measured"],
        "claimed_increase": 2 * root / num_layers,
        "measured_increase": flops[1] / flops[0] - 1,
    }
