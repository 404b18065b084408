"""The forms for issues and pull requests, and the workflow, checked as GitHub reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from remat_jax.cli.app import app
from tests.versions import VERSIONS

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
COMMAND = "remat-jax doctor --json"
# GitHub's required keys for each kind of element: https://docs.github.com/communities, "Syntax for GitHub's form schema".
NEEDED = {"markdown": {"value"}, "textarea": {"label"}, "input": {"label"}, "dropdown": {"label", "options"}}
KNOWN = {
    "markdown": {"value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
    "input": {"label", "description", "placeholder", "value"},
    "dropdown": {"label", "description", "multiple", "options", "default"},
}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_what_github_takes(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert set(form) <= {"name", "description", "title", "labels", "body"} and {"name", "description", "body"} <= set(form)
    asked = [element for element in form["body"] if element["type"] != "markdown"]
    ids = [element["id"] for element in asked]
    assert len(asked) >= 3 and len(set(ids)) == len(ids)
    for element in form["body"]:
        given = set(element["attributes"])
        assert NEEDED[element["type"]] <= given <= KNOWN[element["type"]], element
        assert set(element) <= {"type", "id", "attributes", "validations"}
        assert all(isinstance(option, str) for option in element["attributes"].get("options", ()))


def test_a_fault_cannot_be_reported_without_what_doctor_says() -> None:
    assert [path.stem for path in FORMS] == ["bug", "feature"]
    for path in FORMS:
        doctor = next(field for field in yaml.safe_load(path.read_text())["body"] if field.get("id") == "doctor")
        assert doctor["attributes"]["label"] == COMMAND and doctor["attributes"]["render"] == "json"
        assert doctor.get("validations", {}).get("required", False) is (path.stem == "bug")
    assert yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "config.yml").read_text()) == {"blank_issues_enabled": False}
    assert f"`{COMMAND}`" in (GITHUB / "PULL_REQUEST_TEMPLATE.md").read_text()


def test_the_command_that_they_ask_for_works_by_itself() -> None:
    done = CliRunner().invoke(app, COMMAND.split()[1:])
    assert done.exit_code == 0 and done.stdout.startswith('{"python": ')


def test_the_workflow_runs_what_a_developer_runs() -> None:
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    assert [step["run"] for step in jobs["all"]["steps"] if "run" in step] == [".ci/run"]
    for job in jobs.values():
        assert job["steps"][0]["with"]["fetch-depth"] == 0, "without tags there is no version"
    rows = {(row["jax"], row["flags"]) for row in jobs["versions"]["strategy"]["matrix"]["include"]}
    assert rows == {(version.jax, version.flag_names) for version in VERSIONS}
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
