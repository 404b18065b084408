"""`save_report`: the page's contents to the byte, its errors, and that no partial file is left behind."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import remat_jax as rj
from remat_jax import errors
from remat_jax.cli.app import app
from remat_jax.memory.compile.process import NotDoneError
from remat_jax.memory.measure import measure_many
from remat_jax.memory.report import Receipt
from remat_jax.overview import gathered as gathering
from remat_jax.overview import save
from remat_jax.overview.page import findings, notes, offload_rows, policy_cells, summary, warnings
from remat_jax.overview.save import gather
from remat_jax.planning.problem import keeping_seconds
from tests.plan_by_hand import plan as plan_of_another_model
from tests.plan_models import MlpLayer, job
from tests.report_pages import JOB, PLAN, POLICIES, parity_report, plan_for


class Tables(HTMLParser):
    """The cells of every table of a page, as (value, text), by the table's label."""

    def __init__(self, text):
        super().__init__()
        self.tables, self._rows, self._cell = {}, None, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        by_name = dict(attributes)
        if by_name.get("role") == "region":
            self._rows = self.tables.setdefault(by_name["aria-label"], [])
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in ("td", "th") and self._rows is not None:
            self._cell = [by_name.get("data-value"), ""]
            self._rows[-1].append(self._cell)

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = None
        elif tag == "table":
            self._rows = None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell[1] += data


def table(text, label):
    """The rows of a table by their first cell, as column → (value, text)."""
    head, *rows = Tables(text).tables[label]
    return {row[0][1]: {title: tuple(cell) for (_, title), cell in zip(head, row, strict=True)} for row in rows}


def cell(gathered, row, title):
    """A cell of the table of policies."""
    cells = policy_cells(gathered, gathered.policies[row])
    return next(value for column, value in cells.items() if column.title == title)


def drawn(text, label):
    """The bytes that each bar of a picture adds up to, by the tooltips of its parts."""
    picture = re.search(rf'aria-label="{label}"><div class="broad">(.*?)</svg>', text, re.DOTALL)[1]
    sizes = Counter()
    # Both panels have the same parts.
    for tooltip in set(re.findall("<title>(.*?)</title>", picture)):
        name, size = re.fullmatch(r"(.*): [A-Z] .* \(([\d,]+) bytes\)", tooltip).groups()
        sizes[name] += int(size.replace(",", ""))
    return sizes


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert rj.save_report(path, JOB, POLICIES, "cpu", plan=PLAN, parity=parity_report()) == path
    return path.read_text(encoding="utf-8")


def test_every_figure_of_a_policy_is_that_of_its_measurement(page):
    rows = table(page, "policies compared")
    assert list(rows) == ["off", "full", "save: *up*", "the plan"]
    for policy, name in zip([*POLICIES, dict(PLAN.policies)], rows, strict=True):
        memory, row = rj.measure(JOB, policy, "cpu"), rows[name]
        bytes_of = {"device": memory.device_bytes, "temp": memory.temp_bytes, "host": memory.host_bytes}
        bytes_of |= {"kept: device": memory.residual_device_bytes, "kept: host": memory.residual_host_bytes}
        assert {title: int(row[title][0]) for title in bytes_of} == bytes_of
        assert row["fits"][1] == ("yes" if memory.device_bytes <= PLAN.budget else "no")
    assert [row["fits"][1] for row in rows.values()] == ["no", "yes", "no", "yes"]
    assert rows["off"]["over keeping all"] == ("0.0", "0 s") and rows["the plan"]["step"][0] == str(PLAN.seconds)
    steps = [float(rows[name]["step"][0]) for name in ("off", "save: *up*", "full")]
    # Unrolled, keeping costs less than any recomputation; in a scan it costs a stack.
    assert steps[1] < steps[2] and steps[1] < steps[0]
    # Only the output of the first product is recomputed: the sine; the second product's output is not read.
    products = 3 * 2 * 2048 * 32 * 128
    assert [rows[name]["recomputed"][0] for name in ("off", "full", "save: *up*")] == ["0", str(products), "0"]


