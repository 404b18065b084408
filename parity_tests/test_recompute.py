"""The training loop of `examples/recompute.py`: every form of both frameworks, the same losses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from examples import recomputing as recompute


@pytest.fixture(scope="module")
def done(in_a_hurry):
    """The command as a user types it."""
    command = [sys.executable, "examples/recompute.py", "--steps", "4", "--json"]
    return subprocess.run(command, env=in_a_hurry, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def rows(done):
    return {(row["framework"], row["form"]): row for row in json.loads(done.stdout)["rows"]}


def test_every_form_computes_the_same(rows):
    plain = rows["torch", "plain"]
    assert plain["losses"][-1] < plain["losses"][0]
    for (framework, form), row in rows.items():
        if "reentrant" not in form:
            assert row["difference"] <= (0 if framework == "torch" else 1e-5), (framework, form, row)


def test_executions_and_bytes(rows):
    """A block executes 6 products, backward 11 (the input needs no gradient), a recomputation 6 more."""
    stream = recompute.BATCH * recompute.LENGTH * recompute.WIDTH * 4
    costs = {key: (row["matmuls"], row["host"]) for key, row in rows.items() if "reentrant" not in key[1]}
    expected = {"plain": (17, 0), "dots": (17, 0), "offload": (23, stream)}
    assert costs == {key: expected.get(key[1], (23, 0)) for key in costs}
    # Besides the block, the loss keeps its two operands in PyTorch, and their difference in JAX.
    assert rows["torch", "checkpoint"]["device"] == 3 * stream and rows["jax", "checkpoint"]["device"] == stream
    assert rows["torch", "offload"]["device"] == 2 * stream


def test_the_reentrant_form_cannot_train_a_first_layer(rows):
    row = rows["torch", "torch.utils.checkpoint, reentrant"]
    assert row["losses"] == [] and row["error"].startswith("element 0 of tensors does not require grad")


def test_as_a_command(done):
    assert [len(row["losses"]) for row in json.loads(done.stdout)["rows"]] == [4, 0] + [4] * 8
    assert done.stderr.splitlines()[0] == "torch: plain" and "Traceback" not in done.stderr
