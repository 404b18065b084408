"""The public names of the PyTorch reference: each documented."""

from __future__ import annotations

import pytest

from tests.public_names import undocumented


@pytest.mark.parametrize("package", ["torch_ref", "examples.pytorch", "examples.pytorch.faithful"])
def test_every_public_name_has_an_example(package: str) -> None:
    assert undocumented(package) == []