def test_the_bars_add_up_to_the_bytes(page):
    names = (*POLICIES, "the plan")
    sizes = [rj.measure(JOB, policy, "cpu").device_bytes for policy in [*POLICIES, dict(PLAN.policies)]]
    kept = [rj.residuals(JOB, policy).device_bytes for policy in ("everything", *POLICIES[1:], dict(PLAN.policies))]
    assert drawn(page, "device memory by policy") == dict(zip(names, sizes, strict=True))
    assert drawn(page, "residuals, by module") == dict(zip(names, kept, strict=True))
    rows = Tables(page).tables["residuals, by module, as a table"][1:]
    columns = list(zip(*[[int(cell[0]) for cell in row[3:]] for row in rows], strict=True))
    assert [sum(column[:-1]) for column in columns] == [column[-1] for column in columns] == kept


def test_a_budget_is_planned_within(tmp_path):
    text = rj.save_report(tmp_path / "report.html", JOB, ["full"], "cpu", plan="20 MiB").read_text()
    rows = table(text, "policies compared")
    (planned,) = (row for row in Tables(text).tables["the frontier"] if row[0][1] == "the plan")
    assert "Fits: within the budget, 20.0 MiB" in text and planned[1][0] == rows["the plan"]["device"][0]
    # Everything fits. In a scan keeping all of it is not the fastest step.
    assert int(rows["the plan"]["device"][0]) < rj.measure(JOB, "off", "cpu").device_bytes
    assert float(rows["the plan"]["over keeping all"][0]) < 0 and list(rows) == ["full", "the plan"]


def test_the_parity_report_is_in_it(page):
    report = parity_report()
    assert report.verdict() in page and "first difference, backward" in page
    assert len(Tables(page).tables["tensors"]) == 1 + len(report.rows)


def test_it_asks_for_nothing_and_names_cannot_break_out(tmp_path):
    named = job(rows=64, scanned=True, layers=2, name="</script><script>alert(1)</script>")
    text = rj.save_report(tmp_path / "report.html", named, ["full"], "cpu", plan=plan_for(named)).read_text()
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|<link", text)
    assert "<script>alert" not in text and text.count("<script") == 1


def test_without_a_plan_and_parity_there_are_no_such_sections(tmp_path):
    text = rj.save_report(tmp_path / "report.html", JOB, ["full"], "cpu").read_text()
    assert re.findall(r'<section id="(\w+)"', text) == ["policies", "modules", "workload"] and 'id="at"' not in text
    assert "MlpLayer (3 calls a step, scanned)" in text


class Squares(nn.Module):
    """A block without any product."""

    @nn.compact
    def __call__(self, x):
        return x * x + self.param("bias", nn.initializers.zeros, x.shape[-1:])


NO_CALLS = rj.Workload(JOB.loss, JOB.params, JOB.batch, nn.LSTMCell, name="other")


def squares():
    model, x = nn.Sequential([Squares(), Squares()]), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return rj.Workload(lambda params, x: jnp.sum(model.apply(params, x)), params, (x,), Squares, name="squares")


def test_usual_policies_without_effect_are_left_out_and_the_page_says_why(tmp_path):
    report = gather(squares(), target="cpu")
    assert [policy.name for policy in report.policies] == ["off", "full"]
    assert set(report.left_out) == {"dots", "dots_with_no_batch_dims", "offload_inputs", "offload_dot_with_no_batch_dims"}
    assert "matches no residual" in report.left_out["dots"]
    assert any(note.startswith("Left out: dots: ") for note in notes(report))
    with pytest.raises(errors.NoEffectError, match="dots"):
        rj.save_report(tmp_path / "report.html", squares(), ["off", "dots"], "cpu")


def test_traps_and_what_offload_did_are_told():
    inside = job(rows=64, layers=2)
    nested = rj.Workload(
        jax.checkpoint(inside.loss), inside.params, inside.batch, MlpLayer, name="nested", own_checkpoints="keep"
    )
    report = gather(nested, ["full"], "cpu")
    (trap,) = findings(report.policies)
    assert (trap.name, trap.under) == ("nested_checkpoint", "full") and "Remove the outer checkpoint" in trap.remedy
    assert cell(report, 0, "traps") == 1 and "Known traps: 1, each with its remedy below." in summary(report)
    report = gather(inside, ["offload_inputs"], "cpu")
    offered = rj.residuals(inside, "offload_inputs").host_bytes
    ((policy, *sizes, _),) = offload_rows(report.policies)
    assert offered > 0 and (policy, *sizes[:2]) == ("offload_inputs", offered, 0) and cell(report, 0, "step").seconds is None
    warning, *_ = warnings(report.policies)
    assert warning.under == "offload_inputs" and "a CPU has one memory" in warning.problem
    assert any("No time is estimated for offload_inputs" in note for note in notes(report))


