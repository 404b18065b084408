"""Finds public names of a package without documentation."""

from __future__ import annotations

import importlib
import inspect


def undocumented(package: str) -> list[str]:
    """Public classes and functions without a `>>>` example, which the doctests run, and their methods without a docstring.

    Tables and modules are data and need none.
    """
    module = importlib.import_module(package)
    named = {name: getattr(module, name) for name in module.__all__}
    documented = {name: value for name, value in named.items() if inspect.isclass(value) or inspect.isfunction(value)}
    assert len(documented) > 3
    names = [name for name, value in documented.items() if ">>>" not in (inspect.getdoc(value) or "")]
    return names + [
        f"{name}.{method}"
        for name, value in documented.items()
        if inspect.isclass(value)
        for method in vars(value)
        if not method.startswith("_") and _is_method(vars(value)[method]) and not inspect.getdoc(getattr(value, method))
    ]


def _is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
