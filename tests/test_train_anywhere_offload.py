"""Training with an optimizer's state on the host, in `examples/distributed` and in the script of its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import remat_jax as rj
from examples.distributed import training
from examples.distributed.checkpoints import Checkpoints
from examples.distributed.setting import Setting
from tests.doc_pages import ROOT, fenced
from tests.planning_models import ROWS, WIDTH, Layer, Model
from tests.small_models import assert_bit_equal

SETTING = Setting(layers=1, width=16, heads=2, length=8, batch=4)
ADAMW = optax.adamw


def offloaded_adamw(learning_rate: float) -> Any:
    return rj.offload_optimizer(ADAMW(learning_rate))


def memories(tree: Any) -> list[str]:
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim]


def trained() -> tuple[training.Trainer, training.State, list[float]]:
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    trainer = training.Trainer(SETTING, mesh, training.workload(SETTING, mesh), "full")
    trainer.compile()
    state, losses = trainer.initial(), []
    for number in range(3):
        state, loss = trainer.step(state, number)
        losses.append(float(loss))
    return trainer, state, losses


def test_a_state_on_the_host_stays_there_step_by_step_and_through_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained()[2]
    monkeypatch.setattr(training.optax, "adamw", offloaded_adamw)
    trainer, state, losses = trained()
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert set(memories(state["state"])) == {"pinned_host"} and set(memories(state["params"])) == {"device"}
    saving = Checkpoints(tmp_path, {}, keep=1, wait=True)
    saving.save(3, state)
    step, restored = saving.restore(trainer.structs, pytest.fail) or pytest.fail("nothing was saved")
    saving.close()
    assert step == 3 and memories(restored) == memories(state)
    assert_bit_equal(restored, state)
    assert float(trainer.step(restored, 3)[1]) == float(trainer.step(state, 3)[1])


def test_the_script_of_the_page_keeps_a_state_where_its_optimizer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two blocks of the page that make the step and take three steps, unchanged, with another optimizer."""
    blocks = [block.text for block in fenced((ROOT / "docs" / "distributed.md").read_text()) if block.language == "python"]
    made, run = (next(text for text in blocks if word in text) for word in ("places = ", "value = train("))
    model, x = Model(), jnp.ones((ROWS, WIDTH))
    names: dict[str, Any] = {
        "loss": lambda p, x, y: jnp.mean((model.apply(p, x) - y) ** 2),
        "params": jax.eval_shape(model.init, jax.random.key(0), x),
        "tokens": x,
        "targets": x,
        "DecoderLayer": Layer,
        "initial_params": lambda: model.init(jax.random.key(0), x),
        "numpy_batch": (np.ones((ROWS, WIDTH), np.float32),) * 2,
    }
    monkeypatch.setattr(optax, "adamw", offloaded_adamw)
    for text in (made, run):
        exec(compile(text, "distributed.md", "exec", dont_inherit=True), names)
    assert set(memories(names["state"])) == {"pinned_host"} and np.isfinite(names["value"])
