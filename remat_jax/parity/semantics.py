"""The settings in which two models differ, read from their modules without running the models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from remat_jax.core.walk import equations
from remat_jax.parity.capture_flax import TracedPass, trace_step
from remat_jax.parity.match import MatchedModule, match, sort_of
from remat_jax.parity.recorder import RecordedTrace
from remat_jax.parity.tapped import Running, is_tap
from remat_jax.porting.float64 import keep_float64

Facts = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """A setting `what` that differs at the Flax module `path`; `torch` and `flax` are its values.

    >>> print(Difference("layers_0", "epsilon", 1e-05, 1e-06))
    layers_0: epsilon is 1e-05 in PyTorch and 1e-06 in Flax
    """

    path: str
    what: str
    torch: Any
    flax: Any

    def __str__(self) -> str:
        """One line."""
        return f"{self.path or '(the whole model)'}: {self.what} is {self.torch} in PyTorch and {self.flax} in Flax"


def differences(
    torch_module: Any,
    flax_module: Any,
    variables: Any,
    inputs: Any,
    *,
    mapping: Any = None,
    flax_call: Any = None,
) -> list[Difference]:
    """List the settings in which matching modules differ, without running either model.

    The compared settings are:

    - norms: epsilon; of batch norms also momentum (Flax's, which is 1 − PyTorch's) and whether they use running statistics;
    - GELU: its form, found by calling PyTorch's GELU modules on a few numbers;
    - convolutions: padding, strides, dilation and groups;
    - dropout: the rate;
    - all modules: whether there is a bias, the dtypes, and the requested matmul precision.

    A Linen model is traced on `variables` and `inputs` (a tuple of arguments or a dict of keywords), which may be
    `jax.ShapeDtypeStruct`. For an NNX model `variables` is None. `mapping` is as in `first_divergences`; modules without an
    entry in it are matched automatically. If you have run `first_divergences`, pass its result's `matched` as `mapping`: those
    modules were matched by running the models, which is more reliable.

    Plain function calls in PyTorch, such as `torch.nn.functional.gelu`, are not compared.

    >>> import flax.linen as nn, jax, jax.numpy as jnp, torch
    >>> theirs, ours = torch.nn.Sequential(torch.nn.LayerNorm(3)), nn.Sequential([nn.LayerNorm()])
    >>> x = jnp.ones((2, 3))
    >>> for found in differences(theirs, ours, ours.init(jax.random.key(0), x), (x,)):
    ...     print(found)
    layers_0: epsilon is 1e-05 in PyTorch and 1e-06 in Flax
    """
    return step_differences(torch_module, trace_step(flax_module, variables, inputs, call=flax_call, backward=False), mapping)


def step_differences(torch_module: Any, step: TracedPass, mapping: Any = None) -> list[Difference]:
    """`differences` for a Flax model that is already traced."""
    theirs = {path.replace(".", "/"): module for path, module in torch_module.named_modules()}
    ours: dict[str, RecordedTrace] = {}  # in the order of execution, with a loop's layers one by one
    for visit in step.visits:
        ours.setdefault(visit.path, step.recorder.calls[visit.label.call])
    listed = [
        MatchedModule(path, type(m).__name__, None, not list(m.children()), any(True for _ in m.parameters()))
        for path, m in theirs.items()
    ]
    outer = {path.rpartition("/")[0] for path in ours} | {""}
    others = [MatchedModule(path, type(ours[path].module).__name__, None, path not in outer) for path in ours]
    matched = match(listed, others, mapping)
    # The class name shows the type of layer only for a module without submodules: a ConvNet is not a convolution.
    leaves = {module.path for module in listed if module.is_leaf}, {module.path for module in others if module.is_leaf}
    differing: list[Difference] = []
    for path, other in matched.items():
        sorts = sort_of(type(theirs[path]).__name__), sort_of(type(ours[other].module).__name__)
        if path in leaves[0] and other in leaves[1] and sorts[0] == sorts[1] != "other":
            torch, flax = torch_facts(theirs[path]), flax_facts(ours[other])
            settings = (setting for setting in torch.keys() & flax.keys() if torch[setting] != flax[setting])
            differing += [Difference(other, setting, torch[setting], flax[setting]) for setting in settings]
    return [*differing, *_rates(theirs, ours), *_gelus(theirs, step, matched)]


def torch_facts(module: Any) -> Facts:
    """The settings of a PyTorch module, in Flax's terms."""
    sort, parameters = sort_of(type(module).__name__), dict(module.named_parameters(recurse=False))
    facts: Facts = {}
    if sort == "norm":
        # Other libraries' modules may lack these attributes: a frozen batch norm has no momentum.
        momentum = getattr(module, "momentum", None)
        facts["epsilon"] = getattr(module, "eps", getattr(module, "variance_epsilon", None))
        facts["momentum"] = None if momentum is None else 1 - momentum
        if hasattr(module, "track_running_stats"):
            facts["statistics"] = "of the batch" if module.training or not module.track_running_stats else "running"
    if sort == "convolution" and hasattr(module, "transposed"):
        facts |= {"strides": tuple(module.stride), "dilation": tuple(module.dilation), "groups": module.groups}
        # A transposed convolution's padding crops the output in PyTorch and pads the dilated input in Flax: it is not compared.
        if not module.transposed:
            text = isinstance(module.padding, str)
            pads = module.padding.upper() if text else module.padding
            padding = _padding(pads, module.kernel_size, module.stride, module.dilation)
            facts["padding"] = padding if module.padding_mode == "zeros" else f"{module.padding_mode} {padding}"
    if sort in ("linear", "convolution") or (sort == "norm" and parameters):
        facts["bias"] = "bias" in parameters
    if sort in ("linear", "convolution"):
        facts["precision"] = "highest"
    if parameters:
        facts["dtype"] = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
    return {setting: value for setting, value in facts.items() if value is not None}


