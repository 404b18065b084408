"""`examples/train_anywhere.py`: the same losses on every mesh, after a kill, and after damage to a checkpoint."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from examples import train_anywhere
from examples.distributed import command, training
from examples.distributed.checkpoints import CheckpointError, Checkpoints
from examples.distributed.setting import Setting
from remat_jax.errors import ArgumentError, PolicyError
from remat_jax.memory.compile.options import OPTION
from tests.plan_by_hand import plan_of

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "train_anywhere.py"
SMALL = ("--layers", "1", "--width", "16", "--heads", "2", "--length", "8", "--batch", "4")
# In float64 two runs differ only by the order of their sums.
EXACT = (*SMALL, "--dtype", "float64", "--log-every", "1")
SETTING = Setting(layers=1, width=16, heads=2, length=8, batch=4)


# Orbax leaves a closed event loop behind if a checkpoint is damaged; Python warns when it is collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module", autouse=True)
def unraisable_as_it_was() -> Iterator[None]:
    """Ignores orbax's leftovers of a damaged checkpoint for the rest of the process; they are collected later."""
    before = sys.unraisablehook
    yield
    gc.collect()
    sys.unraisablehook = before


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """The command turns 64-bit types on for its whole process; a test's leftovers are collected with it."""
    yield
    jax.config.update("jax_enable_x64", False)
    gc.collect()


