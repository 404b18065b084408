"""The Python blocks of README and guides run, and print what the pages say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remat_jax import compat
from remat_jax.planning import search
from tests.doc_pages import ROOT, run


@pytest.fixture(autouse=True)
def few_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation takes seconds; that a plan's last per cent is found is asked elsewhere."""
    monkeypatch.setitem(search.Search.__init__.__kwdefaults__, "most_compiled", 2)
    torch.manual_seed(0)


@pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="XLA's GPU compiler is not installed")
def test_the_porting_guide() -> None:
    assert run((ROOT / "docs" / "porting.md").read_text(), "porting.md", {"__name__": "porting"}) > 20