def flax_facts(call: RecordedTrace) -> Facts:
    """The settings of a Linen or NNX module."""
    module, sort = call.module, sort_of(type(call.module).__name__)
    facts: Facts = {}
    if sort == "norm":
        facts["epsilon"] = getattr(module, "epsilon", getattr(module, "eps", None))
        facts["momentum"] = getattr(module, "momentum", None)
        if getattr(module, "use_running_average", None) is not None:
            facts["statistics"] = "running" if module.use_running_average else "of the batch"
    if sort == "convolution" and hasattr(module, "padding"):
        facts |= _convolution(module)
    if sort in ("linear", "convolution") or (sort == "norm" and call.parameters):
        facts["bias"] = "bias" in call.parameters
    precision = getattr(module, "precision", None)
    if precision is not None and (chosen := _precision(precision)) != "highest":
        facts["precision"] = chosen
    if call.parameters:
        dtype = getattr(module, "dtype", None)
        facts["dtype"] = np.dtype(next(iter(call.parameters.values())).dtype if dtype is None else dtype).name
    return {setting: value for setting, value in facts.items() if value is not None}


def _convolution(module: Any) -> Facts:
    size = module.kernel_size
    size = (size,) if isinstance(size, int) else tuple(size)

    def each(value: Any) -> tuple[int, ...]:
        return (value or 1,) * len(size) if value is None or isinstance(value, int) else tuple(value)

    strides, dilation = each(module.strides), each(getattr(module, "kernel_dilation", 1))
    facts = {"strides": strides, "dilation": dilation, "groups": getattr(module, "feature_group_count", 1)}
    if "transpose" in type(module).__name__.lower():
        return facts
    return facts | {"padding": _padding(module.padding, size, strides, dilation)}


def _precision(precision: Any) -> str:
    """JAX's name of a matmul precision or algorithm; for a pair (one precision per operand), both names or, if equal, one."""
    if type(precision) is tuple:
        return " and ".join(dict.fromkeys(map(_precision, precision)))
    try:
        return str(jax.lax.Precision(precision).name.lower())
    except ValueError:
        return str(getattr(precision, "name", precision)).lower()


