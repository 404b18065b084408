"""The frame of all HTML pages: one file that loads nothing, light or dark as the system or the reader chooses."""

from __future__ import annotations

import contextlib
import html
import os
import shutil
import uuid
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

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


def document(title: str, body: str) -> str:
    """The HTML text of a page, with the style and the script that all pages share.

    >>> text = document("a < b", "<p>c</p>")
    >>> "<title>a &lt; b</title>" in text, text.count("</script>"), "http" in text
    (True, 1, False)
    """
    style, script = map(_asset, ("page.css", "page.js"))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f"<body><main><header><h1>{escaped(title)}</h1>{_THEME}</header>{body}</main>"
        f"<script>(() => {{\n{script}}})();\n</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("remat_jax.report").joinpath(name).read_text(encoding="utf-8")


def escaped(value: object) -> str:
    """`value` as text, escaped for HTML."""
    return html.escape(visible(str(value)))


def write_whole(path: str | os.PathLike[str], text: str, *, replace: bool = True) -> Path:
    """Write `text` to a file through `written_whole`. Also raises ValueError if `text` cannot be encoded."""
    with written_whole(path, replace=replace) as new:
        new.write_text(text, encoding="utf-8")
    return Path(path)


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[Path]:
    """A path to write a file to atomically: readers see the old or the new file; several writers are allowed.

    At the end of the context the new file replaces the old file; an error or an interrupt leaves no new file behind. The file
    keeps its mode, a symbolic link still points to the same file, and a pipe or a device is written to directly. Raises OSError
    if the file cannot be written (FileExistsError if it exists and `replace` is False), and ValueError if `path` is not a path.
    """
    requested = Path(path)
    if requested.exists() and not requested.is_file():
        yield requested
        return
    target = Path(os.path.realpath(requested))
    if not replace and target.exists():
        raise FileExistsError(f"{requested} is there already")
    # `tempfile` would create a file that only its owner can read. Keep the ending: some writers choose the format by it.
    new = target.parent / f".{uuid.uuid4().hex}.new{target.suffix}"
    try:
        yield new
        if target.exists():
            shutil.copymode(target, new)
        if replace:
            new.replace(target)
        else:
            # Unlike a rename, a link fails if another process has created the file in the meantime.
            os.link(new, target)
    finally:
        # After a rename the temporary name no longer exists.
        new.unlink(missing_ok=True)
