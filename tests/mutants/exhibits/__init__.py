"""The exhibits, a module for each class of bug; each module has its name, `KIND`, and a tuple `EXHIBITS`."""

import importlib
import pkgutil

from tests.mutants.exhibit import Exhibit


def by_kind() -> dict[str, tuple[Exhibit, ...]]:
    """Return the exhibits of each class of bug."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {module.KIND: module.EXHIBITS for module in modules}


def all_exhibits() -> list[Exhibit]:
    """Return every exhibit, by module and in the order of its module."""
    return [exhibit for exhibits in by_kind().values() for exhibit in exhibits]