def test_what_is_miscompiled_is_not_called_the_smallest_or_fastest():
    report = gather(JOB, ["off", "full"], "cpu", plan=plan_for(JOB, budget=2**40))
    off, full, planned = report.policies
    assert "Beside the plan, the fastest policy within the budget (1.0 TiB) is full:" in summary(report)[2]
    wrong = Receipt(offered_bytes=1, host_bytes=1, returned_bytes=0, miscompiled=True)
    report.policies[1] = replace(full, memory=replace(full.memory, receipt=wrong))
    assert "Beside the plan, the fastest policy within the budget (1.0 TiB) is off:" in summary(report)[2]
    assert "full" not in summary(report)[0]
    report.policies[:] = [replace(off, memory=replace(off.memory, receipt=wrong)), planned]
    assert summary(report)[1] == "No policy that is safe to run is within the budget (1.0 TiB)."
    # The plan's own host budget applies to the other policies.
    away = replace(full, memory=replace(full.memory, host_bytes=2))
    report.policies[1:] = [away, planned]
    for host_budget, fits in ((2, "yes"), (1, "no")):
        assert cell(replace(report, plan=plan_for(JOB, budget=2**40, host_budget=host_budget)), 1, "fits") == fits


def test_a_named_policy_that_beats_the_plan_is_named_where_the_times_can_be_compared():
    report = gather(JOB, ["full"], "cpu")
    (full,), described = report.policies, report.described
    base = described.base_seconds + keeping_seconds(described)
    slow = plan_for(JOB, budget=2**40, base_seconds=base, seconds=2 * full.seconds)
    sentence = "Compiled for this page, these policies fit and are estimated to be faster than the plan: full."
    assert sentence in summary(replace(report, plan=slow))
    assert sentence not in summary(replace(report, plan=replace(slow, seconds=full.seconds)))
    elsewhere = replace(report, plan=replace(slow, base_seconds=2 * base))
    assert sentence not in summary(elsewhere) and any("or with different rates" in note for note in notes(elsewhere))


