"""The reference: examples in docstrings become code, and a name that a function shares with its module is the function's."""

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
        modules = _modules(pkg)
        for module in (pkg, *(pkg[path] for path in sorted(modules))):
            for name, member in list(module.members.items()):
                path = member.target_path if member.is_alias else ""
                while (imported := _imported(pkg, modules, path)) not in ("", path):
                    path = imported
                if path:
                    # A new one, because what the old one leads to has been looked up already.
                    module.members[name] = griffe.Alias(name, path, parent=module)


def _imported(pkg: griffe.Module, modules: set[str], path: str) -> str:
    """What the module in the first part of a path imports under its last name; empty where it imports none."""
    parent, _, name = path.removeprefix(f"{pkg.name}.").rpartition(".")
    return pkg[parent].imports.get(name, "") if parent in modules else ""


def _modules(module: griffe.Module, prefix: str = "") -> set[str]:
    """The paths of all modules in a package, from within it."""
    found = set()
    for name, one in module.modules.items():
        if not one.is_alias:
            found |= {f"{prefix}{name}", *_modules(one, f"{prefix}{name}.")}
    return found
