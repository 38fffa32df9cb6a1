"""Changes modules of a serving stack when it imports them, and not before.

Importing a model's module from a plugin would load that model, and choose a platform, in each process of a server, even
in processes that serve another model.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

Change = Callable[[types.ModuleType], None]


def change_on_import(changes: Mapping[str, Change]) -> None:
    """Changes the modules that are already imported, and the others when they are imported.

    Args:
        changes: by full name of a module, the function that changes it after it has run. The finder calls it at most
            once, and each call of `change_on_import` again, so it must do nothing if the change is already made.
    """
    for name, change in changes.items():
        if name in sys.modules:
            _change(sys.modules[name], change)
    if not any(isinstance(finder, ChangingFinder) and finder.changes == changes for finder in sys.meta_path):
        sys.meta_path.insert(0, ChangingFinder(changes))


class ChangingFinder(importlib.abc.MetaPathFinder):
    """Finds some modules through the other finders, and changes them once they have run."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self.changes = changes
        self._asking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns a spec as the import system wants it; None for every other module."""
        change = self.changes.get(fullname)
        if change is None or fullname in self._asking:  # asked by another finder that asks all others
            return None
        self._asking.add(fullname)
        try:
            for finder in sys.meta_path:
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec = None if find is None else find(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        _run_after(spec.loader, change)
                    return spec
        finally:
            self._asking.discard(fullname)
        return None


def _run_after(loader: Any, change: Change) -> None:
    """Makes this one loader change its module. The loader keeps its class, which tools that read sources ask for."""
    run = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        run(module)
        _change(module, change)

    loader.exec_module = exec_module


def _change(module: types.ModuleType, change: Change) -> None:
    """Changes a module; if the change fails because the module is too different, it is still imported."""
    try:
        change(module)
    except Exception as error:
        logger.warning("cute-kernels: %s stays as it is: %s: %s", module.__name__, type(error).__name__, error)
