"""`remat-jax plan`: its output, its files, and its exit statuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import remat_jax as rj
from remat_jax.cli.app import app
from remat_jax.planning.compile_candidates import Compiler
from tests.plan_models import job

FILE = Path(__file__).with_name("cli_jobs.py")


def command(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def run(*arguments):
    return command("plan", *arguments)


def test_the_plan_is_printed_written_and_drawn(tmp_path):
    page, saved, plot = tmp_path / "plan.html", tmp_path / "plan.json", tmp_path / "plan.svg"
    asked = f"{FILE}:planned", "-b", "9 MiB", "--target", "cpu"
    done = run(*asked, "--html", page, "--save", saved, "--plot", plot, "--explain")
    assert done.exit_code == 0, done.stderr
    for said in ("Plan for perceptrons on cpu within 9.0 MiB", "MlpLayer 0", "The plan and the named policies", "this plan"):
        assert said in done.stdout
    assert " more would save " in done.stdout and "recomputing it takes" in done.stdout
    assert "tracing" in done.stderr and "compiling " in done.stderr
    assert rj.Plan.load(saved).budget == 9 * 2**20
    assert plot.read_text().startswith("<svg") and "<!doctype html>" in page.read_text()
    for path in (page, saved, plot):
        assert str(path) in done.stdout.replace("\n", "")
    once_more = run(*asked, "--json")
    assert once_more.exit_code == 0
    data = json.loads(once_more.stdout)
    assert data["device_bytes"] <= 9 * 2**20 and data["policies"] == json.loads(saved.read_text())["policies"]


def test_the_file_of_a_plan_is_a_policy(tmp_path):
    saved = tmp_path / "plan.json"
    made = rj.plan(job(scanned=True), "9 MiB", "cpu")
    made.save(saved)
    policies = ["-p", saved, "-p", "full", "--diff", "full", saved, "--residuals", "--json", "--target", "cpu"]
    result = command("measure", f"{FILE}:planned", *policies)
    data = json.loads(result.stdout)
    assert result.exit_code == 0 and [report["policy"] for report in data["reports"]] == [str(saved), "full"]
    assert data["reports"][0]["device_bytes"] == made.device_bytes > data["reports"][1]["device_bytes"]
    assert data["residuals"][0]["policy"] == data["diff"]["after"] == str(saved)
    assert data["diff"]["device_bytes"] == made.device_bytes - data["reports"][1]["device_bytes"]
    diagnosed = command("doctor", f"{FILE}:planned", "-p", saved, "--target", "none")
    title = f"perceptrons under {saved} (traced, not compiled): no traps"
    assert diagnosed.exit_code == 0 and title in diagnosed.stdout.replace("\n", ""), diagnosed.stdout
    for name in ("measure", "doctor"):
        gone = command(name, f"{FILE}:planned", "-p", tmp_path / "none.json")
        assert gone.exit_code == 2 and "no such file; write one with remat-jax plan --save" in gone.stderr
        wrong = command(name, f"{FILE}:planned_unrolled", "-p", saved)
        assert wrong.exit_code == 2 and "Traceback" not in wrong.stderr and "another" in wrong.stderr, wrong.stderr


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C while the second pair of steps is compiled."""
    calls, compiled = [], Compiler.compile

    def compile(self, candidates, best):
        calls.append(candidates)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compiled(self, candidates, best)

    monkeypatch.setattr(Compiler, "compile", compile)


def test_an_interrupt_shows_and_saves_the_best_so_far(tmp_path, interrupted):
    done = run(f"{FILE}:planned", "-b", "6 MiB", "--target", "cpu", "--save", tmp_path / "plan.json")
    saved = rj.Plan.load(tmp_path / "plan.json")
    assert done.exit_code == 130 and saved.cut_short and 0 < saved.device_bytes <= 6 * 2**20 and len(saved.tried) == 2
    text = " ".join(done.stdout.split())
    assert f"within 6.0 MiB: {rj.report.format_bytes(saved.device_bytes)} compiled" in text and "Saved: " in text
    assert "The search was interrupted; a longer search may find a faster plan" in text and "timeout" not in text


