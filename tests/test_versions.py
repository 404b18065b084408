"""What must hold in every version, and the versions in which the tests run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import jax
import pytest

import remat_jax as rj
from remat_jax.compat import versions as compat_versions
from remat_jax.policy import NAMED
from tests import versions
from tests.small_models import Mlp, assert_same, make_loss

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.versions
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_gradients_under_every_named_policy_are_the_plain_ones(x64: None, scanned: bool) -> None:
    plain, params, x = make_loss(Mlp, scanned=scanned)
    expected = jax.jit(jax.grad(plain, (0, 1)))(params, x)
    for policy in NAMED:
        grads = jax.jit(jax.grad(rj.checkpoint_blocks(plain, {Mlp: policy}), (0, 1)))(params, x)
        assert_same(grads, expected)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.10.2", (0, 10, 2)), ("0.13.0rc1", (0, 13, 0)), ("0.13.0.dev20261122", (0, 13, 0)), ("0.12.0+local", (0, 12, 0))],
)
def test_a_candidate_and_a_nightly_build_have_the_numbers_of_their_release(version: str, numbers: tuple[int, ...]) -> None:
    assert compat_versions._numbers(version) == numbers


def test_the_table_has_the_oldest_a_middle_and_the_newest_jax() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(set(versions.VERSIONS)) == len(versions.VERSIONS)
    lowest = next(dependency.partition(">=")[2] for dependency in project["dependencies"] if dependency.startswith("jax>="))
    assert {version.jax for version in versions.VERSIONS} == {lowest, "0.11.2", versions.NEWEST}
    newer = {(version.jax, version.flags) for version in versions.VERSIONS if version.python == "3.12"}
    assert newer >= {(name, flags) for name in ("0.11.2", versions.NEWEST) for flags in ((), versions.REMAT3)}
    assert newer >= {(versions.NEWEST, flags) for flags in (versions.DERIVATIVES, versions.REMAT3 + versions.DERIVATIVES)}
    assert versions.Version(project["requires-python"].removeprefix(">="), lowest, versions.REMAT3) in versions.VERSIONS
