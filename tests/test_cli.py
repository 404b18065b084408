"""The command line: its output and its exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

import remat_jax as rj
from examples import byte_decoder
from remat_jax import compat
from remat_jax.cli import output, workloads
from remat_jax.cli.app import app
from remat_jax.errors import ArgumentError
from remat_jax.hardware import targets as target_names
from remat_jax.memory.compile import cache
from remat_jax.memory.diff import diff_policies
from remat_jax.planning import loop
from remat_jax.policy import ALIASES, NAMED

ROOT = Path(__file__).resolve().parents[1]
WORKLOAD = """
    from tests import cli_jobs
    print("a line of the user's own")

    def job():
        return cli_jobs.job(layers=3, rows=4, name="three blocks")

    def needs(width, depth=2): ...
    def wrong(): return 3
    def broken(): return {}["missing"]
    ready, number = job(), 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "train.py").write_text(textwrap.dedent(WORKLOAD))
    (folder / "bad.py").write_text("import not_there_at_all\n")
    (folder / "ends.py").write_text("import sys\nsys.exit(0)\n")
    fails = "import jax\ndef inner(x):\n    return jax.numpy.ones(3) @ x\nstep = jax.jit(lambda x: jax.grad(inner)(x))\n"
    (folder / "fails.py").write_text(f"{fails}example_args = (jax.numpy.ones(4),)\n")
    jobs = folder / "team" / "jobs"
    jobs.mkdir(parents=True)
    for package in (jobs, jobs.parent):
        (package / "__init__.py").write_text("")
    (jobs / "inner.py").write_text("from ..models import train_job as job\n")
    models = textwrap.dedent(WORKLOAD).replace("def job", "def train_job", 1).replace("ready, number = job(), 3", "")
    (jobs.parent / "models.py").write_text(models)
    return folder


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def shell(*arguments, cwd=ROOT):
    command = [sys.executable, "-m", "remat_jax.cli", *map(str, arguments)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def test_help_lists_the_commands_that_work_and_no_other():
    result = run("--help")
    names = [info.callback.__name__ for info in app.registered_commands]
    assert names == "batch blocks calibrate demo doctor measure parity plan policies report targets".split()
    assert result.exit_code == 0 and all(f" {name} " in result.stdout for name in names)


def test_help_loads_neither_torch_nor_plotting():
    code = "import sys\nfrom typer.testing import CliRunner\nfrom remat_jax.cli.app import app\n"
    code += "assert CliRunner().invoke(app, ['--help']).exit_code == 0\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "remat_jax.cli.demo" in loaded and not loaded & {"torch", "torch_ref", "matplotlib", "plotly", "examples"}


def test_policies_lists_every_named_policy_with_its_text():
    data = json.loads(run("policies", "--json").stdout)["policies"]
    assert {row["name"]: row["text"] for row in data} == {name: str(policy) for name, policy in NAMED.items()}
    assert {alias: row["name"] for row in data for alias in row["aliases"]} == ALIASES
    assert all(len(row["meaning"]) > 20 for row in data)
    shown = run("policies").stdout
    assert all(name in shown for name in [*NAMED, *ALIASES]) and "…" not in shown


def test_targets_lists_every_target():
    rows = {row["name"]: row for row in json.loads(run("targets", "--json").stdout)["targets"]}
    assert tuple(rows) == target_names() and rows["h200"]["memory_bytes"] == 150_754_820_096
    shown = run("targets").stdout
    assert "140.4 GiB" in shown and "8x8xh200" in shown and all(name in shown for name in rows)


def test_measure_says_what_the_library_says_as_one_json_object_and_nothing_else(folder):
    done = shell(
        "measure", "train.py:job", "-p", "full", "-p", "save: @dots", "--residuals", "--json", "--target", "cpu", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    job = workloads.load_workload(f"{folder}/train.py:job")
    assert data["workload"] == "three blocks" and data["target"] == "cpu"
    assert [report["policy"] for report in data["reports"]] == ["full", "dots"]
    assert data["reports"][0] == rj.measure(job, "full").to_dict()
    assert [table["policy"] for table in data["residuals"]] == ["full", "dots"]
    assert {row["name"]: row["bytes"] for row in data["residuals"][1]["rows"]}["layers_2/up:dot_general#0"] == 4 * 32 * 4
    # Backward reads the first product of each of three blocks (4 rows, 32 wide); it does not read products that are only added.
    assert data["reports"][1]["residual_device_bytes"] - data["reports"][0]["residual_device_bytes"] == 3 * 4 * 32 * 4
    assert "a line of the user's own" in done.stderr and "compiled full for cpu" in done.stderr


@pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="XLA's GPU compiler is not installed")
def test_measure_asks_about_a_memory_limit_and_draws_what_is_on_the_device_by_module(folder, tmp_path):
    limited = ["measure", f"{folder}/train.py:job", "--target", "h200", "--memory-limit", "10%", "--diff", "full", "dots"]
    result = run(*limited, "--plot", picture := tmp_path / "memory.svg", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    for report in data["reports"]:
        # A tenth of the device's memory is an eighth of the memory that XLA uses, 80 % of it.
        assert report["memory_limit"] == 15_075_482_009
        assert report["compiler_options"] == {"xla_gpu_memory_limit_slop_factor": 12}
    assert data["picture"] == str(picture)
    drawn = picture.read_text()
    assert drawn.startswith("<svg") and "three blocks: one training step compiled for h200" in drawn
    assert "Compiled with a memory limit of 14.0 GiB." in " ".join(run(*limited).stdout.split())


def test_measure_prints_a_table_and_warns(folder):
    result = run("measure", f"{folder}/train.py:job", "--target", "cpu", "-p", "offload_inputs", "--residuals")
    assert result.exit_code == 0, result.output
    assert "three blocks: one training step compiled for cpu" in result.stdout
    assert "layers_1:input#0" in result.stdout and "384 B" in result.stdout
    assert "warning: a CPU has one memory" in result.stdout


def test_measure_compares_off_and_full_unless_told(folder):
    data = json.loads(run("measure", f"{folder}/train.py:job", "--target", "cpu", "--json").stdout)
    assert [report["policy"] for report in data["reports"]] == ["off", "full"] and "residuals" not in data


def test_measure_tells_what_moves_between_two_policies(folder):
    result = run("measure", f"{folder}/train.py:job", "--target", "cpu", "--diff", "full", "save: @dots", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [report["policy"] for report in data["reports"]] == ["full", "dots"], "those two, and no others"
    job = workloads.load_workload(f"{folder}/train.py:job")
    assert data["diff"] == json.loads(json.dumps(diff_policies(job, "full", "dots").to_dict()))
    assert {move["name"]: move["device_bytes"] for move in data["diff"]["moves"]}["layers_1/up:dot_general#0"] == 4 * 32 * 4
    shown = run("measure", f"{folder}/train.py:job", "--target", "cpu", "-p", "off", "--diff", "full", "dots")
    assert "layers_*/up:dot_general#0 ×3" in shown.stdout and "not kept → save" in shown.stdout
    assert "compiled: device memory" in shown.stdout and "three blocks on cpu: full → dots" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "expected path/to/file.py:function or package.module:function"),
        (["none.py:job"], "there is no file"),
        (["no.such.module:job"], "there is no module 'no.such.module'"),
        (["a b:job"], "neither a .py file nor a module's name"),
        (["train.py:jop"], "has no 'jop'. Did you mean 'job'? It has job, needs, wrong, broken, ready"),
        (["train.py:needs"], "needs the arguments width. A function without arguments"),
        (["train.py:wrong"], "gave a int: expected a remat_jax.Workload"),
        (["train.py:number"], "is a int: expected a remat_jax.Workload, or a function that returns one"),
        (["train.py:broken"], "running it raised KeyError: 'missing', at "),
        (["ends.py:job"], "raised SystemExit: 0, at "),
        (["fails.py:step"], "/fails.py:3 in inner"),
        (["train.py:job", "--live", "--target", "cpu"], "--live with target 'cpu': memory at the peak is known only for GPU"),
        (["train.py:job", "--target", "2xh200"], "target='2xh200' has 2 devices, but 'three blocks' has no mesh to use them"),
        (["bad.py:job"], "raised ModuleNotFoundError: No module named 'not_there_at_all', at "),
        (["train.py:job", "-p", "dotz"], "policy='dotz' is not the name of a policy. Did you mean 'dots'?"),
        (["train.py:job", "--timeout", "-1"], "timeout=-1.0: expected a positive number of seconds"),
        (["train.py:job", "--memory-limit", "1GiB", "--target", "cpu"], "with target='cpu': XLA takes a memory limit only for"),
        (["train.py:job", "--plot", "memory.gif"], "plot='memory.gif': pictures are written as SVG; expected a name that"),
    ],
)
def test_wrong_use_ends_with_2_and_a_message(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    result = run("measure", *arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert result.stdout.replace("a line of the user's own\n", "") == ""
    assert message in result.stderr
    as_json = run("measure", *arguments, "--json")
    assert as_json.exit_code == 2 and message in json.loads(as_json.stdout)["error"]


def test_wrong_options_end_with_2():
    for line in ("measure", "measure x.py:y --polcy full", "no-such-command", "demo --steps 0", "calibrate -o ."):
        result = run(*line.split())
        assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr, line


def test_a_compiler_that_does_not_end_ends_the_command_with_1(folder):
    cache.forget()
    result = run("measure", f"{folder}/train.py:job", "-p", "full", "--timeout", "0.05", "--json")
    assert result.exit_code == 1
    assert "not done after timeout=0.05 s" in json.loads(result.stdout)["error"]


def test_a_file_in_a_package_may_import_relatively_and_a_module_is_found_from_here(folder, monkeypatch):
    assert workloads.load_workload(f"{folder}/team/jobs/inner.py:job").name == "three blocks"
    monkeypatch.chdir(folder)
    assert workloads.load_workload("team.models:train_job").name == "three blocks"
    assert workloads.load_workload("train.py:ready").name == "three blocks"


def test_a_file_does_not_take_the_name_of_a_module(tmp_path):
    import types

    (tmp_path / "types.py").write_text("def job():\n    raise ValueError('mine')\n")
    with pytest.raises(ArgumentError, match=r"raised ValueError: mine, at .*types\.py:2 in job"):
        workloads.load_workload(f"{tmp_path}/types.py:job")
    assert sys.modules["types"] is types


def test_the_example_of_the_command_line_is_a_workload():
    job = workloads.load_workload(f"{ROOT}/examples/byte_decoder.py:job")
    table = rj.residuals(job, "offload_inputs")
    # 32 layers, 16 sequences of 2048 bytes, 1280 wide, two bytes per number.
    assert table.host_bytes == 32 * 16 * 2048 * 1280 * 2


@pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="XLA's GPU compiler is not installed")
def test_demo_begins_with_a_plan_and_needs_no_torch_for_it(monkeypatch, folder, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    job = workloads.load_workload(f"{folder}/train.py:job")
    monkeypatch.setattr(byte_decoder, "job", lambda: job)
    monkeypatch.setattr(loop, "MOST_COMPILED", 1)
    result = run("demo", "--output", str(tmp_path / "new"))
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["plan.html", "plan.json", "plan.svg"]
    text = " ".join(result.stdout.split())
    assert "off: no checkpoints" in text and "the plan for 40GiB" in text and "pip install 'remat_jax[torch]'" in text


def test_json_has_no_numbers_that_json_does_not_know():
    assert output.finite({"a": [float("inf"), 1.5], "b": (float("nan"), 2)}) == {"a": [None, 1.5], "b": [None, 2]}


def test_it_says_its_version():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"remat-jax {rj.__version__}\n")
