"""Launches that are prepared before a test, as if an earlier call on a GPU had done it."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from cute_kernels.runtime.launch import PreparedLaunches


class _Learning(dict[Any, Any]):
    """Returns the same value for every key, and records the keys."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def get(self, key: Any, default: Any = None) -> Any:
        self[key] = self._value
        return self._value


def prepare(monkeypatch: pytest.MonkeyPatch, module: Any, launch: Any, *requests: Mapping[str, Any]) -> None:
    """Prepares `launch` in a module that launches, for some requests and for no others.

    Launches it once for each of them, from which it learns the key.
    """
    learned = _Learning(launch)
    monkeypatch.setattr(module, "_prepared", learned)
    for request in requests:
        launch_of(module)(request)
    prepared: PreparedLaunches[Any, Any] = PreparedLaunches(learned)
    assert len(prepared) == len(requests)
    monkeypatch.setattr(module, "_prepared", prepared)


def launch_of(module: Any) -> Callable[[Mapping[str, Any]], Any]:
    """The function of a module that looks up what is prepared."""
    return module.launch if hasattr(module, "launch") else module._launch