def losses(path: Path) -> dict[int, list[float]]:
    """The losses of each step in a metrics file, in the order of computation."""
    by_step: dict[int, list[float]] = {}
    for line in path.read_text().splitlines():
        by_step.setdefault(json.loads(line)["step"], []).append(json.loads(line)["loss"])
    return by_step


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def started(log: Path, env: dict[str, str], *arguments: str, script: Path = SCRIPT) -> Iterator[subprocess.Popen[bytes]]:
    """The script in its own process, which ends with the test."""
    with log.open("wb") as output:
        line = [sys.executable, str(script), *EXACT, *arguments]
        child = subprocess.Popen(line, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield child
        finally:
            child.kill()
            child.wait()


def wait_for(holds: Callable[[], bool], children: list[subprocess.Popen[bytes]], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit and all(child.poll() is None for child in children)
        time.sleep(0.02)


def test_a_process_is_killed_and_the_losses_go_on_on_another_mesh(tmp_path: Path, in_a_hurry: dict[str, str]) -> None:
    """Two processes of two devices each, one of them killed; then one process of two; compared with one undisturbed device."""
    environment = in_a_hurry | {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
    metrics, saved = tmp_path / "metrics.jsonl", tmp_path / "run"
    common = ("--metrics", str(metrics), "--checkpoint", str(saved), "--save-every", "3")
    together = ("--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2", "--heartbeat", "5")
    first = (*common, *together, "--mesh", "data=2,fsdp=2", "--steps", "100000")
    with (
        started(tmp_path / "0.log", environment, *first, "--process-id", "0") as survivor,
        started(tmp_path / "1.log", environment, *first, "--process-id", "1") as victim,
    ):
        wait_for(lambda: metrics.exists() and len(losses(metrics)) >= 8, [survivor, victim], 240)
        victim.send_signal(signal.SIGKILL)
        # By itself, or ended by JAX after the heartbeat if it waits for the other process outside a step.
        reasons = {command.FAILED: "most likely because another process has ended", -signal.SIGABRT: "another task died"}
        assert reasons[survivor.wait(120)] in (tmp_path / "0.log").read_text()
    steps = 1 + max(lost := losses(metrics)) + 3
    second = (*common, "--mesh", "fsdp=2", "--policy", "offload_inputs", "--steps", str(steps))
    with started(tmp_path / "again.log", environment, *second) as child:
        assert child.wait(240) == 0, (tmp_path / "again.log").read_text()
    reasons = (tmp_path / "again.log").read_text()
    by_step, begun = losses(metrics), int(reasons.split("at step ")[1].split(",")[0])
    assert 3 <= begun <= max(lost) + 1 and begun % 3 == 0 and "fsdp=2" in reasons

    undisturbed = tmp_path / "undisturbed.jsonl"
    assert train_anywhere.main([*EXACT, "--policy", "off", "--metrics", str(undisturbed), "--steps", str(steps)]) == 0
    expected = {step: values[0] for step, values in losses(undisturbed).items()}
    assert by_step.keys() == expected.keys() == set(range(steps))
    # The steps lost with the kill were computed twice.
    assert [len(by_step[step]) for step in sorted(by_step)] == [1] * begun + [2] * (max(lost) + 1 - begun) + [1] * 3
    for step, values in by_step.items():
        np.testing.assert_allclose(values, expected[step], rtol=1e-10, err_msg=f"step {step}")
    # Batches differ more than so few steps teach: the last batch's loss is compared with a run without learning.
    still = tmp_path / "still.jsonl"
    train_anywhere.main([*EXACT, "--policy", "off", "--metrics", str(still), "--steps", str(steps), "--learning-rate", "1e-30"])
    assert losses(still)[steps - 1][0] - expected[steps - 1] > 0.1, "the losses would be alike if nothing were learnt"


def state_of(seed: int = 0) -> dict[str, Any]:
    """Arrays of every kind that a checkpoint holds, too large to be written into the index itself."""
    random = np.random.default_rng(seed)
    return {
        "params": {"w": jnp.asarray(random.normal(size=(64, 32)), jnp.float32), "half": jnp.ones((3, 5), jnp.bfloat16)},
        "state": (jnp.asarray(seed, jnp.int32), jnp.asarray(random.normal(size=2000), jnp.float32)),
    }


class Folder:
    """A folder with the checkpoints of steps 10 and 20, and the messages while they were read."""

    def __init__(self, path: Path, setting: dict[str, Any] | None = None) -> None:
        self.path, self.told, self.setting = path, [], setting or {"layers": 2}

    def saved(self) -> Folder:
        checkpoints = self._opened()
        for step in (10, 20):
            checkpoints.save(step, state_of(step))
        checkpoints.close()
        return self

    def restored(self) -> tuple[int, Any] | None:
        checkpoints = self._opened()
        try:
            return checkpoints.restore(jax.eval_shape(state_of), self.told.append)
        finally:
            checkpoints.close()

    def _opened(self) -> Checkpoints:
        return Checkpoints(self.path, self.setting, keep=2, wait=False)


def same(first: Any, second: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


def largest(step: Path) -> Path:
    return max(step.rglob("d/*"), key=lambda path: path.stat().st_size)


def flip(step: Path) -> None:
    content = bytearray(largest(step).read_bytes())
    content[len(content) // 2] ^= 1
    largest(step).write_bytes(content)


def remove(step: Path) -> None:
    largest(step).unlink()


def rewrite(step: Path) -> None:
    (about,) = (path for path in (step / "about").rglob("*") if path.is_file() and '"layers": 2' in path.read_text())
    about.write_text(about.read_text().replace('"layers": 2', '"layers": 3'))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        # Orbax may read a flipped bit silently, or fail to decode the data.
        (flip, "are not what was saved|Exception: "),
        (remove, "Exception: "),
        (rewrite, "what it says of itself is not what was saved"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_loudly(tmp_path: Path, damage: Callable[[Path], None], why: str) -> None:
    folder = Folder(tmp_path).saved()
    damage(tmp_path / "20")
    step, state = folder.restored()
    assert step == 10 and same(state, state_of(10))
    (told,) = folder.told
    assert told.startswith("the checkpoint of step 20 cannot be read") and re.search(why, told)
    # Its step is repeated, and the damaged checkpoint stays for inspection.
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["10", "20.damaged"]
    damage(tmp_path / "10")
    with pytest.raises(CheckpointError, match="none of the checkpoints of steps 10 can be read; give another folder"):
        folder.restored()


def test_a_save_that_was_cut_short_leaves_the_one_before(tmp_path: Path) -> None:
    folder = Folder(tmp_path).saved()
    # A kill leaves this: orbax writes this file last, and then gives the folder its name.
    (tmp_path / "20" / "commit_success.txt").unlink()
    (tmp_path / "20").rename(tmp_path / "20.orbax-checkpoint-tmp")
    assert folder.restored()[0] == 10 and folder.told == []
    assert not (tmp_path / "20.orbax-checkpoint-tmp").exists()
    assert Folder(tmp_path / "empty").restored() is None


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    Folder(tmp_path).saved()
    message = r"step 20 is of another training \(layers: 3 here, 2 there; seed: 1 here, None there"
    with pytest.raises(ArgumentError, match=message):
        Folder(tmp_path, {"layers": 3, "seed": 1}).restored()
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="--checkpoint .*file.*give a folder that can be written to"):
        Folder(tmp_path / "file").restored()


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All trainings of a test share a setting, mesh and policy: the first one's program serves all."""
    compile_it, programs = training.Trainer.compile, []

    def compile_once(self: training.Trainer) -> tuple[int, int]:
        if not programs:
            programs.append((compile_it(self), self._step))
        self._step = programs[0][1]
        return programs[0][0]

    monkeypatch.setattr(training.Trainer, "compile", compile_once)


@pytest.mark.usefixtures("compiled_once")
def test_the_same_command_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(steps: int, *arguments: str) -> dict[int, list[float]]:
        path = tmp_path / "metrics.jsonl"
        path.unlink(missing_ok=True)
        line = [*SMALL, "--steps", str(steps), "--metrics", str(path), "--save-every", "2", *arguments]
        assert train_anywhere.main(line) == 0
        return losses(path) if path.exists() else {}

    straight = run(5)
    saved = ("--checkpoint", str(tmp_path / "run"))
    begun = run(3, *saved)
    assert run(5, *saved) == {step: straight[step] for step in (3, 4)} and begun == {step: straight[step] for step in range(3)}
    assert "at step 3, from" in capsys.readouterr().out
    assert run(5, *saved) == {} and "the newest checkpoint is of step 5, and --steps is 5" in capsys.readouterr().out
    assert train_anywhere.main([*SMALL, *saved, "--seed", "1"]) == 2
    assert "is of another training (seed: 1 here, 0 there)" in capsys.readouterr().err


def test_the_job_is_that_of_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAIN_ANYWHERE", " ".join((*SMALL, "--mesh", "data=2,fsdp=2", "--dtype", "bfloat16")))
    job = train_anywhere.job()
    assert job.mesh.shape == {"data": 2, "fsdp": 2} and job.batch[0].shape == (4, 8)
    assert {leaf.dtype for leaf in jax.tree.leaves(job.params)} == {np.dtype("float32")}
    embedding = job.shardings[0]["embed"]["embedding"]
    assert embedding.spec == P("fsdp") and job.shardings[1].spec == P(("data", "fsdp"))
    monkeypatch.setenv("TRAIN_ANYWHERE", " ".join((*SMALL, "--dtype", "float64")))
    with pytest.raises(ArgumentError, match="set JAX_ENABLE_X64=1 as well"):
        train_anywhere.job()


def test_a_plan_is_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = training.workload(SETTING, {"fsdp": 1})
    path = str(tmp_path / "plan.json")
    made = {"compiler_options": {OPTION: 40}, "host_bytes": 24 * 2**20}
    for target, devices in (("h100", 1), ("cpu", 1), ("gone.toml:8xours", 1), ("8xh100", 8)):
        plan = plan_of(job, "dots", target=target, **made)
        plan.save(path)
        messages = {"planned": f"90.0 MiB on each device of {target}, 24.0 MiB on its host"}
        assert command.chosen_policy(path, job) == (plan.policies, messages, {OPTION: 40})
        warned = (
            f"plan.json was made for {target}, {devices} devices, and the mesh has 1: its figures are not those of this run"
        )
        told = capsys.readouterr().err
        assert told == "" if devices == 1 else warned in told
    assert command.chosen_policy(str(plan_of(job, "off", target="h100").save(path)), job)[0] == "off"
    assert train_anywhere.main([*SMALL, "--layers", "2", "--policy", path]) == 2
    assert "was made for another model than 'train anywhere'" in capsys.readouterr().err
    with pytest.raises(PolicyError, match="banana"):
        command.chosen_policy("banana", job)


class Diverging:
    """A trainer whose loss is NaN at step 3."""

    def step(self, state: Any, number: int) -> tuple[Any, jax.Array]:
        return state, jnp.where(number == 3, jnp.nan, 1.0)


def test_a_loss_that_is_not_finite_ends_the_training_before_it_is_saved(tmp_path: Path) -> None:
    line = ("--steps", "6", "--log-every", "6", "--save-every", "2", "--checkpoint", str(tmp_path))
    saving = Checkpoints(tmp_path, {}, keep=3, wait=True)
    with pytest.raises(command.TrainingError, match="the loss of step 3 is nan: begin in another --checkpoint folder"):
        command._run(Diverging(), state_of(), 0, SETTING, command.parser().parse_args(line), saving)
    saving.close()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["2"]