def test_one_usual_policy_that_the_compiler_refuses_does_not_end_the_report(monkeypatch):
    def refusing(workload, policies, *rest):
        if "full" in policies:
            raise errors.CompileError("full: out of memory\nand more")
        return measure_many(workload, policies, *rest)

    monkeypatch.setattr(gathering, "measure_many", refusing)
    report = gather(squares(), target="cpu")
    assert [policy.name for policy in report.policies] == ["off"] and report.left_out["full"] == "full: out of memory"
    with pytest.raises(errors.CompileError):
        gather(squares(), ["off", "full"], "cpu")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"path": 3}, errors.ArgumentError, "path=3: expected the path of a file"),
        ({"path": "none/report.html"}, errors.ArgumentError, "there is no folder .*none; create it"),
        ({"path": "."}, errors.ArgumentError, "path='.' is a folder: give a file, such as 'report.html'"),
        ({"workload": "job"}, errors.ArgumentError, "workload='job': expected a remat_jax.Workload"),
        ({"policies": "full"}, errors.ArgumentError, r"policies='full': expected a list of policies, such as"),
        ({"policies": []}, errors.ArgumentError, "policies is empty"),
        ({"policies": ["full", "dotz"]}, errors.UnknownPolicyError, r"policies\[1\]='dotz'.*Did you mean 'dots'"),
        ({"parity": "passed"}, errors.ArgumentError, "parity='passed': expected a ParityReport"),
        ({"plan": ["9 MiB"]}, errors.ArgumentError, "expected a Plan, a budget such as '40GiB'"),
        ({"plan": "1 KiB"}, errors.InfeasibleBudget, "1.0 KiB"),
        ({"workload": NO_CALLS}, errors.BlockError, "LSTMCell"),
        ({"plan": plan_of_another_model(target="cpu")}, errors.PlanningError, "made for another model"),
        ({"plan": plan_of_another_model()}, errors.PlanningError, "the plan is for target='h200', but the report is for 'cpu'"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(tmp_path, monkeypatch, changes, error, message):
    monkeypatch.chdir(tmp_path)
    arguments = {"path": "report.html", "workload": JOB, "policies": ["full"], "target": "cpu", **changes}
    with pytest.raises(error, match=message):
        rj.save_report(arguments.pop("path"), arguments.pop("workload"), **arguments)
    assert list(tmp_path.iterdir()) == []


def test_policies_of_all_kinds_are_taken_and_told_apart():
    dots, none = jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.nothing_saveable
    wrapped = [lambda *args, **kwargs: dots(*args, **kwargs), lambda *args, **kwargs: none(*args, **kwargs)]
    policies = gather(JOB, [*wrapped, "1 x full | 2 x dots", {MlpLayer: "off"}, "off", "full"], "cpu").policies
    *names, _, _ = (policy.name for policy in policies)
    assert names == ["<lambda>", "<lambda> (2)", "1 × full | 2 × dots", "MlpLayer: off"]
    _, of_none, layered, mapped, off, full = policies
    # A function's policy is unknown before tracing, so its time is unknown; the others are priced layer by layer.
    assert [policy.seconds is None for policy in policies[:4]] == [True, True, False, False]
    assert of_none.memory.device_bytes == full.memory.device_bytes and mapped.memory.device_bytes == off.memory.device_bytes
    assert mapped.kept.rows == off.kept.rows and mapped.extra_seconds == 0
    assert layered.recompute_flops == 2 * 2048 * 32 * 128


# --- the command line --------------------------------------------------------------------------------------------------

USERS_FILE = """
from __future__ import annotations
from tests.report_pages import JOB as job, PLAN, parity_report

def case():
    return parity_report()

def compared():
    raise RuntimeError("compared")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "train.py"
    path.write_text(USERS_FILE)
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_writes_the_page_and_says_where(file, tmp_path):
    page, saved = tmp_path / "report.html", PLAN.save(tmp_path / "plan.json")
    done = run(f"{file}:job", "-p", "off", "-p", "full", "--target", "cpu", "--plan", saved, "-o", page)
    assert done.exit_code == 0, done.stderr
    assert "one training step compiled for cpu" in " ".join(done.stdout.split()) and "the plan" in done.stdout
    assert f"Report: {page}" in done.stdout.replace("\n", "") and "looking for traps under full" in done.stderr
    assert "Fits: within the budget, 6.0 MiB" in page.read_text()


def test_a_plan_that_is_not_found_in_time_does_not_end_the_report(file, tmp_path, monkeypatch):
    def late(*_, **__):
        raise NotDoneError("timeout=200 s was over before a step of 'job' was compiled.")

    monkeypatch.setattr(save, "make_plan", late)
    page = tmp_path / "report.html"
    done = run(f"{file}:job", "-p", "full", "--target", "cpu", "--budget", "9 MiB", "--timeout", "400", "-o", page, "--json")
    assert done.exit_code == 1, done.stderr
    data = json.loads(done.stdout)
    why = "timeout=200 s was over before a step of 'job' was compiled. The plan has half of timeout=400 s"
    assert data["left_out"] == {"the plan": why} and data["plan"] is None and len(data["policies"]) == 1
    assert f"Left out: the plan: {html.escape(why)}" in page.read_text()


def test_its_json_has_the_figures_and_a_failed_comparison_exits_1(file, tmp_path, monkeypatch):
    # The report exists already: nothing is compared.
    monkeypatch.setattr("remat_jax.cli.report.require_torch", lambda: None)
    page = tmp_path / "report.html"
    done = run(f"{file}:job", "-p", "full", "--target", "cpu", "--parity", f"{file}:case", "--output", page, "--json")
    assert done.exit_code == 1 and "<!doctype html>" in page.read_text()
    data = json.loads(done.stdout)
    assert data["report"] == str(page) and not data["parity"]["passed"] and data["plan"] is None
    (full,) = data["policies"]
    assert full["device_bytes"] == rj.measure(JOB, "full", "cpu").device_bytes and full["findings"] == []
    # What can be refused at once is refused before the comparison.
    plan = plan_for(JOB, target="h200").save(tmp_path / "plan.json")
    done = run(f"{file}:job", "--target", "cpu", "--plan", plan, "--parity", f"{file}:compared", "--output", page)
    assert done.exit_code == 2 and "the plan is for target='h200'" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "none/report.html"], "output='none/report.html': there is no folder"),
        (["-o", "report.html", "--budget", "lots"], "budget='lots'"),
        (["-o", "report.html", "--budget", "9 MiB", "--plan", "plan.json"], "give only one of them"),
        (["-o", "report.html", "--plan", "plan.json"], "no such file"),
        ([], "--output"),
    ],
)
def test_bad_usage_exits_2_before_the_users_file_is_run(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('the file was run')")
    done = run("train.py:job", *arguments)
    assert done.exit_code == 2 and message in " ".join(done.stderr.split())