def test_an_interrupt_says_how_to_save(interrupted):
    done = run(f"{FILE}:planned", "-b", "6 MiB", "--target", "cpu")
    assert done.exit_code == 130
    assert "Nothing was saved. With --save FILE, Ctrl-C saves the best plan so far." in done.stdout


def test_an_interrupted_call_has_the_best_so_far(interrupted, tmp_path):
    with pytest.raises(KeyboardInterrupt) as stopped:
        rj.plan(job(scanned=True), "6 MiB", "cpu")
    best = stopped.value.plan
    (note,) = stopped.value.__notes__
    assert f"per step, {rj.report.format_bytes(best.device_bytes)} on the device. To save it: except Keyboard" in note
    assert best.save(tmp_path / "plan.json").is_file() and "error.plan.save(" in note


def test_progress_says_what_going_on_may_gain(monkeypatch):
    asked, compiled = [], Compiler.compile

    def compile(self, candidates, best):
        if best is not None:  # on a CPU target times are traced estimates, and the gain is their difference
            now = self.described.base_seconds + best.candidate.seconds
            asked.append(100 * (best.candidate.seconds - min(step.seconds for step in candidates)) / now)
        return compiled(self, candidates, best)

    monkeypatch.setattr(Compiler, "compile", compile)
    said = []
    rj.plan(job(scanned=True), "6 MiB", "cpu", progress=lambda activity, *_: said.append(activity))
    (line,) = (activity for activity in said if "best so far" in activity)
    assert " to " in line.split(", ")[1]  # rates of a CPU are assumed
    assert line.endswith(f"; going on may gain {asked[0]:.1f} %, Ctrl-C keeps the best") and asked[0] > 0.1


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_call_from_python_shows_progress_only_in_a_terminal(monkeypatch):
    for stream, shows in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        rj.plan(job(scanned=True), "20 MiB", "cpu")
        assert ("compiling " in stream.getvalue()) is shows
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    rj.plan(job(scanned=True), "20 MiB", "cpu", progress=lambda *_: None)
    assert stream.getvalue() == ""


def test_what_does_not_fit_exits_3_and_says_the_least():
    done = run(f"{FILE}:planned", "--budget", "3 MiB", "--target", "cpu", "--json")
    assert done.exit_code == 3
    data = json.loads(done.stdout)
    assert 3 * 2**20 < data["least_bytes"] < 6 * 2**20 and data["held_by"]["parameters"] == 196608
    assert "no policy of 'perceptrons' fits" in data["error"] and data["error"] in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "lots", "--target", "cpu"], "budget='lots': expected a number of bytes"),
        (["--budget", "80%", "--target", "cpu"], "has no memory_bytes"),
        (["--budget", "9 MiB", "--target", "cpu", "--plot", "plan.gif"], "expected a name that ends in .svg"),
        (["--budget", "9 MiB", "--target", "cpu", "--save", "."], "save='.' is a folder: give a file, such as 'plan.json'"),
        (["--target", "cpu"], "--budget"),
    ],
)
def test_bad_usage_exits_2_before_the_users_file_is_run(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('the file was run')")
    done = run("train.py:job", *arguments)
    assert done.exit_code == 2 and message in " ".join(done.stderr.split())


def test_what_a_finished_step_cannot_have_is_bad_usage():
    for arguments in (["--allow", "head_in_chunks"], ["--mesh", "data=2", "--target", "2xh200"]):
        done = run(f"{FILE}:step", "-b", "9 MiB", "--target", "cpu", *arguments)
        assert done.exit_code == 2 and "is a finished step" in done.stderr
    done = run(f"{FILE}:step", "--budget", "9 MiB", "--target", "cpu")
    assert done.exit_code == 2 and "block='layers': the glob matches no path of a called module" in done.stderr


def test_the_default_target_of_all_commands_is_one():
    command = typer.main.get_command(app)
    defaults = {name: {each.name: each.default for each in sub.params} for name, sub in command.commands.items()}
    targets = {name: options["target"] for name, options in defaults.items() if "target" in options}
    assert targets == dict.fromkeys(("batch", "demo", "doctor", "measure", "plan", "report"), "h200")
