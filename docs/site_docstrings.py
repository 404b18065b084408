"""What the reference makes of docstrings: examples become code, and a name that a module shares is the function, not the module."""

from __future__ import annotations

import re
from typing import Any

import griffe

# From a prompt to the next empty line: what is printed belongs to it.
_EXAMPLE = re.compile(r"^([ ]*)>>> .*?(?=\n[ ]*\n|\Z)", re.DOTALL | re.MULTILINE)


class Docstrings(griffe.Extension):
    """Read by griffe, which imports nothing of ours."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put fences around the examples."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """`from remat_jax.planning import plan` is the function that `planning` imports, beside its module `plan.py`."""
        for member in list(pkg.members.values()):
            while member.is_alias:
                parent, _, name = member.target_path.removeprefix(f"{pkg.name}.").rpartition(".")
                imported = pkg[parent].imports.get(name) if parent and parent in _modules(pkg) else None
                if imported is None or imported == member.target_path:
                    break
                member.target_path = imported


def _modules(module: griffe.Module, prefix: str = "") -> set[str]:
    """The paths of all modules in a package, from within it."""
    found = set()
    for name, one in module.modules.items():
        if not one.is_alias:
            found |= {f"{prefix}{name}", *_modules(one, f"{prefix}{name}.")}
    return found
