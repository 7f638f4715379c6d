"""The exhibits, a module for each class of bug; each module has a tuple `EXHIBITS`."""

from __future__ import annotations

import importlib
import pkgutil

from tests.mutants.exhibit import Exhibit


def all_exhibits() -> list[Exhibit]:
    """Return every exhibit, by module and in the order of its module."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [exhibit for name in modules for exhibit in importlib.import_module(f"{__name__}.{name}").EXHIBITS]
