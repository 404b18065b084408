"""`remat-jax doctor`: what it prints where, and how it ends."""

from __future__ import annotations

import json
import textwrap

import pytest
from typer.testing import CliRunner

import remat_jax as rj
from remat_jax.cli import workloads
from remat_jax.cli.app import app

WORKLOAD = """
    import flax.linen as nn, jax, jax.numpy as jnp
    import remat_jax as rj
    print("a line of the user's own")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(8, name="down")(nn.gelu(nn.Dense(32, name="up")(x)))

    def job(model=None):
        model, x = model or nn.Sequential([Block(), Block()]), jax.ShapeDtypeStruct((4, 8), jnp.float32)
        params = jax.eval_shape(model.init, jax.random.key(0), x)
        return rj.Workload(lambda p, x: jnp.mean(model.apply(p, x) ** 2), params, (x,), Block, name="two blocks")

    def unchecked():
        return job(nn.remat_scan(Block, lengths=(3,))())
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "train.py"
    path.write_text(textwrap.dedent(WORKLOAD))
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_nothing_found_exits_0_and_says_so(file):
    done = run(f"{file}:job", "--policy", "dots")
    assert done.exit_code == 0, done.output
    assert "two blocks under dots (traced, not compiled): no traps; 1 different checkpointed region." in done.stdout


def test_a_trap_exits_1_and_is_told_with_its_remedy(file):
    done = run(f"{file}:unchecked")
    assert done.exit_code == 1, done.output
    # Where a line of the table breaks depends on how long the path of the file is.
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if line.startswith("│")]
    trap, _, _, remedy = (" ".join(" ".join(cells).split()) for cells in zip(*rows, strict=True))
    assert trap == "remat_scan_of_one_length"
    assert "two lengths or more" in remedy and remedy.replace(" ", "").endswith("checkpoint_blocks(loss,{Block:'full'})")
    assert "tracing" in done.stderr


def test_json_is_one_object_with_what_the_library_says(file):
    done = run(f"{file}:job", "-p", "save: gelu_out", "--json")
    assert done.exit_code == 1
    job = workloads.load_workload(f"{file}:job")
    assert json.loads(done.stdout) == rj.doctor(job, "save: gelu_out").to_dict()
    assert json.loads(run(f"{file}:job", "-p", "full", "--json").stdout)["findings"] == []


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["train.py:job", "-p", "ful"], "Did you mean 'full'"),
        (["train.py:job", "--target", "h2000"], "h2000"),
        (["train.py:job", "--target", "cpu"], "no GPU"),
        (["train.py:jobs"], "has no 'jobs'"),
        (["train.py:job", "--timeout", "0"], "timeout=0.0: expected a positive number of seconds"),
    ],
)
def test_bad_usage_exits_2(file, arguments, said):
    done = run(f"{file.parent}/{arguments[0]}", *arguments[1:])
    assert done.exit_code == 2 and said in done.stderr
