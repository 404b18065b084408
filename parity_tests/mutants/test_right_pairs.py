"""Right pairs raise no alarm: every tensor agrees, and no module is named, also in train mode and through checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flax import nnx

from examples.models import linen, weights
from examples.models import nnx as nnx_models
from parity_tests import support as s
from parity_tests.mutants import models as m
from parity_tests.third_party.of_transformers import PORTS
from remat_jax.parity.case import Case
from remat_jax.parity.runs import Runs
from remat_jax.porting import Rules

SIZES = s.SIZES["ByteDecoder"]
UNUSED = dict.fromkeys(("variables", "loss", "torch_blocks", "flax_blocks", "optimizer", "torch_call", "flax_call"))


def decoder_scanned() -> dict[str, Any]:
    rules = Rules.parse(m.DECODER).stacked("layers_{i}", "layers")
    return m.decoder(flax_module=linen.ByteDecoder(**SIZES, scan=True), rules=rules)


def decoder_nnx() -> dict[str, Any]:
    model = nnx.eval_shape(lambda: nnx_models.ByteDecoder(**SIZES, rngs=nnx.Rngs(0)))
    return m.decoder(flax_module=weights.load_nnx(model, s.parameters("ByteDecoder", False, "float32")))


RIGHT: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "decoder-scan": (decoder_scanned, "checkpoint"),
    "decoder-nnx": (decoder_nnx, "off"),
    "conv-train-checkpoint": (m.conv, "checkpoint"),
    "conv-evaluation": (lambda: m.conv(train=False), "off"),
    "gpt2-scan": (lambda: m.transformer(PORTS["gpt2"], scan=True), "checkpoint"),
    "llama-train": (m.MODELS["llama"], "off"),
    "gemma-scan": (lambda: m.transformer(PORTS["gemma"], scan=True), "off"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_pair_raises_no_alarm(name: str) -> None:
    make, mode = RIGHT[name]
    options = {"modes": mode, "dtypes": "float64", "steps": 1, "excite": True, "keep_float64": False}
    runs = Runs(Case(**{**UNUSED, **make(), **options}), lambda *progress: None)
    report = runs.report(memory=False, target=None)
    assert report.passed and report.differences == (), str(report)
    # Where everything agrees nothing is searched; here a search runs, and must name no module.
    before = len(runs.checks)
    assert runs.explain(mode) == {"forward": None, "backward": None}
    assert runs.checks[before:] == []
