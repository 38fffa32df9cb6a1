"""Changes modules of a serving stack when it imports them, and not before.

Importing a model's module from a plugin would load that model, and choose a platform, in each process of a server, also
in those that serve another model.
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
    """Changes those modules that are imported, and the others when they are.

    Args:
        changes: by full name of a module, what is done to it once it has run: at most once by the finder, and at each
            call of this function, so a change that is made already must do nothing.
    """
    for name, change in changes.items():
        if name in sys.modules:
            _change(sys.modules[name], change)
    if not any(isinstance(finder, ChangingFinder) and finder.changes == changes for finder in sys.meta_path):
        sys.meta_path.insert(0, ChangingFinder(changes))


class ChangingFinder(importlib.abc.MetaPathFinder):
    """Finds some modules where the other finders find them, and changes them once they have run."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self.changes = changes
        self._asking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec as the import system wants it; None for every other module."""
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
    """Lets this one loader change its module; it stays of its class, which tools that read sources ask for."""
    run = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        run(module)
        _change(module, change)

    loader.exec_module = exec_module


def _change(module: types.ModuleType, change: Change) -> None:
    """Changes a module; one that has moved so far that this fails is still imported."""
    try:
        change(module)
    except Exception as error:
        logger.warning("cute-kernels: %s stays as it is: %s: %s", module.__name__, type(error).__name__, error)
