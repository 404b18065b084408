"""What all HTML pages share: one file that loads nothing, light or dark as the system is or as the reader chooses."""

from __future__ import annotations

import contextlib
import html
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from remat_jax.reading import visible

_THEME = (
    '<fieldset class="theme"><legend>Colours</legend>'
    + "".join(
        f'<label><input type="radio" name="theme" value="{value}" autocomplete="off"{" checked" * (value == "system")}> '
        f"{value}</label>"
        for value in ("system", "light", "dark")
    )
    + "</fieldset>"
)


def document(
    title: str,
    body: str,
    *,
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    data: Mapping[str, Any] | None = None,
) -> str:
    """A page as text. `styles` and `scripts` name files of this package beside those of every page; `data` is for the scripts.

    >>> text = document("a < b", "<p>c</p>", data={"d": "</script>"})
    >>> "<title>a &lt; b</title>" in text, text.count("</script>"), "http" in text
    (True, 2, False)
    """
    style = "".join(asset(name) for name in ("page.css", *styles))
    # Each in a function of its own, so that their names do not meet.
    script = "".join(f"(() => {{\n{asset(name)}}})();\n" for name in ("theme.js", *scripts))
    # Inside a script element only "<" could end it.
    plain = "" if data is None else json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    given = f'<script type="application/json" id="data">{plain}</script>' if plain else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f"<body><main><header><h1>{escaped(title)}</h1>{_THEME}</header>{body}</main>{given}<script>{script}</script></body></html>\n"
    )


def asset(name: str) -> str:
    """The text of a file of this package."""
    return resources.files("remat_jax.report").joinpath(name).read_text(encoding="utf-8")


def escaped(value: object) -> str:
    """`value` as text that stays text in a page."""
    return html.escape(visible(str(value)))


def write_whole(path: str | os.PathLike[str], text: str, *, replace: bool = True) -> Path:
    """Write a file as `written_whole` has it. Raises ValueError, too, where `text` is nothing that can be written."""
    with written_whole(path, replace=replace) as new:
        new.write_text(text, encoding="utf-8")
    return Path(path)


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[Path]:
    """Where to write a file, so that whoever reads meanwhile finds the old one or the new one; others may write it, too.

    When the context ends what was written takes its place; after an error or an interrupt nothing is left behind.
    A file keeps its mode, and a link what it points at; a pipe or a device is written to. Raises OSError where it cannot be
    written (FileExistsError where there is a file and `replace` is False), and ValueError where `path` is none.
    """
    where = Path(path)
    if where.exists() and not where.is_file():
        yield where
        return
    place = Path(os.path.realpath(where))
    if not replace and place.exists():
        raise FileExistsError(f"{where} is there already")
    # A file of tempfile's could be read by nobody else once it is in its place. Its ending is what some writers go by.
    new = place.parent / f".{uuid.uuid4().hex}.new{place.suffix}"
    try:
        yield new
        if place.exists():
            shutil.copymode(place, new)
        if replace:
            new.replace(place)
        else:
            # Unlike a rename it fails where another one has made the file meanwhile.
            os.link(new, place)
    finally:
        # In its place it has this name no more.
        new.unlink(missing_ok=True)
