"""The Python blocks of README and guides run, and print what the pages show."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax.traverse_util import unflatten_dict

import benchmarks.public_reports.__main__  # noqa: F401 it collects the reports
import remat_jax as rj
from benchmarks.public_reports.report import REPORTS
from examples import pytorch
from examples.models import linen
from examples.models.pi0 import Pi0
from examples.models.pi0_config import Pi0Config
from examples.models.rules.pi0 import rules
from parity_tests.small_pairs import Flax, Torch
from remat_jax import compat, porting
from remat_jax.planning import loop
from tests.doc_pages import ROOT, run

PORTING = {  # in the order of the menu, with their blocks of Python: each page has the names of those before it
    "docs/porting.md": 2,
    "docs/porting/checkpoints.md": 16,
    "docs/porting/what_is_kept.md": 11,
    "docs/porting/devices_and_budgets.md": 10,
    "docs/porting/proof.md": 7,
}
ALL_COMPILED = loop.MOST_COMPILED
SIZES = {"d_model": 16, "nhead": 2, "num_layers": 2, "max_len": 8}


@pytest.fixture(autouse=True)
def few_compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One compilation suffices, because each takes seconds; other tests cover the search. Files go to the test's folder."""
    monkeypatch.setattr(loop, "MOST_COMPILED", 1)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


# torch.compile imports it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="XLA's GPU compiler is not installed")
def test_the_porting_guide() -> None:
    namespace: dict[str, Any] = {"__name__": "porting"}
    assert {page: run(text_of(page), page, namespace) for page in PORTING} == PORTING


def test_the_page_on_parity() -> None:
    assert run(text_of("docs/parity.md"), "parity.md", {"__name__": "parity"}) == 10


def test_the_notes(capsys: pytest.CaptureFixture[str]) -> None:
    """The first note runs as it is; in the second `measure` is replaced, because its compilations take minutes."""
    assert run(text_of("docs/notes/segments.md"), "segments.md", {}) == 1
    assert capsys.readouterr().out == "47\n59\n"
    text = text_of("docs/notes/unrolled_offload.md").replace("rj.measure(", "only_bind(rj.measure)(")
    assert run(text, "unrolled_offload.md", {"only_bind": only_bind}) == 1


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


class Layer(nn.Module):
    """The purpose of the map in docs/pytorch.md."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(nn.Dense(8, use_bias=False, name="q")(nn.RMSNorm(name="norm")(x)))


def torch_layers() -> Torch:
    parts = ({"q_proj": torch.nn.Linear(8, 8, bias=False), "norm": torch.nn.RMSNorm(8, eps=1e-6)} for _ in range(2))
    layers = torch.nn.ModuleList(Torch(lambda m, x: x + torch.tanh(m.q_proj(m.norm(x))), **each) for each in parts)
    return Torch(lambda m, x: m.layers[1](m.layers[0](x)), layers=layers)


def taken_for_granted() -> dict[str, Any]:
    """The names that a page assumes: a model, its loss and parameters, a batch; a pair of models."""
    model, x = linen.ByteDecoder(**SIZES, scan=True), np.ones((2, 8), np.float32)

    def loss(params: Any, tokens: Any, targets: Any) -> jax.Array:
        return model.apply({"params": params}, tokens, targets, method="loss")

    def job(rows: int = 4) -> rj.Workload:
        tokens = jax.ShapeDtypeStruct((rows, 8), jnp.int32)
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
        return rj.Workload(loss, params, (tokens, tokens), blocks=linen.DecoderLayer, optimizer=optax.sgd(0.1))

    params, (tokens, targets) = job().params, job().batch
    names = {"loss": loss, "loss_fn": loss, "params": params, "tokens": tokens, "targets": targets, "make_job": job}
    names |= {"only_bind": only_bind, "DecoderLayer": linen.DecoderLayer, "optax": optax, "block": lambda x: jnp.sin(x), "x": x}
    flax = Flax(lambda m, x: Layer(name="layers_1")(Layer(name="layers_0")(x)))
    variables = jax.eval_shape(flax.init, jax.random.key(0), x)
    return names | {"torch_model": torch_layers(), "flax_model": flax, "variables": variables, "inputs": (x,)}


def only_bind(function: Any) -> Any:
    """Replaces a function by a check of its arguments: its own example runs the many compilations."""
    return inspect.signature(function).bind


@pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="XLA's GPU compiler is not installed")
def test_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README runs with all compilations: its figures are those of the whole search."""
    monkeypatch.setattr(loop, "MOST_COMPILED", ALL_COMPILED)
    assert run(text_of("README.md"), "README.md", {"__name__": "readme"}) == 1


def test_the_page_on_pytorch() -> None:
    names = taken_for_granted()
    flax_side, torch_side = text_of("docs/pytorch.md").split("## torch_ref")
    config = Pi0Config(depth=1)
    shapes = jax.eval_shape(Pi0(config, scan=True).init, jax.random.key(0), *config.shapes(1)[:3])
    made = porting.to_torch(
        jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes), rules(config, True, "openpi_jax"), numpy=True
    )
    names |= {"config": config, "shapes": shapes, "openpi_parameters": unflatten_dict(made, sep="/")}
    assert run(flax_side, "pytorch.md", names) == 3 and names["report"].passed
    assert jax.tree.map(jnp.shape, names["variables"]) == jax.tree.map(jnp.shape, shapes)
    given = {name: pytorch.ByteDecoder(**SIZES) for name in ("model", "other")}
    given |= dict.fromkeys(("tokens", "targets"), torch.ones(2, 8, dtype=torch.long)) | {"DecoderLayer": pytorch.DecoderLayer}
    assert run(torch_side, "pytorch.md", given) == 1
    # Neither the switch's policy, `full`, nor any other of the page is active while the receipt counts offloads.
    assert given["r"].bytes_on_host == 0


def test_the_guide_to_many_devices() -> None:
    """On one device; `test_train_anywhere` and `test_sharded` use several."""
    names = taken_for_granted()
    batch = np.zeros((4, 8), np.int32)
    model = linen.ByteDecoder(**SIZES, scan=True)
    names |= {"params": names["make_job"]().params, "folder": Path.cwd() / "run", "numpy_batch": (batch, batch)}
    names |= dict(zip(("tokens", "targets"), names["make_job"]().batch, strict=True))
    names["initial_params"] = lambda: model.init(jax.random.key(0), batch)["params"]
    assert run((ROOT / "docs/distributed.md").read_text(), "distributed.md", names) == 9
    assert np.isfinite(names["value"]) and names["manager"].all_steps() == [3]


def test_each_report_is_named_once_and_in_the_page() -> None:
    names = [report.issue for report in REPORTS]
    assert len(set(names)) == len(names) >= 40
    text = (Path(__file__).parents[1] / "docs/notes/public_reports.md").read_text(encoding="utf-8")
    assert all(f"[{name}]" in text for name in names)