def _padding(padding: Any, size: Any, strides: Any, dilation: Any) -> Any:
    """The padding as (low, high) pairs.

    A name stays a name if it is "SAME" and the pairs depend on the input's size. Padding other than zeros is a text.
    """
    if padding == "VALID":
        return tuple((0, 0) for _ in size)
    spans = [d * (k - 1) for d, k in zip(dilation, size, strict=True)]
    if padding == "CAUSAL":
        return tuple((span, 0) for span in spans)
    if padding in ("CIRCULAR", "REFLECT"):
        return f"{padding.lower()} {tuple((span // 2, span - span // 2) for span in spans)}"
    if padding == "SAME" and all(stride == 1 or not span for stride, span in zip(strides, spans, strict=True)):
        return tuple((span // 2, span - span // 2) for span in spans)
    if isinstance(padding, str):
        return padding
    pads = (padding,) * len(size) if isinstance(padding, int) else padding
    return tuple((pad, pad) if isinstance(pad, int) else tuple(pad) for pad in pads)


def _rates(torch: Mapping[str, Any], flax: Mapping[str, RecordedTrace]) -> list[Difference]:
    """Compare the sets of rates of the two models, not single modules: one model may use the same module in several places."""
    theirs = {getattr(m, "p", None) for m in torch.values() if sort_of(type(m).__name__) == "dropout"} - {None, 0}
    dropouts = [call.module for call in flax.values() if sort_of(type(call.module).__name__) == "dropout"]
    rates = {module.rate for module in dropouts if getattr(module, "rate", None)}
    # Without rates in PyTorch's modules, nothing is compared: its dropout may be a plain function call.
    return [] if theirs == rates or not theirs else [Difference("", "dropout rates", sorted(theirs), sorted(rates))]


# In JAX, GELU is a function that adds an erf, a tanh or (quick GELU) a factor 1.702 to the jaxpr. The taps, which mark the
# inputs and outputs of each module call (`tapped.py`), show which module computes the GELU.

_FORMS = {"erf": "exact", "erfc": "exact", "tanh": "by tanh"}
_QUICK = 1.702
"""The factor of quick GELU, x · sigmoid(1.702 · x)."""


def _gelus(torch: Mapping[str, Any], step: TracedPass, matched: Mapping[str, str]) -> list[Difference]:
    forms = defaultdict[str, set[str]](set)
    running = Running(step.recorder.paths)
    for eqn in equations(step.jaxpr):
        if is_tap(eqn):
            running.passes(eqn)
        elif form := _form(eqn):
            forms[_without_indices(running.path)].add(form)
    differing = []
    for path, module in torch.items():
        around = path
        while around and around not in matched:
            around = around.rpartition("/")[0]
        form, ours = _torch_gelu(module), forms[_without_indices(matched[around])]
        if form and ours and form not in ours:
            differing.append(Difference(matched[around], "GELU", form, " and ".join(sorted(ours))))
    return differing


def _without_indices(path: str) -> str:
    return "/".join(part for part in path.split("/") if not part.isdigit())


def _torch_gelu(module: Any) -> str:
    """The form of GELU that a module computes, found by evaluating it; empty if the module is no GELU."""
    import torch

    if "gelu" not in type(module).__name__.lower():
        return ""
    x = torch.linspace(-3, 3, 25, dtype=torch.float64)
    try:
        with torch.no_grad(), keep_float64():
            made = module.forward(x)
        if made.shape != x.shape:
            return ""
    except Exception:  # the module does not map a single array to a single array
        return ""
    forms = {
        "exact": torch.nn.functional.gelu(x),
        "by tanh": torch.nn.functional.gelu(x, approximate="tanh"),
        "quick": x * torch.sigmoid(_QUICK * x),
    }
    return next((name for name, right in forms.items() if torch.allclose(made, right, 0, 1e-6)), "")


def _form(eqn: JaxprEqn) -> str:
    """The form of GELU that an equation belongs to, or ""."""
    if eqn.primitive.name == "mul":
        numbers = [np.asarray(atom.val) for atom in eqn.invars if hasattr(atom, "val")]
        return "quick" if any(x.ndim == 0 and abs(float(x) - _QUICK) < 1e-3 for x in numbers) else ""
    return _FORMS.get(eqn.primitive.name, "")
