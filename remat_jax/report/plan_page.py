"""One self-contained HTML page of a plan: memory against time, with a slider along the frontier. It loads nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any


def plan_page(data: Mapping[str, Any]) -> str:
    """The page as text.

    `data` has `title`; `summary`, sentences; `budget` in bytes; `base_seconds`; `points` along the frontier with `device`,
    `host`, `seconds`, `compiled`, `says` and `parts`; `chosen`, the index of the plan among them; and `named`, points that
    have a `name`. A part has `where`, `policy`, `costs`, `bytes` and `texts` by action, and `rows` of (residual, action,
    size, seconds).

    >>> point = {"device": 1, "host": 0, "seconds": 1.0, "compiled": True, "says": "</script>", "parts": []}
    >>> rest = {"title": "t", "summary": [], "budget": 1, "base_seconds": 1.0, "chosen": 0, "named": []}
    >>> text = plan_page({**rest, "points": [point]})
    >>> text.count("</script>"), "http" in text
    (2, False)
    """
    title = html.escape(str(data["title"]))
    # Inside a script element only "<" could end it.
    plain = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    said = "".join(f"<p>{html.escape(str(one))}</p>" for one in data["summary"])
    style = _asset("page.css") + _asset("plan_page.css")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f"<body><main><h1>{title}</h1>{said}{_asset('plan_page.html')}</main>"
        f'<script type="application/json" id="data">{plain}</script><script>{_asset("plan_page.js")}</script></body></html>\n'
    )


def _asset(name: str) -> str:
    return resources.files("remat_jax.report").joinpath(name).read_text(encoding="utf-8")
