"""Pairs of equivalent models, as the arguments of `compare`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from examples.models import linen
from examples.models import nnx as nnx_models
from parity_tests import support as s
from parity_tests.mutants import models
from parity_tests.third_party import ports as p
from parity_tests.third_party.of_transformers import PORTS
from remat_jax.parity import ParityReport, compare

STACK, QUICK = models.STACK, models.QUICK
GPT2 = PORTS["gpt2"]


@functools.cache
def original(name: str) -> Any:
    """The PyTorch model in float32, shared by all tests; `compare` does not change it."""
    return s.make_torch("DecoderStack", "float32") if name == "stack" else p.make_torch(GPT2, "float32")


def stack(api: str = "linen", **options: Any) -> dict[str, Any]:
    """The decoder stack of both frameworks."""
    if api == "nnx":
        from flax import nnx

        model: Any = nnx_models.DecoderStack(**s.SIZES["DecoderStack"], rngs=nnx.Rngs(0))
    else:
        model = linen.DecoderStack(**s.SIZES["DecoderStack"])
    inputs = (s.data("DecoderStack").x.astype(np.float32),)
    return {"torch_module": original("stack"), "flax_module": model, "inputs": inputs, "rules": STACK, **options}


def gpt2(scan: bool = False, **options: Any) -> dict[str, Any]:
    """GPT-2 of `transformers` and its port."""
    return {
        "torch_module": original("gpt2"),
        "flax_module": GPT2.make_flax(GPT2.config, scan=scan),
        "inputs": dict(GPT2.inputs),
        "rules": GPT2.rules(GPT2.config, scan),
        "torch_call": lambda model, **inputs: model(**inputs).logits,
        "flax_call": lambda model, **inputs: model(*GPT2.arguments(inputs)),
        **options,
    }


def run(case: dict[str, Any], **options: Any) -> ParityReport:
    """`compare` of a case."""
    return compare(**{**case, **options})
