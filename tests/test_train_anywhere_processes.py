"""`examples/train_anywhere.py` in several processes, and with an optimizer's state on the host."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import remat_jax as rj
from examples.distributed import command, training
from examples.distributed.checkpoints import Checkpoints
from examples.distributed.setting import Setting
from tests.doc_pages import fenced
from tests.planning_models import ROWS, WIDTH, Layer, Model
from tests.small_models import assert_bit_equal
from tests.test_train_anywhere import ROOT, as_it_was, free_port, losses, started, wait_for

__all__ = ["as_it_was"]  # a fixture for every test


def together(rank: int, port: int) -> tuple[str, ...]:
    address = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--heartbeat", "10")
    return (*address, "--process-id", str(rank))


IMPATIENT = """
import sys
from examples import train_anywhere
from examples.distributed import checkpoints
checkpoints._LATE = (0.1, 0.1)
sys.exit(train_anywhere.main())
"""


def test_a_folder_that_is_not_shared_is_refused_by_all(tmp_path: Path, in_a_hurry: dict[str, str]) -> None:
    """A relative path, and another working directory on each host: orbax would wait for files that are elsewhere.

    The processes do not wait seven seconds for a slow network file system.
    """
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    environment = in_a_hurry | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    port = free_port()
    with contextlib.ExitStack() as running:
        children = []
        for rank in range(2):
            (tmp_path / f"host_{rank}").mkdir()
            with contextlib.chdir(tmp_path / f"host_{rank}"):
                line = ("--checkpoint", "run", "--steps", "4", *together(rank, port))
                process = started(tmp_path / f"{rank}.log", environment, *line, script=tmp_path / "impatient.py")
                children.append(running.enter_context(process))
        codes = [child.wait(240) for child in children]
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    refusal = "error: --checkpoint run: in processes 1 it is another folder than in process 0"
    # A process that ends first may end the other.
    assert command.BAD_USAGE in codes, logs
    for code, log in zip(codes, logs, strict=True):
        assert {command.BAD_USAGE: refusal, -signal.SIGABRT: "another task died"}[code] in log
    assert [path.name for path in tmp_path.glob("host_*/run/*")] == []


def test_processes_that_are_asked_to_end_save_first(tmp_path: Path, in_a_hurry: dict[str, str]) -> None:
    """One of them is signalled; both end after the same step, and the saved checkpoint is of that step."""
    environment = in_a_hurry | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    metrics, port = tmp_path / "metrics.jsonl", free_port()
    line = ("--checkpoint", str(tmp_path / "run"), "--save-every", "1000000", "--steps", "1000000", "--metrics", str(metrics))
    with (
        started(tmp_path / "0.log", environment, *line, *together(0, port)) as first,
        started(tmp_path / "1.log", environment, *line, *together(1, port)) as second,
    ):
        wait_for(lambda: metrics.exists() and len(losses(metrics)) >= 3, [first, second], 240)
        second.send_signal(signal.SIGTERM)
        codes = [child.wait(120) for child in (first, second)]
    (saved,) = (int(path.name) for path in (tmp_path / "run").iterdir() if path.is_dir())
    assert saved == 1 + max(losses(metrics)) >= 4
    for rank, code in enumerate(codes):
        log = (tmp_path / f"{rank}.log").read_text()
        assert code == command.FAILED, log
        assert f"error: asked to end (SIGTERM) after {saved} steps; the same command goes on from there" in log


# An optimizer's state on the host, in `examples/distributed` and in the script of its page.


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
