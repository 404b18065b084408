"""Tests without a checkout: the activation against PyTorch, the command's words, the comparison itself."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from examples.models.diffusion import ACTIVATIONS
from parity_tests.upstream import __main__ as command
from parity_tests.upstream import checkouts, comparing
from parity_tests.upstream.comparing import Row

# DiffSynth-Studio's formula, verbatim.
IN_TORCH = {
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_slopes_are_pytorchs(name: str, x64: None) -> None:
    x = np.linspace(-6, 6, 97)
    given = torch.tensor(x, requires_grad=True)
    expected = IN_TORCH[name](given)
    expected.sum().backward()
    value, slope = jax.vmap(jax.value_and_grad(ACTIVATIONS[name]))(jnp.asarray(x))
    np.testing.assert_allclose(value, expected.detach(), rtol=0, atol=1e-14)
    np.testing.assert_allclose(slope, given.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --diffsynth, --openpi or both"),
        (["--diffsynth", "nowhere"], "nowhere: has no folder 'diffsynth'; give the root of a checkout"),
        (["--openpi", "nowhere"], "nowhere: has no folder 'src/openpi'; give the root of a checkout"),
    ],
)
def test_what_is_no_checkout_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_packages_that_are_not_installed_are_named_and_a_folder_inside_a_checkout_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    with pytest.raises(checkouts.CheckoutError, match="pip install no_such_package$"):
        checkouts.use(str(tmp_path), "theirs", ("numpy", "no_such_package"), ())
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    assert re.fullmatch(r"[0-9a-f]{7,}, \d{4}-\d\d-\d\d", checkouts.commit(tmp_path.resolve()))
    assert checkouts.commit((tmp_path / "theirs").resolve()) == "not known"


ROW = Row("a", "float32", "off", "scanned", 1e-7, 1e-7, 1e-5, "w", comparing.LIMITS["float32"])


def test_errors_above_the_limit_fail() -> None:
    assert ROW.passed and not ROW._replace(output=2e-6).passed and not ROW._replace(gradient=2e-6).passed
    exact = ROW._replace(dtype="float64", output=0.0, gradient=0.0, limit=comparing.LIMITS["float64"])
    assert not exact.passed and exact._replace(tensor=1e-13).passed
    assert not ROW._replace(ratio=4.1).passed
    near = ROW._replace(original=comparing.Errors(2e-7, 3e-7), port=comparing.Errors(4e-7, 5e-7), ratio=1.5)
    start = "| a | float32 | off | scanned | 1.0e-07 | 1.0e-07 | 1.0e-05, `w` | 1e-06 |"
    assert f"{start} 2.0e-07, 3.0e-07 | 4.0e-07, 5.0e-07 | 1.50 |" in command.table([near])


@pytest.mark.parametrize("spoilt", [None, "output", "w", "b"])
def test_a_difference_in_any_tensor_is_seen(spoilt: str | None) -> None:
    gradients = {"w": np.ones(1000), "b": np.full(1, 1e-3)}
    original = comparing.Step(np.ones(3), gradients)
    changed = {name: value * (1 + 1e-9 * (name == spoilt)) for name, value in gradients.items()}
    port = comparing.Step(np.ones(3) * (1 + 1e-9 * (spoilt == "output")), changed)

    class Same(comparing.Pair):
        def port(self, *_: object) -> comparing.Step:
            return port

    pair = Same("a", None, (), ("float64",), {}, None, (), None, (), None)  # type: ignore[arg-type]  # not run
    row = comparing._row(pair, "float64", "off", True, original, original)
    assert row.passed == (spoilt is None) and (spoilt in (None, "output") or row.name == spoilt)
    with pytest.raises(AssertionError, match="a: only one side has a gradient of b"):
        comparing._row(pair, "float64", "off", True, original._replace(gradients={"w": np.ones(1000)}), original)
